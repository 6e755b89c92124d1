// Collectives that exchange values between the lanes of a warp. None orders memory.
#include "state.h"

namespace gpu {
namespace {
template <class T> const T& of(const void* const* in, u32 lane) { return *static_cast<const T*>(in[lane]); }
template <class T> T& to(void* const* out, u32 lane) { return *static_cast<T*>(out[lane]); }
template <class Visit> void each_lane(u32 mask, Visit visit) {
  for (u32 lane = 0; lane < kWarp; lane++)
    if (mask >> lane & 1) visit(lane);
}

struct ShuffleIn { u32 value, b, clamp, site; };
template <Shuffle Mode> void run_shuffle(Thread* first, const void* const* in, void* const* out, u32 mask) {
  each_lane(mask, [&](u32 lane) {
    const ShuffleIn& i = of<ShuffleIn>(in, lane);
    u32 clamp = i.clamp & 31, segment = i.clamp >> 8 & 31, b = i.b & 31;
    u32 highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment, source;
    bool in_range;
    if (Mode == Shuffle::up) { source = lane - b; in_range = static_cast<s32>(source) >= static_cast<s32>(highest); }
    else if (Mode == Shuffle::down) { source = lane + b; in_range = source <= highest; }
    else if (Mode == Shuffle::bfly) { source = lane ^ b; in_range = source <= highest; }
    else { source = lowest | (b & ~segment); in_range = source <= highest; }
    if (!in_range) source = lane;
    if (!(mask >> source & 1))
      fail(machine.all[first->id + lane], i.site, "divergence: shfl.sync reads lane " + std::to_string(source) + ", which is not in the mask");
    to<Shuffled>(out, lane) = {of<ShuffleIn>(in, source).value, in_range};
  });
}

void run_ballot(Thread*, const void* const* in, void* const* out, u32 mask) {
  u32 votes = 0;
  each_lane(mask, [&](u32 lane) { votes |= static_cast<u32>(of<bool>(in, lane)) << lane; });
  each_lane(mask, [&](u32 lane) { to<u32>(out, lane) = votes; });
}

void run_match_any(Thread*, const void* const* in, void* const* out, u32 mask) {
  each_lane(mask, [&](u32 lane) {
    u32 equal = 0;
    each_lane(mask, [&](u32 other) { equal |= static_cast<u32>(of<u64>(in, lane) == of<u64>(in, other)) << other; });
    to<u32>(out, lane) = equal;
  });
}

struct ReduxIn { u32 value; Redux how; };
void run_redux(Thread*, const void* const* in, void* const* out, u32 mask) {
  u32 first = static_cast<u32>(__builtin_ctz(mask)), r = of<ReduxIn>(in, first).value;
  each_lane(mask & ~(1u << first), [&](u32 lane) {
    u32 v = of<ReduxIn>(in, lane).value;
    switch (of<ReduxIn>(in, lane).how) {
      case Redux::add: r += v; break;
      case Redux::min_s: r = static_cast<s32>(v) < static_cast<s32>(r) ? v : r; break;
      case Redux::max_s: r = static_cast<s32>(v) > static_cast<s32>(r) ? v : r; break;
      case Redux::min_u: r = v < r ? v : r; break;
      case Redux::max_u: r = v > r ? v : r; break;
      case Redux::and_: r &= v; break;
      case Redux::or_: r |= v; break;
      case Redux::xor_: r ^= v; break;
    }
  });
  each_lane(mask, [&](u32 lane) { to<u32>(out, lane) = r; });
}
}  // namespace

Shuffled shuffle(Thread* t, Shuffle mode, u32 value, u32 b, u32 clamp, u32 mask, u32 site) {
  static const Collective modes[] = {{"shfl.sync.up", false, false, run_shuffle<Shuffle::up>},
                                     {"shfl.sync.down", false, false, run_shuffle<Shuffle::down>},
                                     {"shfl.sync.bfly", false, false, run_shuffle<Shuffle::bfly>},
                                     {"shfl.sync.idx", false, false, run_shuffle<Shuffle::idx>}};
  ShuffleIn in{value, b, clamp, site};
  Shuffled out;
  meet(t, modes[static_cast<int>(mode)], mask, site, &in, &out);
  return out;
}

u32 ballot(Thread* t, bool value, u32 mask, u32 site) {
  static const Collective what{"vote.sync", false, false, run_ballot};
  u32 votes;
  meet(t, what, mask, site, &value, &votes);
  return votes;
}
bool vote_uniform(Thread* t, bool value, u32 mask, u32 site) {
  u32 votes = ballot(t, value, mask, site);
  return votes == 0 || votes == mask;
}

u32 match_any(Thread* t, u64 value, u32 mask, u32 site) {
  static const Collective what{"match.sync", false, false, run_match_any};
  u32 equal;
  meet(t, what, mask, site, &value, &equal);
  return equal;
}
Matched match_all(Thread* t, u64 value, u32 mask, u32 site) {
  bool all = match_any(t, value, mask, site) == mask;
  return {all ? mask : 0, all};
}

u32 redux(Thread* t, Redux how, u32 value, u32 mask, u32 site) {
  static const Collective what{"redux.sync", false, false, run_redux};
  ReduxIn in{value, how};
  u32 out;
  meet(t, what, mask, site, &in, &out);
  return out;
}

Elected elect(Thread* t, u32 mask, u32 site) {
  static const Collective what{"elect.sync", false, false, nullptr};
  meet(t, what, mask, site, nullptr, nullptr);
  u32 leader = static_cast<u32>(__builtin_ctz(mask));
  return {leader, leader == t->lane};
}
}  // namespace gpu
