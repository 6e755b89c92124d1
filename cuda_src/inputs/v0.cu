// Inputs of a step: what the host packed into one buffer of 32-bit words, unpacked to where the other kernels read it.
#include "common/ptx.cuh"

// apply_segments<<<segments, 128>>>
// Segment s is packed[first + 3 s ...] = target, source, count: state[target + i] = packed[source + i], or 0 for a
// source of -1. Segments of one launch do not overlap.
//   state  i32 [words]  rows' state
//   packed i32 [words]
extern "C" __global__ void apply_segments(int* state, const int* packed, int first) {
  const int* segment = packed + first + 3 * blockIdx.x;
  const int target = segment[0], source = segment[1], count = segment[2];
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    state[target + i] = source < 0 ? 0 : packed[source + i];
  }
}

// expand_entries<<<entries, 128>>>: the ragged batch, one block per entry.
//   packed          i32 [words]: entry rows [n], first positions [n], first token of each entry [n + 1] and input ids
//                   [tokens] at rows_at, starts_at, firsts_at and ids_at; an id of -1 is the row's last sampled one
//   last_ids        i32 [max_num_seqs]
//   ids, token_rows, positions  i32 [tokens], out
//   query_start_loc i32 [n + 1], entry_rows i32 [n], seq_lens i32 [n], out
extern "C" __global__ void expand_entries(const int* packed, const int* last_ids, int* ids, int* token_rows,
                                          int* positions, int* query_start_loc, int* entry_rows, int* seq_lens,
                                          int rows_at, int starts_at, int firsts_at, int ids_at) {
  const int entry = blockIdx.x;
  const int row = packed[rows_at + entry], start = packed[starts_at + entry];
  const int first = packed[firsts_at + entry], end = packed[firsts_at + entry + 1];
  for (int token = first + threadIdx.x; token < end; token += blockDim.x) {
    const int id = packed[ids_at + token];
    ids[token] = id < 0 ? last_ids[row] : id;
    token_rows[token] = row;
    positions[token] = start + token - first;
  }
  if (threadIdx.x == 0) {
    if (entry == 0) query_start_loc[0] = 0;
    query_start_loc[entry + 1] = end;
    entry_rows[entry] = row;
    seq_lens[entry] = start + end - first;
  }
}
