// The shortest prefix of a row's tokens, most likely first, whose weights reach a target: radix select by rank.
//
// Weights are integers, so that their sums are the same whatever the order of the atomic additions.
#pragma once
#include "sampling/row.cuh"

struct Histogram {
  u64 weights[256];
  u32 counts[256];
  u64 left;   // of the target, within the chosen bin
  u32 digit;  // of the chosen bin; 256 if the target is not reached
  u32 count;  // of tokens in it
};

// A thread's sums of four bins on their way to the histogram: the first digit is the exponent, which few bins share
// almost all tokens of, so that every lane would wait for every other to add to the same word.
struct Bins {
  u64 weights[4] = {};
  u32 counts[4] = {}, digits[4] = {};

  DEVICE void add(Histogram& h, u32 digit, u64 weight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (digit % 4 != i) continue;
      if (digit != digits[i]) {
        flush(h, i);
        digits[i] = digit;
      }
      weights[i] += weight;
      counts[i] += 1;
    }
  }

  DEVICE void flush(Histogram& h, int i) {
    if (counts[i] == 0) return;
    atomicAdd(&h.weights[digits[i]], weights[i]);
    atomicAdd(&h.counts[digits[i]], counts[i]);
    weights[i] = counts[i] = 0;
  }

  DEVICE void flush(Histogram& h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) flush(h, i);
  }
};

// Lanes of the first warp find the bin in which the running sum reaches the target.
template <class Target>
DEVICE void choose_bin(Histogram& h, u64 left, Target target, bool first) {
  const int lane = threadIdx.x;
  u64 sum = 0;
  for (int i = 0; i < 8; ++i) sum += h.weights[lane * 8 + i];
  u64 end = sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u64 before = __shfl_up_sync(0xffffffffu, end, step);
    if (lane >= step) end += before;
  }
  if (first) left = target(__shfl_sync(0xffffffffu, end, 31));
  if (lane == 31 && end < left) h.digit = 256;
  if (end < left || end - sum >= left) return;
  left -= end - sum;
  for (int digit = lane * 8;; ++digit) {
    if (h.weights[digit] >= left) {
      h.left = left;
      h.digit = digit;
      h.count = h.counts[digit];
      return;
    }
    left -= h.weights[digit];
  }
}

// The last rank of that prefix, among ranks up to `limit`; `limit` if all of them don't reach the target.
//   rank(i, value): of token i; weight(value): its weight; target(sum of all weights) >= 1.
template <class Rank, class Weight, class Target>
DEVICE u64 select(const float* values, int vocab, u64 limit, Histogram& h, Rank rank, Weight weight, Target target) {
  u64 prefix = 0, left = 0;
  for (int shift = 48; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) h.weights[i] = h.counts[i] = 0;
    __syncthreads();
    Bins bins;
    for (int quad = threadIdx.x; quad < (vocab + 3) / 4; quad += blockDim.x) {
      const Quad x = load_quad(values, quad, vocab);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u64 r = rank(quad * 4 + i, x.v[i]);
        if (quad * 4 + i < vocab && r <= limit && r >> (shift + 8) == prefix)
          bins.add(h, r >> shift & 255, weight(x.v[i]));
      }
    }
    bins.flush(h);
    __syncthreads();
    if (threadIdx.x < 32) choose_bin(h, left, target, shift == 48);
    __syncthreads();
    if (h.digit == 256) return limit;
    left = h.left;
    prefix = prefix << 8 | h.digit;
    if (h.count == 1) return min(limit, (prefix + 1 << shift) - 1);
  }
  return prefix;
}
