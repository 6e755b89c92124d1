"""A client that does not read: its deltas merge, nothing is lost, memory is bounded, others don't notice."""

import asyncio

import pytest

from engine.request.outputs import Logprob
from engine.serving.stream import MERGE_TOKENS
from rpc.client import Client
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import Served, read

TOKENS = 20_000
TEXT_CHARS = 1000

HANDED_OVER_BYTES = 8 << 20
"""What gRPC takes off the channel before flow control stops it: its windows; 4 MiB with grpc 1.85."""


def text_of(i: int) -> str:
    return f"{i:>{TEXT_CHARS}}"


async def test_deltas_of_a_slow_reader_merge_and_arrive_in_full(served: Served) -> None:
    async with Client(f"127.0.0.1:{served.port}") as other:
        slow = served.client.generate(pb.GenerateRequest(text="slow", include_usage=True))
        submission = await served.engine.submissions.get()
        quick = other.generate(pb.GenerateRequest(text="quick"))
        beside = await served.engine.submissions.get()
        for i in range(TOKENS):
            submission.push(text_of(i), [i])
            if i % 200 == 0:  # the other stream gets each of its tokens at once
                beside.push(str(i), [i])
                assert list((await read(quick)).deltas[0].token_ids) == [i]
        waiting = submission.channel.num_pending_tokens
        assert waiting * TEXT_CHARS > TOKENS * TEXT_CHARS - HANDED_OVER_BYTES
        submission.finish(finish_reason="length")
        responses = [response async for response in slow]
        deltas = [d for response in responses for d in response.deltas]
        assert [i for d in deltas for i in d.token_ids] == list(range(TOKENS))
        assert "".join(d.text for d in deltas) == "".join(map(text_of, range(TOKENS)))
        assert responses[-1].usage.completion_tokens == TOKENS
        assert max(len(d.token_ids) for d in deltas) == MERGE_TOKENS
        assert submission.channel.num_pending_tokens == 0
        beside.finish()
        assert (await read(quick)).deltas[0].finish_reason == pb.FINISH_REASON_STOP


async def test_a_message_stays_below_the_4_mib_that_clients_accept(served: Served) -> None:
    """20 alternatives for every token of prompt and output, all merged."""
    position = {i: Logprob(-0.5 - i, i + 1, "some token") for i in range(21)}
    call = served.client.generate(pb.GenerateRequest(text="x"))
    submission = await served.engine.submissions.get()
    submission.push("", [0], logprobs=(position,), prompt_logprobs=(None, *[position] * 9_999))
    for i in range(1, 6000):
        submission.push("", [i], logprobs=(position,))
    submission.finish()
    sizes: list[int] = []
    prompt_positions: list[int] = []
    ids: list[int] = []
    positions = 0
    async for response in call:
        sizes.append(response.ByteSize())
        prompt_positions += [len(p.tokens) for p in response.deltas[0].prompt_logprobs]
        positions += len(response.deltas[0].logprobs)
        ids += response.deltas[0].token_ids
    assert max(sizes) < 2 << 20
    assert prompt_positions == [0] + [21] * 9_999
    assert positions == 6000 and ids == list(range(6000))


async def test_a_slow_reader_that_leaves_frees_everything(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x", request_id="r"))
    submission = await served.engine.submissions.get()
    for i in range(TOKENS):
        submission.push(text_of(i), [i])
        if i % 100 == 0:
            await asyncio.sleep(0)
    assert submission.channel.num_pending_tokens > 0
    call.cancel()
    assert await served.engine.aborts.get() == "r"


@pytest.mark.parametrize("tokens", [1, 512, 513, 1024])
async def test_prompt_logprobs_of_every_length_concatenate(served: Served, tokens: int) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x"))
    given = (None, *({i: Logprob(-i, 1)} for i in range(1, tokens)))
    (await served.engine.submissions.get()).finish("end", [7], prompt_logprobs=given)
    deltas = [d async for r in call for d in r.deltas]
    assert [[t.token_id for t in p.tokens] for d in deltas for p in d.prompt_logprobs] == [[]] + [
        [i] for i in range(1, tokens)
    ]
    assert "".join(d.text for d in deltas) == "end" and deltas[-1].finish_reason == pb.FINISH_REASON_STOP
