// PTX scalar types as C++ types, and the moves between typed values and untyped registers.
//
// A register holds bits (`b16`, `b32`, `b64`, or `bool` for a predicate). An instruction names the type it reads them
// as: `as<f32>(reg)`, and writes back with `bits<b32>(value)`. f16 and bf16 are structs so that arithmetic on them has
// to name its rounding. Next: arithmetic.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gpu {
using b8 = uint8_t; using b16 = uint16_t; using b32 = uint32_t; using b64 = uint64_t; using pred = bool;
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;
using f32 = float; using f64 = double;
struct f16 { u16 raw; };
struct bf16 { u16 raw; };
template <class T> struct Pair { T lo, hi; };
using f16x2 = Pair<f16>;
using bf16x2 = Pair<bf16>;

template <class To, class From> inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The bits of a register (or an immediate) read as T. Integers narrow by truncation, as `st.u8` of a 32-bit register.
template <class T, class Bits> inline T as(Bits value) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(value);
  else if constexpr (sizeof(T) == sizeof(Bits)) return bit_cast<T>(value);
  else return bit_cast<T>(static_cast<std::conditional_t<sizeof(T) == 2, u16, u32>>(value));
}

// A typed value as register bits. Signed integers extend their sign, as `ld.s8` into a 32-bit register.
template <class Bits, class T> inline Bits bits(T value) {
  if constexpr (std::is_integral_v<T>) return static_cast<Bits>(value);
  else if constexpr (sizeof(T) == sizeof(Bits)) return bit_cast<Bits>(value);
  else return static_cast<Bits>(bit_cast<std::conditional_t<sizeof(T) == 2, u16, u32>>(value));
}

template <class T, int N> struct Vector { T e[N]; };

inline bool is_nan(f32 x) { return x != x; }
inline bool is_nan(f64 x) { return x != x; }

inline f32 widen(f32 x) { return x; }
inline f64 widen(f64 x) { return x; }
inline f32 widen(bf16 x) { return bit_cast<f32>(static_cast<u32>(x.raw) << 16); }
inline f32 widen(f16 x) {
  u32 sign = (x.raw & 0x8000u) << 16, exponent = x.raw >> 10 & 31, mantissa = x.raw & 1023;
  if (exponent == 31) return bit_cast<f32>(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return bit_cast<f32>(sign | (exponent + 112) << 23 | mantissa << 13);
  f32 subnormal = static_cast<f32>(mantissa) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

// `.ftz`: subnormal f32 inputs and results become a zero of the same sign.
inline f32 flush(f32 x) {
  u32 raw = bit_cast<u32>(x);
  return raw & 0x7f800000u ? x : bit_cast<f32>(raw & 0x80000000u);
}
}  // namespace gpu
