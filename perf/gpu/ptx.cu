// Every wrapper of common/ptx.cuh, so that a GPU and the executor can be asked the same questions.
#include "common/ptx.cuh"

// One thread per element. x: [n]; all outputs: [n]; pairs are of x[i] and x[n - 1 - i].
extern "C" __global__ void conversions(const float* x, u16* bf16, u16* f16, u32* bf16x2, u32* f16x2, float* from_bf16,
                                       float* from_f16, float* ex2, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  bf16[i] = bf16_from_f32(x[i]);
  f16[i] = f16_from_f32(x[i]);
  bf16x2[i] = bf16x2_from_f32(x[i], x[n - 1 - i]);
  f16x2[i] = f16x2_from_f32(x[i], x[n - 1 - i]);
  from_bf16[i] = f32_from_bf16(bf16[i]);
  from_f16[i] = f32_from_f16(f16[i]);
  ex2[i] = ex2_approx(x[i]);
}

// One warp. a: 16-bit [16, 16], b: [8, 16] (transposed); matrix, transposed: u32 [32, 4], what each lane loads;
// copied: u32 [64], 16 words by cp.async of 4 bytes and 48 by cp.async of 16, of which the last 4 are not valid;
// bf16, f16: f32 [16, 8], a . b.T
extern "C" __global__ void tiles(const u16* a_bf16, const u16* b_bf16, const u16* a_f16, const u16* b_f16, u32* matrix,
                                 u32* transposed, u32* copied, float* bf16, float* f16) {
  __shared__ __align__(16) u16 a[256], other[256];
  __shared__ __align__(16) u32 words[64];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  cp_async_16(shared_address(a + 8 * lane), a_bf16 + 8 * lane, true);
  cp_async_16(shared_address(other + 8 * lane), a_f16 + 8 * lane, true);
  cp_async_commit();
  if (lane < 16) cp_async_4(shared_address(words + lane), a_bf16 + 2 * lane, lane != 3);
  if (lane < 12) cp_async_16(shared_address(words + 16 + 4 * lane), a_bf16 + 8 * lane, lane != 11);
  cp_async_commit();
  cp_async_wait<1>();
  __syncwarp();
  const int at = (lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8;
  u32 rows[4], columns[4], halves[4];
  ldmatrix_x4(rows, shared_address(a + at));
  ldmatrix_x4_trans(columns, shared_address(a + at));
  ldmatrix_x4(halves, shared_address(other + at));
  float sums[4] = {}, half_sums[4] = {};
  const u32* b = reinterpret_cast<const u32*>(b_bf16) + g * 8 + t;
  const u32* half_b = reinterpret_cast<const u32*>(b_f16) + g * 8 + t;
  mma_m16n8k16_bf16(sums, rows, b[0], b[4]);
  mma_m16n8k16_f16(half_sums, halves, half_b[0], half_b[4]);
  for (int i = 0; i < 4; ++i) {
    matrix[4 * lane + i] = rows[i];
    transposed[4 * lane + i] = columns[i];
    const int place = (g + i / 2 * 8) * 8 + 2 * t + i % 2;
    bf16[place] = sums[i];
    f16[place] = half_sums[i];
  }
  cp_async_wait<0>();
  __syncwarp();
  copied[lane] = words[lane];
  copied[32 + lane] = words[32 + lane];
}
