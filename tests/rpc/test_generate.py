"""Generate: what reaches the engine, what comes back, and how a call ends early."""

import asyncio
from dataclasses import fields
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc_status import rpc_status

from engine.errors import DeviceFault, EngineStopped, InvalidRequest, OverCapacity, RequestFault
from engine.request.outputs import Logprob
from engine.request.params import SamplingParams
from engine.request.structured import StructuredOutputs
from loader.errors import CheckpointError
from loader.generation import GenerationConfig
from rpc import client as rpc_client
from rpc import convert
from rpc.calls import Calls
from rpc.clock import MonotonicClock
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.servicer import EngineServicer
from tests.rpc.conftest import Served, Serving, read
from tests.rpc.fake_engine import FakeEngine

HELLO = pb.GenerateRequest(text="hi")


async def test_deltas_arrive_one_by_one(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="hi", request_id="r1", include_usage=True))
    submission = await served.engine.submissions.get()
    assert (submission.request_id, submission.prompt) == ("r1", [1, ord("h"), ord("i")])
    submission.push("He", [5], num_cached_tokens=2)
    first = await call.read()  # arrives although the answer is not finished
    submission.finish("llo", [6, 7], finish_reason="length")
    second: Any = await call.read()
    assert await call.read() is grpc.aio.EOF
    assert first == pb.GenerateResponse(request_id="r1", deltas=[pb.Delta(text="He", token_ids=[5])])
    assert second.deltas[0] == pb.Delta(text="llo", token_ids=[6, 7], finish_reason=pb.FINISH_REASON_LENGTH)
    assert second.usage == pb.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=2)
    assert served.engine.aborts.empty()


async def test_usage_comes_when_the_last_choice_has_finished(served: Served) -> None:
    request = pb.GenerateRequest(text="hi", include_usage=True, sampling=pb.SamplingParams(n=2))
    call = served.client.generate(request)
    submission = await served.engine.submissions.get()
    submission.finish("b", [5], index=1)
    first: Any = await call.read()
    submission.finish("a", [6, 7], index=0)
    second: Any = await call.read()
    assert [(r.deltas[0].index, r.HasField("usage")) for r in (first, second)] == [(1, False), (0, True)]
    assert second.usage.completion_tokens == 3


async def test_no_usage_unless_asked(served: Served) -> None:
    call = served.client.generate(HELLO)
    (await served.engine.submissions.get()).finish("x", [1])
    assert [response.HasField("usage") async for response in call] == [False]


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 1, 2])), [3, 1, 2]),
        (pb.GenerateRequest(text="a"), [1, 97]),
        (
            pb.GenerateRequest(chat=rpc_client.chat([{"role": "user", "content": "q"}])),
            [ord(c) for c in "<user>q<assistant>"],
        ),
        (
            pb.GenerateRequest(
                chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="q")], add_generation_prompt=False)
            ),
            [ord(c) for c in "<user>q"],
        ),
    ],
    ids=["token_ids", "text", "chat", "chat without generation prompt"],
)
async def test_each_kind_of_prompt(served: Served, request_: pb.GenerateRequest, prompt: list[int]) -> None:
    call = served.client.generate(request_)
    submission = await served.engine.submissions.get()
    assert submission.prompt == prompt
    submission.finish()
    assert [len(response.deltas) async for response in call] == [1]


async def test_unset_sampling_fields_take_the_defaults(served: Served) -> None:
    call = served.client.generate(HELLO)
    submission = await served.engine.submissions.get()
    assert submission.params == SamplingParams()
    submission.finish()
    await call.read()


async def test_the_models_own_defaults_hold_where_nothing_is_given(served: Served) -> None:
    served.engine.checkpoint.generation = GenerationConfig(temperature=0.5, top_p=0.75, top_k=20, min_p=0.1)
    for given, expected in (
        (pb.SamplingParams(), SamplingParams(temperature=0.5, top_p=0.75, top_k=20, min_p=0.1)),
        (pb.SamplingParams(temperature=0, top_k=0), SamplingParams(temperature=0, top_p=0.75, top_k=0, min_p=0.1)),
        (pb.SamplingParams(use_beam_search=True), SamplingParams(use_beam_search=True)),
    ):
        call = served.client.generate(pb.GenerateRequest(text="x", sampling=given))
        submission = await served.engine.submissions.get()
        assert submission.params == expected
        submission.finish()
        async for _ in call:
            pass


