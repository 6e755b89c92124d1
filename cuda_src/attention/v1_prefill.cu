// Attention v1, prefill: FlashAttention-2 over pages; 4 warps share each tile of keys, 16 query rows per warp.
//
// A block takes 64 query rows of one entry and one KV head: tokens x the query heads of the KV head, so that any
// ratio of heads reads keys and values once per block. Splits are joined in order as they end, into shared memory:
// a split's sums start from nothing, exactly as in v1_decode.
// Launch: grid (tokens * group / 64 + entries, kv_heads), block 128, PIPELINE_BYTES + 256 * HEAD_DIM bytes of shared
// memory. Entries that the decode kernel takes (1 to decode_tokens tokens) are left alone. Arguments as in v0.cu.
#include "attention/batch.cuh"
#include "attention/tile.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * WARPS;
static_assert(SPLIT % TILE == 0, "a tile lies in one split");

// Blocks are dealt to entries by an upper bound of what they need, without a prefix sum of the rounded-up counts:
// floor(a + b) - floor(a) + 1 >= ceil(b).
DEVICE int first_block(const int* query_start_loc, int e, int group) { return query_start_loc[e] * group / ROWS + e; }

DEVICE int entry_of_block(const int* query_start_loc, int entries, int group, int block) {
  int low = 0, high = entries;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_block(query_start_loc, middle, group) <= block ? low : high) = middle;
  }
  return low;
}

// Outputs and softmax of the splits so far. Each thread reads and writes its own words of `outputs` alone.
struct Joined {
  float* outputs;  // [HEAD_DIM / 2, THREADS]
  Softmax softmax[2];
  bool empty = true;

  DEVICE Joined(u8* memory) : outputs(reinterpret_cast<float*>(memory) + threadIdx.x) {}

  // rows = the splits so far joined with rows.
  DEVICE void join_into(OutputRows& rows) {
    rows.close();
    const Shares shares[2] = {join(softmax[0], rows.softmax[0]), join(softmax[1], rows.softmax[1])};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        rows.o[i][j] = join(empty ? 0.f : outputs[(4 * i + j) * THREADS], rows.o[i][j], shares[j / 2]);
  }

  DEVICE void take(OutputRows& rows) {
    join_into(rows);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) outputs[(4 * i + j) * THREADS] = rows.o[i][j];
    empty = false;
    rows.reset();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
attention_v1_prefill(const element* queries, const u8* keys, const u8* values, const float* key_scales,
                     const float* value_scales, const int* block_table, const int* query_start_loc,
                     const int* entry_rows, const int* seq_lens, const float* sinks, element* out, int entries,
                     int heads, int kv_heads, int blocks_per_row, int decode_tokens, int window, float scale,
                     float cap) {
  extern __shared__ __align__(16) u8 memory[];
  const int group = heads / kv_heads, kv_head = blockIdx.y;
  const int block = gridDim.x - 1 - blockIdx.x;  // an entry's last rows have the most keys and start first
  const int e = entry_of_block(query_start_loc, entries, group, block);
  const Entry entry(query_start_loc, seq_lens, e);
  const int rows = entry.tokens * group, first_row = (block - first_block(query_start_loc, e, group)) * ROWS;
  if (entry.is_decode(decode_tokens) || first_row >= rows) return;

  const int first_token = first_row / group, last_token = (min(first_row + ROWS, rows) - 1) / group;
  const int begin = window > 0 ? max(0, entry.start + first_token - window + 1) : 0;
  const int end = entry.start + last_token + 1;
  const Pages pages = {keys, values, key_scales, value_scales,
                       block_table + static_cast<long long>(entry_rows[e]) * blocks_per_row, kv_heads, kv_head};
  const int row = first_row + threadIdx.x / 32 * 16;
  const long long origin = (static_cast<long long>(entry.first_token) * heads + kv_head * group) * HEAD_DIM;
  const QueryRows q(queries + origin, row, rows, group, heads, entry.start, window);
  OutputRows output;
  Joined joined(memory + PIPELINE_BYTES);
  // The warp's rows see nothing after this key: tiles beyond it would add zeros.
  const int last_key = entry.start + (min(row + 16, rows) - 1) / group;
  for_each_tile<THREADS>(pages, begin, end, memory, [&](int start, u32 tile_keys, u32 tile_values) {
    if (row < rows && start <= last_key) output.attend(q, start, tile_keys, tile_values, scale, cap);
    if ((start + TILE) % SPLIT == 0 && start + TILE < end) joined.take(output);
  });
  joined.join_into(output);

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + lane / 4 + 8 * half;
    if (r >= rows) continue;
    const float factor = normaliser(joined.softmax[half], sinks, kv_head * group + r % group);
    u32* target = reinterpret_cast<u32*>(
        out + origin + (static_cast<long long>(r / group) * heads + r % group) * HEAD_DIM + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
      target[4 * i] = to_elements(normalised(output.o[i][2 * half], factor),
                                  normalised(output.o[i][2 * half + 1], factor));
  }
}
