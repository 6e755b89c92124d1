"""A device without a model: its next token is a hash of the context *as read through the block table*.

Pages hold token ids instead of keys and values, so that any mistake with blocks (stale contents, a
block reused too early, a wrong table entry, a false prefix hit) changes the output. `expected` is the
same function over a plain list. Steps run when their ticket is asked for, as late as possible. A step
that writes to a block which a step in flight uses for another request is refused at its launch: whether
the device would have run them in order or not, the host has freed something too early.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.devices.protocol import DeviceInfo
from engine.errors import EngineError
from engine.kv.groups import KVGroup
from engine.plan import PLACEHOLDER, SampleBatch, StepPlan, StepResult, TokenLogprobs

POISON = -7
VOCAB = 1000
FAULT = VOCAB - 1
"""A sampled id that the device reports as "no usable logits"."""
ONE_GROUP = (KVGroup(None, (0,)),)

NextToken = Callable[[Sequence[int]], int]


def hashed(context: Sequence[int]) -> int:
    """A token that depends on every token of the context and on its place."""
    value = 17
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % (VOCAB - 1)


def ranked(context: Sequence[int]) -> list[tuple[int, float]]:
    """Eight next tokens with their logprobs, most likely first; the first is `hashed`'s. Sums hardly ever tie."""
    first = hashed(context)
    best, spread = -0.2 - first / 7919, 0.3 + first / 3001
    return [((first + 13 * j) % (VOCAB - 1), best - spread * j) for j in range(8)]


