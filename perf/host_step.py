"""What the host costs per step: the real loop on a device that does nothing, by phase, rows and sequence length.

    python -m perf.host_step [--rows 64] [--profile]

Every row decodes one token per step and has its text made, from ids that the demo model's tokenizer gives
English text; nobody reads the streams. The rows cross block boundaries at different steps. Times are the means
over STEPS steps, the least of REPEATS runs, in microseconds; a step is all phases. `--profile` prints where
the time goes instead. Recorded in perf/results/host_step.json.

The second table is what the prefix index costs when nothing hits: the same with and without prefix caching, and
prompts of PREFILL_LENGTH tokens in steps of PREFILL_BUDGET. Recorded in perf/results/prefix_index.json.
Read next: docs/performance.md.
"""

import asyncio
import cProfile
import gc
import pstats
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import click
import uvloop

from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.loop import EngineLoop
from engine.observe.records import PHASES, IterationRecord
from engine.plan import SampleBatch, StepResult
from engine.request.params import SamplingParams
from engine.schedule.roster import Roster
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence
from engine.serving.inbox import Inbox
from engine.serving.live_request import LiveRequest
from engine.serving.stream import OutputChannel
from engine.text.tokenizer import TextTokenizer
from loader.checkpoint import open_checkpoint
from loader.demo import demo_checkpoint
from perf.null_device import NullDevice
from perf.record import record

BLOCK_SIZE = 16
LENGTHS = (32, 4096)
PREFILL_LENGTH, PREFILL_BUDGET = 2048, 512
STEPS = 256
WARM_UP = 16
REPEATS = 9


class Case(NamedTuple):
    """A workload of `rows` requests that is still at it after STEPS + WARM_UP steps.

    Attributes:
        length: prompt tokens; up to a block more, so that the rows cross block boundaries at different steps.
        budget: tokens of a step; all prompts at once if None.
    """

    rows: int
    length: int
    output: int = STEPS + WARM_UP + 8
    budget: int | None = None
    caching: bool = True

    @property
    def num_tokens(self) -> int:
        """Most tokens of a sequence."""
        return self.length + BLOCK_SIZE + self.output


class StoppingDevice(NullDevice):
    """Stops after `steps` steps and says that it is `done`."""

    def __init__(self, tokenizer: TextTokenizer, rows: int, steps: int) -> None:
        super().__init__(tokenizer, rows)
        self.done = asyncio.Event()
        self._steps = steps

    async def run(self, batch: SampleBatch, ends_at: float) -> StepResult:
        if batch.step > self._steps:
            self.done.set()
            await asyncio.Future()
        return await super().run(batch, ends_at)


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1, 16, 64, 256), show_default=True)
@click.option("--profile", is_flag=True, help="Print a profile of the last case instead of recording.")
def main(rows: tuple[int, ...], profile: bool) -> None:
    """Measure every number of rows at every length, and the prefix index."""
    tokenizer = open_checkpoint(demo_checkpoint()).load_tokenizer()
    assert tokenizer is not None
    text = TextTokenizer(tokenizer)
    if profile:
        with cProfile.Profile() as profiler:
            uvloop.run(run(text, Case(rows[-1], LENGTHS[0])))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    table = [step_row(text, n, length) for n in rows for length in LENGTHS]
    record("host_step", table, title="Host time of a step in which every row decodes, microseconds")
    prefill = Case(128, PREFILL_LENGTH, 1, PREFILL_BUDGET)
    index = [
        index_row(text, "64 rows decode", Case(64, LENGTHS[0])),
        index_row(text, f"{PREFILL_BUDGET} prompt tokens", prefill),
    ]
    record("prefix_index", index, title="Host time of a step with and without prefix index, no hits, microseconds")


def step_row(tokenizer: TextTokenizer, rows: int, length: int) -> dict[str, Any]:
    """A row of the first table."""
    (best,) = measure(tokenizer, Case(rows, length))
    means = {name: 1e6 * sum(r.phases[i] for r in best) / len(best) for i, name in enumerate(PHASES)}
    step = sum(means.values())
    return {
        "rows": rows,
        "tokens before": length,
        **{name: round(means[name], 1) for name in ("schedule", "sample", "settle", "publish")},
        "rest": round(means["intake"] + means["launch"] + means["tasks"] + means["device"], 1),
        "step": round(step, 1),
        "per row": round(step / rows, 2),
    }


def index_row(tokenizer: TextTokenizer, name: str, case: Case) -> dict[str, Any]:
    """A row of the second table. A device step of the last column's length makes the difference 1% of it."""
    runs = measure(tokenizer, case, case._replace(caching=False))
    on, off = (1e6 * sum(r.seconds for r in best) / len(best) for best in runs)
    tokens = sum(r.tokens for r in runs[0]) / len(runs[0])
    return {
        "step": name,
        "with": round(on, 1),
        "without": round(off, 1),
        "difference": round(on - off, 1),
        "per token": round((on - off) / tokens, 3),
        "1% of, ms": round((on - off) / 10, 2),
    }


def measure(tokenizer: TextTokenizer, *cases: Case) -> list[list[IterationRecord]]:
    """The quickest run of each case; the cases take turns."""
    turns = [[uvloop.run(run(tokenizer, case)) for case in cases] for _ in range(REPEATS)]
    return [min(runs, key=lambda records: sum(r.seconds for r in records)) for runs in zip(*turns, strict=True)]


async def run(tokenizer: TextTokenizer, case: Case) -> list[IterationRecord]:
    """Records of STEPS steps."""
    num_blocks = case.rows * (case.num_tokens // BLOCK_SIZE + 1)
    kv = KVManager([KVGroup(None, (0,))], num_blocks, BLOCK_SIZE, enable_prefix_caching=case.caching)
    scheduler = Scheduler(
        Roster(kv, case.rows),
        max_num_batched_tokens=case.budget or case.rows * case.num_tokens,
        enable_chunked_prefill=True,
    )
    device = StoppingDevice(tokenizer, case.rows, STEPS + WARM_UP)
    inbox = Inbox(case.rows)
    loop = EngineLoop(scheduler, device, inbox)
    for live in requests(tokenizer, case):
        inbox.submit(live)
    gc.collect()
    gc.freeze()  # as Engine does
    task = asyncio.create_task(loop.run())
    done = asyncio.create_task(device.done.wait())
    try:
        await asyncio.wait([task, done], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task  # raises what ended the loop
        return list(loop.observer.records.iterations)[-STEPS:]
    finally:
        task.cancel()
        done.cancel()
        await asyncio.wait([task, done])
        gc.unfreeze()


def requests(tokenizer: TextTokenizer, case: Case) -> Iterator[LiveRequest]:
    """One for each row; no two prompts begin alike."""
    ids = count(1000)
    params = SamplingParams(max_tokens=case.output, ignore_eos=True)
    for i in range(case.rows):
        prompt = [next(ids) for _ in range(case.length + i % BLOCK_SIZE)]
        prompt[1:] = [1000 + t % 20_000 for t in prompt[1:]]
        sequence = Sequence(f"r{i}", prompt, params, max_output=case.output, seed=i)
        yield LiveRequest([sequence], OutputChannel(), tokenizer)


if __name__ == "__main__":
    main()
