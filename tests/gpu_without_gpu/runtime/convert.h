// `cvt`: every conversion between PTX types, with its rounding and saturation.
//
// All float to float conversions go through `round_to`, which rounds a double to a format given by its exponent and
// mantissa widths; a double holds every f16, bf16, f32 and fp8 value exactly. NaN results are PTX's canonical NaNs.
#pragma once
#include "types.h"

namespace gpu {
enum class Round { rn, rz, rm, rp, rna };

inline f64 round_to_integer(f64 x, Round mode) {
  switch (mode) {
    case Round::rz: return std::trunc(x);
    case Round::rm: return std::floor(x);
    case Round::rp: return std::ceil(x);
    case Round::rna: return std::round(x);
    default: return std::nearbyint(x);  // the host runs in round to nearest even
  }
}

struct Format { int exponent_bits, mantissa_bits; bool has_inf; };
constexpr Format kF16{5, 10, true}, kBf16{8, 7, true}, kF32{8, 23, true}, kE4M3{4, 3, false}, kE5M2{5, 2, true};

// The bits of |x| rounded to `format`, or the largest finite value where `saturate` and past it. x is not NaN.
inline u32 round_to(f64 x, Format format, Round mode, bool saturate) {
  bool negative = std::signbit(x);
  f64 magnitude = std::fabs(x);
  u32 sign = negative ? 1u << (format.exponent_bits + format.mantissa_bits) : 0;
  if (negative) mode = mode == Round::rm ? Round::rp : mode == Round::rp ? Round::rm : mode;
  int bias = (1 << (format.exponent_bits - 1)) - 1;
  u32 infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  u32 largest = format.has_inf ? infinity - 1 : infinity | ((1u << format.mantissa_bits) - 2);  // e4m3: 0x7e, 448
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | (saturate ? largest : format.has_inf ? infinity : largest + 1);
  int exponent;
  std::frexp(magnitude, &exponent);
  exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;  // subnormals share the smallest exponent
  f64 scaled = round_to_integer(std::ldexp(magnitude, format.mantissa_bits - exponent), mode);
  u64 significand = static_cast<u64>(scaled);
  u64 result = (static_cast<u64>(exponent + bias - 1) << format.mantissa_bits) + significand;
  if (result <= largest) return sign | static_cast<u32>(result);
  bool toward_zero = mode == Round::rz || mode == Round::rm;
  if (saturate || toward_zero) return sign | largest;
  return sign | (format.has_inf ? infinity : largest + 1);
}

inline f16 to_f16(f64 x, Round mode = Round::rn, bool saturate = false) {
  return {static_cast<u16>(is_nan(x) ? 0x7fff : round_to(x, kF16, mode, saturate))};
}
inline bf16 to_bf16(f64 x, Round mode = Round::rn, bool saturate = false) {
  return {static_cast<u16>(is_nan(x) ? 0x7fff : round_to(x, kBf16, mode, saturate))};
}
inline bf16 to_bf16(f32 x) {  // the common case, without a double
  u32 raw = bit_cast<u32>(x);
  if (is_nan(x)) return {0x7fff};
  return {static_cast<u16>((raw + 0x7fff + (raw >> 16 & 1)) >> 16)};
}
inline u8 to_e4m3(f64 x) { return static_cast<u8>(is_nan(x) ? 0x7f : round_to(x, kE4M3, Round::rn, true)); }
inline u8 to_e5m2(f64 x) { return static_cast<u8>(is_nan(x) ? 0x7f : round_to(x, kE5M2, Round::rn, true)); }
inline f16 from_e5m2(u8 x) { return {static_cast<u16>(x << 8)}; }
inline f16 from_e4m3(u8 x) {
  if ((x & 0x7f) == 0x7f) return {0x7fff};
  int exponent = x >> 3 & 15, mantissa = x & 7;
  f64 magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return to_f16(x & 0x80 ? -magnitude : magnitude);
}

// Floats to integers: out of range clamps, NaN gives 0 (PTX: the result of a clamped conversion).
template <class To> inline To to_integer(f64 x, Round mode) {
  if (is_nan(x)) return 0;
  f64 rounded = round_to_integer(x, mode);
  constexpr int width = 8 * sizeof(To);
  f64 low = std::is_signed_v<To> ? -std::ldexp(1.0, width - 1) : 0.0;
  f64 past = std::ldexp(1.0, std::is_signed_v<To> ? width - 1 : width);
  if (rounded <= low) return std::is_signed_v<To> ? static_cast<To>(u64{1} << (width - 1)) : To{0};
  if (rounded >= past) return static_cast<To>(std::is_signed_v<To> ? (u64{1} << (width - 1)) - 1 : ~u64{0});
  return static_cast<To>(rounded);
}

// Integers to integers with `.sat`: clamp to the range of To.
template <class To, class From> inline To clamp_integer(From x) {
  using Wide = __int128;
  constexpr int width = 8 * sizeof(To);
  Wide low = std::is_signed_v<To> ? -(Wide{1} << (width - 1)) : 0;
  Wide high = (Wide{1} << (std::is_signed_v<To> ? width - 1 : width)) - 1;
  Wide value = x;
  return static_cast<To>(value < low ? low : value > high ? high : value);
}

// f64 to f32 and integers to f32 with a named rounding; the exact value is a double or a 64-bit integer.
inline f32 to_f32(f64 x, Round mode) {
  if (mode == Round::rn || is_nan(x)) return static_cast<f32>(x);
  return bit_cast<f32>(round_to(x, kF32, mode, false));
}
inline f32 canonical(f32 x) { return is_nan(x) ? bit_cast<f32>(0x7fffffffu) : x; }  // cvt.f32.f16 on an H200
template <class From> inline f32 integer_to_f32(From x, Round mode) {
  if (mode == Round::rn) return static_cast<f32>(x);
  if (sizeof(From) < 8) return to_f32(static_cast<f64>(x), mode);
  f32 nearest = static_cast<f32>(x);  // 64-bit integers do not fit a double: step from the nearest
  __int128 error = static_cast<__int128>(nearest) - static_cast<__int128>(x);
  bool down = mode == Round::rm || (mode == Round::rz && x > 0);
  if (down && error > 0) return std::nextafterf(nearest, -INFINITY);
  if (!down && error < 0) return std::nextafterf(nearest, INFINITY);
  return nearest;
}
template <class T> inline T saturate_unit(T x) { return x > 0 ? (x > 1 ? T{1} : x) : T{0}; }  // `.sat`: NaN gives 0
}  // namespace gpu
