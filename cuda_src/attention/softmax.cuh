// Softmax over keys that arrive in parts: the arithmetic that every attention kernel shares.
//
// Logits are held times log2(e), so that weights are exp2. Roundings are spelled out (__fmul_rn and so on): left to
// itself the compiler contracts products and sums into fma, differently in each kernel, and the kernels' results
// must agree bit for bit.
#pragma once
#include "common/ptx.cuh"

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
constexpr float LOG2_E = 1.4426950408889634f;

// Of one query row over some keys: the largest logit, and the sum of exp2(logit - max). No key yet: -inf and 0.
struct Softmax {
  float max = NEGATIVE_INFINITY;
  float sum = 0.f;
};

// What logits are subtracted from: finite even where there is no key, so that exp2(-inf - x) is 0 and never NaN.
DEVICE float finite_max(float max) { return max == NEGATIVE_INFINITY ? 0.f : max; }

// cap * tanh(x / cap); the rounding error is 1e-7 of cap. cap 0 is off.
DEVICE float soft_cap(float x, float cap) {
  if (cap == 0.f) return x;
  const float e = ex2_approx(__fmul_rn(__fdiv_rn(x, cap), 2.f * LOG2_E));
  return __fmul_rn(cap, __fsub_rn(1.f, __fdiv_rn(2.f, __fadd_rn(e, 1.f))));
}

DEVICE float to_logit(float product, float scale, float cap) {
  return __fmul_rn(soft_cap(__fmul_rn(product, scale), cap), LOG2_E);
}

// Factors of two parts' sums and outputs in the sums and outputs of both.
struct Shares {
  float first, second;
};

// first = first joined with second.
DEVICE Shares join(Softmax& first, const Softmax& second) {
  const float max = fmaxf(first.max, second.max);
  const float base = finite_max(max);
  const Shares shares = {ex2_approx(__fsub_rn(first.max, base)), ex2_approx(__fsub_rn(second.max, base))};
  first.sum = __fmaf_rn(first.sum, shares.first, __fmul_rn(second.sum, shares.second));
  first.max = max;
  return shares;
}

DEVICE float join(float first, float second, const Shares& shares) {
  return __fmaf_rn(first, shares.first, __fmul_rn(second, shares.second));
}

// What the output over all keys is multiplied by. `sinks` [heads] are logits without a value; null is none.
DEVICE float normaliser(Softmax softmax, const float* sinks, int head) {
  float factor = 1.f;
  if (sinks != nullptr) factor = join(softmax, {__fmul_rn(sinks[head], LOG2_E), 1.f}).first;
  return softmax.sum == 0.f ? 0.f : __fdiv_rn(factor, softmax.sum);
}

// Adding zero makes -0 into 0: keys with weight 0 may be there or not, and -0 + 0 is 0.
DEVICE float normalised(float output, float factor) { return __fadd_rn(__fmul_rn(output, factor), 0.f); }
