// The element type of activations and weights, chosen by -DELEM_BF16: bfloat16 if 1, float16 if 0.
//
// Elements are held as their 16 bits; arithmetic is float32.
#pragma once
#include "common/ptx.cuh"

using element = u16;

#if ELEM_BF16
DEVICE float to_float(element x) { return f32_from_bf16(x); }
DEVICE element to_element(float x) { return bf16_from_f32(x); }
DEVICE u32 to_elements(float low, float high) { return bf16x2_from_f32(low, high); }
DEVICE void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_bf16(c, a, b0, b1); }
#else
DEVICE float to_float(element x) { return f32_from_f16(x); }
DEVICE element to_element(float x) { return f16_from_f32(x); }
DEVICE u32 to_elements(float low, float high) { return f16x2_from_f32(low, high); }
DEVICE void mma_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16_f16(c, a, b0, b1); }
#endif
