// Inputs v0: a step's plan as it came from the host to what the forward pass reads; differences to state arrays.
#include "common/ptx.cuh"

// One thread per token finds its entry. Placeholders (-1) become the id that their row sampled last; tokens beyond
// the plan, up to `padded`, belong to no row (-1), and have id and position 0.
//   plan_ids: int [total]; query_start_loc: int [entries + 1], its last is total; starts, entry_rows: int [entries]
//   last_ids: int [rows]; ids, token_rows, positions: int [padded]; seq_lens: int [entries]
// Launch: grid ceil(padded / 256), block 256; entries <= padded.
extern "C" __global__ void __launch_bounds__(256)
prepare_inputs_v0(const int* plan_ids, const int* query_start_loc, const int* starts, const int* entry_rows,
                  const int* last_ids, int* ids, int* token_rows, int* positions, int* seq_lens, int entries,
                  int padded) {
  const int token = blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= padded) return;
  if (token < entries) seq_lens[token] = starts[token] + query_start_loc[token + 1] - query_start_loc[token];
  int entry = 0, end = entries;  // the last entry that starts at or before the token
  while (end - entry > 1) {
    const int middle = (entry + end) / 2;
    if (query_start_loc[middle] <= token)
      entry = middle;
    else
      end = middle;
  }
  const bool real = token < query_start_loc[entries];
  const int row = real ? entry_rows[entry] : -1;
  const int id = real ? plan_ids[token] : 0;
  ids[token] = id < 0 ? last_ids[row] : id;
  token_rows[token] = row;
  positions[token] = real ? starts[entry] + token - query_start_loc[entry] : 0;
}

// target[indices[i]] = values[i], items of `width` ints; no index is there twice.
//   target: int [*, width]; indices: int [items]; values: int [items, width]
// Launch: grid ceil(items * width / 256), block 256.
extern "C" __global__ void __launch_bounds__(256)
scatter_v0(int* target, const int* indices, const int* values, int items, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < items * width) target[static_cast<size_t>(indices[i / width]) * width + i % width] = values[i];
}
