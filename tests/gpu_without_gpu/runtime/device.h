// What a translated kernel sees of the machine: its thread's coordinates, memory, and the collectives.
//
// Everything here is implemented in the runtime library; a kernel holds no state but its registers and local memory.
// `site` numbers the instruction within its module; the launcher turns it into file and line for messages.
#pragma once
#include "arithmetic.h"

namespace gpu {
struct Dim3 { u32 x, y, z; };
struct ThreadView { Dim3 tid, ctaid, ntid, nctaid; u32 lane, warp, dynamic_shared, total_shared; };
struct Thread;
inline const ThreadView& view(const Thread* t) { return *reinterpret_cast<const ThreadView*>(t); }

// ---- memory. `strong` accesses (volatile, relaxed, acquire, release) do not race with each other.
enum class Access : u8 { read, write, strong_read, strong_write, atomic };
void* global_access(Thread*, u64 address, u32 bytes, Access, u32 site);
void* shared_access(Thread*, u64 address, u32 bytes, Access, u32 site);   // address in the shared window
void* local_access(Thread*, u64 address, u32 bytes, Access, u32 site);
void* constant_access(Thread*, u64 address, u32 bytes, Access, u32 site);
void* generic_access(Thread*, u64 address, u32 bytes, Access, u32 site);
u64 shared_to_generic(u64 window_address);
u64 generic_to_shared(u64 generic_address);
void acquire(Thread*);
void release(Thread*);
using AccessFunction = void* (*)(Thread*, u64, u32, Access, u32);

template <AccessFunction Space, class T, int N = 1>
inline Vector<T, N> load(Thread* t, u64 address, u32 site, Access kind = Access::read) {
  Vector<T, N> value;
  memcpy(&value, Space(t, address, sizeof value, kind, site), sizeof value);
  return value;
}
template <AccessFunction Space, class T, int N = 1>
inline void store(Thread* t, u64 address, Vector<T, N> value, u32 site, Access kind = Access::write) {
  memcpy(Space(t, address, sizeof value, kind, site), &value, sizeof value);
}
template <AccessFunction Space, class T, class Update>
inline T atomic(Thread* t, u64 address, u32 site, Update update) {
  void* at = Space(t, address, sizeof(T), Access::atomic, site);
  T old;
  memcpy(&old, at, sizeof old);
  T updated = update(old);
  memcpy(at, &updated, sizeof updated);
  return old;
}

// Local memory of one function call, with the bytes written so far.
struct LocalFrame {
  Thread* owner; LocalFrame* outer; u8* base; u32 size; u8* written;
  LocalFrame(Thread*, u8* base, u32 size, u8* written);
  ~LocalFrame();
};

// ---- collectives
void barrier(Thread*, u32 id, u32 count, u32 site);           // count 0: every thread of the block
void barrier_arrive(Thread*, u32 id, u32 count, u32 site);
enum class Reduce : u8 { popc, all, any };
u32 barrier_reduce(Thread*, u32 id, u32 count, Reduce, bool value, u32 site);
void warp_sync(Thread*, u32 mask, u32 site);
struct Shuffled { u32 value; bool in_range; };
enum class Shuffle : u8 { up, down, bfly, idx };
Shuffled shuffle(Thread*, Shuffle, u32 value, u32 b, u32 clamp, u32 mask, u32 site);
u32 ballot(Thread*, bool value, u32 mask, u32 site);
bool vote_uniform(Thread*, bool value, u32 mask, u32 site);
u32 match_any(Thread*, u64 value, u32 mask, u32 site);
struct Matched { u32 mask; bool all; };
Matched match_all(Thread*, u64 value, u32 mask, u32 site);
enum class Redux : u8 { add, min_s, max_s, min_u, max_u, and_, or_, xor_ };
u32 redux(Thread*, Redux, u32 value, u32 mask, u32 site);
struct Elected { u32 leader; bool is_leader; };
Elected elect(Thread*, u32 mask, u32 site);

// ---- tensor cores
enum class Element : u8 { f16, bf16, s8, u8 };
void ldmatrix(Thread*, u32* fragments, u64 row_address, u32 matrices, bool transpose, u32 site);
void mma_m16n8k16(Thread*, Element, f32* d, const u32* a, const u32* b, const f32* c, u32 site);
void mma_m16n8k32(Thread*, Element a_type, Element b_type, s32* d, const u32* a, const u32* b, const s32* c, u32 site);

// ---- asynchronous copies
void copy_async(Thread*, u64 shared_address, u64 global_address, u32 bytes, u32 source_bytes, u32 site);
void copy_async_commit(Thread*);
void copy_async_wait(Thread*, u32 groups_left_pending);

void fence(Thread*);
void pause(Thread*, u32 site);   // nanosleep
u64 clock64(Thread*);
[[noreturn]] void trap(Thread*, const char* what, u32 site);
}  // namespace gpu
