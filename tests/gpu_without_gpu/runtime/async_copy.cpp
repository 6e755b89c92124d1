// cp.async: copies that happen at once (early), when waited for (late), or at either by chance.
//
// Whenever the bytes move, the destination counts as being written from issue to wait, so that a missing wait or a
// stage overwritten too early is found under every schedule. Next: shadow.h.
#include "state.h"

namespace gpu {
static void move(Thread* t, AsyncCopy& copy) {
  void* to = reinterpret_cast<void*>(shared_to_generic(copy.shared_address));
  memset(to, 0, copy.bytes);
  u32 step = copy.source_bytes == copy.bytes ? copy.bytes : 1;  // a partial copy is read byte by byte
  for (u32 at = 0; at < copy.source_bytes; at += step)
    memcpy(static_cast<u8*>(to) + at, global_access(t, copy.global_address + at, step, Access::read, copy.site), step);
  copy.done = true;
}

void copy_async(Thread* t, u64 shared_address, u64 global_address, u32 bytes, u32 source_bytes, u32 site) {
  if (source_bytes > bytes) fail(t, site, "cp.async: the source is larger than the copy");
  if (global_address & (bytes - 1)) fail(t, site, "misaligned access: cp.async source");
  async_write_begins(t, shared_address, bytes, site);
  AsyncCopy copy{shared_address, global_address, bytes, source_bytes, site, false};
  bool early = machine.async_copies == AsyncCopies::early ||
               (machine.async_copies == AsyncCopies::random && machine.random() & 1);
  if (early) move(t, copy);
  t->open_group.push_back(copy);
}

void copy_async_commit(Thread* t) {
  t->groups.push_back(std::move(t->open_group));
  t->open_group.clear();
}

void copy_async_wait(Thread* t, u32 groups_left_pending) {
  while (t->groups.size() > groups_left_pending) {
    for (AsyncCopy& copy : t->groups.front()) {
      if (!copy.done) move(t, copy);
      async_write_ends(t, copy.shared_address, copy.bytes, copy.site);
    }
    t->groups.erase(t->groups.begin());
  }
}

bool has_pending_copies(const Thread* t) {
  for (const auto& group : t->groups)
    if (!group.empty()) return true;
  return !t->open_group.empty();
}
}  // namespace gpu
