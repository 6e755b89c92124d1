// What changes a row's logits before they are sampled, in RowState's order (engine/plan.py).
//
// A row's part of the rules, ints: banned ids, ids with a bias, their values (float bits), allowed ids, bad words
// (each its length, then its ids). No id is twice in a list. History: counts[history] has for every id how often the
// output has it, and bit 31 if the prompt does; history[history] the tokens before `position`.
#pragma once
#include "sampling/row.cuh"

struct RuleArrays {
  const int* rules;
  const u32* counts;   // [histories, vocab]
  const int* history;  // [histories, max_model_len]
  const u32* masks;    // [samples, ceil(vocab / 32)] or null
  int max_model_len;
};

DEVICE bool follows(const int* word, int length, const int* history, int position) {
  if (length - 1 > position) return false;
  for (int i = 0; i < length - 1; ++i)
    if (word[i] != history[position - (length - 1) + i]) return false;
  return true;
}

// Changed copy of `values` in `changed`, [vocab]; ends with a barrier.
DEVICE void apply_rules(const float* values, float* changed, int vocab, const RowParams& row, const RuleArrays& arrays,
                        const u32* mask, int position) {
  const int* banned = arrays.rules + row.rules;
  const int* bias = banned + row.num_banned;
  const int* allowed = bias + 2 * row.num_bias;
  const int* words = allowed + row.num_allowed;
  auto masked = [&](int id) { return mask != nullptr && (mask[id >> 5] >> (id & 31) & 1) == 0; };

  for (int id = threadIdx.x; id < vocab; id += blockDim.x)
    changed[id] = row.num_allowed > 0 || masked(id) ? -INFINITE : values[id];
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_allowed; i += blockDim.x)
    if (!masked(allowed[i])) changed[allowed[i]] = values[allowed[i]];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (position < row.min_position)
      for (int i = 0; i < row.num_banned; ++i) changed[banned[i]] = -INFINITE;
    const int* history = arrays.history + static_cast<size_t>(row.history) * arrays.max_model_len;
    for (int at = 0; at < row.words_length; at += 1 + words[at])
      if (follows(words + at + 1, words[at], history, position)) changed[words[at + words[at]]] = -INFINITE;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_bias; i += blockDim.x)
    changed[bias[i]] += __int_as_float(bias[row.num_bias + i]);
  __syncthreads();
  if (row.history < 0) return;
  const u32* counts = arrays.counts + static_cast<size_t>(row.history) * vocab;
  for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
    if (counts[id] == 0) continue;
    const u32 outputs = counts[id] & 0x7fffffffu;
    double value = changed[id];
    value = value > 0.0 ? value / row.repetition_penalty : value * row.repetition_penalty;
    if (outputs > 0) value -= __dadd_rn(__dmul_rn(outputs, row.frequency_penalty), row.presence_penalty);
    changed[id] = static_cast<float>(value);
  }
  __syncthreads();
}
