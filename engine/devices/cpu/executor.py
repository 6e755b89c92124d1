"""CpuExecutor: runs steps in the calling thread and its team. The worker process owns one; tests drive it directly.

    forward(plan)   apply the plan's differences, run the body over its tokens
    sample(batch)   per tile of HEAD_ROWS rows: head, sampler, log-probabilities

A plan that is wrong raises ValueError before anything is computed, and later plans work.
Read next: `engine/devices/cpu/model.py`, `engine/devices/cpu/worker.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.kernels import teamwork
from engine.devices.cpu.kernels.entries import ENTRIES
from engine.devices.cpu.layout import HEAD_ROWS, padded
from engine.devices.cpu.model import CpuModel, ModelShape, record
from engine.devices.cpu.products import packed_product
from engine.devices.cpu.program import tokens_per_unit
from engine.devices.cpu.rows import Rows
from engine.devices.cpu.sampling.params import PARAMS
from engine.devices.cpu.sampling.rules import gather_rules
from engine.devices.cpu.sampling.sampler import sample_rows, token_logprobs
from engine.devices.cpu.team import Team
from engine.devices.cpu.weights import Weights
from engine.kv.groups import kv_groups
from engine.plan import (
    GREEDY_ROW,
    NO_TARGET,
    PLACEHOLDER,
    BlockUpdate,
    BoolArray,
    Float32Array,
    Int32Array,
    SampleBatch,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from loader.weights import WeightSource

LogitsHook = Callable[[Int32Array, Float32Array], None]


def compile_kernels(codes: Iterable[int] = ENTRIES) -> None:
    """Compile what the given ops and every model need, or load it from the cache; functions are called in vain."""
    for code in codes:
        _ = ENTRIES[code].address
    none, empty = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
    ids, floats = none.astype(np.int32), none.astype(np.float32)
    board = np.zeros(teamwork.board_words(1, 0), np.int64)
    teamwork.begin(board.ctypes.data, 0, 0, 0, 0, 1)
    teamwork.lead(board.ctypes.data, 1)
    teamwork.follow(board.ctypes.data, 0, 1)
    params, scratch = np.zeros(0, PARAMS), np.zeros((1, 3, 0))
    sample_rows(empty, 0, params, gather_rules((), (), None), ids, ids.astype(np.bool_), scratch, 0, 1)
    token_logprobs(empty, 0, none, ids, 0, floats, ids, ids.reshape(0, 0), empty, 0, 1)


class CpuExecutor:
    """One model on one team of threads.

    Attributes:
        on_logits: called per tile with the plan's token indices and their logits [rows, vocab]
            before sampling may see them; tests read, and poison, them here.
    """

    def __init__(
        self, shape: ModelShape, source: WeightSource, advance: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        vocab = shape.decoder.vocab_size
        groups = len(kv_groups(shape.decoder.layer_windows))
        self.shape = shape
        self.on_logits: LogitsHook | None = None
        self._rows = Rows(shape.max_num_seqs, groups, shape.blocks_per_row, shape.num_blocks, vocab)
        with ThreadPoolExecutor(shape.threads) as pool:
            codes = {op.code for op in record(shape).recorder.ops}
            compiled = pool.submit(compile_kernels, codes)  # mostly imports, while weights are read and packed
            weights = Weights(source, packed_product(shape.dtype, shape.weights_int8), shape.threads, pool, advance)
            self.model = CpuModel(shape, weights, self._rows)
            compiled.result()
        self._team = Team(shape.threads, max(len(self.model.body), len(self.model.head)))
        self._scratch = np.empty((shape.threads, 3, padded(vocab)), np.float64)
        self._items_per_unit = tokens_per_unit(shape.decoder)
        self._plan: StepPlan | None = None
        self._seconds = 0.0

    def close(self) -> None:
        self._team.close()

    def warm_up(self) -> None:
        """Run a step of one token: loading compiled code takes 0.15 s, which no request should pay for.

        What it leaves in row 0 and block 0 is written again before anybody reads it.
        """
        one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        state = replace(GREEDY_ROW, num_logprobs=0)
        self.forward(StepPlan(0, zero, zero, one, zero, None, (state,), (BlockUpdate(0, 0, 0, (0,)),), ()))
        self.sample(SampleBatch(0, zero, zero))

    def forward(self, plan: StepPlan) -> None:
        """Compute the plan's tokens: keys and values into the pages, hidden states into the workspace."""
        began = time.perf_counter()
        self._plan = None
        for state in plan.row_states:
            self._rows.initialise(state)
        for update in plan.block_updates:
            self._rows.update_blocks(update)
        for copy in plan.block_copies:
            self.model.copy_block(copy)
        self._check(plan)
        tokens = len(plan.token_ids)
        ids = self.model.token_ids[:tokens]
        rows = np.repeat(plan.rows, plan.num_tokens)
        np.copyto(ids, plan.token_ids)
        np.copyto(ids, self._rows.last_ids[rows], where=plan.token_ids == PLACEHOLDER)
        firsts = np.cumsum(plan.num_tokens) - plan.num_tokens
        self.model.token_rows[:tokens] = rows
        self.model.positions[:tokens] = np.arange(tokens) + np.repeat(plan.starts - firsts, plan.num_tokens)
        self._team.replay(self.model.body, tokens, self._make_items(plan, firsts))
        self._plan = plan
        self._seconds = time.perf_counter() - began

    def sample(self, batch: SampleBatch) -> StepResult:
        """Sample for the plan of the last `forward`, and compute every log-probability that it asks for."""
        began = time.perf_counter()
        plan = self._plan
        if plan is None or plan.step != batch.step:
            raise ValueError(f"step {batch.step}: sample without its forward")
        entries = batch.entries
        lasts = (np.cumsum(plan.num_tokens) - 1)[entries]
        positions = (plan.starts + plan.num_tokens)[entries]
        targets = np.full(len(plan.token_ids), NO_TARGET) if plan.prompt_targets is None else plan.prompt_targets
        prompt = np.flatnonzero(targets != NO_TARGET)
        ids, faulted = np.zeros(len(entries), np.int32), np.zeros(len(entries), np.bool_)
        sampled_logprobs = _LogprobTable(self._rows.num_logprobs[batch.rows])
        prompt_logprobs = _LogprobTable(self._prompt_counts(plan)[prompt])
        for tile in _tiles(len(entries)):
            logits = self._logits(lasts[tile])
            masks = None if batch.masks is None else batch.masks[tile]
            self._sample_tile(batch.rows[tile], positions[tile], masks, logits, ids[tile], faulted[tile])
            sampled_logprobs.fill(self._team, tile, logits, self.shape.decoder.vocab_size, ids[tile])
        for tile in _tiles(len(prompt)):
            logits = self._logits(prompt[tile])
            prompt_logprobs.fill(self._team, tile, logits, self.shape.decoder.vocab_size, targets[prompt[tile]])
        self._rows.append(batch.rows, ids)
        seconds = self._seconds + time.perf_counter() - began
        return StepResult(plan.step, ids, faulted, sampled_logprobs.result(), prompt_logprobs.result(), seconds)

    def _check(self, plan: StepPlan) -> None:
        """What the kernels rely on; they don't check bounds."""
        limit, ids = self.shape.max_num_batched_tokens, plan.token_ids
        tokens = int(plan.num_tokens.sum())
        if tokens != len(ids) or tokens > limit:
            raise ValueError(f"step {plan.step}: num_tokens add up to {tokens}, {len(ids)} ids, at most {limit}")
        if ids.size and not (ids.min() >= PLACEHOLDER and ids.max() < self.shape.decoder.vocab_size):
            raise ValueError(f"step {plan.step}: token ids {ids.min()} to {ids.max()} are outside the vocabulary")
        if np.any(plan.starts < 0) or np.any(plan.starts + plan.num_tokens > self.shape.max_model_len):
            raise ValueError(f"step {plan.step}: a row goes beyond max_model_len {self.shape.max_model_len}")

    def _make_items(self, plan: StepPlan, firsts: Int32Array) -> int:
        """Cut the entries into attention items of a few tokens; their number."""
        unit = self._items_per_unit
        counts = -(-plan.num_tokens // unit)
        total = int(counts.sum())
        within = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)) * unit
        items = self.model.items[:total]
        items[:, 0] = np.repeat(firsts, counts) + within
        items[:, 1] = np.minimum(np.repeat(plan.num_tokens, counts) - within, unit)
        items[:, 2] = np.repeat(plan.rows, counts)
        items[:, 3] = np.repeat(plan.starts, counts) + within
        return total

    def _logits(self, tokens: NDArray[Any]) -> Float32Array:
        """Logits after the plan's tokens at these indices: [rows <= HEAD_ROWS, padded vocab], valid until the next."""
        self.model.selected[: len(tokens)] = tokens
        self._team.replay(self.model.head, len(tokens), 0)
        logits = self.model.logits[: len(tokens)]
        if self.on_logits is not None:
            self.on_logits(np.asarray(tokens, np.int32), logits[:, : self.shape.decoder.vocab_size])
        return logits

    def _sample_tile(
        self,
        rows: Int32Array,
        positions: Int32Array,
        masks: NDArray[np.uint32] | None,
        logits: Float32Array,
        ids: Int32Array,
        faulted: BoolArray,
    ) -> None:
        params = self._rows.params[rows]
        params["position"] = positions
        rules = self._rows.rules(rows, positions, masks)
        vocab = self.shape.decoder.vocab_size
        self._team.run(len(ids), sample_rows, logits, vocab, params, rules, ids, faulted, self._scratch)

    def _prompt_counts(self, plan: StepPlan) -> Int32Array:
        return np.repeat(self._rows.num_prompt_logprobs[plan.rows], plan.num_tokens)


