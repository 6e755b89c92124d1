// Tensor cores: the fragment layouts of ldmatrix and mma.sync, from the PTX manual ("Matrix fragments for mma").
//
// Lane l holds row l / 4 ("group") and columns 2 * (l % 4), + 1 ("pair") of each 8 x 8 tile of 16-bit elements.
// Products are exact and summed in double with one rounding to f32 at the end; hardware sums in an order and with a
// truncation of its own, so results may differ by a few ulp of the largest partial sum.
#include "state.h"

namespace gpu {
namespace {
struct LdmatrixIn { u64 row; u32 matrices, site; };
template <bool Transpose> void run_ldmatrix(Thread* first, const void* const* in, void* const* out, u32) {
  u32 matrices = static_cast<const LdmatrixIn*>(in[0])->matrices;
  for (u32 m = 0; m < matrices; m++) {
    u16 tile[8][8];
    for (u32 r = 0; r < 8; r++) {
      u32 lane = 8 * m + r;
      const LdmatrixIn& i = *static_cast<const LdmatrixIn*>(in[lane]);
      memcpy(tile[r], shared_access(machine.all[first->id + lane], i.row, 16, Access::read, i.site), 16);
    }
    for (u32 lane = 0; lane < kWarp; lane++) {
      u32 group = lane / 4, pair = 2 * (lane % 4);
      u32 lo = Transpose ? tile[pair][group] : tile[group][pair];
      u32 hi = Transpose ? tile[pair + 1][group] : tile[group][pair + 1];
      static_cast<u32*>(out[lane])[m] = lo | hi << 16;
    }
  }
}

f32 element(Element type, u32 packed, u32 half) {
  u16 raw = static_cast<u16>(packed >> (16 * half));
  return type == Element::bf16 ? widen(bf16{raw}) : widen(f16{raw});
}

struct Mma16 { const u32 *a, *b; const f32* c; };
template <Element Type> void run_m16n8k16(Thread*, const void* const* in, void* const* out, u32) {
  alignas(64) f64 a[16][16], b[16][8], sum[16][8];
  for (u32 lane = 0; lane < kWarp; lane++) {
    const Mma16& i = *static_cast<const Mma16*>(in[lane]);
    u32 group = lane / 4, pair = 2 * (lane % 4);
    for (u32 half = 0; half < 2; half++) {
      for (u32 reg = 0; reg < 4; reg++) a[group + 8 * (reg & 1)][pair + half + 8 * (reg >> 1)] = element(Type, i.a[reg], half);
      for (u32 reg = 0; reg < 2; reg++) b[pair + half + 8 * reg][group] = element(Type, i.b[reg], half);
    }
    for (u32 reg = 0; reg < 4; reg++) sum[group + 8 * (reg >> 1)][pair + (reg & 1)] = i.c[reg];
  }
  for (u32 m = 0; m < 16; m++)
    for (u32 k = 0; k < 16; k++)
      for (u32 n = 0; n < 8; n++) sum[m][n] += a[m][k] * b[k][n];
  for (u32 lane = 0; lane < kWarp; lane++)
    for (u32 reg = 0; reg < 4; reg++)
      static_cast<f32*>(out[lane])[reg] = static_cast<f32>(sum[lane / 4 + 8 * (reg >> 1)][2 * (lane % 4) + (reg & 1)]);
}

struct Mma32 { const u32 *a, *b; const s32* c; };
s32 byte_of(bool is_signed, u32 packed, u32 i) {
  u32 raw = packed >> (8 * i) & 0xff;
  return is_signed ? static_cast<s8>(raw) : static_cast<s32>(raw);
}
template <bool SignedA, bool SignedB> void run_m16n8k32(Thread*, const void* const* in, void* const* out, u32) {
  s32 a[16][32], b[32][8], sum[16][8];
  for (u32 lane = 0; lane < kWarp; lane++) {
    const Mma32& i = *static_cast<const Mma32*>(in[lane]);
    u32 group = lane / 4, quad = 4 * (lane % 4);
    for (u32 byte = 0; byte < 4; byte++) {
      for (u32 reg = 0; reg < 4; reg++) a[group + 8 * (reg & 1)][quad + byte + 16 * (reg >> 1)] = byte_of(SignedA, i.a[reg], byte);
      for (u32 reg = 0; reg < 2; reg++) b[quad + byte + 16 * reg][group] = byte_of(SignedB, i.b[reg], byte);
    }
    for (u32 reg = 0; reg < 4; reg++) sum[group + 8 * (reg >> 1)][2 * (lane % 4) + (reg & 1)] = i.c[reg];
  }
  for (u32 m = 0; m < 16; m++)
    for (u32 k = 0; k < 32; k++)
      for (u32 n = 0; n < 8; n++) sum[m][n] = static_cast<s32>(static_cast<u32>(sum[m][n]) + static_cast<u32>(a[m][k] * b[k][n]));
  for (u32 lane = 0; lane < kWarp; lane++)
    for (u32 reg = 0; reg < 4; reg++) static_cast<s32*>(out[lane])[reg] = sum[lane / 4 + 8 * (reg >> 1)][2 * (lane % 4) + (reg & 1)];
}
}  // namespace

void ldmatrix(Thread* t, u32* fragments, u64 row_address, u32 matrices, bool transpose, u32 site) {
  static const Collective plain{"ldmatrix", true, false, run_ldmatrix<false>};
  static const Collective transposed{"ldmatrix.trans", true, false, run_ldmatrix<true>};
  LdmatrixIn in{row_address, matrices, site};
  meet(t, transpose ? transposed : plain, kAllLanes, site, &in, fragments);
}

void mma_m16n8k16(Thread* t, Element type, f32* d, const u32* a, const u32* b, const f32* c, u32 site) {
  static const Collective half{"mma.m16n8k16.f16", true, false, run_m16n8k16<Element::f16>};
  static const Collective brain{"mma.m16n8k16.bf16", true, false, run_m16n8k16<Element::bf16>};
  Mma16 in{a, b, c};
  meet(t, type == Element::f16 ? half : brain, kAllLanes, site, &in, d);
}

void mma_m16n8k32(Thread* t, Element a_type, Element b_type, s32* d, const u32* a, const u32* b, const s32* c, u32 site) {
  static const Collective types[2][2] = {
      {{"mma.m16n8k32.u8.u8", true, false, run_m16n8k32<false, false>}, {"mma.m16n8k32.u8.s8", true, false, run_m16n8k32<false, true>}},
      {{"mma.m16n8k32.s8.u8", true, false, run_m16n8k32<true, false>}, {"mma.m16n8k32.s8.s8", true, false, run_m16n8k32<true, true>}}};
  Mma32 in{a, b, c};
  meet(t, types[a_type == Element::s8][b_type == Element::s8], kAllLanes, site, &in, d);
}
}  // namespace gpu
