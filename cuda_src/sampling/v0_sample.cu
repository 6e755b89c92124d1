// Sampling v0: one block per sample makes a token of a row of logits. The rules are those of engine/devices/cpu/sampling/sampler.py.
//
// Rules, then greedy, or: min-p, top-k, top-p, each on what the one before left, over softmax(logits / temperature),
// then the argmax of logit / temperature + Gumbel noise. A logit that is NaN or +inf, or all -inf, is a fault.
// What is read once per token and pass stays in L2; every filter is a threshold on ranks, found by radix select.
//
// Launch: grid samples, block 512.
#include "sampling/philox.cuh"
#include "sampling/rules.cuh"
#include "sampling/select.cuh"

constexpr double kGreedyBelow = 1e-5, kMassTolerance = 1e-6;
constexpr float kMassOne = 0x1p44f;  // fixed point of probabilities: 2^20 of them fit 64 bits

struct Scratch {
  Histogram histogram;
  Best best[32];
  double score[32];
  int id[32];
};

// Distances below the top, over the temperature: the scaled logit, negated.
struct Scale {
  float top, temperature;
  DEVICE float distance(float value) const { return (top - value) / temperature; }
  DEVICE u64 rank(int id, float value) const { return make_rank(__float_as_uint(distance(value)), id); }
};

// The last rank that passes every filter.
DEVICE u64 filter(const float* values, int vocab, const RowParams& row, const Scale& scale, Histogram& histogram) {
  u64 limit = make_rank(0x7f800000u, 0) - 1;  // not -inf
  if (row.min_p > 0.0) {
    const float farthest = -__double2float_ru(log(row.min_p));
    limit = make_rank(__float_as_uint(farthest + 0.0f) + 1, 0) - 1;
  }
  auto rank = [&](int id, float value) { return scale.rank(id, value); };
  if (row.top_k > 0 && row.top_k < vocab)
    limit = select(
        values, vocab, limit, histogram, rank, [](float) { return 1ull; },
        [&](u64) { return static_cast<u64>(row.top_k); });
  if (row.top_p < 1.0)
    limit = select(
        values, vocab, limit, histogram, rank,
        [&](float value) { return __float2ull_rn(expf(-scale.distance(value)) * kMassOne); },
        [&](u64 total) {
          return max(static_cast<u64>(ceil((row.top_p - kMassTolerance) * static_cast<double>(total))), 1ull);
        });
  return limit;
}

// The token with the highest noisy logit among ranks up to `limit`, in thread 0.
DEVICE int gumbel_argmax(const float* values, int vocab, const RowParams& row, const Scale& scale, u64 limit,
                         int position, Scratch& scratch) {
  double best = -INFINITE;
  float reached = -INFINITE;  // best, to within what gumbel_bound leaves
  int token = vocab;
  for (int quad = threadIdx.x; quad < (vocab + 3) / 4; quad += blockDim.x) {
    const Quad x = load_quad(values, quad, vocab);
    const Words words = philox(row.seed, quad, position, row.choice);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = -scale.distance(x.v[i]);
      if (scale.rank(quad * 4 + i, x.v[i]) > limit || scaled + gumbel_bound(words.v[i]) < reached) continue;
      const double score = scaled + gumbel(words.v[i]);
      if (score > best) best = score, reached = static_cast<float>(score), token = quad * 4 + i;
    }
  }
  auto merge = [&](double score, int id) {
    if (score > best || (score == best && id < token)) best = score, token = id;
  };
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    merge(__shfl_xor_sync(0xffffffffu, best, step), __shfl_xor_sync(0xffffffffu, token, step));
  if ((threadIdx.x & 31) == 0) {
    scratch.score[threadIdx.x >> 5] = best;
    scratch.id[threadIdx.x >> 5] = token;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < blockDim.x >> 5; ++warp) merge(scratch.score[warp], scratch.id[warp]);
  return token;
}

// The sampled id in thread 0; -1 is a fault.
DEVICE int sample(const float* logits, float* changed, int vocab, const RowParams& row, const RuleArrays& arrays,
                  const u32* mask, int position, Scratch& scratch) {
  bool unusable;
  Best best = most_likely(logits, vocab, scratch.best, unusable);
  if (unusable || best.value == -INFINITE) return -1;
  const float* values = logits;
  if (row.num_banned + row.num_bias + row.num_allowed + row.words_length > 0 || row.history >= 0 || mask != nullptr) {
    apply_rules(logits, changed, vocab, row, arrays, mask, position);
    values = changed;
    best = most_likely(values, vocab, scratch.best, unusable);
    if (unusable || best.value == -INFINITE) return -1;
  }
  if (row.temperature < kGreedyBelow) return best.id;
  const Scale scale = {best.value, static_cast<float>(row.temperature)};
  const u64 limit = filter(values, vocab, row, scale, scratch.histogram);
  return gumbel_argmax(values, vocab, row, scale, limit, position, scratch);
}

// Sample i takes a token from logits[logit_rows[i]] for the row rows[i] at positions[i] of its sequence.
//   logits: float [*, vocab]; logit_rows, rows, positions: int [samples]; params: [rows]
//   rules, counts, history, masks: as in rules.cuh; changed: float [samples, vocab], scratch
//   token_ids: int [samples], 0 where faulted: int [samples], 0 or 1; last_ids: int [rows]
extern "C" __global__ void __launch_bounds__(512)
sample_v0(const float* logits, const int* logit_rows, const int* rows, const int* positions, const RowParams* params,
          const int* rules, u32* counts, int* history, const u32* masks, float* changed, int* token_ids, int* faulted,
          int* last_ids, int vocab, int max_model_len) {
  __shared__ Scratch scratch;
  const int i = blockIdx.x, position = positions[i], index = rows[i];
  const RowParams row = params[index];
  const RuleArrays arrays = {rules, counts, history, masks, max_model_len};
  const u32* mask = masks == nullptr ? nullptr : masks + static_cast<size_t>(i) * ((vocab + 31) / 32);
  const int token = sample(logits + static_cast<size_t>(logit_rows[i]) * vocab, changed + static_cast<size_t>(i) * vocab,
                           vocab, row, arrays, mask, position, scratch);
  if (threadIdx.x != 0) return;
  const int id = max(token, 0);
  token_ids[i] = last_ids[index] = id;
  faulted[i] = token < 0;
  if (row.history < 0) return;
  counts[static_cast<size_t>(row.history) * vocab + id] += 1;
  if (position < max_model_len) history[static_cast<size_t>(row.history) * max_model_len + position] = id;
}

// A row's tokens so far: into history[slot], and counted in counts[slot], which was zeroed before.
//   tokens: int [length], the prompt's first. Launch: grid ceil(length / 256), block 256.
extern "C" __global__ void __launch_bounds__(256)
start_history_v0(const int* tokens, u32* counts, int* history, int slot, int length, int prompt_length, int vocab,
                 int max_model_len) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= length) return;
  const int token = tokens[i];
  history[static_cast<size_t>(slot) * max_model_len + i] = token;
  u32* count = counts + static_cast<size_t>(slot) * vocab + token;
  if (i < prompt_length)
    atomicOr(count, 0x80000000u);
  else
    atomicAdd(count, 1u);
}
