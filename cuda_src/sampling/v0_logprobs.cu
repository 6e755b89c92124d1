// Logprobs v0: one block per request for log-softmax of raw logits: a token's, its rank, and the k most likely.
//
// Launch: grid requests, block 512, dynamic shared memory 8 * max(k, 1).
#include "common/reduce.cuh"
#include "sampling/select.cuh"

struct Scratch {
  Histogram histogram;
  Best best[32];
  double sums[32];
  int ranks[32];
  int found;
};

// Ranks up to `limit`, of which there are at most k, in no particular order, in `found`.
DEVICE void gather(const float* values, int vocab, u64 limit, int k, u64* found, int& count) {
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
    const u64 rank = make_rank(falling(values[id]), id);
    if (rank > limit) continue;
    const int slot = atomicAdd(&count, 1);
    if (slot < k) found[slot] = rank;
  }
  __syncthreads();
}

// Request i asks for tokens[i] at logits[logit_rows[i]].
//   logits: float [*, vocab]; logit_rows, tokens: int [requests]; k <= vocab
//   logprobs: float [requests]; ranks: int [requests], 1 is the most likely
//   top_ids: int [requests, k], most likely first; top_logprobs: float [requests, k]
extern "C" __global__ void __launch_bounds__(512)
logprobs_v0(const float* logits, const int* logit_rows, const int* tokens, float* logprobs, int* ranks, int* top_ids,
            float* top_logprobs, int vocab, int k) {
  extern __shared__ u64 found[];
  __shared__ Scratch scratch;
  const size_t request = blockIdx.x;
  const float* values = logits + static_cast<size_t>(logit_rows[request]) * vocab;
  const int token = tokens[request];
  bool unusable;
  const Best best = most_likely(values, vocab, scratch.best, unusable);
  const u64 own = make_rank(falling(values[token]), token);
  double sum = 0.0;
  int before = 0;
  for (int id = threadIdx.x; id < vocab; id += blockDim.x) {
    sum += expf(values[id] - best.value);
    before += make_rank(falling(values[id]), id) < own;
  }
  const double normalizer = best.value + log(block_sum(sum, scratch.sums));
  before = block_sum(before, scratch.ranks);
  if (threadIdx.x == 0) {
    logprobs[request] = static_cast<float>(values[token] - normalizer);
    ranks[request] = before + 1;
  }
  if (k == 0) return;
  const u64 limit = select(
      values, vocab, ~0ull >> 8, scratch.histogram, [](int id, float value) { return make_rank(falling(value), id); },
      [](float) { return 1ull; }, [&](u64) { return static_cast<u64>(k); });
  gather(values, vocab, limit, k, found, scratch.found);
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    int place = 0;
    for (int j = 0; j < k; ++j) place += found[j] < found[i];
    top_ids[request * k + place] = rank_id(found[i]);
    top_logprobs[request * k + place] = static_cast<float>(values[rank_id(found[i])] - normalizer);
  }
}
