"""Rig: scheduler and device without the loop, driven step by step; the books must balance after every step.

What it is made of serves the loop's tests, too. Read next: `tests/engine/fake_device.py`, `tests/engine/server.py`.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.request.params import SamplingParams
from engine.schedule.roster import Roster
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence, Status
from engine.schedule.settle import settle
from engine.schedule.step import Step
from tests.engine.fake_device import ONE_GROUP, FakeDevice, expected

BLOCK = 4


def scheduler_for(
    device: FakeDevice, budget: int, *, caching: bool = True, threshold: int = 0, chunked: bool = True
) -> Scheduler:
    """One that has all rows and blocks of the device."""
    kv = KVManager(device.groups, device.num_blocks, device.block_size, enable_prefix_caching=caching)
    return Scheduler(
        Roster(kv, device.max_num_seqs),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
    )


def make_choices(
    name: str,
    prompt: Seq[int],
    params: SamplingParams,
    max_output: int,
    make_grammar: Callable[[], Any] = lambda: None,
    **place: Any,
) -> list[Sequence]:
    """The choices of a request; the others fork from the first."""
    choices = [
        Sequence(
            name, list(prompt), params, max_output=max_output, seed=0, index=index, grammar=make_grammar(), **place
        )
        for index in range(params.num_choices)
    ]
    choices[0].forks = tuple(choices[1:])
    return choices


class Rig:
    """Up to `overlap` steps are in flight; every finish is recorded."""

    def __init__(
        self,
        num_blocks: int = 32,
        max_num_seqs: int = 4,
        budget: int = 16,
        overlap: int = 2,
        caching: bool = True,
        block_size: int = BLOCK,
        threshold: int = 0,
        chunked: bool = True,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
    ) -> None:
        self.device = FakeDevice(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, groups=groups)
        self.scheduler = scheduler_for(self.device, budget, caching=caching, threshold=threshold, chunked=chunked)
        self.roster = self.scheduler.roster
        self.budget = budget
        self.overlap = overlap
        self.in_flight: deque[Step] = deque()
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.prompt_ids: dict[Sequence, list[int]] = {}
        self.num_requests = 0
        self.num_steps = 0

    def add(
        self,
        prompt: Seq[int],
        max_output: int,
        *,
        tenant: str = "",
        client: str = "",
        priority: int = 0,
        cache_salt: str = "",
        **params: Any,
    ) -> Sequence:
        """Queue a request; its choices are in `sequences`, the first one is returned."""
        sampling = SamplingParams(max_tokens=max_output, **params)
        name = f"r{self.num_requests}"
        self.num_requests += 1
        place: dict[str, Any] = {"tenant": tenant, "client": client, "priority": priority, "cache_salt": cache_salt}
        choices = make_choices(name, prompt, sampling, max_output, **place)
        self.sequences += choices
        self.roster.add(choices[0])
        return choices[0]

    def iterate(self) -> Step | None:
        """One iteration of the loop: launch, then settle the step before."""
        step = self.scheduler.schedule()
        self.num_steps += 1
        if step is not None:
            assert sum(step.plan.num_tokens.tolist()) <= self.budget
            self.launch(step)
        if len(self.in_flight) >= self.overlap or (self.in_flight and step is None):
            self.settle()
        assert self.roster.audit() == []
        return step

    def launch(self, step: Step) -> None:
        self.device.forward(step.plan)
        assert all(update.blocks for update in step.plan.block_updates)
        for sequence in self.roster.running:  # the device knows of every block that it will read or write
            if sequence.row in step.plan.rows:
                for known, table in zip(self.device._launched_tables[:, sequence.row], sequence.tables, strict=True):
                    assert known[: len(table.blocks)].tolist() == table.blocks
        self.device.sample(step.batch)
        self.in_flight.append(step)

    def settle(self) -> None:
        step = self.in_flight.popleft()
        result = self.device.run_until(step.plan.step)
        for settled in settle(self.roster, step, result).others:
            if settled.prompt_rows:
                assert result.prompt_logprobs is not None
                ids = result.prompt_logprobs.top_ids[settled.prompt_rows.start : settled.prompt_rows.stop, 0]
                self.prompt_ids.setdefault(settled.sequence, []).extend(ids.tolist())
            if settled.finish is not None:
                self.finished.append(settled.sequence)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if self.roster.is_idle:
                return
            self.iterate()
        raise AssertionError("the scheduler makes no progress")

    def steps_to_first_token(self, sequence: Sequence) -> int:
        """Runs as many: its TTFT, in virtual time."""
        start = self.num_steps
        while sequence.num_output == 0:
            self.iterate()
        return self.num_steps - start

    def check_outputs(self) -> None:
        for s in self.sequences:
            if s.status is Status.FINISHED and s in self.finished:
                prompt = s.token_ids[: s.prompt_len]
                assert s.token_ids[s.prompt_len :] == expected(prompt, s.max_output, s.index)
                if s.params.prompt_logprobs is not None and s.index == 0:
                    assert self.prompt_ids.get(s, []) == prompt[1:]