async def test_every_sampling_field_arrives_also_when_it_is_zero_or_false(served: Served) -> None:
    given: dict[str, Any] = {
        "temperature": 0.1, "top_p": 0.3, "top_k": -1, "min_p": 0.7, "seed": 2**63 - 1, "stop": ("a", "b"),
        "stop_token_ids": (9,), "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 0,
        "min_tokens": 0, "logprobs": 0, "prompt_logprobs": 0, "skip_special_tokens": False, "detokenize": True,
        "n": 1, "best_of": 1, "presence_penalty": -0.3, "frequency_penalty": 0.0, "repetition_penalty": 1.1,
        "logit_bias": {7: -0.1}, "allowed_token_ids": (3, 4), "bad_words": ("no",), "truncate_prompt_tokens": 5,
        "use_beam_search": False, "length_penalty": 0.5, "early_stopping": False,
        "structured_outputs": StructuredOutputs(regex="a+"),
    }  # fmt: skip
    names = {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}
    assert set(given) == names == {f.name for f in fields(SamplingParams)}
    sampling = pb.SamplingParams(**{**given, "structured_outputs": pb.StructuredOutputs(regex="a+")})
    call = served.client.generate(pb.GenerateRequest(text="x", sampling=sampling))
    submission = await served.engine.submissions.get()
    assert submission.params == SamplingParams(**given)
    submission.finish()
    await call.read()


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object"}},
        {"json_object": True},
        {"regex": "[0-9]+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"'},
    ],
)
async def test_every_kind_of_structured_output_arrives(served: Served, wanted: dict[str, Any]) -> None:
    given = StructuredOutputs(**wanted)
    sampling = pb.SamplingParams(structured_outputs=convert.structured_outputs(given))
    call = served.client.generate(pb.GenerateRequest(text="x", sampling=sampling))
    submission = await served.engine.submissions.get()
    assert submission.params.structured_outputs == given
    submission.finish()
    await call.read()


