// Philox4x32-10 (Salmon et al., SC 2011) and Gumbel noise: the bits of engine/devices/cpu/sampling/philox.py.
#pragma once
#include "common/ptx.cuh"

struct Words {
  u32 v[4];
};

// key = (seed low, seed high), counter = (token id / 4, position, choice, 0); word token id % 4 is the token's.
DEVICE Words philox(u64 seed, u32 quad, u32 position, u32 choice) {
  u32 c0 = quad, c1 = position, c2 = choice, c3 = 0;
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<u32>(p1);
    c3 = static_cast<u32>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// -log(-log(u)), u = 1 - (word + 1/2) / 2^32; float64, as on the cpu.
DEVICE double gumbel(u32 word) { return -log(-log1p(-(word + 0.5) * 0x1p-32)); }

// At least gumbel(word), by 8e-4 or more: -log((word + 1/2) / 2^32) <= (1 + leading zeros) * log 2.
DEVICE float gumbel_bound(u32 word) { return 0.694f * (1 + __clz(word)); }
