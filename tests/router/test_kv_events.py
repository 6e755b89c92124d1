"""SubscribeKvEvents: over a real index behind a fake engine, and over real engines that compute."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from engine.engine import Engine
from engine.kv.prefix import token_key
from rpc.options import ServerOptions
from rpc.router import kv_events, servicer
from rpc.server import Server
from tests.router.conftest import Routed
from tests.rpc.real import engine_config

BLOCK = 16


class Mirror:
    """What a router knows from the batches of one subscription: hash to (parent's hash, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.sequence = 0
        self.chunks: list[tuple[int, int, int]] = []

    def apply(self, batch: common.KvEventBatch) -> None:
        assert self.sequence in (0, batch.sequence_number - 1)
        self.sequence = batch.sequence_number
        if batch.HasField("snapshot"):
            self.chunks.append((batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks))
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "stored":
                    self._store(event.stored)
                case "removed":
                    for name in event.removed.block_hashes:
                        del self.blocks[name]

    def _store(self, stored: common.KvBlocksStored) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        assert parent is None or parent in self.blocks
        for block in stored.blocks:
            assert block.block_hash not in self.blocks and block.block_size == BLOCK
            self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
            parent = block.block_hash


def expected(prompts: Sequence[Sequence[int]], root: str = "") -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The blocks of prompts, by the definition of their names."""
    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for tokens in prompts:
        digest = blake2b(root.encode(), digest_size=8).digest()
        parent: int | None = None
        for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = tuple(tokens[i : i + BLOCK])
            digest = blake2b(digest + struct.pack(f"<{BLOCK}i", *block), digest_size=8).digest()
            name = int.from_bytes(digest, "little", signed=True)
            blocks[name] = (parent, block)
            parent = name
    return blocks


def subscribe(stub: pb_grpc.VllmEngineStub, **request: Any) -> Any:
    return stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(**request))


async def read_snapshot(call: Any, mirror: Mirror) -> None:
    while not mirror.chunks or len(mirror.chunks) < mirror.chunks[0][1]:
        mirror.apply(await call.read())


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value.code(), caught.value.details() or ""


def fill(routed: Routed, tokens: Sequence[int], root: str = "", first_block: int = 0) -> None:
    """Name the blocks of a prompt in the index."""
    parent: int | str = root
    for n, i in enumerate(range(0, len(tokens), BLOCK)):
        parent = routed.engine.index.insert(parent, token_key(tokens[i : i + BLOCK]), first_block + n).uid


# -- the stream -------------------------------------------------------------------------


async def test_metadata_comes_before_the_engine_answers(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def never(feed: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(routed.engine, "follow_blocks", never)
    call = subscribe(routed.stub)
    await asyncio.wait_for(call.initial_metadata(), 30)
    await asked.wait()
    call.cancel()


async def test_a_snapshot_in_chunks_and_then_what_changes(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "CHUNK_BLOCKS", 2)
    first, second = list(range(3 * BLOCK)), list(range(100, 100 + 2 * BLOCK))
    fill(routed, first)
    fill(routed, second, first_block=3)
    fill(routed, first, root="acme", first_block=5)  # another tenant's
    call, mirror = subscribe(routed.stub), Mirror()
    await read_snapshot(call, mirror)
    assert mirror.blocks == expected([first, second])
    assert mirror.chunks == [(i, 4, 5) for i in range(4)]
    fill(routed, second, root="acme", first_block=8)
    for _ in range(3):
        await routed.stub.HealthCheck(pb.HealthCheckRequest())  # the subscription's turn: nothing in it is its own
    for block in (2, 5, 4, 1):
        routed.engine.index.evict(block)
    fill(routed, range(200, 200 + 2 * BLOCK), first_block=10)
    while len(mirror.blocks) != 4:
        mirror.apply(await call.read())
    assert mirror.blocks == expected([first[:BLOCK], second[:BLOCK], list(range(200, 200 + 2 * BLOCK))])
    call.cancel()


async def test_an_empty_cache_is_a_snapshot_too(routed: Routed) -> None:
    call, mirror = subscribe(routed.stub), Mirror()
    await read_snapshot(call, mirror)
    assert (mirror.chunks, mirror.blocks) == ([(0, 1, 0)], {})
    call.cancel()


async def test_a_chain_is_one_message(routed: Routed) -> None:
    call = subscribe(routed.stub)
    await call.read()
    fill(routed, range(3 * BLOCK))
    (event,) = (await call.read()).events
    assert len(event.stored.blocks) == 3
    for block in (2, 1, 0):
        routed.engine.index.evict(block)
    (event,) = (await call.read()).events
    assert len(event.removed.block_hashes) == 3
    call.cancel()


async def test_there_is_no_resuming(routed: Routed) -> None:
    code, message = await end_of(subscribe(routed.stub, start_sequence_number=7))
    assert code is grpc.StatusCode.OUT_OF_RANGE and "start_sequence_number" in message


async def test_one_that_falls_behind_starts_again(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_PENDING_EVENTS", 4)
    call = subscribe(routed.stub)
    await call.read()
    fill(routed, range(5 * BLOCK))  # all at once, before the subscriber's turn
    assert (await end_of(call))[0] is grpc.StatusCode.DATA_LOSS
    call, mirror = subscribe(routed.stub), Mirror()
    await read_snapshot(call, mirror)
    assert mirror.blocks == expected([range(5 * BLOCK)])
    call.cancel()


async def test_streams_end_when_the_server_stops_serving(routed: Routed) -> None:
    """While a request is live: the drain must not wait for a subscriber, nor end before the request."""
    generate = routed.stub.Generate(pb.GenerateRequest(text="x"))
    request = await routed.engine.submissions.get()
    call = subscribe(routed.stub)
    await call.read()
    routed.served.server.stop()
    assert (await end_of(call))[0] is grpc.StatusCode.UNAVAILABLE
    assert (await end_of(subscribe(routed.stub)))[0] is grpc.StatusCode.UNAVAILABLE
    request.finish(ids=[3])
    routed.engine.all_ended.set()
    assert list((await generate.read()).complete.output_ids) == [3]


async def test_a_subscriber_that_left_is_forgotten(routed: Routed) -> None:
    call = subscribe(routed.stub)
    await call.read()
    (feed,) = routed.engine.index._feeds
    call.cancel()
    while not feed.closed:
        await asyncio.sleep(0)
    fill(routed, range(BLOCK))
    assert routed.engine.index._feeds == []


# -- real engines -----------------------------------------------------------------------


@asynccontextmanager
async def real(model: Path, **options: Any) -> AsyncIterator[tuple[Engine, str]]:
    """A server over an engine that computes, on blocks for 256 tokens."""
    engine = Engine(engine_config(model, kv_cache_memory_bytes=16 * 2048 * BLOCK, max_model_len=128))
    server = Server(engine, ServerOptions(port=0, http_port=None, **options))
    address = f"127.0.0.1:{await server.start()}"
    run = asyncio.create_task(server.run())
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            while True:
                try:
                    await pb_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), metadata=_auth("a"))
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0)
        yield engine, address
    finally:
        server.stop()
        await asyncio.wait([run])


def _auth(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def generate(stub: pb_grpc.VllmEngineStub, tokens: Sequence[int], **more: Any) -> pb.GenerateComplete:
    sampling = pb.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=tokens), sampling_params=sampling)
    (reply,) = [r async for r in stub.Generate(request, **more)]
    return reply.complete


async def test_a_router_knows_what_an_engine_has_cached(model: Path) -> None:
    """More prompts than fit, so that blocks are taken again; and an engine started later tells the same names."""
    prompts = [[n, *range(5, 5 + 4 * BLOCK)] for n in range(10)]
    names = []
    for _ in range(2):
        async with real(model) as (engine, address), grpc.aio.insecure_channel(address) as channel:
            assert engine.info.num_blocks == 16
            stub = pb_grpc.VllmEngineStub(channel)
            call, mirror = subscribe(stub), Mirror()
            await read_snapshot(call, mirror)
            for prompt in prompts:
                assert (await generate(stub, prompt)).cached_tokens == 0
            last = expected([prompts[-1]])
            while not last.keys() <= mirror.blocks.keys():
                mirror.apply(await call.read())
            assert mirror.blocks.items() <= expected(prompts).items() and len(mirror.blocks) <= 16
            held = [p for p in prompts if expected([p]).keys() <= mirror.blocks.keys()]
            assert 1 <= len(held) < len(prompts)
            names.append(set(mirror.blocks))
            for prompt in reversed(held):
                assert (await generate(stub, prompt)).cached_tokens == 4 * BLOCK
            await stub.FlushCache(common.FlushCacheRequest())
            while mirror.blocks:
                mirror.apply(await call.read())
            assert (await generate(stub, prompts[-1])).cached_tokens == 0
            call.cancel()
    assert names[0] == names[1]


async def test_a_tenant_sees_and_flushes_its_own_blocks_only(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a alice\nb bob\n")
    prompt = list(range(5, 5 + 3 * BLOCK))
    async with (
        real(model, api_key_file=str(keys)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        for token in "ab":
            await generate(stub, [*prompt, ord(token)], metadata=_auth(token))
        await stub.FlushCache(common.FlushCacheRequest(), metadata=_auth("b"))
        for token, blocks in (("a", expected([prompt], "alice")), ("b", {})):
            call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), metadata=_auth(token))
            mirror = Mirror()
            await read_snapshot(call, mirror)
            assert mirror.blocks == blocks
            call.cancel()
        assert (await generate(stub, [*prompt, 9], metadata=_auth("a"))).cached_tokens == 3 * BLOCK
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.FlushCache(common.FlushCacheRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
