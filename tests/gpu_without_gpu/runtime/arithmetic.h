// Arithmetic of single instructions, one function each, named after the opcode.
//
// Results are those of the PTX manual where it defines them. `.approx` functions are computed by the host's libm, which
// is more precise than the hardware. Directed rounding (`.rz`, `.rm`, `.rp`) of f32 goes through `directed` in
// rounding.cpp, compiled so that the host's rounding mode is honoured.
#pragma once
#include "convert.h"

namespace gpu {
enum class Op { add, sub, mul, fma, div, sqrt };
f32 directed(Op, Round, f32 a, f32 b, f32 c);  // rounding.cpp
f64 directed(Op, Round, f64 a, f64 b, f64 c);

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <int Bytes> struct Integer;
template <> struct Integer<2> { using s = s16; using u = u16; };
template <> struct Integer<4> { using s = s32; using u = u32; };
template <> struct Integer<8> { using s = s64; using u = u64; };
template <> struct Integer<16> { using s = __int128; using u = unsigned __int128; };
template <class T> using Wide = std::conditional_t<std::is_signed_v<T>, typename Integer<2 * sizeof(T)>::s,
                                                   typename Integer<2 * sizeof(T)>::u>;

// ---- integers: wrap around as unsigned, so that no overflow is undefined
template <class T> inline T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
  else return a + b;
}
template <class T> inline T sub(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) - static_cast<u64>(b));
  else return a - b;
}
template <class T> inline T mul(T a, T b) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
  else return a * b;
}
template <class T> inline T add_sat(T a, T b) { return clamp_integer<T>(static_cast<s64>(a) + static_cast<s64>(b)); }
template <class T> inline T sub_sat(T a, T b) { return clamp_integer<T>(static_cast<s64>(a) - static_cast<s64>(b)); }
template <class T> inline Wide<T> mul_wide(T a, T b) { return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b); }
template <class T> inline T mul_hi(T a, T b) { return static_cast<T>(mul_wide(a, b) >> (8 * sizeof(T))); }
template <class T> inline s64 low24(T a) { return std::is_signed_v<T> ? static_cast<s32>(a << 8) >> 8 : a & 0xffffffu; }
template <class T> inline T mul24_lo(T a, T b) { return static_cast<T>(low24(a) * low24(b)); }
template <class T> inline T mul24_hi(T a, T b) { return static_cast<T>((low24(a) * low24(b)) >> 16); }
template <class T> inline T div(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) return static_cast<T>(~u64{0});  // unspecified by PTX; all ones on hardware
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return sub<T>(0, a);
  }
  return a / b;
}
template <class T> inline T rem(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return a % b;
}
template <class T> inline T neg(T a) { if constexpr (std::is_integral_v<T>) return sub<T>(0, a); else return -a; }
template <class T> inline T abs(T a) {
  if constexpr (std::is_integral_v<T>) return a < 0 ? sub<T>(0, a) : a; else return std::fabs(a);
}
template <class T> inline T sad(T a, T b, T c) { return add<T>(c, a < b ? sub<T>(b, a) : sub<T>(a, b)); }
inline f32 copysign(f32 sign, f32 magnitude) { return std::copysign(magnitude, sign); }
inline f64 copysign(f64 sign, f64 magnitude) { return std::copysign(magnitude, sign); }

// ---- min and max: a NaN loses unless `.NaN`; -0 < +0; `.xorsign.abs` is not used by NVRTC
template <class T> inline T min(T a, T b) {
  if constexpr (std::is_integral_v<T>) return b < a ? b : a;
  else { if (is_nan(a)) return b; if (is_nan(b)) return a; return a < b || (a == b && std::signbit(a)) ? a : b; }
}
template <class T> inline T max(T a, T b) {
  if constexpr (std::is_integral_v<T>) return a < b ? b : a;
  else { if (is_nan(a)) return b; if (is_nan(b)) return a; return a > b || (a == b && !std::signbit(a)) ? a : b; }
}
template <class T> inline T min_nan(T a, T b) { return is_nan(a) || is_nan(b) ? static_cast<T>(NAN) : min(a, b); }
template <class T> inline T max_nan(T a, T b) { return is_nan(a) || is_nan(b) ? static_cast<T>(NAN) : max(a, b); }

