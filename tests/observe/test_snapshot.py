"""A snapshot of the real loop on the fake device, moved step by step: what is in it is counted by hand."""

from engine.kv.pool import CACHED, FREE, SHARED, USED
from engine.observe.snapshot import MAX_SEQUENCES, take_snapshot
from tests.engine.timed import STEP, TimedServer, timed_server

PROMPT = [1] * 9
"""Two full blocks of 4 and one token."""


def blocks(server: TimedServer) -> dict[int, int]:
    (states,) = take_snapshot(server.loop.state, server.roster, server.loop.observer).blocks
    return {state: states.tolist().count(state) for state in (FREE, CACHED, USED, SHARED)}


async def finish(server: TimedServer, max_tokens: int) -> None:
    """One request, from its arrival to its end."""
    stream = server.generate(PROMPT, max_tokens)
    await server.settle()
    stream.cancel()


async def open_next(server: TimedServer) -> None:
    """Let the oldest step settle; two are in flight before and after."""
    launched = len(server.device.plans)
    server.device.open(server.device.opened + 1)
    await server.until(lambda: len(server.device.plans) > launched)


async def test_blocks_and_sequences() -> None:
    async with timed_server(num_blocks=16, max_num_seqs=2) as server:
        assert blocks(server) == {FREE: 16, CACHED: 0, USED: 0, SHARED: 0}
        await finish(server, 2)
        assert blocks(server) == {FREE: 14, CACHED: 2, USED: 0, SHARED: 0}

        last = server.device.plans[-1].step
        server.device.open(last)
        streams = [server.generate(PROMPT, 30, name) for name in ("first", "second", "third")]
        await server.until(lambda: server.device.plans[-1].step == last + 2)
        snapshot = take_snapshot(server.loop.state, server.roster, server.loop.observer)
        # The cached blocks serve two requests, and each has a block of its own.
        assert blocks(server) == {FREE: 12, CACHED: 0, USED: 2, SHARED: 2}
        assert [s.request_id for s in snapshot.running] == ["first", "second"]
        assert sorted(s.row for s in snapshot.running) == [0, 1]
        assert [s[1:3] + s[4:] for s in snapshot.running] == [(1, 0, 9, 8, 8, 0, 30), (2, 0, 9, 8, 8, 0, 30)]
        assert [s[:] for s in snapshot.waiting] == [("third", 3, 0, -1, 9, 0, 0, 0, 30)]
        assert (snapshot.stats.num_running, snapshot.stats.num_waiting) == (2, 1)

        for outputs in range(1, 8):
            await open_next(server)
            first, second = take_snapshot(server.loop.state, server.roster, server.loop.observer).running
            assert first.output_tokens == second.output_tokens == outputs
            assert first.computed_tokens == 9 + outputs - 1
        assert len(streams) == 3


async def test_iterations_and_latencies() -> None:
    async with timed_server() as server:
        await finish(server, 3)
        snapshot = take_snapshot(server.loop.state, server.roster, server.loop.observer)
    assert [(r.launched, r.tokens, r.decode_rows) for r in snapshot.iterations] == [
        (1, 9, 0),
        (2, 1, 1),
        (3, 1, 1),
        (0, 0, 0),
    ]
    assert sum(snapshot.time_to_first_token.counts) == 1
    gaps = snapshot.inter_token_latency
    assert sum(gaps.counts) == 2
    assert [low for low, n in zip(gaps.bounds, gaps.counts[1:], strict=True) if n][-1] >= STEP
    assert sum(snapshot.time_per_output_token.counts) == 1


async def test_a_snapshot_does_not_change_with_the_engine() -> None:
    async with timed_server() as server:
        before = take_snapshot(server.loop.state, server.roster, server.loop.observer)
        await finish(server, 3)
    assert not before.iterations and not any(before.time_to_first_token.counts)
    assert before.blocks[0].tolist() == [FREE] * 64


async def test_what_is_listed_is_bounded() -> None:
    async with timed_server(max_num_seqs=1) as server:
        streams = [server.generate([1], 2) for _ in range(MAX_SEQUENCES + 40)]
        await server.until(lambda: len(server.device.plans) == 2)
        snapshot = take_snapshot(server.loop.state, server.roster, server.loop.observer)
        assert len(snapshot.waiting) == MAX_SEQUENCES
        assert snapshot.waiting[0].number == 1
        assert snapshot.stats.num_waiting == len(streams) - 1
