// Device memory: one arena, in which every allocation starts on a page of its own with an unused page behind it.
//
// A page table gives the allocation of an address in one load, so that each access is checked against exact bounds.
// Per allocation the bytes loaded and stored are counted, in all and without repetition.
#pragma once
#include "shadow.h"

namespace gpu {
constexpr u64 kArenaBytes = u64{32} << 30, kPage = 4096;
// Shared addresses start at 1024, as on hardware that reserves the first kilobyte, so that 0 is never valid.
constexpr u32 kSharedWindow = 1024, kSharedBytes = 256 << 10;

struct Allocation {
  u64 base, bytes;
  bool live, read_only, touched;
  u64 loaded, stored;  // bytes, by all threads of the launch
};
struct Traffic { u64 loaded, stored, unique_loaded, unique_stored; };

u32 allocate(u64 bytes);
void release_allocation(u32 id);
Allocation& allocation(u32 id);
Traffic traffic(u32 id);
}  // namespace gpu
