// Layers v1: as v0, eight elements per thread and turn in accesses of 16 bytes. The width is a multiple of 8.
//
//   -DELEM_BF16  0, 1  element type
//
// Launch: grid rows, block 256; each block does one row. Residuals are float [rows, width].
#include "layers/vector.cuh"

// out[row] = weight[ids[row]]; weight: element [vocab, width], ids: int [rows].
extern "C" __global__ void __launch_bounds__(256)
embedding_v1(const int* ids, const element* weight, float* out, int width) {
  const size_t id = ids[blockIdx.x], row = blockIdx.x;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8)
    store_floats(out + row * width + i, load_elements(weight + id * width + i));
}

// out[row] = x[indices[row]]; indices: int [rows], out: float [rows, width].
extern "C" __global__ void __launch_bounds__(256)
select_rows_v1(const int* indices, const float* x, float* out, int width) {
  const size_t source = indices[blockIdx.x], row = blockIdx.x;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8)
    store_floats(out + row * width + i, load_floats(x + source * width + i));
}

// out = silu(gate) * up; gate_up: element [rows, 2 * width], all gates first, or 8 gates and 8 ups in turn if
// `interleaved`; out: element [rows, width].
extern "C" __global__ void __launch_bounds__(256)
silu_and_mul_v1(const element* gate_up, element* out, int width, int interleaved) {
  const size_t row = blockIdx.x;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
    const element* gates = gate_up + row * 2 * width + (interleaved ? 2 * i : i);
    Floats x = load_elements(gates);
    const Floats ups = load_elements(gates + (interleaved ? 8 : width));
#pragma unroll
    for (int e = 0; e < 8; ++e) x.v[e] = x.v[e] / (1.0f + expf(-x.v[e])) * ups.v[e];
    store_elements(out + row * width + i, x);
  }
}
