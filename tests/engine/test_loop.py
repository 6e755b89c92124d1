"""EngineLoop over a fake device: order of launches and settles, cancellation everywhere, faults."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.beam import BeamRequest
from engine.errors import DeviceFault, EngineStopped, OverCapacity, RequestFault, StepFault
from engine.inbox import Inbox
from engine.kv.groups import KVGroup
from engine.kv.manager import KVManager
from engine.loop import EngineLoop
from engine.masks import Masks
from engine.publish import LiveRequest
from engine.request import Delta, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stream import OutputChannel, OutputStream
from tests.engine.fake_device import FAULT, ONE_GROUP, FakeDevice, NextToken, expected, hashed, ranked

BLOCK = 4


class Server:
    """A running loop and the few lines of Engine that a test needs."""

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        queue: int,
        next_token: NextToken,
        *,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        block_size: int = BLOCK,
        caching: bool = True,
        threshold: int = 0,
        masks: Masks | None = None,
    ) -> None:
        kv = KVManager(groups, num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=threshold,
        )
        self.device = FakeDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            next_token=next_token,
            gated=True,
            groups=groups,
        )
        self.inbox = Inbox(queue)
        self.loop = EngineLoop(self.scheduler, self.device, self.inbox, masks=masks)
        self.task = asyncio.create_task(self.loop.run())
        self._num_requests = 0

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        eos: tuple[int, ...] = (),
        tenant: str = "",
        priority: int = 0,
        make_grammar: Callable[[], Any] = lambda: None,
        **params: Any,
    ) -> OutputStream:
        self._num_requests += 1
        name = f"r{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        place: dict[str, Any] = {"eos_token_ids": eos, "tenant": tenant, "priority": priority}
        choices = [
            Sequence(name, prompt, sampling, max_output=max_tokens, seed=0, index=i, grammar=make_grammar(), **place)
            for i in range(sampling.num_choices)
        ]
        choices[0].forks = tuple(choices[1:])
        channel = OutputChannel(sampling.n)
        kind = BeamRequest if sampling.use_beam_search else LiveRequest
        self.inbox.submit(kind(choices, channel, None))
        return OutputStream(name, prompt, channel, self.inbox.abort)

    async def is_clean(self) -> bool:
        """No request, block or row is left; the loop is asleep."""
        self.device.open(10**9)
        await self.inbox.control(lambda: None)
        await self.loop.without_requests.wait()
        while not self.scheduler.is_idle:
            await asyncio.sleep(0)
        problems = await self.inbox.control(self.scheduler.audit)
        kv = self.scheduler.kv
        return problems == [] and kv.num_available == kv.num_blocks

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop's task run until something has happened."""
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never happened")


@asynccontextmanager
async def serving(
    *,
    num_blocks: int = 32,
    max_num_seqs: int = 4,
    budget: int = 16,
    queue: int = 100,
    next_token: NextToken = hashed,
    free_running: bool = True,
    **settings: Any,
) -> AsyncIterator[Server]:
    server = Server(num_blocks, max_num_seqs, budget, queue, next_token, **settings)
    if free_running:
        server.device.open(10**9)
    try:
        yield server
    finally:
        server.task.cancel()
        await asyncio.wait([server.task])


async def collect(stream: OutputStream) -> list[Delta]:
    return [delta async for delta in stream]


async def tokens_of(stream: OutputStream) -> list[int]:
    return [t for delta in await collect(stream) for t in delta.token_ids]


async def test_streams_what_the_model_says() -> None:
    async with serving() as server:
        prompts = [[1, 2, 3], [4] * 30, [5, 6]]
        streams = [server.generate(p, 7) for p in prompts]
        outputs = await asyncio.gather(*(tokens_of(s) for s in streams))
        assert outputs == [expected(p, 7) for p in prompts]
        assert await server.is_clean()


async def test_a_step_is_launched_before_the_one_before_settles() -> None:
    async with serving(free_running=False) as server:
        stream = server.generate([1, 2, 3], 3)
        log = server.device.log
        await server.until(lambda: ("forward", 2) in log)
        assert ("result", 1) not in log
        assert server.device.plans[1].token_ids.tolist() == [-1]
        server.device.open(1)
        await server.until(lambda: ("forward", 3) in log)
        assert log.index(("result", 1)) < log.index(("forward", 3))
        assert ("result", 2) not in log
        server.device.open(99)
        assert await tokens_of(stream) == expected([1, 2, 3], 3)
        assert [kind for kind, _ in log] == ["forward", "forward", "result", "forward", "result", "result"]


