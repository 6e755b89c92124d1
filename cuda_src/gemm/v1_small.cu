// GEMM v1 for few rows: a block owns 16 columns, each warp a segment of K with a cp.async ring of its own; W is read once.
//
// Launch: grid (ceil(N / 16), ceil(M / 16)), block 256, dynamic shared memory 8 * STAGES * (2048 + 16 * bytes of a
// W row's tile). K must be a multiple of 8, of 16 with WEIGHT_INT8. Between barriers warps never meet: a decode step
// has little to compute, so what counts is bytes in flight.
#include "gemm/tile.cuh"

constexpr int kRows = 16;
constexpr int kATile = kRows * 128, kStage = kATile + 16 * kWeightRowBytes;

// Partial sums of a warp, [16, 16] float; columns of every other pair of rows are exchanged to spread the banks.
DEVICE int partial_index(int warp, int row, int column) { return (warp * 16 + row) * 16 + (column ^ (row & 2) << 2); }

// a: element [M, K]; w: [N, K]; scales, bias: float [N] or null; out: by EPILOGUE.
extern "C" __global__ void __launch_bounds__(256)
gemm_v1_small(const element* a, const weight* w, const float* scales, const float* bias, void* out, int m, int n,
              int k) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row0 = blockIdx.y * kRows, column0 = blockIdx.x * 16;
  const int tiles = k_tiles(k), segment = segment_tiles(k);
  const int first = min(warp * segment, tiles), count = min(segment, tiles - first);

  unsigned char* ring = shared + warp * STAGES * kStage;
  const u32 ring_address = shared_address(ring);
  auto copy = [&](int tile) {
    const u32 stage = ring_address + tile % STAGES * kStage;
    copy_elements<kRows, 32>(stage, a, row0, m, (first + tile) * kTileK, k, lane);
    copy_weights<16, 32>(stage + kATile, w, column0, n, (first + tile) * kTileK, k, lane);
  };
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    if (tile < count) copy(tile);
    cp_async_commit();
  }
  float sums[2][4] = {};
  for (int tile = 0; tile < count; ++tile) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();
    if (tile + STAGES - 1 < count) copy(tile + STAGES - 1);
    cp_async_commit();
    const int stage = tile % STAGES * kStage;
    u32 fragments_a[kTileK / 16][4], fragments_b[kTileK / 16][4];
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      load_a(fragments_a[step], ring_address + stage, 0, step, lane);
      load_b(fragments_b[step], ring + stage + kATile, 0, step, lane);
    }
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      mma_16816(sums[0], fragments_a[step], fragments_b[step][0], fragments_b[step][1]);
      mma_16816(sums[1], fragments_a[step], fragments_b[step][2], fragments_b[step][3]);
    }
  }

  __syncthreads();  // every ring has been filled and read: its memory takes the partial sums
  float* partial = reinterpret_cast<float*>(shared);
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int half = i & 1, r = g + (i >> 1) * 8;
    *reinterpret_cast<float2*>(partial + partial_index(warp, r, half * 8 + t * 2)) =
        make_float2(sums[half][(i >> 1) * 2], sums[half][(i >> 1) * 2 + 1]);
  }
  __syncthreads();
  const int r = threadIdx.x >> 4, c = threadIdx.x & 15, row = row0 + r, column = column0 + c;
  float sum = 0.0f;
  for (int i = 0; i * segment < tiles; ++i) sum += partial[partial_index(i, r, c)];
  if (column < n) sum = finished(sum, column, scales, bias);
#if EPILOGUE == SWIGLU
  const float up = __shfl_down_sync(0xffffffffu, sum, 8);
  if (row < m && column < n && c < 8) put(out, row, column0 / 2 + c, n / 2, swiglu(sum, up));
#else
  if (row < m && column < n) put(out, row, column, n, sum);
#endif
}