class _LogprobTable:
    """Log-probabilities of a step, filled tile by tile.

    Its width is the largest count any row asks for; rows that ask for none cost nothing and hold zeros.
    """

    def __init__(self, counts: Int32Array) -> None:
        self._wanted = counts >= 0
        self._width = max(0, int(counts.max(initial=-1)))
        size = len(counts)
        self._table = TokenLogprobs(
            np.zeros(size, np.float32),
            np.zeros(size, np.int32),
            np.zeros((size, self._width), np.int32),
            np.zeros((size, self._width), np.float32),
        )

    def fill(self, team: Team, tile: slice, logits: Float32Array, vocab: int, ids: NDArray[Any]) -> None:
        """Rows `tile` of the table from the same rows of `logits`, for the tokens `ids`."""
        rows = np.flatnonzero(self._wanted[tile])
        if not rows.size:
            return
        table = self._table
        out = [a[tile] for a in (table.logprobs, table.ranks, table.top_ids, table.top_logprobs)]
        width = min(self._width, vocab)
        team.run(len(rows), token_logprobs, logits, vocab, rows, ids, width, *out)

    def result(self) -> TokenLogprobs | None:
        return self._table if self._wanted.any() else None


def _tiles(count: int) -> Iterator[slice]:
    return (slice(first, min(first + HEAD_ROWS, count)) for first in range(0, count, HEAD_ROWS))
