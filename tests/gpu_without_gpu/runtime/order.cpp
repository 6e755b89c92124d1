// Order through memory: a fence publishes what its thread knows; a later atomic leaves that at its address, and an
// atomic that finds it there, followed by a fence, takes it over. Both carry over barriers, as `__threadfence` by every
// thread, a barrier and one atomic by thread 0 is the common form.
#include "state.h"

namespace gpu {
static std::unordered_map<u64, ClockRef> locations;

void forget_locations() { locations.clear(); }

void fence(Thread* t) {
  if (t->pending) {
    t->clock = join(t->clock, t->pending);
    t->pending = {};
  }
  t->fenced = with_own(t->clock, t->id, t->count++);
}
void acquire(Thread* t) { fence(t); }
void release(Thread* t) { fence(t); }

void synchronise_location(Thread* t, u64 address, Access kind, u32 site) {
  ClockRef& left = locations[address];
  ClockRef found = left;
  if (kind != Access::strong_read && t->fenced) left = left ? join(t->fenced, left) : t->fenced;
  if (kind != Access::strong_write && found) t->pending = t->pending ? join(t->pending, found) : found;
  if (kind == Access::strong_read || kind == Access::atomic)
    if (++t->idle_polls % 64 == 0) yield_to_others(t, site);  // it may be waiting for another thread's store
}
}  // namespace gpu
