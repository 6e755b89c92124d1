// GEMM v0: one thread per output, 16 x 16 tiles in shared memory. Obviously right; serves any M, N, K.
//
// Launch: grid (ceil(N / 16), ceil(M / 16)), block (16, 16).
#include "gemm/epilogue.cuh"

// a: element [M, K]; w: [N, K]; scales, bias: float [N] or null; out: by EPILOGUE.
extern "C" __global__ void __launch_bounds__(256)
gemm_v0(const element* a, const weight* w, const float* scales, const float* bias, void* out, int m, int n, int k) {
  __shared__ float tile_a[16][16], tile_w[16][17];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x, w_row = blockIdx.x * 16 + y;
  float sum = 0.0f;
  for (int start = 0; start < k; start += 16) {
    const int at = start + x;
    tile_a[y][x] = row < m && at < k ? to_float(a[static_cast<size_t>(row) * k + at]) : 0.0f;
    tile_w[y][x] = w_row < n && at < k ? weight_to_float(w[static_cast<size_t>(w_row) * k + at]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum += tile_a[y][i] * tile_w[x][i];
    __syncthreads();
  }
  const bool inside = row < m && column < n;
  if (inside) sum = finished(sum, column, scales, bias);
#if EPILOGUE == SWIGLU
  tile_a[y][x] = sum;
  __syncthreads();
  if (inside && x < 8) put(out, row, blockIdx.x * 8 + x, n / 2, swiglu(sum, tile_a[y][x + 8]));
#else
  if (inside) put(out, row, column, n, sum);
#endif
}
