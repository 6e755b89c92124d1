// Eight neighbours of a row as float32, read and written 16 bytes at a time.
#pragma once
#include "common/element.cuh"

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
