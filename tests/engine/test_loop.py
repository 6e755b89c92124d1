"""EngineLoop over a fake device: order of launches and settles, the queue, faults, the end."""

import asyncio
from typing import Any

import pytest

from engine.errors import DeviceFault, EngineStopped, OverCapacity, RequestFault, StepFault
from tests.engine.fake_device import FAULT, expected, hashed, ranked
from tests.engine.server import collect, serving, tokens_of


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
        blocks = set(server.roster.running[0].tables[0].blocks)
        first.cancel()
        second = server.generate([2] * 8, 4)
        server.device.open(1)
        await server.until(lambda: len(server.device.plans) == 3)
        taken = {b for u in server.device.plans[2].block_updates for b in u.blocks}
        assert not taken & blocks
        assert server.roster.fence
        server.device.open(99)
        assert await tokens_of(second) == expected([2] * 8, 4)
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
        await server.until(lambda: server.roster.num_waiting == 2 and sum(server.inbox.waiting.values()) == 2)
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


async def test_a_device_that_breaks_while_the_loop_sleeps_ends_it() -> None:
    async with serving() as server:
        assert await tokens_of(server.generate([1, 2], 2)) == expected([1, 2], 2)
        await server.until(lambda: server.roster.is_idle)
        server.device.tell(DeviceFault("gone"))
        await asyncio.wait([server.task])
        assert server.loop.state == "failed"
        assert isinstance(server.task.exception(), DeviceFault)


async def test_a_mistake_in_the_loop_fails_everyone_and_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(max_num_seqs=1) as server:
        running, waiting = server.generate([1], 9), server.generate([2], 9)
        assert (await running.read()) is not None

        def schedule() -> None:
            raise KeyError("row 7")

        monkeypatch.setattr(server.scheduler, "schedule", schedule)
        for stream in (running, waiting):
            with pytest.raises(DeviceFault, match="the engine loop failed: KeyError"):
                await tokens_of(stream)
        await asyncio.wait([server.task])
        assert server.loop.state == "failed"
        assert isinstance(server.task.exception(), KeyError)
        with pytest.raises(EngineStopped, match="the engine is failed"):
            server.generate([3], 9)


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
        assert server.loop.requests.is_empty.is_set()
