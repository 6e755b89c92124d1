// Sums over a warp and over a block, in an order that depends on the block's size only.
#pragma once
#include "common/ptx.cuh"

template <class T>
DEVICE T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum in every thread of a block of whole warps; `scratch` holds 32 and may be reused after the next barrier.
template <class T>
DEVICE T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  T total = scratch[0];
  for (int warp = 1; warp < blockDim.x >> 5; ++warp) total += scratch[warp];
  return total;
}
