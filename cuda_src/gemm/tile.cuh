// Tiles of 64 along K in shared memory, and the order in which products are summed.
//
// Bits of an output depend on its row of A, its row of W and K, never on M, N, its place, tile sizes or the version:
//   - K is cut into at most 8 segments of whole tiles, by `segment_tiles(K)` alone;
//   - a segment is one chain of m16n8k16 from zero, in order of k;
//   - segments are added in order, to zero.
//
// Rows of a 16-bit tile are 128 bytes, of an int8 one 64; their 16-byte chunks are permuted by row so that neither a
// copy nor an ldmatrix meets itself in a bank.
#pragma once
#include "gemm/epilogue.cuh"

constexpr int kTileK = 64;
constexpr int kSegments = 8;

DEVICE int k_tiles(int k) { return (k + kTileK - 1) / kTileK; }
DEVICE int segment_tiles(int k) { return (k_tiles(k) + kSegments - 1) / kSegments; }

DEVICE int element_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
DEVICE int int8_offset(int row, int chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }

#if WEIGHT_INT8
constexpr int kWeightRowBytes = 64;
#else
constexpr int kWeightRowBytes = 128;
#endif

// Copy rows [row, row + Rows) of columns [column, column + 64) of source[rows, k]; what is outside becomes zero.
// `Threads` threads take part, this one is number `thread`.
template <int Rows, int Threads>
DEVICE void copy_elements(u32 target, const element* source, int row, int rows, int column, int k, int thread) {
  static_assert(Rows * 8 % Threads == 0, "a loop of known length, so that it is unrolled");
#pragma unroll
  for (int round = 0; round < Rows * 8 / Threads; ++round) {
    int i = thread + round * Threads, r = i >> 3, chunk = i & 7, at = column + chunk * 8;
    bool valid = row + r < rows && at < k;
    cp_async_16(target + element_offset(r, chunk), valid ? source + static_cast<size_t>(row + r) * k + at : source,
                valid);
  }
}

template <int Rows, int Threads>
DEVICE void copy_weights(u32 target, const weight* source, int row, int rows, int column, int k, int thread) {
#if WEIGHT_INT8
  static_assert(Rows * 4 % Threads == 0, "a loop of known length, so that it is unrolled");
#pragma unroll
  for (int round = 0; round < Rows * 4 / Threads; ++round) {
    int i = thread + round * Threads, r = i >> 2, chunk = i & 3, at = column + chunk * 16;
    bool valid = row + r < rows && at < k;
    cp_async_16(target + int8_offset(r, chunk), valid ? source + static_cast<size_t>(row + r) * k + at : source, valid);
  }
#else
  copy_elements<Rows, Threads>(target, source, row, rows, column, k, thread);
#endif
}

// Fragment of A: rows [row, row + 16) of a tile, columns [16 * step, 16 * step + 16).
DEVICE void load_a(u32 (&a)[4], u32 tile, int row, int step, int lane) {
  ldmatrix_x4(a, tile + element_offset(row + (lane & 15), step * 2 + (lane >> 4)));
}

// Fragments of W for 16 outputs: b[0], b[1] of rows [row, row + 8) of a tile, b[2], b[3] of the next 8.
DEVICE void load_b(u32 (&b)[4], const unsigned char* tile, int row, int step, int lane) {
#if WEIGHT_INT8
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int r = row + (i >> 1) * 8 + (lane >> 2);
    u16 pair = *reinterpret_cast<const u16*>(tile + int8_offset(r, step) + (i & 1) * 8 + (lane & 3) * 2);
    b[i] = to_elements(static_cast<float>(static_cast<i8>(pair & 0xff)), static_cast<float>(static_cast<i8>(pair >> 8)));
  }
#else
  int r = row + (lane & 7) + (lane >> 4) * 8;
  ldmatrix_x4(b, shared_address(tile) + element_offset(r, step * 2 + (lane >> 3 & 1)));
#endif
}