// ---- bits
template <class T> inline T shl(T a, u32 n) { return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n); }
template <class T> inline T shr(T a, u32 n) {
  u32 width = 8 * sizeof(T);
  if (n >= width) return std::is_signed_v<T> ? static_cast<T>(a >> (width - 1)) : T{0};
  return static_cast<T>(a >> n);
}
template <class T> inline u32 popc(T a) { return static_cast<u32>(__builtin_popcountll(a)); }
template <class T> inline u32 clz(T a) {
  return a ? static_cast<u32>(__builtin_clzll(static_cast<u64>(a)) - (64 - 8 * static_cast<int>(sizeof(T))))
           : static_cast<u32>(8 * sizeof(T));
}
template <class T> inline T brev(T a) {
  T r = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++) r = static_cast<T>(r << 1 | (a >> i & 1));
  return r;
}
template <class T> inline u32 bfind(T a) {  // the most significant bit that is not a copy of the sign
  using U = Unsigned<T>;
  U u = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~a : a);
  return u ? static_cast<u32>(8 * sizeof(T) - 1) - clz<U>(u) : ~0u;
}
template <class T> inline u32 bfind_shift(T a) {
  u32 at = bfind(a);
  return at == ~0u ? at : static_cast<u32>(8 * sizeof(T) - 1) - at;
}
template <class T> inline T bfe(T a, u32 position, u32 length) {
  constexpr u32 msb = 8 * sizeof(T) - 1;
  position &= 0xff; length &= 0xff;
  bool sign = std::is_signed_v<T> && length && (static_cast<Unsigned<T>>(a) >> (position + length - 1 < msb ? position + length - 1 : msb) & 1);
  Unsigned<T> r = 0;
  for (u32 i = 0; i <= msb; i++) {
    bool bit = i < length && position + i <= msb ? static_cast<Unsigned<T>>(a) >> (position + i) & 1 : sign;
    r |= static_cast<Unsigned<T>>(bit) << i;
  }
  return static_cast<T>(r);
}
template <class T> inline T bfi(T a, T b, u32 position, u32 length) {
  constexpr u32 width = 8 * sizeof(T);
  position &= 0xff; length &= 0xff;
  if (position >= width || length == 0) return b;
  T mask = static_cast<T>((length >= width ? T(~T{0}) : static_cast<T>((T{1} << length) - 1)) << position);
  return static_cast<T>((b & ~mask) | (static_cast<T>(a << position) & mask));
}
template <u32 Table> inline u32 lop3(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (Table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline u32 prmt(u32 a, u32 b, u32 selector) {
  u64 pool = static_cast<u64>(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 nibble = selector >> (4 * i) & 15, byte = static_cast<u32>(pool >> (8 * (nibble & 7)) & 0xff);
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline u32 shf_l(u32 lo, u32 hi, u32 n) { return n == 0 ? hi : n == 32 ? lo : hi << n | lo >> (32 - n); }
inline u32 shf_r(u32 lo, u32 hi, u32 n) { return n == 0 ? lo : n == 32 ? hi : hi << (32 - n) | lo >> n; }
template <class A, class B> inline u32 dp4a(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 4; i++)
    c += static_cast<u32>(static_cast<s32>(static_cast<A>(a >> 8 * i)) * static_cast<s32>(static_cast<B>(b >> 8 * i)));
  return c;
}

// ---- floats
inline f32 fma(f32 a, f32 b, f32 c) { return std::fma(a, b, c); }
inline f64 fma(f64 a, f64 b, f64 c) { return std::fma(a, b, c); }
template <class T> inline T rcp(T a) { return T{1} / a; }
template <class T> inline T sqrt(T a) { return std::sqrt(a); }
template <class T> inline T rsqrt(T a) { return T{1} / std::sqrt(a); }
inline f64 upper_half(f64 a) { return bit_cast<f64>(bit_cast<u64>(a) & 0xffffffff00000000u); }
inline f32 ex2(f32 a) { return std::exp2(a); }
inline f32 lg2(f32 a) { return std::log2(a); }
inline f32 sin(f32 a) { return std::sin(a); }
inline f32 cos(f32 a) { return std::cos(a); }
inline f32 tanh(f32 a) { return std::tanh(a); }
template <class T> inline bool testp_finite(T a) { return std::isfinite(a); }
template <class T> inline bool testp_infinite(T a) { return std::isinf(a); }
template <class T> inline bool testp_number(T a) { return !is_nan(a); }
template <class T> inline bool testp_notanumber(T a) { return is_nan(a); }
template <class T> inline bool testp_normal(T a) { return std::isnormal(a); }
template <class T> inline bool testp_subnormal(T a) { return std::fpclassify(a) == FP_SUBNORMAL; }

// ---- 16-bit floats: exact in double, then one rounding
template <class T> T narrow(f64 x);
template <> inline f16 narrow<f16>(f64 x) { return to_f16(x); }
template <> inline bf16 narrow<bf16>(f64 x) { return to_bf16(x, Round::rn); }
template <class F, class... T> inline auto apply(F f, T... x) { return f(x...); }
template <class F, class... T> inline auto each_half(F f, T... x) {
  return Pair<decltype(f(x.lo...))>{f(x.lo...), f(x.hi...)};
}
template <class T> inline T relu(T x) { return is_nan(x) ? x : x > 0 ? x : 0; }
inline f64 ex2(f64 a) { return std::exp2(a); }
inline f64 tanh(f64 a) { return std::tanh(a); }

// ---- comparisons
template <class T> inline bool unordered(T a, T b) {
  if constexpr (std::is_integral_v<T>) return false; else return is_nan(a) || is_nan(b);
}
}  // namespace gpu
