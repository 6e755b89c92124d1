#pragma once
#include "types.h"

namespace gpu {
struct Thread;
// Counts of one launch, in warp instructions, additional passes over shared memory, and sectors of 32 bytes.
struct Profile { u64 shared_accesses, bank_conflicts, sectors_loaded, sectors_stored; };
void profile_start_launch();
void profile_access(const Thread*, u64 address, u32 bytes, bool writes, bool shared, u32 site);
void profile_end_block();
Profile profile_counts();
}  // namespace gpu
