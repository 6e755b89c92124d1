#include "memory.h"
#include <sys/mman.h>
#include "profile.h"

namespace gpu {
namespace {
u8* reserve(u64 bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) abort();
  return static_cast<u8*>(at);
}

struct Arena {
  u8* base = reserve(kArenaBytes);
  u32* page_owner = reinterpret_cast<u32*>(reserve(kArenaBytes / kPage * sizeof(u32)));  // 0: no allocation
  u8* loaded = reserve(kArenaBytes / 8);  // a bit for each byte loaded, and stored, in this launch
  u8* stored = reserve(kArenaBytes / 8);
  u64 used_pages = 1;
  std::vector<Allocation> allocations{Allocation{}};
  std::vector<std::pair<u64, u64>> free_ranges;  // first page, pages
  Shadow shadow{kArenaBytes, false};
};
Arena& arena() { static Arena* a = new Arena; return *a; }

struct Shared {
  u8* base = reserve(kSharedBytes);
  Shadow shadow{kSharedBytes, true};
};
Shared& shared() { static Shared* s = new Shared; return *s; }

u64 pages_of(u64 bytes) { return (bytes + kPage - 1) / kPage + 1; }  // and one behind, to tell whose end was passed

u64 take_pages(u64 pages) {
  auto& free = arena().free_ranges;
  for (size_t i = 0; i < free.size(); i++)
    if (free[i].second == pages) {
      u64 first = free[i].first;
      free.erase(free.begin() + static_cast<long>(i));
      return first;
    }
  u64 first = arena().used_pages;
  arena().used_pages += pages;
  return (first + pages) * kPage > kArenaBytes ? 0 : first;
}

void mark(u8* bitmap, u64 offset, u32 bytes) {  // aligned, so at most one 16-bit word
  u32 mask = ((1u << bytes) - 1) << (offset % 8);
  u16* word = reinterpret_cast<u16*>(bitmap + offset / 8);
  if (bytes == 16) *word = 0xffff;
  else bitmap[offset / 8] |= static_cast<u8>(mask);
}

u64 count_bits(const u8* bitmap, u64 first_byte, u64 bytes) {
  u64 n = 0;
  for (u64 i = first_byte / 8; i < (first_byte + bytes + 7) / 8; i++)  // allocations start on whole words
    n += static_cast<u64>(__builtin_popcountll(reinterpret_cast<const u64*>(bitmap)[i]));
  return n;
}

void clear_traffic(Allocation& a) {
  if (!a.touched) return;
  u64 offset = a.base - reinterpret_cast<u64>(arena().base);
  memset(arena().loaded + offset / 8, 0, a.bytes / 8 + 1);
  memset(arena().stored + offset / 8, 0, a.bytes / 8 + 1);
  a.touched = false;
  a.loaded = a.stored = 0;
}

const char* verb(Access kind) {
  return kind == Access::read || kind == Access::strong_read ? "read" : kind == Access::atomic ? "atomic" : "write";
}

std::string hex(u64 x) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

void check_aligned(Thread* t, u64 address, u32 bytes, u32 site) {
  if (address & (bytes - 1)) [[unlikely]]
    fail(t, site, "misaligned access: " + std::to_string(bytes) + " bytes at " + hex(address));
}

bool in_arena(u64 address) { return address - reinterpret_cast<u64>(arena().base) < kArenaBytes; }
bool in_shared(u64 address) { return address - reinterpret_cast<u64>(shared().base) < kSharedBytes; }
bool in_params(u64 address) { return address - reinterpret_cast<u64>(machine.params) < machine.param_bytes; }
bool in_frame(const Thread* t, u64 address) {
  for (LocalFrame* f = t->frames; f; f = f->outer)
    if (address - reinterpret_cast<u64>(f->base) < f->size) return true;
  return false;
}
}  // namespace

u32 allocate(u64 bytes) {
  Arena& a = arena();
  u64 first = take_pages(pages_of(bytes));
  if (!first) return 0;
  u32 id = static_cast<u32>(a.allocations.size());
  a.allocations.push_back({reinterpret_cast<u64>(a.base) + first * kPage, bytes, true, false, false, 0, 0});
  for (u64 p = first; p < first + pages_of(bytes); p++) a.page_owner[p] = id;
  return id;
}

Allocation& allocation(u32 id) { return arena().allocations[id]; }

void release_allocation(u32 id) {
  Arena& a = arena();
  Allocation& freed = a.allocations[id];
  u64 offset = freed.base - reinterpret_cast<u64>(a.base), pages = pages_of(freed.bytes);
  a.shadow.forget(offset, freed.bytes);
  clear_traffic(freed);
  for (u64 p = offset / kPage; p < offset / kPage + pages; p++) a.page_owner[p] = 0;
  madvise(reinterpret_cast<void*>(freed.base), pages * kPage, MADV_DONTNEED);
  a.free_ranges.emplace_back(offset / kPage, pages);
  freed.live = false;
}

Traffic traffic(u32 id) {
  const Allocation& of = allocation(id);
  u64 offset = of.base - reinterpret_cast<u64>(arena().base);
  if (!of.touched) return {};
  return {of.loaded, of.stored, count_bits(arena().loaded, offset / 8, of.bytes / 8 + 1),
          count_bits(arena().stored, offset / 8, of.bytes / 8 + 1)};
}

void memory_start_launch() {
  for (Allocation& a : arena().allocations)
    if (a.live) clear_traffic(a);
}

void memory_start_block() {
  for (const SharedRegion& region : machine.shared_regions)
    memset(shared().base + region.begin - kSharedWindow, 0xff, region.end - region.begin);
}