def expected(prompt: Sequence[int], num_tokens: int, choice: int = 0) -> list[int]:
    """The output a correct engine gives for `prompt`; the choices of a request differ."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append((hashed(context) + choice) % (VOCAB - 1))
    return context[len(prompt) :]


class FakeTicket:
    """Resolves when asked, or, with a gate, when the test opens it."""

    def __init__(self, device: "FakeDevice", step: int) -> None:
        self.step = step
        self._device = device

    def done(self) -> bool:
        return not self._device.gated or self.step <= self._device.opened

    async def result(self) -> StepResult:
        while not self.done():
            self._device.gate.clear()
            await self._device.gate.wait()
        return self._device.run_until(self.step)


class FakeDevice:
    """Implements `engine.devices.protocol.Device`; `log` records launches and results in order."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        next_token: NextToken = hashed,
        gated: bool = False,
        groups: Sequence[KVGroup] = ONE_GROUP,
    ) -> None:
        self.info = DeviceInfo(kind="fake", name="hash of the context", dtype="int32")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.groups = groups
        self.pages = np.full((len(groups), num_blocks, block_size), POISON, np.int64)
        self.tables = np.full((len(groups), max_num_seqs, num_blocks + 1), POISON, np.int64)
        self.last_ids = np.full(max_num_seqs, POISON, np.int64)
        self.choices = np.full(max_num_seqs, POISON, np.int64)
        self.gated = gated
        self.gate = asyncio.Event()
        self.opened = 0
        self.log: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        self.closed = False
        self.faults: dict[int, EngineError] = {}
        self.next_token = next_token
        self._launched: list[tuple[StepPlan, SampleBatch]] = []
        self._results: dict[int, StepResult] = {}
        self._forwarded: StepPlan | None = None
        self._launched_tables = self.tables.copy()
        self._occupants = np.zeros(max_num_seqs, np.int64)
        self._in_use: dict[int, dict[tuple[int, int], int]] = {}

    def forward(self, plan: StepPlan) -> None:
        self._check_fence(plan)
        self.log.append(("forward", plan.step))
        self.plans.append(plan)
        self._forwarded = plan

    def _check_fence(self, plan: StepPlan) -> None:
        for update in plan.block_updates:
            end = update.first + len(update.blocks)
            self._launched_tables[update.group, update.row, update.first : end] = update.blocks
        for state in plan.row_states:
            self._occupants[state.row] = plan.step * 1000 + state.row
        used: dict[tuple[int, int], int] = {}
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True):
            occupant = int(self._occupants[row])
            for g, tables in enumerate(self._launched_tables):
                pages = tables[row, : -(-(start + count) // self.block_size)].tolist()
                for block in pages[start // self.block_size :]:
                    users = {s[g, block] for s in self._in_use.values() if (g, block) in s}
                    assert users <= {occupant}, f"step {plan.step} writes block {block}, which is still in use"
                used |= {(g, block): occupant for block in pages}
        self._in_use[plan.step] = used

    def sample(self, batch: SampleBatch) -> FakeTicket:
        assert self._forwarded is not None and self._forwarded.step == batch.step
        # The last of a request's choices goes on in the block that they shared.
        self._occupants[batch.rows] = self._occupants[self._forwarded.rows[batch.entries]]
        self._launched.append((self._forwarded, batch))
        self._forwarded = None
        return FakeTicket(self, batch.step)

    def on_failure(self, tell: Callable[[EngineError], None]) -> None:
        self.tell = tell

    async def close(self) -> None:
        self.closed = True

    def open(self, step: int) -> None:
        """Let the tickets up to `step` resolve."""
        self.opened = step
        self.gate.set()

    def run_until(self, step: int) -> StepResult:
        """Execute what was launched, in order, up to `step`."""
        while self._launched and self._launched[0][0].step <= step:
            plan, batch = self._launched.pop(0)
            self._results[plan.step] = self._execute(plan, batch)
        self.log.append(("result", step))
        del self._in_use[step]
        if step in self.faults:
            raise self.faults[step]
        return self._results.pop(step)

    def _execute(self, plan: StepPlan, batch: SampleBatch) -> StepResult:
        for state in plan.row_states:
            self.choices[state.row] = state.choice
        for copy in plan.block_copies:
            self.pages[copy.group, copy.target] = self.pages[copy.group, copy.source]
        for update in plan.block_updates:
            self.tables[update.group, update.row, update.first : update.first + len(update.blocks)] = update.blocks
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row is in a step once"
        offset = 0
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True):
            for i in range(count):
                token = int(plan.token_ids[offset + i])
                token = int(self.last_ids[row]) if token == PLACEHOLDER else token
                page, slot = divmod(start + i, self.block_size)
                for pages, tables in zip(self.pages, self.tables, strict=True):
                    pages[tables[row, page], slot] = token
            offset += count
        ids: list[int] = []
        rankings: list[Any] = []
        for e, row in zip(batch.entries.tolist(), batch.rows.tolist(), strict=True):
            context = self._context(int(plan.rows[e]), int(plan.starts[e] + plan.num_tokens[e]))
            token = self.next_token(context)
            token = token if token == FAULT else (token + int(self.choices[row])) % (VOCAB - 1)
            ids.append(token if batch.masks is None else _allowed(token, batch.masks[len(ids)]))
            rankings.append(ranked(context))
            self.last_ids[row] = ids[-1]
        return StepResult(
            step=plan.step,
            token_ids=np.array(ids, np.int32),
            faulted=np.array([i == FAULT for i in ids], np.bool_),
            logprobs=_sampled_logprobs(ids, rankings),
            prompt_logprobs=None if plan.prompt_targets is None else _logprobs(_targets(plan)),
            device_seconds=0.0,
        )

    def _context(self, row: int, length: int) -> list[int]:
        """What the first group holds; the others must hold the same within their windows."""
        context = self._read(0, row, 0, length)
        assert POISON not in context, "a page was read before it was written"
        for g, group in enumerate(self.groups):
            first = max(0, length - (group.window or length))
            assert self._read(g, row, first, length) == context[first:], f"group {g} holds other tokens"
        return context

    def _read(self, g: int, row: int, start: int, stop: int) -> list[int]:
        pages, table = self.pages[g], self.tables[g, row]
        return [int(pages[table[p // self.block_size], p % self.block_size]) for p in range(start, stop)]


def _allowed(token: int, mask: NDArray[np.uint32]) -> int:
    """The token if the mask has it, else one of those it has."""
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return token if token in ids else int(ids[token % len(ids)])


def _sampled_logprobs(ids: Sequence[int], rankings: Sequence[list[tuple[int, float]]]) -> TokenLogprobs:
    return TokenLogprobs(
        logprobs=np.array([dict(r).get(i, -9.0) for i, r in zip(ids, rankings, strict=True)], np.float32),
        ranks=np.ones(len(ids), np.int32),
        top_ids=np.array([[i for i, _ in r] for r in rankings], np.int32).reshape(len(ids), 8),
        top_logprobs=np.array([[v for _, v in r] for r in rankings], np.float32).reshape(len(ids), 8),
    )


def _targets(plan: StepPlan) -> list[int]:
    assert plan.prompt_targets is not None
    return [t for t in plan.prompt_targets.tolist() if t >= 0]


def _logprobs(ids: Sequence[int]) -> TokenLogprobs:
    """Recognisable values: the logprob of token t is -t / 1000 and its rank t + 1."""
    ids_array = np.array(ids, np.int32)
    return TokenLogprobs(
        logprobs=(-ids_array / 1000).astype(np.float32),
        ranks=ids_array + 1,
        top_ids=np.stack([ids_array, ids_array + 1], 1) if len(ids) else np.zeros((0, 2), np.int32),
        top_logprobs=np.zeros((len(ids), 2), np.float32),
    )
