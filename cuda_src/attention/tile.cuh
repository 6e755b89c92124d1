// One warp's attention of 16 query rows to tiles of TILE keys, and the pipeline that brings the tiles.
//
//   pages --cp.async, two stages--> shared memory [--int8: dequantize-->] --ldmatrix--> mma: S = Q K^T
//   S --mask, online softmax, round to elements--> P --mma with V--> output in registers
//
// Batch invariance: everything that happens to a query row depends on its own keys alone. Tiles begin at multiples
// of TILE; a tile of which the row sees no key multiplies its sums by 1 (or 0 by 0) and adds 0. Keys that a row
// does not see are masked by selection, and keys that no row of the block sees are zero in shared memory and are
// never read from the pages: what an unused slot holds cannot matter, not even a NaN.
// This takes for granted that mma computes a row alike wherever it lies, and that products with 0 change no sum but
// the sign of a zero: true of the executor and of an H200; perf/gpu/invariance.py asks any other.
// Shared rows are padded by 16 bytes: HEAD_DIM / 8 + 1 chunks is odd, so 8 rows of an ldmatrix hit 8 bank groups.
#pragma once
#include "attention/softmax.cuh"
#include "common/element.cuh"

constexpr int TILE = HEAD_DIM > 128 ? 16 : 32;
constexpr int STRIDE = 2 * HEAD_DIM + 16;
constexpr int TILE_BYTES = TILE * STRIDE;
constexpr int STORED_STRIDE = KV_INT8 ? HEAD_DIM : STRIDE;
constexpr int STORED_BYTES = TILE * STORED_STRIDE;
constexpr int STAGE_BYTES = 2 * STORED_BYTES + (KV_INT8 ? 8 * TILE : 0);
constexpr int PIPELINE_BYTES = 2 * STAGE_BYTES + (KV_INT8 ? 2 * TILE_BYTES : 0);

// The pages of one layer and one KV head, as one sequence sees them.
struct Pages {
  const u8 *keys, *values;  // [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
  const float *key_scales, *value_scales;
  const int* table;
  int kv_heads, kv_head;

  DEVICE long long slot(int key) const {
    return (static_cast<long long>(table[key / BLOCK_SIZE]) * kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE;
  }
};

template <int THREADS>
DEVICE void synchronise() {
  if constexpr (THREADS == 32)
    __syncwarp();
  else
    __syncthreads();
}

// Starts the copy of keys [start, start + TILE); those outside [begin, end) become zero.
template <int THREADS>
DEVICE void load_tile(const Pages& pages, int start, int begin, int end, u32 stage) {
  constexpr int ROW_BYTES = KV_INT8 ? HEAD_DIM : 2 * HEAD_DIM;
  constexpr int CHUNKS = ROW_BYTES / 16, ALL = TILE * CHUNKS;
#pragma unroll
  for (int round = 0; round < (ALL + THREADS - 1) / THREADS; ++round) {  // unrolled: lookups of blocks are in flight together
    const int i = threadIdx.x + round * THREADS, row = i / CHUNKS, chunk = i % CHUNKS;
    if (ALL % THREADS != 0 && i >= ALL) break;
    const bool valid = start + row >= begin && start + row < end;
    const long long source = (valid ? pages.slot(start + row) : 0) * ROW_BYTES + 16 * chunk;
    const u32 target = stage + row * STORED_STRIDE + 16 * chunk;
    cp_async_16(target, pages.keys + source, valid);
    cp_async_16(target + STORED_BYTES, pages.values + source, valid);
  }
#if KV_INT8
  for (int row = threadIdx.x; row < TILE; row += THREADS) {
    const bool valid = start + row >= begin && start + row < end;
    const long long source = valid ? pages.slot(start + row) : 0;
    const u32 target = stage + 2 * STORED_BYTES + 4 * row;
    cp_async_4(target, pages.key_scales + source, valid);
    cp_async_4(target + 4 * TILE, pages.value_scales + source, valid);
  }
#endif
}

#if KV_INT8
DEVICE u32 dequantize_pair(u32 bytes, float scale) {
  const float low = static_cast<i8>(bytes & 0xff), high = static_cast<i8>(bytes >> 8 & 0xff);
  return to_elements(__fmul_rn(low, scale), __fmul_rn(high, scale));
}

// Keys and values of a stage, times their scales, as elements to `target`.
template <int THREADS>
DEVICE void dequantize_tile(const u8* stage, u8* target) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < 2 * TILE * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;  // rows of values follow those of keys
    const uint2 x = *reinterpret_cast<const uint2*>(stage + row * HEAD_DIM + 8 * chunk);
    const float scale = *reinterpret_cast<const float*>(stage + 2 * STORED_BYTES + 4 * row);
    *reinterpret_cast<uint4*>(target + row * STRIDE + 16 * chunk) = {
        dequantize_pair(x.x, scale), dequantize_pair(x.x >> 16, scale), dequantize_pair(x.y, scale),
        dequantize_pair(x.y >> 16, scale)};
  }
}
#endif

