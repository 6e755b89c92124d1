"""Logits to a token, for rows with parameters of their own; and log-probabilities of tokens.

Rules change the logits first (`rules.py`). Filters apply in vLLM's order, each to what the one before left, over
softmax(logits / temperature): min-p, then top-k, then top-p.
"More likely" is a total order: larger logit first, then lower id.
The choice is Gumbel-max: argmax of logit / temperature + noise, with noise from `philox.py` computed in float64, so
the noise of a token is the same whatever was filtered.
Logits must be finite or -inf; a row with NaN, +inf or nothing but -inf is reported as faulted.
"""

# mypy: disable-error-code="no-untyped-def,misc"

import math

import numpy as np

from engine.devices.cpu.kernels.jit import inner, kernel
from engine.devices.cpu.sampling.philox import philox4x32

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: they would overflow float32, and leave no chance to any other token."""

MASS_TOLERANCE = 1e-6
"""A mass this near to top_p has reached it: float32 logits don't resolve probabilities any finer."""

_LN2 = math.log(2.0)
_INFINITY, _MINUS_INFINITY = np.int32(0x7F800000), np.int32(-0x7F800001)
"""As `_in_order` gives them; NaNs are beyond."""
_INFINITY, _MINUS_INFINITY = np.int32(0x7F800000), np.int32(-0x7F800001)
"""As `_in_order` gives them: NaNs are beyond."""
_LARGEST_NOISE = 23.0
"""No Gumbel noise is larger: the largest word makes 22.9."""


@kernel
def sample_rows(logits, vocab, params, rules, ids, faulted, scratch, thread, threads):
    """Sample rows thread, thread + threads, ... of a tile.

    Args:
        logits: [rows, >= vocab] float32, unchanged.
        params: [rows] records of PARAMS.
        rules: Rules of the rows.
        ids: [rows] int32, out.
        faulted: [rows] bool, out; the id is 0 where set.
        scratch: [threads, 3, >= vocab] float64.
    """
    for row in range(thread, len(ids), threads):
        values = logits[row, :vocab]
        token = -1
        if _maximum(values) > -np.inf:
            values = apply_rules(values, rules, row, params[row], scratch[thread, 2].view(np.float32)[:vocab])
            token = _sample(values, params[row], scratch[thread, 0], scratch[thread, 1])
        ids[row] = max(token, 0)
        faulted[row] = token < 0


@inner
def apply_rules(values, rules, row, params, changed):
    """`values` if the row has no rules, else a copy in `changed` with them applied, in RowState's order."""
    banned = rules.banned_starts[row : row + 2]
    allowed = rules.allowed_starts[row : row + 2]
    bias = rules.bias_starts[row : row + 2]
    seen = rules.seen_starts[row : row + 2]
    count = banned[1] - banned[0] + allowed[1] - allowed[0] + bias[1] - bias[0] + seen[1] - seen[0]
    if count == 0 and len(rules.masks) == 0:
        return values
    changed[:] = values
    if allowed[0] < allowed[1]:
        changed[:] = -np.inf
        for token in rules.allowed_ids[allowed[0] : allowed[1]]:
            changed[token] = values[token]
    if len(rules.masks) > 0:
        _mask(changed, rules.masks[row])
    for token in rules.banned_ids[banned[0] : banned[1]]:
        changed[token] = -np.inf
    for i in range(bias[0], bias[1]):
        changed[rules.bias_ids[i]] += rules.bias_values[i]
    for i in range(seen[0], seen[1]):
        _penalize(changed, rules.seen_ids[i], rules.seen_counts[i], params)
    return changed


