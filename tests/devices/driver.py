"""Drives a CpuExecutor the way the loop would: sequences on rows, chunks, scattered blocks, logits by position."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.cpu.executor import CpuExecutor
from engine.devices.cpu.model import ModelShape
from engine.plan import GREEDY_ROW as GREEDY
from engine.plan import NO_TARGET, PLACEHOLDER, BlockCopy, BlockUpdate, RowState, SampleBatch, StepPlan, StepResult
from loader.decoder import DecoderConfig, RopeConfig
from loader.weights import WeightSource

TINY = DecoderConfig(
    architecture="LlamaForCausalLM",
    dtype="float32",
    vocab_size=210,
    hidden_size=72,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    qk_norm=False,
    attention_scale=24**-0.5,
    residual_factor=1.0,
    logit_factor=1.0,
    layer_windows=(None, None),
    rotary_layers=(True, True),
    rope=RopeConfig(kind="default", theta=10000.0),
)
"""No width is a multiple of 16, so that every pad and tail is in use."""


class LoudWeights:
    """Random weights large enough for attention to matter, biases and norms random too."""

    def __init__(self, decoder: DecoderConfig, seed: int = 0) -> None:
        from loader.parameters import parameter_table

        self.table, self.seed = parameter_table(decoder), seed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table)

    @property
    def nbytes(self) -> int:
        return sum(4 * int(np.prod(shape)) for shape in self.table.values())

    def tensor(self, name: str) -> NDArray[Any]:
        shape = self.table[name]
        rng = np.random.default_rng([self.seed, *name.encode()])
        scale = 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.5
        values = rng.standard_normal(shape) * scale + name.endswith("norm.weight")
        return values.astype(np.float32)


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


@dataclass
class Row:
    """One sequence: its ids so far, its blocks in every group, and how many tokens are computed."""

    state: RowState
    ids: list[int]
    blocks: list[tuple[int, ...]]
    computed: int = 0
    known: bool = False
    sampled: list[int] = field(default_factory=list)
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@contextmanager
def open_executor(decoder: DecoderConfig, weights: WeightSource, **settings: Any) -> Iterator[CpuExecutor]:
    given: dict[str, Any] = {
        "decoder": decoder,
        "dtype": "float32",
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": decoder.max_position_embeddings,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "threads": 2,
    }
    shape = ModelShape(**given | settings)
    executor = CpuExecutor(shape, weights)
    try:
        executor.model.pool[:] = 0xFF  # a NaN in either dtype
        yield executor
    finally:
        executor.close()


class Driver:
    """Rows of one executor; each `step` runs the given number of tokens of each given row."""

    def __init__(self, executor: Any, seed: int = 0) -> None:
        self.executor, self.step_number = executor, 0
        self.rows: dict[int, Row] = {}
        self.free = np.random.default_rng(seed).permutation(executor.shape.num_blocks).tolist()

    def add(
        self, row: int, ids: Sequence[int] | NDArray[Any], state: RowState = GREEDY, shared: Sequence[int] = ()
    ) -> Row:
        """Put a sequence on a row; `shared` are blocks whose tokens are computed already."""
        shape = self.executor.shape
        groups = len(set(shape.decoder.layer_windows))
        need = -(-(len(ids) + 32) // shape.block_size) - len(shared)
        blocks = [(*shared, *(self.free.pop() for _ in range(need))) for _ in range(groups)]
        added = Row(replace(state, row=row), list(map(int, ids)), blocks, len(shared) * shape.block_size)
        self.rows[row] = added
        return added

    def drop(self, row: int) -> None:
        for blocks in self.rows.pop(row).blocks:
            self.free.extend(blocks)

    def step(
        self, grants: dict[int, int], *, prompt_logprobs: bool = False, copies: tuple[BlockCopy, ...] = ()
    ) -> StepResult:
        """Run `grants[row]` tokens of each row, sampling those that reach the end of their ids."""
        plan, entries = self.plan(grants, prompt_logprobs, copies)
        starts = np.concatenate([[0], np.cumsum(plan.num_tokens)])

        def keep(tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
            for token, values in zip(tokens, logits, strict=True):
                entry = int(np.searchsorted(starts, token, "right")) - 1
                position = int(plan.starts[entry] + token - starts[entry])
                self.rows[int(plan.rows[entry])].logits[position] = values.copy()

        self.executor.on_logits = keep
        self.executor.forward(plan)
        result = self.executor.sample(SampleBatch(plan.step, entries, plan.rows[entries]))
        for entry, token in zip(entries, result.token_ids, strict=True):
            row = self.rows[int(plan.rows[entry])]
            row.sampled.append(int(token))
            row.ids.append(int(token))
        return result

    def plan(
        self, grants: dict[int, int], prompt_logprobs: bool, copies: tuple[BlockCopy, ...]
    ) -> tuple[StepPlan, NDArray[np.int32]]:
        ids: list[int] = []
        targets: list[int] = []
        states: list[RowState] = []
        updates: list[BlockUpdate] = []
        entries, starts = [], []
        for entry, (number, count) in enumerate(grants.items()):
            row = self.rows[number]
            end = row.computed + count
            if not row.known:
                row.known = True
                states.append(row.state)
                updates.extend(BlockUpdate(group, number, 0, blocks) for group, blocks in enumerate(row.blocks))
            known = len(row.ids) - len(row.sampled)
            ids += [row.ids[i] if i < known else PLACEHOLDER for i in range(row.computed, end)]
            targets += [row.ids[i + 1] if i + 1 < known else NO_TARGET for i in range(row.computed, end)]
            starts.append(row.computed)
            row.computed = end
            if end == len(row.ids):
                entries.append(entry)
        self.step_number += 1
        plan = StepPlan(
            step=self.step_number,
            rows=i32(*grants),
            starts=i32(*starts),
            num_tokens=i32(*grants.values()),
            token_ids=i32(*ids),
            prompt_targets=i32(*targets) if prompt_logprobs else None,
            row_states=tuple(states),
            block_copies=copies,
            block_updates=tuple(updates),
        )
        return plan, i32(*entries)

    def run(self, row: int, chunk: int, outputs: int, neighbours: Callable[[], dict[int, int]] = dict) -> Row:
        """Prefill a row in chunks with all prompt logits, then decode until it has `outputs` tokens."""
        sequence = self.rows[row]
        while len(sequence.sampled) < outputs:
            left = len(sequence.ids) - sequence.computed
            self.step({row: min(chunk, left)} | neighbours(), prompt_logprobs=True)
        return sequence
