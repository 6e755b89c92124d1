"""What the host costs per step: the real loop on a device that does nothing, by phase, rows and sequence length.

    python -m perf.host_step [--rows 64] [--profile]

Every row decodes one token per step and has its text made, from ids that the demo model's tokenizer gives
English text; nobody reads the streams. The rows cross block boundaries at different steps. Times are the means
over STEPS steps, the least of REPEATS runs, in microseconds; a step is all phases. `--profile` prints where
the time goes instead. Recorded in perf/results/host_step.json. Read next: docs/performance.md.
"""

import asyncio
import cProfile
import gc
import pstats
from collections.abc import Iterator
from itertools import count
from typing import Any

import click
import numpy as np
import uvloop

from engine.devices.protocol import DeviceInfo
from engine.inbox import Inbox
from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.loop import EngineLoop
from engine.plan import SampleBatch, StepPlan, StepResult
from engine.publish import LiveRequest
from engine.request import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stream import OutputChannel
from engine.text.tokenizer import TextTokenizer
from engine.trace import PHASES, IterationRecord
from loader.checkpoint import open_checkpoint
from loader.demo import demo_checkpoint
from perf.record import record

BLOCK_SIZE = 16
LENGTHS = (32, 4096)
STEPS = 256
WARM_UP = 16
REPEATS = 9
TEXT = "The quick brown fox jumps over the lazy dog, and nobody (not even the dog) knows why it did so in 2026.\n"


class NullDevice:
    """Answers every step at once, with ids that were made before."""

    def __init__(self, token_ids: list[int], rows: int, steps: int) -> None:
        self.info = DeviceInfo("null", "nothing", "none")
        self.done = asyncio.Event()
        self.steps = steps
        ids = np.array([token_ids[i % len(token_ids)] for i in range(rows + len(token_ids))], np.int32)
        self._ids = [ids[i : i + rows].copy() for i in range(len(token_ids))]
        self._no_fault = np.zeros(rows, np.bool_)

    def forward(self, plan: StepPlan) -> None:
        """Do nothing."""

    def sample(self, batch: SampleBatch) -> "NullTicket":
        return NullTicket(self, batch)

    def result(self, batch: SampleBatch) -> StepResult:
        sampled, ids = len(batch.entries), self._ids[batch.step % len(self._ids)]
        return StepResult(batch.step, ids[:sampled], self._no_fault[:sampled], None, None, 0.0)

    async def close(self) -> None:
        """Nothing to close."""


class NullTicket:
    """A step that is about to have run."""

    def __init__(self, device: NullDevice, batch: SampleBatch) -> None:
        self._device, self._batch = device, batch

    def done(self) -> bool:
        return False

    async def result(self) -> StepResult:
        if self._batch.step > self._device.steps:
            self._device.done.set()
            await asyncio.Future()
        return self._device.result(self._batch)


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1, 16, 64, 256), show_default=True)
@click.option("--profile", is_flag=True, help="Print a profile of the last case instead of recording.")
def main(rows: tuple[int, ...], profile: bool) -> None:
    """Measure every number of rows at every length."""
    tokenizer = open_checkpoint(demo_checkpoint()).load_tokenizer()
    assert tokenizer is not None
    text = TextTokenizer(tokenizer)
    if profile:
        with cProfile.Profile() as profiler:
            uvloop.run(run(text, rows[-1], LENGTHS[0]))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    table = [measure(text, n, length) for n in rows for length in LENGTHS]
    record("host_step", table, title="Host time of a step in which every row decodes, microseconds")


def measure(tokenizer: TextTokenizer, rows: int, length: int) -> dict[str, Any]:
    runs = [uvloop.run(run(tokenizer, rows, length)) for _ in range(REPEATS)]
    best = min(runs, key=lambda records: sum(r.seconds for r in records))
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


async def run(tokenizer: TextTokenizer, rows: int, length: int) -> list[IterationRecord]:
    """Records of STEPS steps."""
    num_tokens = length + BLOCK_SIZE + STEPS + WARM_UP + 8
    kv = KVManager([KVGroup(None, (0,))], rows * (num_tokens // BLOCK_SIZE + 1), BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(kv, max_num_seqs=rows, max_num_batched_tokens=rows * num_tokens, enable_chunked_prefill=True)
    device = NullDevice(tokenizer.encode(TEXT), rows, STEPS + WARM_UP)
    inbox = Inbox(rows)
    loop = EngineLoop(scheduler, device, inbox)
    for live in requests(tokenizer, rows, length):
        inbox.submit(live)
    gc.collect()
    gc.freeze()  # as Engine does
    task = asyncio.create_task(loop.run())
    try:
        await device.done.wait()
        return list(loop.observer.trace.iterations)[-STEPS:]
    finally:
        task.cancel()
        await asyncio.wait([task])
        gc.unfreeze()


def requests(tokenizer: TextTokenizer, rows: int, length: int) -> Iterator[LiveRequest]:
    """One for each row; no two prompts begin alike."""
    ids = count(1000)
    params = SamplingParams(max_tokens=STEPS + WARM_UP + 8, ignore_eos=True)
    for i in range(rows):
        prompt = [next(ids) for _ in range(length + i % BLOCK_SIZE)]
        prompt[1:] = [1000 + t % 20_000 for t in prompt[1:]]
        sequence = Sequence(f"r{i}", prompt, params, max_output=params.max_tokens or 0, seed=i)
        yield LiveRequest([sequence], OutputChannel(), tokenizer)


if __name__ == "__main__":
    main()
