#include "clock.h"

namespace gpu {
static void absorb_counts(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.count.size(); i++) into.count[i] = std::max(into.count[i], other.count[i]);
}

static void absorb_foreign(Clock& into, u32 block, const ClockRef& known) {
  if (block == into.block) return absorb_counts(into, *known.get());
  for (auto& [serial, clock] : into.foreign)
    if (serial == block) {
      if (clock == known) return;
      ClockRef merged(new Clock(*clock.get()));
      merged->references = 1;
      merged->foreign.clear();
      absorb_counts(*merged.get(), *known.get());
      clock = merged;
      return;
    }
  into.foreign.emplace_back(block, known);
}

void absorb(Clock& into, const ClockRef& other) {
  if (!other) return;
  absorb_foreign(into, other->block, other);
  for (const auto& [serial, clock] : other->foreign) absorb_foreign(into, serial, clock);
}

static ClockRef copy(const ClockRef& clock) {
  Clock* duplicate = new Clock(*clock.get());
  duplicate->references = 0;
  return ClockRef(duplicate);
}

ClockRef join(const ClockRef& base, const ClockRef& other) {
  if (!base) return other;
  if (!other || base == other) return base;
  ClockRef joined = copy(base);
  absorb(*joined.get(), other);
  return joined;
}

ClockRef with_own(const ClockRef& clock, u32 thread, u32 count) {
  ClockRef own = copy(clock);
  own->count[thread] = count;
  return own;
}
}  // namespace gpu