async def test_structured_outputs_without_a_constraint_are_refused(served: Served) -> None:
    sampling = pb.SamplingParams(structured_outputs=pb.StructuredOutputs())
    error = await error_of(served.client.generate(pb.GenerateRequest(text="x", sampling=sampling)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "structured_outputs: give exactly one of json" in (error.details() or "")


async def test_what_belongs_to_tools_reaches_the_template(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    calls = [{"type": "function", "function": {"name": "clock", "arguments": {}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "1", "name": "clock"},
    ]
    call = served.client.generate(pb.GenerateRequest(chat=rpc_client.chat(messages, tools)))
    (await served.engine.submissions.get()).finish()
    await call.read()
    assert served.engine.chat_messages == messages
    assert served.engine.chat_options["tools"] == tools


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "[" * 100_000])
async def test_malformed_tools_are_refused_by_name(served: Served, text: str) -> None:
    message = pb.ChatMessage(role="user", content="q")
    chat = pb.ChatMessages(messages=[message], tools=text)
    error = await error_of(served.client.generate(pb.GenerateRequest(chat=chat)))
    assert (error.code(), (error.details() or "")[:12]) == (grpc.StatusCode.INVALID_ARGUMENT, "chat.tools: ")
    message.tool_calls = text
    error = await error_of(served.client.generate(pb.GenerateRequest(chat=pb.ChatMessages(messages=[message]))))
    assert (error.details() or "").startswith("chat.messages[0].tool_calls: ")


async def test_logprobs_and_stop_reasons(served: Served) -> None:
    call = served.client.generate(HELLO)
    submission = await served.engine.submissions.get()
    submission.push(
        "a",
        [5],
        logprobs=({5: Logprob(-0.5, 2, "a"), 8: Logprob(-0.25, 1)},),
        prompt_logprobs=(None, {4: Logprob(-1.5, 3)}),
    )
    delta = (await read(call)).deltas[0]
    submission.finish(stop_reason="END")
    last = (await read(call)).deltas[0]
    assert [[t.token_id for t in position.tokens] for position in delta.logprobs] == [[5, 8]]
    assert delta.logprobs[0].tokens[0] == pb.TokenLogprob(token_id=5, logprob=-0.5, rank=2, decoded_token="a")
    assert not delta.logprobs[0].tokens[1].HasField("decoded_token")
    assert [len(position.tokens) for position in delta.prompt_logprobs] == [0, 1]
    assert (last.finish_reason, last.WhichOneof("stop_reason"), last.stop_string) == (
        pb.FINISH_REASON_STOP, "stop_string", "END",
    )  # fmt: skip


async def test_a_stop_token_id_of_zero_is_reported(served: Served) -> None:
    call = served.client.generate(HELLO)
    (await served.engine.submissions.get()).finish(stop_reason=0)
    delta = (await read(call)).deltas[0]
    assert (delta.WhichOneof("stop_reason"), delta.stop_token_id) == ("stop_token_id", 0)


async def error_of(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def fields_of(call: grpc.aio.UnaryStreamCall) -> list[str]:
    status = await rpc_status.aio.from_call(call)
    bad_request = error_details_pb2.BadRequest()
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.details[0].Unpack(bad_request)
    return [violation.field for violation in bad_request.field_violations]


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (OverCapacity("1024 requests wait"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineStopped("draining"), grpc.StatusCode.UNAVAILABLE),
        (RequestFault("row 3: NaN"), grpc.StatusCode.INTERNAL),
        (DeviceFault("worker died"), grpc.StatusCode.INTERNAL),
        (CheckpointError("/m", ["no lm_head.weight"]), grpc.StatusCode.FAILED_PRECONDITION),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_a_refusal_is_a_status_with_its_message(
    served: Served, refusal: Exception, code: grpc.StatusCode
) -> None:
    served.engine.refusal = refusal
    error = await error_of(served.client.generate(HELLO))
    assert (error.code(), error.details()) == (code, str(refusal))


async def test_an_unknown_exception_is_internal_and_leaks_nothing(served: Served) -> None:
    served.engine.refusal = KeyError("secret")
    error = await error_of(served.client.generate(HELLO))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error: KeyError")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), "chat"),
        (pb.GenerateRequest(text="x", request_id="i" * 257), "request_id"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=-1)), "temperature"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=0)), "top_p"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=[""])), "stop"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(seed=2**63)), "seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_names_its_field(served: Served, request_: pb.GenerateRequest, field: str) -> None:
    call = served.client.generate(request_)
    error = await error_of(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(field)
    assert await fields_of(call) == [field]
    assert served.engine.submissions.empty()


async def test_what_the_engine_finds_invalid_names_its_field_too(served: Served) -> None:
    served.engine.refusal = InvalidRequest("prompt", "2049 tokens, at most 2048 fit")
    call = served.client.generate(HELLO)
    assert (await error_of(call)).details() == "prompt: 2049 tokens, at most 2048 fit"
    assert await fields_of(call) == ["prompt"]


async def test_a_very_long_message_still_arrives(served: Served) -> None:
    served.engine.refusal = InvalidRequest("prompt", "é" * 100_000)
    call = served.client.generate(HELLO)
    assert (await error_of(call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await fields_of(call) == ["prompt"]


async def test_a_fault_in_mid_stream_comes_after_what_was_produced(served: Served) -> None:
    call = served.client.generate(HELLO)
    submission = await served.engine.submissions.get()
    submission.push("a", [5])
    submission.channel.fail(RequestFault("NaN at step 7"))
    assert (await read(call)).deltas[0].text == "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "NaN at step 7")


async def test_a_live_request_id_is_refused_and_the_first_goes_on(served: Served) -> None:
    request = pb.GenerateRequest(text="x", request_id="same")
    first = served.client.generate(request)
    submission = await served.engine.submissions.get()
    second = served.client.generate(request)
    await error_of(second)
    assert await fields_of(second) == ["request_id"]
    submission.finish("ok")
    assert [response.deltas[0].text async for response in first] == ["ok"]


async def test_cancelling_before_the_first_token_aborts(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x", request_id="r"))
    await served.engine.submissions.get()
    call.cancel()
    assert await served.engine.aborts.get() == "r"


async def test_cancelling_in_mid_stream_aborts(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x", request_id="r"))
    (await served.engine.submissions.get()).push("a", [5])
    await call.read()
    call.cancel()
    assert await served.engine.aborts.get() == "r"


async def test_a_client_that_goes_away_aborts(served: Served) -> None:
    async with rpc_client.Client(f"127.0.0.1:{served.port}") as other:
        call = other.generate(pb.GenerateRequest(text="x", request_id="r"))
        (await served.engine.submissions.get()).push("a", [5])
        await call.read()
    assert await served.engine.aborts.get() == "r"


async def test_cancelling_a_call_whose_client_does_not_read_aborts(served: Served) -> None:
    """The handler then waits in a write, blocked by flow control, not for a delta."""
    call = served.client.generate(pb.GenerateRequest(text="x", request_id="r"))
    submission = await served.engine.submissions.get()
    for _ in range(64):
        submission.push("x" * 65536, [5])
        await asyncio.sleep(0)
    call.cancel()
    assert await served.engine.aborts.get() == "r"


async def test_the_clients_deadline_aborts(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x", request_id="r"), timeout=0.05)
    assert (await error_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await served.engine.aborts.get() == "r"


class CallContext:
    """What a handler sees of a call from a client that can no longer cancel."""

    def __init__(self, remaining: float) -> None:
        self.remaining = remaining
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> float:
        return self.remaining

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        self.code = code
        raise grpc.aio.AbortError

    async def write(self, response: pb.GenerateResponse) -> None:
        pass


def servicer(engine: FakeEngine) -> EngineServicer:
    clock = MonotonicClock()
    return EngineServicer(engine, Calls(clock), clock)


@pytest.mark.parametrize(("remaining", "submitted"), [(0.0, 0), (-1.0, 0), (0.001, 0), (0.01, 1)])
async def test_the_server_holds_the_deadline_itself(remaining: float, submitted: int) -> None:
    """One that has passed already costs nothing."""
    context: Any = CallContext(remaining)
    async with FakeEngine() as engine:
        with pytest.raises(grpc.aio.AbortError):
            await servicer(engine).Generate(HELLO, context)
        assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (engine.submissions.qsize(), engine.aborts.qsize()) == (submitted, submitted)


async def test_the_engine_is_told_where_a_call_comes_from() -> None:
    async with FakeEngine() as engine:
        context: Any = CallContext(100.0)
        handler = asyncio.create_task(servicer(engine).Generate(HELLO, context))
        assert (await engine.submissions.get()).client == "127.0.0.1"
        handler.cancel()
        await asyncio.wait([handler])


async def test_a_cancelled_handler_stays_cancelled() -> None:
    async with FakeEngine() as engine:
        context: Any = CallContext(100.0)
        handler = asyncio.create_task(servicer(engine).Generate(HELLO, context))
        await engine.submissions.get()
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        assert engine.aborts.qsize() == 1


@pytest.mark.parametrize(("options", "limit"), [({}, 2 << 20), ({"max_message_bytes": 2048}, 2048)])
async def test_a_message_above_the_limit_is_refused_with_both_numbers(
    serving: Serving, options: dict[str, int], limit: int
) -> None:
    async with serving(**options) as served:
        error = await error_of(served.client.generate(pb.GenerateRequest(text="x" * limit)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = error.details() or ""
        assert f"vs. {limit}" in details and "larger than max" in details
