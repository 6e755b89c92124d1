// What every GEMM version shares: its configuration, and what becomes of a sum.
//
//   -DELEM_BF16    0, 1      element type of A, of W unless WEIGHT_INT8, and of 16-bit outputs
//   -DEPILOGUE     0 to 3    as below
//   -DHAS_BIAS     0, 1      add bias[n]
//   -DWEIGHT_INT8  0, 1      W is int8; a sum is multiplied by scales[n]
#pragma once
#include "common/element.cuh"

#define STORE 0      // out: element [M, N]
#define STORE_F32 1  // out: float [M, N]
#define ADD_F32 2    // out: float [M, N], added to
#define SWIGLU 3     // out: element [M, N / 2] = silu(gate) * up; rows of W alternate: 8 of gate, 8 of up

#if WEIGHT_INT8
using weight = i8;
DEVICE float weight_to_float(weight x) { return static_cast<float>(x); }
#else
using weight = element;
DEVICE float weight_to_float(weight x) { return to_float(x); }
#endif

// The product's value in `column`. Not contracted to an fma: every version rounds alike.
DEVICE float finished(float sum, int column, const float* scales, const float* bias) {
#if WEIGHT_INT8
  sum = __fmul_rn(sum, scales[column]);
#endif
#if HAS_BIAS
  sum += bias[column];
#endif
  return sum;
}

DEVICE float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// Element (row, column) of the [*, columns] output.
DEVICE void put(void* out, int row, int column, int columns, float value) {
  size_t index = static_cast<size_t>(row) * columns + column;
#if EPILOGUE == STORE_F32
  static_cast<float*>(out)[index] = value;
#elif EPILOGUE == ADD_F32
  static_cast<float*>(out)[index] += value;
#else
  static_cast<element*>(out)[index] = to_element(value);
#endif
}

// Elements (row, column) and (row, column + 1) of the [*, columns] output; `column` is even.
DEVICE void put_pair(void* out, int row, int column, int columns, float first, float second) {
  if (columns % 2 != 0) {
    if (column < columns) put(out, row, column, columns, first);
    if (column + 1 < columns) put(out, row, column + 1, columns, second);
    return;
  }
  if (column >= columns) return;
  size_t index = static_cast<size_t>(row) * columns + column;
#if EPILOGUE == STORE_F32
  *reinterpret_cast<float2*>(static_cast<float*>(out) + index) = make_float2(first, second);
#elif EPILOGUE == ADD_F32
  float2* target = reinterpret_cast<float2*>(static_cast<float*>(out) + index);
  float2 before = *target;
  *target = make_float2(before.x + first, before.y + second);
#else
  *reinterpret_cast<u32*>(static_cast<element*>(out) + index) = to_elements(first, second);
#endif
}
