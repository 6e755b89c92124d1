// Barriers of a block and rendezvous of a warp, with the order they give to memory.
#include "state.h"

namespace gpu {
static ClockRef join_all(Thread* const* threads, size_t n, ClockRef Thread::*member) {
  ClockRef joined = threads[0]->*member;
  for (size_t i = 1; i < n; i++)
    if (!(threads[i]->*member == threads[i - 1]->*member)) joined = join(joined, threads[i]->*member);
  return joined;
}

void synchronise(Thread* const* threads, size_t n, Thread* const* learners, size_t learner_count) {
  Clock* known = new Clock(*join_all(threads, n, &Thread::clock).get());
  known->references = 0;
  ClockRef shared(known), fenced = join_all(threads, n, &Thread::fenced), pending = join_all(threads, n, &Thread::pending);
  for (size_t i = 0; i < n; i++) known->count[threads[i]->id] = threads[i]->count++;
  for (size_t i = 0; i < learner_count; i++) {
    learners[i]->clock = shared;
    learners[i]->fenced = fenced;
    learners[i]->pending = pending;
  }
}

// ---- warps
static bool same_line(u32 site, u32 other) { return machine.site_lines[site] == machine.site_lines[other]; }

static std::string lanes_text(u32 mask) {
  char text[16];
  snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

static Rendezvous& join_group(Thread* t, const Collective& what, u32 mask, u32 site) {
  Rendezvous* empty = nullptr;
  for (Rendezvous& group : machine.warp[t->warp].groups) {
    if (!group.arrived) { if (!empty) empty = &group; continue; }
    if (!(group.mask & mask)) continue;
    if (group.mask != mask)
      fail(t, site, std::string("divergence: ") + what.name + " with mask " + lanes_text(mask) + " while lanes wait at " +
                        group.what->name + " with mask " + lanes_text(group.mask) + " at " + site_text(group.site));
    if (group.what != &what || (what.aligned && !same_line(group.site, site)))
      fail(t, site, std::string("divergence: ") + what.name + " while lanes of the warp wait at " + group.what->name + " at " + site_text(group.site));
    return group;
  }
  if (!empty) empty = &machine.warp[t->warp].groups.emplace_back();
  return *empty = {&what, mask, 0, site, {}, {}};
}

void meet(Thread* t, const Collective& what, u32 mask, u32 site, const void* in, void* out) {
  const u32 first = t->warp * kWarp, absent = machine.warp[t->warp].absent;
  if (!(mask >> t->lane & 1)) fail(t, site, std::string(what.name) + ": the mask " + lanes_text(mask) + " lacks the calling lane");
  if (mask & absent)
    fail(t, site, std::string("divergence: ") + what.name + " with mask " + lanes_text(mask) + " names lane " +
                      std::to_string(__builtin_ctz(mask & absent)) + ", which has exited or does not exist");
  Rendezvous& group = join_group(t, what, mask, site);
  group.in[t->lane] = in;
  group.out[t->lane] = out;
  group.arrived |= 1u << t->lane;
  if (group.arrived != mask) return suspend(t, what.name, site);
  if (what.run) what.run(machine.all[first], group.in, group.out, mask);
  group.arrived = 0;
  Thread* members[kWarp];
  size_t n = 0;
  for (u32 left = mask; left; left &= left - 1) members[n++] = machine.all[first + static_cast<u32>(__builtin_ctz(left))];
  if (what.orders_memory) synchronise(members, n, members, n);
  for (size_t i = 0; i < n; i++)
    if (members[i] != t) make_ready(members[i]);
}

void warp_sync(Thread* t, u32 mask, u32 site) {
  static const Collective what{"bar.warp.sync", false, true, nullptr};
  meet(t, what, mask, site, nullptr, nullptr);
}

// ---- blocks
static Barrier& arrive(Thread* t, u32 id, u32 count, bool value, bool waits, u32 site) {
  if (id >= kBarriers) fail(t, site, "barrier " + std::to_string(id) + " does not exist");
  if (count % kWarp && count != machine.threads) fail(t, site, "barrier: the thread count is not a multiple of the warp size");
  Barrier& b = machine.barriers[id];
  u32 expected = count ? count : machine.threads;
  if (b.arrived.empty()) {
    b.expected = expected;
    b.site = site;
    b.trues = 0;
  }
  if (b.expected != expected) fail(t, site, "divergence: barrier with another thread count than at " + site_text(b.site));
  if (!count && !same_line(b.site, site)) fail(t, site, "divergence: threads of the block wait at another barrier, at " + site_text(b.site));
  if (!count && machine.live < machine.threads) fail(t, site, "divergence: barrier of all threads after some have exited");
  b.arrived.push_back(t);
  if (waits) b.waiting.push_back(t);
  b.trues += value;
  return b;
}

static void complete_or_wait(Thread* t, Barrier& b, bool waits, u32 site) {
  if (b.arrived.size() < b.expected) return waits ? suspend(t, "barrier", site) : void();
  synchronise(b.arrived.data(), b.arrived.size(), b.waiting.data(), b.waiting.size());
  b.last_trues = b.trues;
  b.last_arrived = static_cast<u32>(b.arrived.size());
  for (Thread* waiter : b.waiting)
    if (waiter != t) make_ready(waiter);
  b.arrived.clear();
  b.waiting.clear();
}

void barrier(Thread* t, u32 id, u32 count, u32 site) { complete_or_wait(t, arrive(t, id, count, false, true, site), true, site); }

void barrier_arrive(Thread* t, u32 id, u32 count, u32 site) { complete_or_wait(t, arrive(t, id, count, false, false, site), false, site); }

u32 barrier_reduce(Thread* t, u32 id, u32 count, Reduce how, bool value, u32 site) {
  Barrier& b = arrive(t, id, count, value, true, site);
  complete_or_wait(t, b, true, site);
  // No thread can complete the next round before all of this round have read the result: each must arrive again.
  switch (how) {
    case Reduce::popc: return b.last_trues;
    case Reduce::all: return b.last_trues == b.last_arrived;
    default: return b.last_trues > 0;
  }
}

void thread_exits(Thread* t) {
  for (u32 id = 0; id < kBarriers; id++) {
    const Barrier& b = machine.barriers[id];
    if (!b.arrived.empty() && b.expected == machine.threads)
      fail(t, b.site, "divergence: a thread exits while others wait at a barrier of all threads");
  }
  machine.warp[t->warp].absent |= 1u << t->lane;
  for (const Rendezvous& group : machine.warp[t->warp].groups)
    if (group.arrived && group.mask >> t->lane & 1)
      fail(t, group.site, std::string("divergence: a lane exits while its warp waits at ") + group.what->name);
}
}  // namespace gpu