async def test_nothing_is_launched_for_nobody() -> None:
    """The loop sleeps when idle: no step runs until a request comes."""
    async with serving() as server:
        assert await tokens_of(server.generate([1], 1)) == expected([1], 1)
        launched = len(server.device.plans)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(server.device.plans) == launched


async def test_blocks_freed_in_flight_wait_for_their_fence() -> None:
    async with serving(free_running=False, num_blocks=6) as server:
        first = server.generate([1] * 8, 8)
        await server.until(lambda: len(server.device.plans) == 2)
        blocks = set(server.scheduler.running[0].tables[0].blocks)
        first.cancel()
        second = server.generate([2] * 8, 4)
        server.device.open(1)
        await server.until(lambda: len(server.device.plans) == 3)
        taken = {b for u in server.device.plans[2].block_updates for b in u.blocks}
        assert not taken & blocks
        assert server.scheduler.fence
        server.device.open(99)
        assert await tokens_of(second) == expected([2] * 8, 4)
        assert await server.is_clean()


async def test_break_aborts_even_when_the_stream_has_a_name() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        async for _ in stream:
            break
        assert await server.is_clean()
        assert stream.request_id


async def test_dropping_aborts() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        del stream
        gc.collect()
        assert await server.is_clean()


async def test_leaving_the_context_aborts() -> None:
    async with serving() as server:
        async with server.generate([1, 2], 100):
            pass
        assert await server.is_clean()


async def test_an_exception_in_the_reader_aborts() -> None:
    async with serving() as server:
        stream = server.generate([1, 2], 100)
        with pytest.raises(ZeroDivisionError):
            async for _ in stream:
                1 / 0  # noqa: B018
        assert await server.is_clean()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt_len", [3, 40])
async def test_cancel_in_every_state(steps: int, prompt_len: int) -> None:
    """K16: queued, before anything settled, mid-chunk, while decoding; with another stream alive."""
    async with serving(free_running=False) as server:
        other = asyncio.create_task(tokens_of(server.generate([9, 9], 20)))
        stream = server.generate([1] * prompt_len, 20)
        task = asyncio.create_task(tokens_of(stream))
        for step in range(1, steps + 1):
            await server.until(lambda step=step: len(server.device.plans) > step)  # type: ignore[misc]
            server.device.open(step)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await server.is_clean()
        assert await other == expected([9, 9], 20)


async def test_cancel_while_waiting_for_a_row() -> None:
    async with serving(max_num_seqs=1) as server:
        running = asyncio.create_task(tokens_of(server.generate([1], 20)))
        queued = server.generate([2], 20)
        queued.cancel()
        queued.cancel()
        assert await running == expected([1], 20)
        (last,) = await collect(queued)
        assert last.finish_reason == "abort" and last.token_ids == ()
        assert await server.is_clean()


async def test_aborting_the_unknown_or_finished_is_harmless() -> None:
    async with serving() as server:
        stream = server.generate([1], 2)
        assert await tokens_of(stream) == expected([1], 2)
        stream.cancel()
        server.inbox.abort("nobody")
        assert await server.is_clean()


async def test_a_slow_reader_gets_everything_merged() -> None:
    async with serving() as server:
        stream = server.generate([1, 2, 3], 50)
        assert await server.is_clean()
        (only,) = await collect(stream)
        assert list(only.token_ids) == expected([1, 2, 3], 50)
        assert only.finish_reason == "length"


async def test_a_full_queue_is_refused_at_once() -> None:
    async with serving(max_num_seqs=1, queue=2) as server:
        streams = [server.generate([i], 3) for i in range(2)]
        with pytest.raises(OverCapacity, match="limit is 2"):
            server.generate([7], 3)
        assert [await tokens_of(s) for s in streams] == [expected([i], 3) for i in range(2)]
        assert await tokens_of(server.generate([7], 3)) == expected([7], 3)


async def test_waiting_requests_count_against_the_queue() -> None:
    async with serving(max_num_seqs=1, queue=2, free_running=False) as server:
        streams = [server.generate([0], 3)]
        await server.until(lambda: len(server.device.plans) == 2)
        streams += [server.generate([i], 3) for i in range(1, 3)]
        server.device.open(1)
        await server.until(lambda: server.scheduler.num_waiting == 2 and sum(server.inbox.waiting.values()) == 2)
        with pytest.raises(OverCapacity):
            server.generate([7], 3)
        server.device.open(99)
        assert [await tokens_of(s) for s in streams] == [expected([i], 3) for i in range(3)]


