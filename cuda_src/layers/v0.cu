// Layers v0: what lies between the products, one element per thread and turn; serves any width.
//
//   -DELEM_BF16  0, 1  element type
//
// Launch: grid rows, block 256; each block does one row. Residuals are float [rows, width].
#include "common/element.cuh"
#include "common/reduce.cuh"

// out[row] = weight[ids[row]]; weight: element [vocab, width], ids: int [rows].
extern "C" __global__ void __launch_bounds__(256)
embedding_v0(const int* ids, const element* weight, float* out, int width) {
  const size_t id = ids[blockIdx.x], row = blockIdx.x;
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[row * width + i] = to_float(weight[id * width + i]);
}

// out[row] = x[indices[row]]; indices: int [rows], out: float [rows, width].
extern "C" __global__ void __launch_bounds__(256)
select_rows_v0(const int* indices, const float* x, float* out, int width) {
  const size_t source = indices[blockIdx.x], row = blockIdx.x;
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[row * width + i] = x[source * width + i];
}

// out = x / sqrt(mean(x^2) + eps) * weight; x: float [rows, width], weight: float [width], out: element [rows, width].
extern "C" __global__ void __launch_bounds__(256)
rms_norm_v0(const float* x, const float* weight, element* out, int width, float eps) {
  __shared__ float scratch[32];
  const size_t row = static_cast<size_t>(blockIdx.x) * width;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) squares += x[row + i] * x[row + i];
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / width + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x) out[row + i] = to_element(x[row + i] * scale * weight[i]);
}

// out = silu(gate) * up; gate_up: element [rows, 2 * width], all gates first, or 8 gates and 8 ups in turn if
// `interleaved`; out: element [rows, width].
extern "C" __global__ void __launch_bounds__(256)
silu_and_mul_v0(const element* gate_up, element* out, int width, int interleaved) {
  const size_t row = blockIdx.x;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const element* gates = gate_up + row * 2 * width + (interleaved ? i / 8 * 16 + i % 8 : i);
    const float gate = to_float(gates[0]), up = to_float(gates[interleaved ? 8 : width]);
    out[row * width + i] = to_element(gate / (1.0f + expf(-gate)) * up);
  }
}
