// The machine's state: one block runs at a time, its threads as fibers. Owned by launch.cpp; everyone else reads it
// through `machine`. Memory is one arena for global memory (memory.cpp) and one window for shared memory.
#pragma once
#include <random>
#include <string>
#include <unordered_map>
#include <vector>
#include "clock.h"
#include "device.h"

namespace gpu {
enum class Schedule : u32 { in_order, reversed, random };
enum class AsyncCopies : u32 { early, late, random };
constexpr u32 kMaxThreads = 1024, kWarp = 32, kBarriers = 16, kAllLanes = ~0u;

struct AsyncCopy { u64 shared_address, global_address; u32 bytes, source_bytes, site; bool done; };

struct Thread : ThreadView {
  u32 id = 0;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  const char* waits_for = nullptr;  // null while it can run
  u32 wait_site = 0;
  bool exited = false;
  u32 count = 1;                    // its own component of the vector clock
  ClockRef clock, fenced, pending;  // known; published by atomics; seen by atomics but not yet fenced
  std::vector<AsyncCopy> open_group;
  std::vector<std::vector<AsyncCopy>> groups;
  LocalFrame* frames = nullptr;
  u32 idle_polls = 0;
};

// One rendezvous of some lanes of a warp: the last to arrive computes for all.
struct Collective {
  const char* name;
  bool aligned;          // all lanes must be at the same instruction
  bool orders_memory;
  void (*run)(Thread* first_of_warp, const void* const* in, void* const* out, u32 mask);
};
struct Rendezvous {
  const Collective* what = nullptr;
  u32 mask = 0, arrived = 0, site = 0;
  const void* in[kWarp];
  void* out[kWarp];
};
struct Warp {
  u32 absent = 0;               // lanes that have exited, or are past the block's last thread
  std::vector<Rendezvous> groups;  // of disjoint lanes
};
struct Barrier {
  u32 expected = 0, site = 0, trues = 0;  // `trues`: threads that brought a true predicate
  std::vector<Thread*> arrived, waiting;
  u32 last_trues = 0, last_arrived = 0;   // of the round that was completed last, for barrier_reduce
};
struct SharedRegion { u64 begin, end; };

struct Machine {
  Schedule schedule;
  AsyncCopies async_copies;
  std::mt19937 random;
  void (*kernel)(Thread*, const u8*);
  const u8* params;
  u64 param_bytes;
  const u32* site_lines;  // sites of one source line compare equal
  std::vector<SharedRegion> shared_regions;  // shared variables, in window addresses
  bool check_races, profiles;
  // the running block
  u32 threads, warps, live;
  u32 block_serial = 0, first_serial = 1;  // serials before `first_serial` belong to earlier launches
  std::vector<Thread*> all;
  u64 ready[kMaxThreads / 64];
  Thread* running;
  void* launcher_stack;
  std::vector<Warp> warp;
  Barrier barriers[kBarriers];
  // findings and counts
  bool failed;
  std::string error;
  u64 polls;
};
extern Machine machine;

// ---- fiber.cpp
void prepare_stack(Thread*);
void run_block();
void make_ready(Thread*);
void suspend(Thread*, const char* why, u32 site);  // returns when someone makes the thread ready
void yield_to_others(Thread*, u32 site);
[[noreturn]] void fail(const Thread*, u32 site, const std::string& what);
std::string site_text(u32 site);
std::string thread_text(u32 thread);

// ---- sync.cpp
void meet(Thread*, const Collective&, u32 mask, u32 site, const void* in, void* out);
// Each learner knows afterwards what every one of `threads` knew.
void synchronise(Thread* const* threads, size_t n, Thread* const* learners, size_t learner_count);
void thread_exits(Thread*);

// ---- memory.cpp
void memory_start_launch();
void memory_start_block();
void async_write_begins(Thread*, u64 shared_address, u32 bytes, u32 site);
void async_write_ends(Thread*, u64 shared_address, u32 bytes, u32 site);

// ---- order.cpp: what atomics and fences order
void synchronise_location(Thread*, u64 address, Access, u32 site);
void forget_locations();

// ---- async_copy.cpp
bool has_pending_copies(const Thread*);
}  // namespace gpu
