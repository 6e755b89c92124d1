// The C interface that Python calls: memory, and one launch at a time.
#include <map>
#include "memory.h"
#include "profile.h"

namespace gpu {
void pause(Thread* t, u32 site) { yield_to_others(t, site); }
u64 clock64(Thread*) { return ++machine.polls; }
void trap(Thread* t, const char* what, u32 site) { fail(t, site, std::string("trap: ") + what); }

static void start_block(const Dim3& block, const Dim3& thread_shape, const Dim3& grid, u32 dynamic_shared, u32 total_shared) {
  machine.block_serial++;
  machine.live = machine.threads;
  memset(machine.ready, 0, sizeof machine.ready);
  for (Barrier& b : machine.barriers) b = {};
  machine.warp.assign(machine.warps, {});
  if (u32 last = machine.threads % kWarp) machine.warp.back().absent = ~u32{0} << last;
  memory_start_block();
  ClockRef nothing_known(new Clock);
  nothing_known->block = machine.block_serial;
  nothing_known->count.assign(machine.threads, 0);
  for (u32 i = 0; i < machine.threads; i++) {
    Thread* t = machine.all[i];
    char* stack = t->stack;
    *t = Thread{};
    t->stack = stack;
    t->id = i;
    t->tid = {i % thread_shape.x, i / thread_shape.x % thread_shape.y, i / (thread_shape.x * thread_shape.y)};
    t->ctaid = block;
    t->ntid = thread_shape;
    t->nctaid = grid;
    t->lane = i % kWarp;
    t->warp = i / kWarp;
    t->dynamic_shared = dynamic_shared;
    t->total_shared = total_shared;
    t->clock = nothing_known;
    prepare_stack(t);
    make_ready(t);
  }
}

static void report_deadlock() {
  std::map<std::string, u32> waits;
  for (u32 i = 0; i < machine.threads; i++) {
    const Thread* t = machine.all[i];
    waits[t->exited ? "exited" : std::string("wait for ") + t->waits_for + " at " + site_text(t->wait_site)]++;
  }
  const Dim3& b = machine.all[0]->ctaid;
  machine.failed = true;
  machine.error = "deadlock";
  for (const auto& [what, n] : waits) machine.error += "\n  " + std::to_string(n) + " threads " + what;
  machine.error += "\n  in block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ")";
}

static std::vector<u32> block_order(u64 blocks) {
  std::vector<u32> order(blocks);
  for (u32 i = 0; i < blocks; i++) order[i] = machine.schedule == Schedule::reversed ? static_cast<u32>(blocks) - 1 - i : i;
  if (machine.schedule == Schedule::random) std::shuffle(order.begin(), order.end(), machine.random);
  return order;
}
}  // namespace gpu

using namespace gpu;
extern "C" {
struct LaunchRequest {
  void (*kernel)(Thread*, const u8*);
  const u8* params;
  u64 param_bytes;
  const u32* site_lines;
  const SharedRegion* regions;
  u32 region_count;
  Dim3 grid, block;
  u32 dynamic_shared, total_shared;
  u32 schedule, async_copies, seed, check_races, profiles;
};

u32 gpu_allocate(u64 bytes) { return allocate(bytes); }
u64 gpu_address(u32 id) { return allocation(id).base; }
void gpu_free(u32 id) { release_allocation(id); }
void gpu_set_read_only(u32 id, u32 read_only) { allocation(id).read_only = read_only; }
void gpu_traffic(u32 id, Traffic* out) { *out = traffic(id); }
void gpu_profile(Profile* out) { *out = profile_counts(); }
const char* gpu_error() { return machine.error.c_str(); }

// Returns 0, or 1 when the launch failed and gpu_error says why.
int gpu_launch(const LaunchRequest* request) {
  machine.schedule = static_cast<Schedule>(request->schedule);
  machine.async_copies = static_cast<AsyncCopies>(request->async_copies);
  machine.random.seed(request->seed);
  machine.kernel = request->kernel;
  machine.params = request->params;
  machine.param_bytes = request->param_bytes;
  machine.site_lines = request->site_lines;
  machine.shared_regions.assign(request->regions, request->regions + request->region_count);
  machine.check_races = request->check_races;
  machine.profiles = request->profiles;
  machine.threads = request->block.x * request->block.y * request->block.z;
  machine.warps = (machine.threads + kWarp - 1) / kWarp;
  machine.failed = false;
  machine.error.clear();
  machine.polls = 0;
  machine.first_serial = machine.block_serial + 1;
  while (machine.all.size() < machine.threads) machine.all.push_back(new Thread);
  memory_start_launch();
  profile_start_launch();
  const Dim3& grid = request->grid;
  for (u32 linear : block_order(u64{grid.x} * grid.y * grid.z)) {
    start_block({linear % grid.x, linear / grid.x % grid.y, linear / (grid.x * grid.y)}, request->block, grid,
                request->dynamic_shared, request->total_shared);
    run_block();
    profile_end_block();
    if (!machine.failed && machine.live) report_deadlock();
    if (machine.failed) break;
  }
  forget_locations();
  return machine.failed;
}
}