// Calls step(start, keys, values) for each tile of [begin, end) in order, with the addresses of its keys and values
// in shared memory, element rows of STRIDE bytes. All THREADS threads of the block take part; `memory` is
// PIPELINE_BYTES of shared memory.
template <int THREADS, class Step>
DEVICE void for_each_tile(const Pages& pages, int begin, int end, u8* memory, Step step) {
  const u32 shared = shared_address(memory);
  const int first = begin / TILE * TILE;
  load_tile<THREADS>(pages, first, begin, end, shared);
  cp_async_commit();
  u32 stage = 0;
  for (int start = first; start < end; start += TILE, stage ^= 1) {
    if (start + TILE < end) load_tile<THREADS>(pages, start + TILE, begin, end, shared + (stage ^ 1) * STAGE_BYTES);
    cp_async_commit();  // empty behind the last tile, so that the wait is for this one
    cp_async_wait<1>();
    synchronise<THREADS>();
#if KV_INT8
    dequantize_tile<THREADS>(memory + stage * STAGE_BYTES, memory + 2 * STAGE_BYTES);
    synchronise<THREADS>();
    step(start, shared + 2 * STAGE_BYTES, shared + 2 * STAGE_BYTES + TILE_BYTES);
#else
    step(start, shared + stage * STAGE_BYTES, shared + stage * STAGE_BYTES + TILE_BYTES);
    synchronise<THREADS>();
#endif
  }
}

// 16 query rows of a warp. A lane holds columns of rows g = lane / 4 and g + 8, as mma wants them.
struct QueryRows {
  u32 q[HEAD_DIM / 16][4];
  int oldest[2], newest[2];  // keys that each of the two rows sees: [oldest, newest]; none if the row is unused

  // Rows [row, row + 16) of `rows`, which are an entry's tokens x the query heads of one KV head.
  // `queries`: the entry's first token, the KV head's first query head.
  DEVICE QueryRows(const element* queries, int row, int rows, int group, int heads, int start, int window) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + lane / 4 + 8 * half, token = r / group;
      const bool used = r < rows;
      newest[half] = used ? start + token : -1;
      oldest[half] = window > 0 ? start + token - window + 1 : 0;
      const u32* source = reinterpret_cast<const u32*>(
          queries + (used ? (static_cast<long long>(token) * heads + r % group) * HEAD_DIM : 0) + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; ++i) {
        q[i][half] = used ? source[8 * i] : 0;
        q[i][half + 2] = used ? source[8 * i + 4] : 0;
      }
    }
  }
};

// Output rows in mma's layout, not yet divided by the sums, and their softmax over the keys so far. The two sums
// are a lane's own share until `close`.
struct OutputRows {
  float o[HEAD_DIM / 8][4];
  Softmax softmax[2];

  DEVICE OutputRows() { reset(); }

  DEVICE void reset() {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = 0.f;
    softmax[0] = softmax[1] = Softmax();
  }

  DEVICE void attend(const QueryRows& rows, int start, u32 keys, u32 values, float scale, float cap) {
    float s[TILE / 8][4] = {};
    multiply_keys(rows, keys, s);
    float shares[2];
    soften(rows, start, scale, cap, s, shares);
    // Exact where it is skipped: x * 1 is x.
    if (__any_sync(~0u, shares[0] != 1.f || shares[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][j] = __fmul_rn(o[i][j], shares[j / 2]);
    }
    multiply_values(values, s);
  }

  // Sums over the four lanes that share a row.
  DEVICE void close() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
        softmax[half].sum = __fadd_rn(softmax[half].sum, __shfl_xor_sync(~0u, softmax[half].sum, step));
  }

 private:
  static DEVICE void multiply_keys(const QueryRows& rows, u32 keys, float (&s)[TILE / 8][4]) {
    const int lane = threadIdx.x % 32;
    const u32 source = keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i)
#pragma unroll
      for (int j = 0; j < TILE / 16; ++j) {
        u32 k[4];
        ldmatrix_x4(k, source + j * 16 * STRIDE + i * 32);
        mma_16816(s[2 * j], rows.q[i], k[0], k[1]);
        mma_16816(s[2 * j + 1], rows.q[i], k[2], k[3]);
      }
  }

  // Products to weights against the new maximum; shares become the factors of older sums.
  DEVICE void soften(const QueryRows& rows, int start, float scale, float cap, float (&s)[TILE / 8][4],
                     float (&shares)[2]) {
    float max[2] = {softmax[0].max, softmax[1].max};
#pragma unroll
    for (int i = 0; i < TILE / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = start + 8 * i + threadIdx.x % 4 * 2 + j % 2, half = j / 2;
        const bool seen = key >= rows.oldest[half] && key <= rows.newest[half];
        s[i][j] = seen ? to_logit(s[i][j], scale, cap) : NEGATIVE_INFINITY;
        max[half] = fmaxf(max[half], s[i][j]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) max[half] = fmaxf(max[half], __shfl_xor_sync(~0u, max[half], step));
      shares[half] = ex2_approx(__fsub_rn(softmax[half].max, finite_max(max[half])));
      softmax[half] = {max[half], __fmul_rn(softmax[half].sum, shares[half])};
    }
#pragma unroll
    for (int i = 0; i < TILE / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = ex2_approx(__fsub_rn(s[i][j], finite_max(max[j / 2])));
        softmax[j / 2].sum = __fadd_rn(softmax[j / 2].sum, s[i][j]);
      }
  }

  DEVICE void multiply_values(u32 values, const float (&s)[TILE / 8][4]) {
    const int lane = threadIdx.x % 32;
    const u32 source = values + lane % 16 * STRIDE + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i) {
      const u32 p[4] = {to_elements(s[2 * i][0], s[2 * i][1]), to_elements(s[2 * i][2], s[2 * i][3]),
                        to_elements(s[2 * i + 1][0], s[2 * i + 1][1]), to_elements(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 16; ++j) {
        u32 v[4];
        ldmatrix_x4_trans(v, source + i * 16 * STRIDE + j * 32);
        mma_16816(o[2 * j], p, v[0], v[1]);
        mma_16816(o[2 * j + 1], p, v[2], v[3]);
      }
    }
  }
};
