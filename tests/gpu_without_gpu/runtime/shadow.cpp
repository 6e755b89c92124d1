#include "shadow.h"
#include <sys/mman.h>

namespace gpu {
Shadow::Shadow(u64 bytes, bool shared) : shared_(shared) {
  u64 size = (bytes / kLineBytes + 1) * sizeof(Line);  // untouched pages cost nothing
  lines_ = static_cast<Line*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

void Shadow::refine(Line& line, u32 granule) {
  Cell* cells = static_cast<Cell*>(calloc(kLineBytes / granule, sizeof(Cell)));
  if (line.cells)
    for (u32 i = 0; i < kLineBytes / granule; i++) cells[i] = line.cells[i * granule / line.granule];
  free(line.cells);
  line = {cells, granule};
}

void Shadow::forget(u64 offset, u64 bytes) {
  for (u64 i = offset / kLineBytes; i * kLineBytes < offset + bytes; i++) {
    free(lines_[i].cells);
    lines_[i] = {};
  }
}

template <class Visit> void Shadow::each_cell(u64 offset, u32 bytes, Visit visit) {
  Line& line = lines_[offset / kLineBytes];  // accesses are aligned and at most 16 bytes: one line
  if (!line.cells || line.granule > bytes) [[unlikely]] refine(line, bytes < 16 ? bytes : 16);
  Cell* cell = line.cells + offset % kLineBytes / line.granule;
  for (u32 n = bytes / line.granule; n--;) visit(*cell++);
}

bool Shadow::ordered(const Thread* t, const Past& past) const {
  if (past.block == machine.block_serial)
    return past.count != kAsyncPending && (past.thread == t->id || t->clock->count[past.thread] >= past.count);
  if (shared_ || past.block < machine.first_serial) return true;
  for (const auto& [serial, clock] : t->clock->foreign)
    if (serial == past.block) return clock->count[past.thread] >= past.count;
  return false;
}

void Shadow::race(const Thread* t, const char* now, const Past& past, const char* before, u32 site) const {
  const char* space = shared_ ? "shared" : "global";
  if (past.count == kAsyncPending)
    fail(t, site, std::string("race on ") + space + " memory: " + now + " of the destination of a cp.async by " +
                      thread_text(past.thread) + " at " + site_text(past.site) + " that nobody has waited for");
  std::string who = past.block == machine.block_serial ? thread_text(past.thread) : "another block";
  fail(t, site, std::string("race on ") + space + " memory: " + now + " unordered with the " + before + " by " + who +
                    " at " + site_text(past.site));
}

void Shadow::read(Thread* t, Cell& cell, bool strong, u32 site) {
  if (shared_ && cell.write.block != machine.block_serial)
    fail(t, site, "uninitialised read of shared memory: no thread of this block has written it");
  if (!(strong && cell.write.strong) && !ordered(t, cell.write)) race(t, "read", cell.write, "write", site);
  Past now{machine.block_serial, t->count, site, static_cast<u16>(t->id), strong};
  for (Past& past : cell.reads)
    if ((past.block == now.block && past.thread == now.thread) || ordered(t, past)) { past = now; return; }
  cell.reads[2] = cell.reads[1];
  cell.reads[1] = cell.reads[0];
  cell.reads[0] = now;
}

void Shadow::write(Thread* t, Cell& cell, bool strong, u32 site, u32 count) {
  if (!(strong && cell.write.strong) && !ordered(t, cell.write)) race(t, "write", cell.write, "write", site);
  for (const Past& past : cell.reads)
    if (!(strong && past.strong) && !ordered(t, past)) race(t, "write", past, "read", site);
  cell = {};
  cell.write = {machine.block_serial, count, site, static_cast<u16>(t->id), strong};
}

void Shadow::check(Thread* t, u64 offset, u32 bytes, Access kind, u32 site) {
  switch (kind) {
    case Access::read: return each_cell(offset, bytes, [&](Cell& c) { read(t, c, false, site); });
    case Access::strong_read: return each_cell(offset, bytes, [&](Cell& c) { read(t, c, true, site); });
    case Access::write: return each_cell(offset, bytes, [&](Cell& c) { write(t, c, false, site, t->count); });
    case Access::strong_write: return each_cell(offset, bytes, [&](Cell& c) { write(t, c, true, site, t->count); });
    case Access::atomic:
      return each_cell(offset, bytes, [&](Cell& c) {
        if (shared_ && c.write.block != machine.block_serial) fail(t, site, "uninitialised read of shared memory: atomic");
        write(t, c, true, site, t->count);
      });
  }
}

void Shadow::async_begins(Thread* t, u64 offset, u32 bytes, u32 site) {
  each_cell(offset, bytes, [&](Cell& c) { write(t, c, false, site, kAsyncPending); });
}

void Shadow::async_ends(Thread* t, u64 offset, u32 bytes, u32 site) {
  each_cell(offset, bytes, [&](Cell& c) {
    if (c.write.block == machine.block_serial && c.write.thread == t->id && c.write.count == kAsyncPending)
      c.write = {machine.block_serial, t->count, site, static_cast<u16>(t->id), false};
  });
}
}  // namespace gpu
