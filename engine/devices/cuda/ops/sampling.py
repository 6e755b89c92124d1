"""Launches of cuda_src/sampling: a step's inputs, tokens from logits, log-probabilities.

    RowState --pack_row--> record of ROW_PARAMS + ints of rules --> SamplingState on the GPU --> sample

The state of a row is written when the row is taken. From then on the kernels keep it: `sample` stores the id
as the row's last and, where rules depend on it, in the row's history. Every function gives bits that depend on the row
and its logits only. Read next: `cuda_src/sampling/v0_sample.cu`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cuda.registry import KernelRegistry, Variant
from engine.plan import RowState

_SAMPLE, _LOGPROBS, _INPUTS = "sampling/v0_sample.cu", "sampling/v0_logprobs.cu", "sampling/v0_inputs.cu"

NO_HISTORY = -1

ROW_PARAMS = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
        *((f"{name}_penalty", np.float64) for name in ("presence", "frequency", "repetition")),
        ("seed", np.uint64),
        *((name, np.int32) for name in ("choice", "top_k", "min_position", "history", "rules")),
        *((name, np.int32) for name in ("num_banned", "num_bias", "num_allowed", "words_length", "unused")),
    ]
)
"""RowParams of cuda_src/sampling/row.cuh. The caller fills in `history`, the row's index into counts and history or
NO_HISTORY, and `rules`, where its part of the rules begins."""

MAX_VOCAB = 1 << 24
"""Bits of an id in the order of tokens."""

_NULL = np.uint64(0)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Rows' state on the GPU.

    Attributes:
        params: [max_num_seqs] records of ROW_PARAMS, an array of any dtype.
        rules: i32, the rows' parts, as `pack_row` makes them.
        counts: u32 or i32 [histories, vocab], how often each id is in the output; bit 31: the prompt has it.
        history: i32 [histories, max_model_len], the tokens so far.
        last_ids: i32 [max_num_seqs], the ids sampled last.
        vocab: at most MAX_VOCAB.
    """

    params: Any
    rules: Any
    counts: Any
    history: Any
    last_ids: Any
    vocab: int
    max_model_len: int


def pack_row(state: RowState, vocab: int) -> tuple[NDArray[np.void], NDArray[np.int32]]:
    """The row's record, [1], and its part of the rules, in the layout of cuda_src/sampling/rules.cuh.

    A row that needs history must be given one (`state.needs_history`, `start_history`).
    """
    banned = _unique(state.banned_ids, vocab)
    allowed = _unique(state.allowed_ids, vocab)
    bias = {i: value for i, value in state.logit_bias if i < vocab}
    words = [word for word in state.bad_words if word and max(word) < vocab]
    lists = (
        banned,
        list(bias),
        np.array(list(bias.values()), np.float32).view(np.int32).tolist(),
        allowed,
        [value for word in words for value in (len(word), *word)],
    )
    record = np.zeros(1, ROW_PARAMS)
    for name in ("temperature", "top_p", "min_p", "seed", "choice", "top_k", "min_position"):
        record[name] = getattr(state, name)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        record[name] = getattr(state, name)
    record["history"] = NO_HISTORY
    sizes = [len(values) for values in lists]
    record["num_banned"], record["num_bias"], _, record["num_allowed"], record["words_length"] = sizes
    return record, np.array([value for values in lists for value in values], np.int32)


def prepare_inputs(
    registry: KernelRegistry,
    *,
    plan_ids: Any,
    starts: Any,
    query_start_loc: Any,
    entry_rows: Any,
    last_ids: Any,
    ids: Any,
    token_rows: Any,
    positions: Any,
    seq_lens: Any,
    entries: int,
    padded: int,
    stream: Any,
) -> None:
    """Fill ids, token_rows, positions [padded] and seq_lens [entries] from a plan; all i32.

    A plan's id below 0 becomes the row's last one. Tokens beyond the plan, up to `padded`, belong to row -1.
    """
    if padded:
        arrays = (plan_ids, query_start_loc, starts, entry_rows, last_ids, ids, token_rows, positions, seq_lens)
        kernel = registry.get(_INPUTS, "prepare_inputs_v0")
        kernel((-(-padded // 256),), (256,), (*arrays, np.int32(entries), np.int32(padded)), stream=stream)


def scatter(
    registry: KernelRegistry, target: Any, indices: Any, values: Any, items: int, width: int, *, stream: Any
) -> None:
    """target[indices[i]] = values[i] for items of `width` 32-bit words; indices i32 [items], none twice."""
    if items:
        kernel = registry.get(_INPUTS, "scatter_v0")
        args = (target, indices, values, np.int32(items), np.int32(width))
        kernel((-(-items * width // 256),), (256,), args, stream=stream)


def start_history(
    registry: KernelRegistry, state: SamplingState, slot: int, tokens: Any, length: int, prompt_len: int, *, stream: Any
) -> None:
    """Fill history `slot` with tokens i32 [length], the first `prompt_len` the prompt's; its counts are zero before."""
    if length:
        sizes = map(np.int32, (slot, length, prompt_len, state.vocab, state.max_model_len))
        kernel = registry.get(_SAMPLE, "start_history_v0")
        kernel((-(-length // 256),), (256,), (tokens, state.counts, state.history, *sizes), stream=stream)


def sample(
    registry: KernelRegistry,
    state: SamplingState,
    *,
    logits: Any,
    logit_rows: Any,
    rows: Any,
    positions: Any,
    masks: Any,
    changed: Any,
    token_ids: Any,
    faulted: Any,
    samples: int,
    stream: Any,
) -> None:
    """Sample i takes a token for rows[i] at positions[i] of its sequence from logits[logit_rows[i]].

    Args:
        logits: f32 [*, vocab], unchanged.
        logit_rows, rows, positions: i32 [samples]; no row twice.
        masks: u32 [samples, ceil(vocab / 32)] of allowed ids, or None.
        changed: f32 [samples, vocab], scratch.
        token_ids: i32 [samples], out; 0 where faulted.
        faulted: i32 [samples], out; 1 where the logits held no usable value.
    """
    if samples == 0:
        return
    places = (logits, logit_rows, rows, positions, state.params, state.rules, state.counts, state.history)
    out = (_NULL if masks is None else masks, changed, token_ids, faulted, state.last_ids)
    args = (*places, *out, np.int32(state.vocab), np.int32(state.max_model_len))
    registry.get(_SAMPLE, "sample_v0")((samples,), (512,), args, stream=stream)


def logprobs(
    registry: KernelRegistry,
    *,
    logits: Any,
    logit_rows: Any,
    tokens: Any,
    out: tuple[Any, Any, Any, Any],
    requests: int,
    k: int,
    vocab: int,
    stream: Any,
) -> None:
    """Log-softmax of tokens[i] at logits[logit_rows[i]], and the k <= vocab most likely there.

    Args:
        logits: f32 [*, vocab].
        logit_rows, tokens: i32 [requests].
        out: logprobs f32 [requests], ranks i32 [requests], top ids i32 [requests, k], their logprobs f32 [requests, k].
    """
    if requests:
        kernel = registry.get(_LOGPROBS, "logprobs_v0")
        args = (logits, logit_rows, tokens, *out, np.int32(vocab), np.int32(k))
        kernel((requests,), (512,), args, shared_mem=8 * max(k, 1), stream=stream)


def variants() -> Iterator[Variant]:
    """All of the family."""
    yield from map(Variant, (_SAMPLE, _LOGPROBS, _INPUTS))


def _unique(ids: tuple[int, ...], vocab: int) -> list[int]:
    return [i for i in dict.fromkeys(ids) if i < vocab]
