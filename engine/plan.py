"""What crosses the boundary between the loop and a device: frozen values, no behaviour.

A step is two calls, `Device.forward(StepPlan)` and `Device.sample(SampleBatch)`; the
ticket of the second resolves to a `StepResult`. Rows are stable indices into the
device's per-row state, which receives only differences (`RowState`, `BlockUpdate`).
Read next: `engine/devices/protocol.py` (who executes it), `engine/schedule/scheduler.py` (who decides it).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

PLACEHOLDER = -1
"""Token id that stands for "the id sampled last for this row", not yet seen by the host."""

NO_TARGET = -1
"""Entry of `StepPlan.prompt_targets` at a position whose prompt logprob nobody asked for."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Everything a device must know to sample for a row; sent once, when the row is taken.

    Order of what changes the logits: allowed ids and bans, bias, penalties, then temperature and the
    filters. Reported logprobs are of the raw logits.

    Attributes:
        row: stable index, 0 <= row < max_num_seqs.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        seed: 64-bit key of the row's random stream.
        choice: index among the choices of one request, second key of the stream.
        banned_ids: ids that may not be sampled at a position below `min_position`.
        min_position: first sequence position at which `banned_ids` may be sampled.
        presence_penalty: subtracted from the logit of every id in the output.
        frequency_penalty: subtracted once for each time the id is in the output.
        repetition_penalty: positive logits of ids in prompt or output are divided by it, negative
            ones multiplied; 1 is off.
        logit_bias: (id, value) pairs added to the logits.
        allowed_ids: the only ids that may be sampled; empty is all.
        bad_words: id sequences; the last id of one may not follow the ids before it.
        token_ids: the row's tokens so far, prompt first, when `needs_history`; else empty.
        prompt_len: how many of them are the prompt's.
        num_logprobs: top alternatives to report per sampled token; -1 reports nothing,
            0 only the sampled token.
        num_prompt_logprobs: the same for prompt tokens.
    """

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    banned_ids: tuple[int, ...]
    min_position: int
    num_logprobs: int
    num_prompt_logprobs: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_len: int = 0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on which tokens came before."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.bad_words)


GREEDY_ROW = RowState(
    row=0,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    choice=0,
    banned_ids=(),
    min_position=0,
    num_logprobs=-1,
    num_prompt_logprobs=-1,
)
"""A row that takes the most likely id and reports nothing."""


class BlockUpdate(NamedTuple):
    """Entries `[first, first + len(blocks))` of a row's block table in one KV group."""

    group: int
    row: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the pages of block `source` to block `target`, in every layer of the group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration's work: a ragged batch over stable rows.

    Attributes:
        step: increasing step number.
        rows: [n] stable row of each entry, each at most once.
        starts: [n] position of the entry's first token (tokens computed before).
        num_tokens: [n] tokens to compute, each >= 1.
        token_ids: [sum(num_tokens)] input ids; `PLACEHOLDER` takes the row's last sampled id.
        prompt_targets: [sum(num_tokens)] id whose logprob is wanted at that position
            (the prompt's next token) or `NO_TARGET`; None when no row asks.
        row_states: rows to (re)initialise before the step.
        block_updates: block table differences to apply before the step.
        block_copies: copies to make before the step, in this order.
    """

    step: int
    rows: Int32Array
    starts: Int32Array
    num_tokens: Int32Array
    token_ids: Int32Array
    prompt_targets: Int32Array | None
    row_states: tuple[RowState, ...]
    block_updates: tuple[BlockUpdate, ...]
    block_copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Which entries of the step's plan sample a token from their last position, and for whom.

    The choices of a request sample their first token from one entry's logits: its index is there
    once for each, and `rows` tells them apart.

    Attributes:
        step: the plan's step number.
        entries: [m] indices into `StepPlan.rows`, ascending; may be empty.
        rows: [m] stable row whose parameters apply and whose last sampled id it becomes.
        masks: [m, ceil(vocab / 32)] uint32, bit i % 32 of word i / 32 allows id i; None allows all.
    """

    step: int
    entries: Int32Array
    rows: Int32Array
    masks: NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of the raw logits (before temperature and filters) at `m` positions.

    Attributes:
        logprobs: [m] float32, of the token in question.
        ranks: [m] int32, 1 is the most likely.
        top_ids: [m, k] int32, most likely first; ties by lower id.
        top_logprobs: [m, k] float32.
    """

    logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host learns when a step has run.

    Attributes:
        step: the plan's step number.
        token_ids: [m] sampled ids, in the order of `SampleBatch.entries`.
        faulted: [m] True where the logits held no usable value (NaN or +inf anywhere, or
            all -inf); the id is meaningless there.
        logprobs: of the sampled ids, [m]; None when no sampling row asks for any.
        prompt_logprobs: for each position with a target, in plan order; None when there is none.
        device_seconds: time the device spent on the step.
    """

    step: int
    token_ids: Int32Array
    faulted: BoolArray
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    device_seconds: float
