// What a row samples by, and the order of its tokens.
//
// "More likely" is a total order: larger logit first, then lower id. A token's rank is a 56-bit number, smaller for
// the more likely: 32 bits that fall with the logit, then 24 of the id. So no two ranks are equal.
#pragma once
#include "common/ptx.cuh"

#define INFINITE __int_as_float(0x7f800000)

// ROW_PARAMS of engine/devices/cuda/ops/sampling.py.
struct RowParams {
  double temperature, top_p, min_p;
  double presence_penalty, frequency_penalty, repetition_penalty;
  u64 seed;
  int choice, top_k, min_position;
  int history;  // index into counts and history, -1 for none
  int rules;    // where the row's part of the rules begins
  int num_banned, num_bias, num_allowed, words_length;
  int unused;
};

struct Quad {
  float v[4];
};

// values[4 * quad] and the three after it; -inf beyond `vocab`.
DEVICE Quad load_quad(const float* values, int quad, int vocab) {
  if (vocab % 4 == 0) {
    const float4 x = reinterpret_cast<const float4*>(values)[quad];
    return {{x.x, x.y, x.z, x.w}};
  }
  Quad x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v[i] = quad * 4 + i < vocab ? values[quad * 4 + i] : -INFINITE;
  return x;
}

constexpr int kIdBits = 24;

DEVICE u64 make_rank(u32 order, int id) { return static_cast<u64>(order) << kIdBits | static_cast<u32>(id); }
DEVICE int rank_id(u64 rank) { return static_cast<int>(rank & ((1u << kIdBits) - 1)); }

// Falls with any value but NaN; both zeros are one.
DEVICE u32 falling(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

struct Best {
  float value;
  int id;
};

// The most likely token of the row in every thread, and whether a NaN or +inf is among its values; `scratch` may be
// reused after the next barrier.
DEVICE Best most_likely(const float* values, int vocab, Best* scratch, bool& unusable) {
  Best best = {-INFINITE, vocab};
  bool bad = false;
  for (int quad = threadIdx.x; quad < (vocab + 3) / 4; quad += blockDim.x) {
    const Quad x = load_quad(values, quad, vocab);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bad |= !(x.v[i] < INFINITE);
      if (x.v[i] > best.value) best = {x.v[i], quad * 4 + i};
    }
  }
  auto merge = [&](Best other) {
    if (other.value > best.value || (other.value == best.value && other.id < best.id)) best = other;
  };
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    merge({__shfl_xor_sync(0xffffffffu, best.value, step), __shfl_xor_sync(0xffffffffu, best.id, step)});
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = best;
  unusable = __syncthreads_or(bad);
  for (int warp = 0; warp < blockDim.x >> 5; ++warp) merge(scratch[warp]);
  return best;
}
