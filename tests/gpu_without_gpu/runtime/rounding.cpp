// Directed rounding by the host's rounding mode. Compiled with -frounding-math.
#include <cfenv>
#include "arithmetic.h"

namespace gpu {
template <class T> static T compute(Op op, Round mode, T a, T b, T c) {
  int saved = fegetround();
  fesetround(mode == Round::rz ? FE_TOWARDZERO : mode == Round::rm ? FE_DOWNWARD : mode == Round::rp ? FE_UPWARD : FE_TONEAREST);
  volatile T x = a, y = b, z = c;  // keeps the operation between the two mode changes
  volatile T result = 0;
  switch (op) {
    case Op::add: result = x + y; break;
    case Op::sub: result = x - y; break;
    case Op::mul: result = x * y; break;
    case Op::fma: result = std::fma(x, y, z); break;
    case Op::div: result = x / y; break;
    case Op::sqrt: result = std::sqrt(x); break;
  }
  fesetround(saved);
  return result;
}
f32 directed(Op op, Round mode, f32 a, f32 b, f32 c) { return compute(op, mode, a, b, c); }
f64 directed(Op op, Round mode, f64 a, f64 b, f64 c) { return compute(op, mode, a, b, c); }
}  // namespace gpu