async def test_stop_ids_end_the_output_and_are_reported() -> None:
    stop = expected([1, 2], 3)[-1]
    async with serving() as server:
        (delta,) = [d for d in await collect(server.generate([1, 2], 50, stop_token_ids=[stop])) if d.finish_reason]
        assert (delta.finish_reason, delta.stop_reason) == ("stop", stop)
        assert await tokens_of(server.generate([1, 2], 50, stop_token_ids=[stop])) == expected([1, 2], 3)
        assert await server.is_clean()


async def test_logprobs_belong_to_their_tokens() -> None:
    """The fake device reports -t/1000 for token t of a prompt."""
    async with serving(budget=4) as server:
        prompt = [3, 1, 4, 1, 5, 9]
        deltas = await collect(server.generate(prompt, 4, logprobs=2, prompt_logprobs=0))
        first = deltas[0]
        assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
        assert [list(m) for m in first.prompt_logprobs[1:] if m] == [[t] for t in prompt[1:]]
        maps = [m for d in deltas for m in d.logprobs or ()]
        ids = expected(prompt, 4)
        rankings = [ranked([*prompt, *ids[:i]])[:2] for i in range(4)]
        assert [list(m) for m in maps] == [[t for t, _ in r] for r in rankings]
        values = [[p.logprob for p in m.values()] for m in maps]
        assert values == [pytest.approx([v for _, v in r]) for r in rankings]
        assert deltas[-1].cumulative_logprob == pytest.approx(sum(r[0][1] for r in rankings))
        assert all(d.prompt_logprobs is None for d in deltas[1:])


async def test_a_fault_of_one_row_ends_that_request_only() -> None:
    """S21, R10"""

    def poisoned(context: Any) -> int:
        return FAULT if context[0] == 13 and len(context) == 5 else hashed(context)

    async with serving(next_token=poisoned) as server:
        bad, good = server.generate([13, 1, 2], 9), server.generate([1, 1, 2], 9)
        task = asyncio.create_task(tokens_of(good))
        seen: list[int] = []
        with pytest.raises(RequestFault, match="finite"):
            async for delta in bad:
                seen += delta.token_ids
        assert seen == expected([13, 1, 2], 2)
        assert await task == expected([1, 1, 2], 9)
        assert await server.is_clean()


async def test_a_failed_step_ends_its_requests_and_the_loop_lives() -> None:
    async with serving() as server:
        server.device.faults[1] = StepFault("bad plan")
        doomed = server.generate([1, 2], 9)
        with pytest.raises(StepFault, match="bad plan"):
            await collect(doomed)
        assert await tokens_of(server.generate([3], 4)) == expected([3], 4)
        assert await server.is_clean()


async def test_a_dead_device_fails_everyone_and_the_loop() -> None:
    async with serving(max_num_seqs=1) as server:
        server.device.faults[2] = DeviceFault("gone")
        streams = [server.generate([i], 9) for i in range(3)]
        for stream in streams:
            with pytest.raises(DeviceFault, match="gone"):
                await collect(stream)
        await asyncio.wait([server.task])
        assert server.loop.state == "failed"
        assert isinstance(server.task.exception(), DeviceFault)


async def test_stopping_ends_live_streams_with_a_reason() -> None:
    """Even while the device hangs: the step in flight never resolves."""
    async with serving(free_running=False) as server:
        task = asyncio.create_task(collect(server.generate([1], 9)))
        await server.until(lambda: len(server.device.plans) == 2)
        queued = server.generate([2], 9)
        server.task.cancel()
        for reader in (task, collect(queued)):
            with pytest.raises(EngineStopped):
                await reader
        assert server.loop.state == "stopped"


async def test_draining_refuses_new_and_finishes_old() -> None:
    async with serving() as server:
        old = server.generate([1], 9)
        await server.inbox.control(server.loop.drain)
        late = server.generate([2], 9)
        with pytest.raises(EngineStopped, match="draining"):
            await collect(late)
        assert await tokens_of(old) == expected([1], 9)
        assert server.loop.without_requests.is_set()


async def test_finalizers_may_run_in_another_thread() -> None:
    async with serving(free_running=False) as server:
        streams = [server.generate([1], 50)]
        await server.until(lambda: len(server.device.plans) == 2)
        await asyncio.to_thread(streams.clear)
        assert await server.is_clean()


async def test_cancelling_a_control_does_not_hurt_the_loop() -> None:
    async with serving(free_running=False) as server:
        stream = server.generate([1], 3)
        await server.until(lambda: len(server.device.plans) == 2)
        waiting: Coroutine[Any, Any, Any] = server.inbox.control(server.scheduler.audit)
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.device.open(99)
        assert await tokens_of(stream) == expected([1], 3)
