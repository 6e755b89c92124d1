// Layers v1: as v0, eight elements per thread and turn in accesses of 16 bytes; a norm reads its row once.
//
// The width must be a multiple of 8. Defines as in v0, and
//   -DVECTORS  groups of 8 that a thread of rms_norm keeps in registers, ceil(width / 8 / blockDim)
// Launch: grid rows, block up to 256; each block does one row.
#include "common/element.cuh"
#include "common/reduce.cuh"

struct Floats {
  float v[8];
};

DEVICE Floats load_floats(const float* from) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
DEVICE void store_floats(float* to, const Floats& x) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}
DEVICE Floats load_elements(const element* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
  Floats x;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.v[i] = to_float(static_cast<element>(words[i / 2] >> i % 2 * 16));
  return x;
}
DEVICE void store_elements(element* to, const Floats& x) {
  *reinterpret_cast<uint4*>(to) = make_uint4(to_elements(x.v[0], x.v[1]), to_elements(x.v[2], x.v[3]),
                                             to_elements(x.v[4], x.v[5]), to_elements(x.v[6], x.v[7]));
}

#if WEIGHT_INT8
using table = i8;
DEVICE Floats load_table(const table* from, float scale) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  Floats x;
#pragma unroll
  for (int i = 0; i < 8; ++i) x.v[i] = static_cast<float>(static_cast<i8>((i < 4 ? bits.x : bits.y) >> i % 4 * 8)) * scale;
  return x;
}
#else
using table = element;
DEVICE Floats load_table(const table* from, float) { return load_elements(from); }
#endif

// out[row] = weight[ids[row]]; weight: [vocab, width], scales: float [vocab] or null, ids: int [rows].
extern "C" __global__ void __launch_bounds__(256)
embedding_v1(const int* ids, const table* weight, const float* scales, float* out, int width) {
  const size_t id = ids[blockIdx.x], row = blockIdx.x;
  const float scale = WEIGHT_INT8 ? scales[id] : 1.0f;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8)
    store_floats(out + row * width + i, load_table(weight + id * width + i, scale));
}

// out[row] = x[indices[row]]; indices: int [rows], out: float [rows, width].
extern "C" __global__ void __launch_bounds__(256)
select_rows_v1(const int* indices, const float* x, float* out, int width) {
  const size_t source = indices[blockIdx.x], row = blockIdx.x;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8)
    store_floats(out + row * width + i, load_floats(x + source * width + i));
}

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

// out = silu(gate) * up; gate_up: element [rows, 2 * width], out: element [rows, width].
extern "C" __global__ void __launch_bounds__(256)
silu_and_mul_v1(const element* gate_up, element* out, int width) {
  const size_t row = blockIdx.x;
  for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
    const element* gates = gate_up + row * 2 * width + (INTERLEAVED ? 2 * i : i);
    Floats x = load_elements(gates);
    const Floats ups = load_elements(gates + (INTERLEAVED ? 8 : width));
#pragma unroll
    for (int e = 0; e < 8; ++e) x.v[e] = x.v[e] / (1.0f + expf(-x.v[e])) * ups.v[e];
    store_elements(out + row * width + i, x);
  }
}
