// What hardware would do with a warp's accesses: bank conflicts and 32-byte sectors.
//
// Lanes run one after another here, so the accesses of one warp instruction are gathered first: the n-th access by each
// lane at one site belongs together. Only launches that ask for a profile pay for it.
#include "profile.h"
#include <algorithm>
#include <array>
#include "state.h"

namespace gpu {
namespace {
struct Group { u32 lanes = 0, bytes = 0; bool writes = false; std::array<u64, kWarp> address; };
struct Key {
  u32 warp, site, occurrence;
  bool shared;
  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& k) const {
    return ((u64{k.site} << 1 | k.shared) * 0x9e3779b97f4a7c15u) ^ (u64{k.occurrence} << 20 | k.warp) * 0xc2b2ae3d27d4eb4fu;
  }
};
std::unordered_map<Key, Group, Hash> open_groups;
std::unordered_map<u64, u32> occurrences;  // by thread, site and space
Profile counts;

void finish_shared(const Group& g) {
  u32 lanes_per_phase = g.bytes == 16 ? 8 : g.bytes == 8 ? 16 : 32;  // a phase serves at most 128 bytes
  counts.shared_accesses++;
  for (u32 first = 0; first < kWarp; first += lanes_per_phase) {
    std::array<std::vector<u64>, 32> words;
    size_t degree = 0;
    for (u32 lane = first; lane < first + lanes_per_phase; lane++)
      for (u64 at = g.address[lane]; g.lanes >> lane & 1 && at < g.address[lane] + g.bytes; at += 4) {
        auto& bank = words[at / 4 % 32];
        if (std::find(bank.begin(), bank.end(), at / 4) == bank.end()) bank.push_back(at / 4);
        degree = std::max(degree, bank.size());
      }
    if (degree > 1) counts.bank_conflicts += degree - 1;
  }
}

void finish_global(const Group& g) {
  std::vector<u64> sectors;
  for (u32 lane = 0; lane < kWarp; lane++)
    if (g.lanes >> lane & 1) sectors.push_back(g.address[lane] / 32);
  std::sort(sectors.begin(), sectors.end());
  u64 n = static_cast<u64>(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
  (g.writes ? counts.sectors_stored : counts.sectors_loaded) += n;
}

void finish(const Key& key, const Group& group) { key.shared ? finish_shared(group) : finish_global(group); }
}  // namespace

void profile_start_launch() { counts = {}; }

void profile_access(const Thread* t, u64 address, u32 bytes, bool writes, bool shared, u32 site) {
  u32 occurrence = occurrences[(u64{site} << 1 | shared) << 10 | t->id]++;
  Key key{t->warp, site, occurrence, shared};
  Group& group = open_groups[key];
  group.lanes |= 1u << t->lane;
  group.bytes = bytes;
  group.writes = writes;
  group.address[t->lane] = address;
  if (group.lanes == kAllLanes) {
    finish(key, group);
    open_groups.erase(key);
  }
}

void profile_end_block() {
  for (const auto& [key, group] : open_groups) finish(key, group);
  open_groups.clear();
  occurrences.clear();
}

Profile profile_counts() { return counts; }
}  // namespace gpu
