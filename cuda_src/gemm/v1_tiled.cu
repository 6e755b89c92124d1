// GEMM v1 for many rows: TILE_M x TILE_N outputs per block by m16n8k16, tiles of 64 along K through a cp.async ring.
//
// Launch: grid (ceil(M / TILE_M), ceil(N / TILE_N)), block 32 * WARPS_M * WARPS_N, dynamic shared memory
// STAGES * (TILE_M * 128 + TILE_N * bytes of a W row's tile). Blocks that share columns of W run side by side.
// K must be a multiple of 8, of 16 with WEIGHT_INT8.
#include "gemm/tile.cuh"

constexpr int kThreads = 32 * WARPS_M * WARPS_N;
constexpr int kWarpM = TILE_M / WARPS_M, kWarpN = TILE_N / WARPS_N;
constexpr int kM16 = kWarpM / 16, kN8 = kWarpN / 8;
constexpr int kATile = TILE_M * 128, kStage = kATile + TILE_N * kWeightRowBytes;

// a: element [M, K]; w: [N, K]; scales, bias: float [N] or null; out: by EPILOGUE.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
gemm_v1_tiled(const element* a, const weight* w, const float* scales, const float* bias, void* out, int m, int n,
              int k) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 shared_base = shared_address(shared);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row0 = blockIdx.x * TILE_M, column0 = blockIdx.y * TILE_N;
  const int warp_row = warp / WARPS_N * kWarpM, warp_column = warp % WARPS_N * kWarpN;
  const int tiles = k_tiles(k), segment = segment_tiles(k);

  auto copy = [&](int tile) {
    const u32 stage = shared_base + tile % STAGES * kStage;
    copy_elements<TILE_M, kThreads>(stage, a, row0, m, tile * kTileK, k, threadIdx.x);
    copy_weights<TILE_N, kThreads>(stage + kATile, w, column0, n, tile * kTileK, k, threadIdx.x);
  };
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    if (tile < tiles) copy(tile);
    cp_async_commit();
  }
  float sums[kM16][kN8][4] = {}, chain[kM16][kN8][4] = {};
  for (int tile = 0, left = segment; tile < tiles; ++tile) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this tile has arrived, and the stage refilled below has been read by every warp
    if (tile + STAGES - 1 < tiles) copy(tile + STAGES - 1);
    cp_async_commit();
    // The next step's fragments are on their way while this one's are multiplied.
    u32 fragments_a[2][kM16][4], fragments_b[2][kN8 / 2][4];
    auto load = [&](int step) {
      const int stage = tile % STAGES * kStage;
#pragma unroll
      for (int i = 0; i < kM16; ++i)
        load_a(fragments_a[step % 2][i], shared_base + stage, warp_row + i * 16, step, lane);
#pragma unroll
      for (int j = 0; j < kN8 / 2; ++j)
        load_b(fragments_b[step % 2][j], shared + stage + kATile, warp_column + j * 16, step, lane);
    };
    load(0);
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      if (step + 1 < kTileK / 16) load(step + 1);
#pragma unroll
      for (int j = 0; j < kN8; j += 2) {
        const u32* fragment_b = fragments_b[step % 2][j / 2];
#pragma unroll
        for (int i = 0; i < kM16; ++i) {
          mma_16816(chain[i][j], fragments_a[step % 2][i], fragment_b[0], fragment_b[1]);
          mma_16816(chain[i][j + 1], fragments_a[step % 2][i], fragment_b[2], fragment_b[3]);
        }
      }
    }
    if (--left == 0 || tile + 1 == tiles) {
      left = segment;
#pragma unroll
      for (int i = 0; i < kM16; ++i)
#pragma unroll
        for (int j = 0; j < kN8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums[i][j][e] += chain[i][j][e];
            chain[i][j][e] = 0.0f;
          }
    }
  }

  const int g = lane >> 2, t = lane & 3;
  auto value = [&](float sum, int column) { return column < n ? finished(sum, column, scales, bias) : 0.0f; };
#pragma unroll
  for (int i = 0; i < 2 * kM16; ++i) {
    const int row = row0 + warp_row + i * 8 + g, e = i % 2 * 2;
    if (row >= m) continue;
#if EPILOGUE == SWIGLU
#pragma unroll
    for (int j = 0; j < kN8; j += 2) {
      const int gate = column0 + warp_column + j * 8 + t * 2, up = gate + 8;
      const float* gates = sums[i / 2][j] + e;
      const float* ups = sums[i / 2][j + 1] + e;
      put_pair(out, row, (column0 + warp_column + j * 8) / 2 + t * 2, n / 2,
               swiglu(value(gates[0], gate), value(ups[0], up)),
               swiglu(value(gates[1], gate + 1), value(ups[1], up + 1)));
    }
#else
#pragma unroll
    for (int j = 0; j < kN8; ++j) {
      const int column = column0 + warp_column + j * 8 + t * 2;
      put_pair(out, row, column, n, value(sums[i / 2][j][e], column), value(sums[i / 2][j][e + 1], column + 1));
    }
#endif
  }
}
