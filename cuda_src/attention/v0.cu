// Attention v0, plain and obviously right: a warp per query row walks its keys one by one.
//
// Launch: grid (tokens, heads), block 32. Defines: HEAD_DIM, BLOCK_SIZE, ELEM_BF16, KV_INT8.
//   queries, out      element [tokens, heads, HEAD_DIM]
//   keys, values      element or int8 [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
//   key_scales, value_scales  float32 [num_blocks, kv_heads, BLOCK_SIZE], unused unless KV_INT8
//   block_table       int32 [rows, blocks_per_row], of the layer's KV group
//   query_start_loc   int32 [entries + 1]; entry_rows, seq_lens int32 [entries], seq_lens after this step
//   sinks             float32 [heads] or null
//   window            keys a token sees, itself included; 0 is all.  soft_cap: 0 is off.
#include "attention/batch.cuh"
#include "attention/softmax.cuh"
#include "common/element.cuh"

#if KV_INT8
using stored = i8;
DEVICE float dequantize(stored x, const float* scales, long long slot) {
  return to_float(to_element(__fmul_rn(static_cast<float>(x), scales[slot])));
}
#else
using stored = element;
DEVICE float dequantize(stored x, const float*, long long) { return to_float(x); }
#endif

constexpr int PER_LANE = (HEAD_DIM + 31) / 32;

extern "C" __global__ void __launch_bounds__(32)
attention_v0(const element* queries, const stored* keys, const stored* values, const float* key_scales,
             const float* value_scales, const int* block_table, const int* query_start_loc, const int* entry_rows,
             const int* seq_lens, const float* sinks, element* out, int entries, int kv_heads, int blocks_per_row,
             int window, float scale, float cap) {
  const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x;
  int e = 0;
  while (e < entries && query_start_loc[e + 1] <= token) ++e;
  if (e == entries) return;
  const Entry entry(query_start_loc, seq_lens, e);
  const int position = entry.start + token - entry.first_token, kv_head = head / (heads / kv_heads);
  const int* table = block_table + static_cast<long long>(entry_rows[e]) * blocks_per_row;
  const long long row = (static_cast<long long>(token) * heads + head) * HEAD_DIM;

  float output[PER_LANE] = {};
  Softmax softmax;
  for (int key = window > 0 ? max(0, position - window + 1) : 0; key <= position; ++key) {
    const long long block = table[key / BLOCK_SIZE];
    const long long slot = (block * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
    float product = 0.f;
    for (int d = lane; d < HEAD_DIM; d += 32)
      product += to_float(queries[row + d]) * dequantize(keys[slot * HEAD_DIM + d], key_scales, slot);
    for (int step = 16; step > 0; step /= 2) product += __shfl_xor_sync(~0u, product, step);
    const Shares shares = join(softmax, {to_logit(product, scale, cap), 1.f});
    for (int i = 0; i < PER_LANE; ++i) {
      const int d = lane + 32 * i;
      if (d < HEAD_DIM)
        output[i] = join(output[i], dequantize(values[slot * HEAD_DIM + d], value_scales, slot), shares);
    }
  }
  const float factor = normaliser(softmax, sinks, head);
  for (int i = 0; i < PER_LANE; ++i) {
    const int d = lane + 32 * i;
    if (d < HEAD_DIM) out[row + d] = to_element(normalised(output[i], factor));
  }
}
