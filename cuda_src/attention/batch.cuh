// The ragged batch of a step as attention sees it: entries, their keys, and where they are cut into splits.
//
// Splits are SPLIT keys long and begin at multiples of SPLIT, whatever the entry's first token or its window: a
// token meets the same splits in a chunk of any size.
#pragma once
#include "common/ptx.cuh"

constexpr int SPLIT = 256;

// Entry e is the tokens [first_token, first_token + tokens) of the step, which are the positions
// [start, start + tokens) of the sequence in `row`.
struct Entry {
  int first_token, tokens, start;

  DEVICE Entry(const int* query_start_loc, const int* seq_lens, int e)
      : first_token(query_start_loc[e]), tokens(query_start_loc[e + 1] - first_token), start(seq_lens[e] - tokens) {}

  // Keys that some token of the entry sees: [first_key, end_key).
  DEVICE int first_key(int window) const { return window > 0 ? max(0, start - window + 1) : 0; }
  DEVICE int end_key() const { return start + tokens; }
  DEVICE int first_split(int window) const { return first_key(window) / SPLIT; }
  DEVICE int splits(int window) const { return (end_key() - 1) / SPLIT + 1 - first_split(window); }

  // Whether decode kernels compute it; others are for the prefill kernel.
  DEVICE bool is_decode(int decode_tokens) const { return tokens >= 1 && tokens <= decode_tokens; }
};

// First partial result of entry e: entries of one split need none. All lanes of a warp call it.
DEVICE int first_partial(const int* query_start_loc, const int* seq_lens, int e, int decode_tokens, int window) {
  int count = 0;
  for (int i = threadIdx.x % 32; i < e; i += 32) {
    const Entry entry(query_start_loc, seq_lens, i);
    if (entry.is_decode(decode_tokens) && entry.splits(window) > 1) count += entry.tokens * entry.splits(window);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(~0u, count, step);
  return count;
}
