// From the fused projection to rotated queries and written pages, in one pass: optional RMSNorm of each query and
// key head, rotary embedding, optional quantization, stores. A warp per token and head.
//
// Launch: grid ceil(tokens * (heads + 2 * kv_heads) / 4), block 128.
// Defines: HEAD_DIM, BLOCK_SIZE, ELEM_BF16, KV_INT8, QK_NORM.
//   qkv               element [tokens, heads + 2 * kv_heads, HEAD_DIM]
//   queries           element [tokens, heads, HEAD_DIM]
//   keys, values      element or int8 [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
//   key_scales, value_scales  float32 [num_blocks, kv_heads, BLOCK_SIZE], unused unless KV_INT8
//   rope              float32 [max_model_len, HEAD_DIM], a position's HEAD_DIM / 2 cosines, then its sines;
//                     null for no rotation
//   query_norm, key_norm      float32 [HEAD_DIM], unused unless QK_NORM
//   block_table       int32 [rows, blocks_per_row], of the layer's KV group
//   token_rows, positions     int32 [tokens]; a token at a negative position is padding and is left out
// int8 is rint(x / scale) with scale = absmax / 127 of the token's head, in IEEE float32; 0 where absmax is so small
// (below 1.5e-36) that the scale would not be a normal number.
#include "common/element.cuh"

#if KV_INT8
using stored = i8;
#else
using stored = element;
#endif

constexpr int PAIRS = HEAD_DIM / 4;              // pairs of elements in half a head
constexpr int PER_LANE = (PAIRS + 31) / 32;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// A lane's elements: pairs lane + 32 * i of the first half of the head, and of the second.
struct Head {
  float2 low[PER_LANE], high[PER_LANE];

  DEVICE Head(const element* source, int lane) {
    const u32* words = reinterpret_cast<const u32*>(source);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      low[i] = pair < PAIRS ? unpack(words[pair]) : float2{0.f, 0.f};
      high[i] = pair < PAIRS ? unpack(words[PAIRS + pair]) : float2{0.f, 0.f};
    }
  }

  static DEVICE float2 unpack(u32 word) { return {to_float(word & 0xffff), to_float(word >> 16)}; }

  // x / sqrt(mean(x**2) + eps) * weight.
  DEVICE void normalise(const float* weight, float eps, int lane) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      sum += low[i].x * low[i].x + low[i].y * low[i].y + high[i].x * high[i].x + high[i].y * high[i].y;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float factor = 1.f / sqrtf(sum / HEAD_DIM + eps);
    const float2* weights = reinterpret_cast<const float2*>(weight);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= PAIRS) continue;
      const float2 a = weights[pair], b = weights[PAIRS + pair];
      low[i] = {low[i].x * factor * a.x, low[i].y * factor * a.y};
      high[i] = {high[i].x * factor * b.x, high[i].y * factor * b.y};
    }
  }

  // Half-split: pair (x[i], x[i + HEAD_DIM / 2]) turns by the position's angle i.
  DEVICE void rotate(const float* rope, int lane) {
    const float2* cosines = reinterpret_cast<const float2*>(rope);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= PAIRS) continue;
      const float2 c = cosines[pair], s = cosines[PAIRS + pair], a = low[i], b = high[i];
      low[i] = {a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y};
      high[i] = {b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y};
    }
  }

  DEVICE void store(element* target, int lane) const {
    u32* words = reinterpret_cast<u32*>(target);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= PAIRS) continue;
      words[pair] = to_elements(low[i].x, low[i].y);
      words[PAIRS + pair] = to_elements(high[i].x, high[i].y);
    }
  }

  // Quantizes and stores; the scale, the same in every lane.
  DEVICE float store(i8* target, int lane) const {
    float absmax = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      absmax = fmaxf(fmaxf(absmax, fmaxf(fabsf(low[i].x), fabsf(low[i].y))),
                     fmaxf(fabsf(high[i].x), fabsf(high[i].y)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, step));
    float scale = __fdiv_rn(absmax, 127.f);
    if (scale < SMALLEST_NORMAL) scale = 0.f;
    u16* words = reinterpret_cast<u16*>(target);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int pair = lane + 32 * i;
      if (pair >= PAIRS) continue;
      words[pair] = quantize(low[i], scale);
      words[PAIRS + pair] = quantize(high[i], scale);
    }
    return scale;
  }

  static DEVICE u16 quantize(float2 x, float scale) {
    const int low = scale == 0.f ? 0 : __float2int_rn(__fdiv_rn(x.x, scale));
    const int high = scale == 0.f ? 0 : __float2int_rn(__fdiv_rn(x.y, scale));
    return static_cast<u16>((low & 0xff) | (high & 0xff) << 8);
  }
};

extern "C" __global__ void __launch_bounds__(128)
rope_and_cache(const element* qkv, element* queries, stored* keys, stored* values, float* key_scales,
               float* value_scales, const float* rope, const float* query_norm, const float* key_norm,
               const int* block_table, const int* token_rows, const int* positions, int tokens, int heads,
               int kv_heads, int blocks_per_row, float eps) {
  const int all = heads + 2 * kv_heads, warp = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp / all, index = warp % all;
  if (token >= tokens || positions[token] < 0) return;
  const int position = positions[token];
  Head head(qkv + (static_cast<long long>(token) * all + index) * HEAD_DIM, lane);
  const bool is_query = index < heads, is_value = index >= heads + kv_heads;
  if (!is_value) {
#if QK_NORM
    head.normalise(is_query ? query_norm : key_norm, eps, lane);
#endif
    if (rope) head.rotate(rope + static_cast<long long>(position) * HEAD_DIM, lane);
  }
  if (is_query) {
    head.store(queries + (static_cast<long long>(token) * heads + index) * HEAD_DIM, lane);
    return;
  }
  const long long block =
      block_table[static_cast<long long>(token_rows[token]) * blocks_per_row + position / BLOCK_SIZE];
  const int kv_head = (index - heads) % kv_heads;
  const long long slot = (block * kv_heads + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE;
  stored* page = (is_value ? values : keys) + slot * HEAD_DIM;
#if KV_INT8
  const float scale = head.store(page, lane);
  if (lane == 0) (is_value ? value_scales : key_scales)[slot] = scale;
#else
  head.store(page, lane);
#endif
}
