// RMSNorm v1: as v0, but a row stays in registers, so it is read once; accesses of 16 bytes.
//
//   -DELEM_BF16  0, 1  element type
//   -DVECTORS          groups of 8 that a thread keeps: ceil(width / 8 / blockDim)
//
// Launch: grid rows, block a multiple of 32 up to 256; each block does one row. The width is a multiple of 8.
#include "common/reduce.cuh"
#include "layers/vector.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight; x: float [rows, width], weight: float [width], out: element [rows, width].
extern "C" __global__ void __launch_bounds__(256)
rms_norm_v1(const float* x, const float* weight, element* out, int width, float eps) {
  __shared__ float scratch[32];
  const size_t row = static_cast<size_t>(blockIdx.x) * width;
  Floats kept[VECTORS];
  float squares = 0.0f;
#pragma unroll
  for (int turn = 0; turn < VECTORS; ++turn) {
    const int i = (turn * blockDim.x + threadIdx.x) * 8;
    if (i >= width) break;
    kept[turn] = load_floats(x + row + i);
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += kept[turn].v[e] * kept[turn].v[e];
  }
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / width + eps);
#pragma unroll
  for (int turn = 0; turn < VECTORS; ++turn) {
    const int i = (turn * blockDim.x + threadIdx.x) * 8;
    if (i >= width) break;
    const Floats gains = load_floats(weight + i);
#pragma unroll
    for (int e = 0; e < 8; ++e) kept[turn].v[e] = kept[turn].v[e] * scale * gains.v[e];
    store_elements(out + row + i, kept[turn]);
  }
}
