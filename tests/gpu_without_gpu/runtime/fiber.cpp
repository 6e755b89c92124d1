// Fibers: one per CUDA thread, switched by hand; and the choice of who runs next.
//
// A thread runs until it waits for others. `ready` is a bitset, so that picking the first, the last or a random ready
// thread costs a few instructions. A failure switches to the launcher's stack and never comes back.
#include <sys/mman.h>
#include <unistd.h>
#include "state.h"

#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif

namespace gpu {
Machine machine;
constexpr size_t kStackBytes = 256 << 10;
constexpr u64 kMaxPolls = 200'000;

extern "C" void gpu_switch_stack(void** save, void* load);
asm(R"(
.text
.globl gpu_switch_stack
.type gpu_switch_stack,@function
gpu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpu_switch_stack, .-gpu_switch_stack
)");

// The first ready thread at or behind `start`, wrapping around; or at or before it.
static Thread* ready_behind(u32 start) {
  u32 words = (machine.threads + 63) / 64;
  for (u32 i = 0, w = start / 64; i <= words; i++, w = (w + 1) % words) {
    u64 candidates = machine.ready[w] & (i == 0 ? ~u64{0} << (start % 64) : ~u64{0});
    if (candidates) return machine.all[w * 64 + static_cast<u32>(__builtin_ctzll(candidates))];
  }
  return nullptr;
}
static Thread* ready_before(u32 start) {
  u32 words = (machine.threads + 63) / 64;
  for (u32 i = 0, w = start / 64; i <= words; i++, w = (w + words - 1) % words) {
    u64 candidates = machine.ready[w] & (i == 0 ? ~u64{0} >> (63 - start % 64) : ~u64{0});
    if (candidates) return machine.all[w * 64 + 63 - static_cast<u32>(__builtin_clzll(candidates))];
  }
  return nullptr;
}

// In order and reversed run as far ahead with one end of the block as they can; a thread that yields lets all others by.
static Thread* pick_ready(const Thread* yielding) {
  u32 n = machine.threads;
  switch (machine.schedule) {
    case Schedule::in_order: return ready_behind(yielding ? (yielding->id + 1) % n : 0);
    case Schedule::reversed: return ready_before(yielding ? (yielding->id + n - 1) % n : n - 1);
    default: return ready_behind(static_cast<u32>(machine.random() % n));
  }
}

static void switch_from(void** save, const Thread* yielding = nullptr) {
  Thread* next = pick_ready(yielding);
  if (!next) return gpu_switch_stack(save, machine.launcher_stack);  // finished, or a deadlock: the launcher looks
  machine.ready[next->id / 64] &= ~(u64{1} << (next->id % 64));
  machine.running = next;
  if (save != &next->stack_pointer) gpu_switch_stack(save, next->stack_pointer);
}

void make_ready(Thread* t) {
  t->waits_for = nullptr;
  machine.ready[t->id / 64] |= u64{1} << (t->id % 64);
}

void suspend(Thread* t, const char* why, u32 site) {
  t->waits_for = why;
  t->wait_site = site;
  switch_from(&t->stack_pointer);
}

void yield_to_others(Thread* t, u32 site) {
  if (++machine.polls > kMaxPolls) fail(t, site, "livelock: threads keep polling memory that nobody changes");
  make_ready(t);
  switch_from(&t->stack_pointer, t);
}

static void thread_main() {
  Thread* t = machine.running;
  machine.kernel(t, machine.params);
  if (has_pending_copies(t)) fail(t, 0, "cp.async: the thread exits without waiting for its copies");
  thread_exits(t);
  t->exited = true;
  machine.live--;
  void* discarded;
  switch_from(&discarded);
  __builtin_trap();
}

void prepare_stack(Thread* t) {
  if (!t->stack) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    t->stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0));
    mprotect(t->stack, page, PROT_NONE);  // a kernel that overflows its stack faults instead of corrupting another's
  }
  void** top = reinterpret_cast<void**>(t->stack + kStackBytes - 64);
  *--top = nullptr;  // the return address of thread_main, which never returns
  *--top = reinterpret_cast<void*>(thread_main);
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  t->stack_pointer = top;
}

void run_block() { switch_from(&machine.launcher_stack); }

std::string site_text(u32 site) { return "{site:" + std::to_string(site) + "}"; }

std::string thread_text(u32 thread) {
  const Dim3& n = machine.all[0]->ntid;
  return "thread (" + std::to_string(thread % n.x) + "," + std::to_string(thread / n.x % n.y) + "," +
         std::to_string(thread / (n.x * n.y)) + ")";
}

void fail(const Thread* t, u32 site, const std::string& what) {
  const Dim3& b = t->ctaid;
  machine.failed = true;
  machine.error = what + "\n  in block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) +
                  ") " + thread_text(t->id) + (site ? " at " + site_text(site) : "");
  void* discarded;
  gpu_switch_stack(&discarded, machine.launcher_stack);
  __builtin_unreachable();
}
}  // namespace gpu