void* global_access(Thread* t, u64 address, u32 bytes, Access kind, u32 site) {
  check_aligned(t, address, bytes, site);
  Arena& a = arena();
  u64 offset = address - reinterpret_cast<u64>(a.base);
  u32 id = offset < kArenaBytes ? a.page_owner[offset / kPage] : 0;
  if (!id) [[unlikely]]
    fail(t, site, std::string("out of bounds: ") + verb(kind) + " of " + std::to_string(bytes) + " bytes at " +
                      hex(address) + (in_shared(address) ? ", which is shared memory, through a global access" : ", in no allocation"));
  Allocation& owner = a.allocations[id];
  if (address + bytes > owner.base + owner.bytes) [[unlikely]]
    fail(t, site, std::string("out of bounds: ") + verb(kind) + " of " + std::to_string(bytes) + " bytes at offset " +
                      std::to_string(address - owner.base) + " of an allocation of " + std::to_string(owner.bytes) + " bytes {allocation:" + std::to_string(id) + "}");
  bool reads = kind == Access::read || kind == Access::strong_read || kind == Access::atomic;
  bool writes = !(kind == Access::read || kind == Access::strong_read);
  owner.touched = true;
  if (reads) { owner.loaded += bytes; mark(a.loaded, offset, bytes); }
  if (writes) {
    if (owner.read_only) [[unlikely]] fail(t, site, std::string(verb(kind)) + " of a read-only array {allocation:" + std::to_string(id) + "}");
    owner.stored += bytes;
    mark(a.stored, offset, bytes);
  }
  if (machine.profiles) profile_access(t, address, bytes, writes, false, site);
  if (machine.check_races) a.shadow.check(t, offset, bytes, kind, site);
  if (kind >= Access::strong_read) synchronise_location(t, address, kind, site);
  return reinterpret_cast<void*>(address);
}

static void check_shared_bounds(Thread* t, u64 address, u32 bytes, const char* what, u32 site) {
  for (const SharedRegion& region : machine.shared_regions)
    if (address >= region.begin && address + bytes <= region.end) return;
  fail(t, site, std::string("out of bounds: ") + what + " of " + std::to_string(bytes) + " bytes at shared offset " +
                    std::to_string(static_cast<s64>(address) - kSharedWindow) + ", in no shared variable");
}

void* shared_access(Thread* t, u64 address, u32 bytes, Access kind, u32 site) {
  check_aligned(t, address, bytes, site);
  check_shared_bounds(t, address, bytes, verb(kind), site);
  u64 offset = address - kSharedWindow;
  if (machine.profiles) profile_access(t, address, bytes, kind == Access::write, true, site);
  if (machine.check_races) shared().shadow.check(t, offset, bytes, kind, site);
  if (kind >= Access::strong_read) synchronise_location(t, reinterpret_cast<u64>(shared().base) + offset, kind, site);
  return shared().base + offset;
}

void async_write_begins(Thread* t, u64 address, u32 bytes, u32 site) {
  check_aligned(t, address, bytes, site);
  check_shared_bounds(t, address, bytes, "cp.async", site);
  if (machine.profiles) profile_access(t, address, bytes, true, true, site);
  if (machine.check_races) shared().shadow.async_begins(t, address - kSharedWindow, bytes, site);
}

void async_write_ends(Thread* t, u64 address, u32 bytes, u32 site) {
  if (machine.check_races) shared().shadow.async_ends(t, address - kSharedWindow, bytes, site);
}

void* local_access(Thread* t, u64 address, u32 bytes, Access kind, u32 site) {
  check_aligned(t, address, bytes, site);
  for (LocalFrame* f = t->frames; f; f = f->outer) {
    u64 offset = address - reinterpret_cast<u64>(f->base);
    if (offset >= f->size) continue;
    if (offset + bytes > f->size) break;
    if (kind == Access::write) memset(f->written + offset, 1, bytes);
    else if (memchr(f->written + offset, 0, bytes)) fail(t, site, "uninitialised read of local memory");
    return reinterpret_cast<void*>(address);
  }
  fail(t, site, std::string("out of bounds: ") + verb(kind) + " of " + std::to_string(bytes) + " bytes at " + hex(address) + ", in no local array");
}

void* constant_access(Thread* t, u64 address, u32 bytes, Access kind, u32 site) {
  return global_access(t, address, bytes, kind, site);
}

void* generic_access(Thread* t, u64 address, u32 bytes, Access kind, u32 site) {
  if (in_arena(address)) return global_access(t, address, bytes, kind, site);
  if (in_shared(address)) return shared_access(t, generic_to_shared(address), bytes, kind, site);
  if (in_frame(t, address)) return local_access(t, address, bytes, kind, site);
  if (in_params(address) && kind == Access::read) return reinterpret_cast<void*>(address);
  return global_access(t, address, bytes, kind, site);  // fails, with the message for global memory
}

u64 shared_to_generic(u64 window_address) { return reinterpret_cast<u64>(shared().base) + window_address - kSharedWindow; }
u64 generic_to_shared(u64 generic_address) { return generic_address - reinterpret_cast<u64>(shared().base) + kSharedWindow; }

LocalFrame::LocalFrame(Thread* t, u8* frame, u32 bytes, u8* bitmap)
    : owner(t), outer(t->frames), base(frame), size(bytes), written(bitmap) {
  memset(base, 0xff, size);
  memset(written, 0, size);
  t->frames = this;
}
LocalFrame::~LocalFrame() { owner->frames = outer; }
}  // namespace gpu