@inner
def _mask(values, mask):
    """Most words of a mask are all ones or all zeros."""
    for word in range((len(values) + 31) // 32):
        bits = mask[word]
        if bits == np.uint32(0xFFFFFFFF):
            continue
        for token in range(32 * word, min(32 * word + 32, len(values))):
            if not (bits >> np.uint32(token & 31)) & np.uint32(1):
                values[token] = -np.inf


@inner
def _penalize(values, token, outputs, params):
    """Repetition for any id seen, frequency and presence for those of the output."""
    value = np.float64(values[token])
    value = value / params.repetition_penalty if value > 0.0 else value * params.repetition_penalty
    if outputs > 0:
        value -= outputs * params.frequency_penalty + params.presence_penalty
    values[token] = value


@kernel
def token_logprobs(logits, vocab, rows, tokens, k, logprobs, ranks, top_ids, top_logprobs, thread, threads):
    """Log-softmax of raw logits of `tokens[row]` and the k most likely, at each of `rows`.

    Args:
        logits: [n, >= vocab] float32.
        rows: [m] int64, which of the n rows to do; a thread takes every `threads`-th.
        logprobs, ranks: [n], out; rank 1 is the most likely.
        top_ids, top_logprobs: [n, >= k], out, most likely first.
    """
    for index in range(thread, len(rows), threads):
        i = rows[index]
        values = logits[i, :vocab]
        token = tokens[i]
        top = _maximum(values)
        total, rank = 0.0, 1
        for j in range(vocab):
            total += math.exp(np.float64(values[j]) - np.float64(top))
            if values[j] > values[token] or (values[j] == values[token] and j < token):
                rank += 1
        normalizer = np.float64(top) + math.log(total)
        logprobs[i] = np.float64(values[token]) - normalizer
        ranks[i] = rank
        _top(values, k, top_ids[i])
        for j in range(k):
            top_logprobs[i, j] = np.float64(values[top_ids[i, j]]) - normalizer


@inner
def _top(values, k, ids):
    """The k most likely ids, best first, by insertion: one comparison per token that is not among them."""
    count = 0
    for j in range(len(values)):
        if count == k and (k == 0 or not values[j] > values[ids[k - 1]]):
            continue
        slot = min(count, k - 1)
        while slot > 0 and values[j] > values[ids[slot - 1]]:
            ids[slot] = ids[slot - 1]
            slot -= 1
        ids[slot] = j
        count = min(count + 1, k)


@inner
def _maximum(values):
    """Largest value; NaN when there is a NaN or +inf, so that callers need one test.

    Integers in the order of the floats, since those compile to vectors: 49,152 values take 2 us, as floats 27.
    """
    bits = values.view(np.int32)
    least, largest = _INFINITY, _MINUS_INFINITY
    for i in range(len(bits)):
        key = _in_order(bits[i])
        least, largest = min(least, key), max(largest, key)
    if least < _MINUS_INFINITY or largest >= _INFINITY:
        return np.float32(np.nan)
    return np.int32(_in_order(largest)).view(np.float32)


@inner
def _in_order(bits):
    """A float32's bits as an integer that grows with it; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def _first(values, value):
    """Index of the first that equals `value`, which is among them; 64 at a time, which compiles to vectors."""
    begin, found = -64, False
    while not found:
        begin += 64
        for i in range(begin, min(begin + 64, len(values))):
            found |= values[i] == value
    while values[begin] != value:
        begin += 1
    return begin


@inner
def _sample(values, params, x, work):
    """Sampled id, or -1 for a fault. x, work: [>= vocab] float64 scratch."""
    top = _maximum(values)
    if not top > -np.inf:
        return -1
    if params.temperature < GREEDY_BELOW:
        return _first(values, top)
    scaled = x.view(np.float32)[: len(values)]
    temperature = np.float32(params.temperature)
    for i in range(len(values)):
        scaled[i] = (values[i] - top) / temperature
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _gumbel_argmax_all(scaled, params)
    ids = work.view(np.int32)[: len(values)]
    return _gumbel_argmax(scaled, ids, _filter(scaled, params, ids), params)


@inner
def _filter(scaled, params, ids):
    """Leave in ids[:count] the tokens that pass every filter, in no particular order; count."""
    lowest = math.log(params.min_p) if params.min_p > 0.0 else -np.inf
    count = 0
    for i in range(len(scaled)):
        if scaled[i] > -np.inf and scaled[i] >= lowest:
            ids[count] = i
            count += 1
    if 0 < params.top_k < count:
        count = _prefix(scaled, ids, count, np.float64(params.top_k), True)
    if params.top_p < 1.0:
        total = 0.0
        for i in range(count):
            total += math.exp(np.float64(scaled[ids[i]]))
        count = _prefix(scaled, ids, count, (params.top_p - MASS_TOLERANCE) * total, False)
    return count


@inner
def _before(scaled, a, b):
    return scaled[a] > scaled[b] or (scaled[a] == scaled[b] and a < b)


@inner
def _prefix(scaled, ids, count, target, unit):
    """Length of the shortest prefix of ids[:count], most likely first, whose weights sum to at least `target`.

    Quickselect by weight, O(count) expected: ids[:length] is that prefix afterwards, unordered.
    Weights are 1 if `unit`, else exp(scaled).
    """
    low, high, reached = 0, count, 0.0
    while high - low > 1:
        middle, end = (low + high) // 2, high - 1
        if _before(scaled, ids[middle], ids[low]):
            ids[low], ids[middle] = ids[middle], ids[low]
        if _before(scaled, ids[end], ids[middle]):
            ids[end], ids[middle] = ids[middle], ids[end]
            if _before(scaled, ids[middle], ids[low]):
                ids[low], ids[middle] = ids[middle], ids[low]
        ids[middle], ids[end] = ids[end], ids[middle]
        pivot, split, left = ids[end], low, 0.0
        for i in range(low, end):
            if _before(scaled, ids[i], pivot):
                ids[split], ids[i] = ids[i], ids[split]
                left += 1.0 if unit else math.exp(np.float64(scaled[ids[split]]))
                split += 1
        ids[split], ids[end] = ids[end], ids[split]
        if reached + left >= target:
            high = split
        else:
            left += 1.0 if unit else math.exp(np.float64(scaled[pivot]))
            if reached + left >= target:
                return split + 1
            low, reached = split + 1, reached + left
    return max(high, 1)


@inner
def _words(params, quad):
    """The four random words of tokens 4 * quad ... 4 * quad + 3."""
    low = np.uint32(params.seed & np.uint64(0xFFFFFFFF))
    high = np.uint32(params.seed >> np.uint64(32))
    return philox4x32(np.uint32(quad), np.uint32(params.position), np.uint32(params.choice), np.uint32(0), low, high)


@inner
def gumbel(word):
    """-log(-log(u)), u = 1 - (word + 1/2) / 2**32: fine steps where the noise is large."""
    return -math.log(-math.log1p(-(np.float64(word) + 0.5) * 2.0**-32))


@inner
def _beats(scaled, word, best):
    """scaled + gumbel(word), or -inf without computing it where it can't exceed `best`.

    gumbel(word) < -log((word + 1/2) / 2**32), and the float64's exponent bounds that logarithm: nearly all tokens
    are settled without a logarithm, which is what makes sampling cheap beside the forward pass.
    """
    v = (np.float64(word) + 0.5) * 2.0**-32
    _, exponent = math.frexp(v)
    if scaled + _LN2 * (1 - exponent) < best:
        return -np.inf
    return np.float64(scaled) + gumbel(word)


@inner
def _largest(values):
    top = values[0]
    for i in range(1, len(values)):
        top = max(top, values[i])
    return top


@inner
def _gumbel_argmax_all(scaled, params):
    best, token = -np.inf, -1
    for quad in range((len(scaled) + 3) // 4):
        lanes = scaled[4 * quad : 4 * quad + 4]
        if not _largest(lanes) > best - _LARGEST_NOISE:
            continue
        words = _words(params, quad)
        for lane in range(len(lanes)):
            value = _beats(lanes[lane], words[lane], best)
            if value > best:
                best, token = value, 4 * quad + lane
    return token


@inner
def _gumbel_argmax(scaled, ids, count, params):
    """Ties, of probability 2**-32, go to the lower id whatever the order of ids."""
    best, token = -np.inf, np.int64(-1)
    for i in range(count):
        candidate = ids[i]
        value = _beats(scaled[candidate], _words(params, candidate // 4)[candidate % 4], best)
        if value > best or (value == best and value > -np.inf and candidate < token):
            best, token = value, np.int64(candidate)
    return token
