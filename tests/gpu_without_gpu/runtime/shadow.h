// The race checker's memory of who accessed what (FastTrack: Flanagan and Freund, PLDI 2009).
//
// A `Line` covers 128 bytes of memory with cells of one granule: 16 bytes at first, halved when an access smaller than
// the granule arrives, so that a cell is always accessed as a whole. A cell keeps its last write and up to three reads
// that are concurrent with each other; a fourth replaces the oldest.
#pragma once
#include <memory>
#include "state.h"

namespace gpu {
constexpr u32 kLineBytes = 128, kAsyncPending = ~0u;
struct Past { u32 block, count, site; u16 thread; bool strong; };
struct Cell { Past write; Past reads[3]; };
struct Line { Cell* cells; u32 granule; };

class Shadow {
 public:
  // `shared` memory forgets accesses of earlier blocks and reports reads of what this block has not written.
  Shadow(u64 bytes, bool shared);
  void check(Thread*, u64 offset, u32 bytes, Access, u32 site);
  void async_begins(Thread*, u64 offset, u32 bytes, u32 site);
  void async_ends(Thread*, u64 offset, u32 bytes, u32 site);
  void forget(u64 offset, u64 bytes);  // the memory was freed

 private:
  template <class Visit> void each_cell(u64 offset, u32 bytes, Visit visit);
  void refine(Line&, u32 granule);
  bool ordered(const Thread*, const Past&) const;
  void read(Thread*, Cell&, bool strong, u32 site);
  void write(Thread*, Cell&, bool strong, u32 site, u32 count);
  [[noreturn]] void race(const Thread*, const char* now, const Past&, const char* before, u32 site) const;

  Line* lines_;
  bool shared_;
};
}  // namespace gpu
