// Attention v1, decode: split-KV; a warp takes one split of SPLIT keys, the query heads of a KV head in mma's M.
//
// Keys and values are read once for all query heads of a KV head (up to 16 rows; more take one warp per 16).
// attention_v1_decode writes entries of one split to `out`, the others' splits as partial results, which
// attention_v1_merge joins in the order of the keys. Both take entries of 1 to decode_tokens tokens.
//   partial_outputs   float32 [partials, heads, HEAD_DIM]
//   partial_softmax   float32 [partials, heads, 2], maximum and sum
// where the partials of an entry are [tokens, splits] and entries follow each other (first_partial).
// Launch: attention_v1_decode grid (any number of blocks that share the splits, kv_heads * ceil(decode_tokens *
// group / 16), entries), block 32, PIPELINE_BYTES of shared memory; attention_v1_merge grid (heads, decode_tokens,
// entries), block 32. Other arguments as in v0.cu.
#include "attention/batch.cuh"
#include "attention/tile.cuh"

static_assert(SPLIT % TILE == 0, "a tile lies in one split");

extern "C" __global__ void __launch_bounds__(32)
attention_v1_decode(const element* queries, const u8* keys, const u8* values, const float* key_scales,
                    const float* value_scales, const int* block_table, const int* query_start_loc,
                    const int* entry_rows, const int* seq_lens, const float* sinks, element* out,
                    float* partial_outputs, Softmax* partial_softmax, int heads, int kv_heads, int blocks_per_row,
                    int decode_tokens, int window, float scale, float cap) {
  extern __shared__ __align__(16) u8 memory[];
  const int e = blockIdx.z, group = heads / kv_heads, kv_head = blockIdx.y % kv_heads;
  const int row = blockIdx.y / kv_heads * 16, lane = threadIdx.x;
  const Entry entry(query_start_loc, seq_lens, e);
  const int rows = entry.tokens * group;
  if (!entry.is_decode(decode_tokens) || row >= rows) return;
  const int splits = entry.splits(window), first_split = entry.first_split(window);
  if (static_cast<int>(blockIdx.x) >= splits) return;

  const Pages pages = {keys, values, key_scales, value_scales,
                       block_table + static_cast<long long>(entry_rows[e]) * blocks_per_row, kv_heads, kv_head};
  const long long first_head = static_cast<long long>(entry.first_token) * heads + kv_head * group;
  const QueryRows q(queries + first_head * HEAD_DIM, row, rows, group, heads, entry.start, window);
  const long long partials =
      splits > 1 ? first_partial(query_start_loc, seq_lens, e, decode_tokens, window) : 0;
  for (int split = blockIdx.x; split < splits; split += gridDim.x) {
    const int first_key = (first_split + split) * SPLIT;
    OutputRows output;
    for_each_tile<32>(pages, max(first_key, entry.first_key(window)), min(first_key + SPLIT, entry.end_key()), memory,
                      [&](int start, u32 tile_keys, u32 tile_values) {
                        output.attend(q, start, tile_keys, tile_values, scale, cap);
                      });
    output.close();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + lane / 4 + 8 * half;
      if (r >= rows) continue;
      const int token = r / group, head = kv_head * group + r % group;
      if (splits == 1) {
        const float factor = normaliser(output.softmax[half], sinks, head);
        u32* target = reinterpret_cast<u32*>(
            out + (first_head + static_cast<long long>(token) * heads + r % group) * HEAD_DIM + 2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i)
          target[4 * i] = to_elements(normalised(output.o[i][2 * half], factor),
                                      normalised(output.o[i][2 * half + 1], factor));
      } else {
        const long long partial = (partials + static_cast<long long>(token) * splits + split) * heads + head;
        if (lane % 4 == 0) partial_softmax[partial] = output.softmax[half];
        float2* target = reinterpret_cast<float2*>(partial_outputs + partial * HEAD_DIM) + lane % 4;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; ++i) target[4 * i] = {output.o[i][2 * half], output.o[i][2 * half + 1]};
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32)
attention_v1_merge(const float* partial_outputs, const Softmax* partial_softmax, const int* query_start_loc,
                   const int* seq_lens, const float* sinks, element* out, int decode_tokens, int window) {
  constexpr int PER_LANE = (HEAD_DIM + 63) / 64;  // pairs
  const int head = blockIdx.x, heads = gridDim.x, token = blockIdx.y, e = blockIdx.z, lane = threadIdx.x;
  const Entry entry(query_start_loc, seq_lens, e);
  if (!entry.is_decode(decode_tokens) || token >= entry.tokens) return;
  const int splits = entry.splits(window);
  if (splits == 1) return;
  const long long partials = first_partial(query_start_loc, seq_lens, e, decode_tokens, window) +
                             static_cast<long long>(token) * splits;
  float2 output[PER_LANE] = {};
  Softmax softmax;
  for (int split = 0; split < splits; ++split) {
    const long long partial = (partials + split) * heads + head;
    const Shares shares = join(softmax, partial_softmax[partial]);
    const float2* source = reinterpret_cast<const float2*>(partial_outputs + partial * HEAD_DIM);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= HEAD_DIM / 2) continue;
      const float2 x = source[pair];
      output[i] = {join(output[i].x, x.x, shares), join(output[i].y, x.y, shares)};
    }
  }
  const float factor = normaliser(softmax, sinks, head);
  u32* target = reinterpret_cast<u32*>(
      out + (static_cast<long long>(entry.first_token + token) * heads + head) * HEAD_DIM);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int pair = lane + 32 * i;
    if (pair < HEAD_DIM / 2)
      target[pair] = to_elements(normalised(output[i].x, factor), normalised(output[i].y, factor));
  }
}
