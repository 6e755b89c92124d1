// Vector clocks for happens-before.
//
// Each thread of the running block counts its own releases. A `Clock` maps every thread of one block to the count that
// its holder has synchronised with; it is immutable once shared, so that all participants of a barrier share one.
// `foreign` holds what is known of other blocks, through fences and atomics. Next: shadow.h, which compares accesses.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>
#include "types.h"

namespace gpu {
class ClockRef;
struct Clock {
  u32 references = 0;
  u32 block = 0;  // serial number of the block whose threads `count` indexes
  std::vector<u32> count;
  std::vector<std::pair<u32, ClockRef>> foreign;  // by block serial
};

class ClockRef {
 public:
  ClockRef() = default;
  explicit ClockRef(Clock* clock) : clock_(clock) { if (clock_) clock_->references++; }
  ClockRef(const ClockRef& other) : ClockRef(other.clock_) {}
  ClockRef(ClockRef&& other) noexcept : clock_(std::exchange(other.clock_, nullptr)) {}
  ClockRef& operator=(ClockRef other) noexcept { std::swap(clock_, other.clock_); return *this; }
  ~ClockRef() { if (clock_ && --clock_->references == 0) delete clock_; }
  Clock* operator->() const { return clock_; }
  Clock* get() const { return clock_; }
  explicit operator bool() const { return clock_ != nullptr; }
  bool operator==(const ClockRef& other) const { return clock_ == other.clock_; }

 private:
  Clock* clock_ = nullptr;
};

// A new clock that knows what both know; `base` gives the block it counts for. Either may be empty.
ClockRef join(const ClockRef& base, const ClockRef& other);
// A private copy of `clock` in which `thread` stands at `count`.
ClockRef with_own(const ClockRef& clock, u32 thread, u32 count);
void absorb(Clock& into, const ClockRef& other);
}  // namespace gpu
