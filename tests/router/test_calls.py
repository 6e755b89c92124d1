"""The router's calls over a fake engine: what reaches the engine, and what the router reads."""

import asyncio
import io
import json
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from engine.errors import OverCapacity
from engine.request.outputs import Logprob
from engine.request.structured import StructuredOutputs
from loader.generation import GenerationConfig
from rpc.router.params import sampling_params
from tests.router.checkpoint import TEMPLATE
from tests.router.conftest import Routed
from tests.router.fake_engine import RoutedEngine
from tests.rpc.conftest import ServerReflectionStub, Serving
from tests.rpc.fake_engine import Submission

IDS = pb.TokenizedInput(input_ids=[5, 6, 7])


def request(stream: bool = False, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r1", tokenized=IDS, stream=stream, sampling_params=pb.SamplingParams(**sampling)
    )


async def read_all(call: Any) -> list[Any]:
    """The chunks and completes that are left of a call."""
    messages = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        messages.append(getattr(reply, reply.WhichOneof("response")))
    return messages


async def submission(routed: Routed) -> Submission:
    return await routed.engine.submissions.get()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


# -- requests ---------------------------------------------------------------------------


async def test_ids_and_text_arrive(routed: Routed) -> None:
    call = routed.stub.Generate(request())
    got = await submission(routed)
    assert (got.request_id, got.prompt) == ("r1", [5, 6, 7])
    call.cancel()
    call = routed.stub.Generate(pb.GenerateRequest(text="hi"))
    got = await submission(routed)
    assert got.prompt == [1, ord("h"), ord("i")] and got.request_id
    call.cancel()


async def test_a_stream_is_a_chunk_for_each_delta_and_an_end_for_each_choice(routed: Routed) -> None:
    call = routed.stub.Generate(request(stream=True, n=2))
    got = await submission(routed)
    assert got.params.n == 2
    got.push(ids=[11, 12], num_cached_tokens=16)
    chunk = (await call.read()).chunk
    assert (chunk.index, list(chunk.token_ids), chunk.prompt_tokens, chunk.completion_tokens) == (0, [11, 12], 3, 2)
    assert chunk.cached_tokens == 16
    got.finish(ids=[13], index=1, finish_reason="length")
    chunk, end = (await call.read()).chunk, (await call.read()).complete
    assert (chunk.index, list(chunk.token_ids)) == (1, [13])
    assert (end.index, end.finish_reason, end.prompt_tokens) == (1, "length", 3)
    got.finish(ids=[2], stop_reason=2)
    chunk, end = await read_all(call)
    assert (chunk.index, list(chunk.token_ids)) == (0, [2])
    assert (end.index, end.finish_reason, end.matched_token_id) == (0, "stop", 2)


async def test_one_answer_holds_everything(routed: Routed) -> None:
    call = routed.stub.Generate(request(n=2, stop=["END"]))
    got = await submission(routed)
    assert got.params.stop == ("END",) and got.params.detokenize
    got.push(ids=[11], num_cached_tokens=16)
    got.finish(ids=[21, 22], index=1, finish_reason="length")
    got.push(ids=[12, 13])
    got.finish(ids=[14], stop_reason="END")
    first, second = await read_all(call)
    assert (first.index, list(first.output_ids), first.finish_reason) == (0, [11, 12, 13, 14], "stop")
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (3, 4, 16)
    assert (first.WhichOneof("matched_stop"), first.matched_stop_str) == ("matched_stop_str", "END")
    assert (second.index, list(second.output_ids), second.finish_reason) == (1, [21, 22], "length")
    assert second.WhichOneof("matched_stop") is None


LOGPROBS = (
    {7: Logprob(-3.0, 9), 4: Logprob(-0.5, 1), 5: Logprob(-1.0, 2)},
    {4: Logprob(-0.25, 1), 5: Logprob(-1.5, 2)},
)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(routed: Routed, stream: bool) -> None:
    """The token itself apart; its alternatives are the most likely ones, the likeliest first."""
    call = routed.stub.Generate(request(stream=stream, logprobs=2, prompt_logprobs=1))
    got = await submission(routed)
    assert (got.params.logprobs, got.params.prompt_logprobs) == (2, 1)
    prompt = (None, {6: Logprob(-2.0, 3), 8: Logprob(-0.125, 1)}, {7: Logprob(-0.75, 1)})
    got.finish(ids=[7, 4], logprobs=LOGPROBS, prompt_logprobs=prompt)
    for message in await read_all(call):
        out = message.output_logprobs
        assert (list(out.token_ids), list(out.token_logprobs)) == ([7, 4], [-3.0, -0.25])
        assert [(list(t.token_ids), list(t.values)) for t in out.top_logprobs] == [
            ([4, 5], [-0.5, -1.0]), ([4, 5], [-0.25, -1.5])
        ]  # fmt: skip
        given = message.input_logprobs
        assert list(given.token_ids) == [5, 6, 7]
        assert [t.value if t.HasField("value") else None for t in given.token_logprobs] == [None, -2.0, -0.75]
        assert [list(t.token_ids) for t in given.top_logprobs] == [[], [8], [7]]


async def test_an_abort_ends_the_stream(routed: Routed) -> None:
    call = routed.stub.Generate(request(stream=True))
    (await submission(routed)).push(ids=[1])
    await call.read()
    await routed.stub.Abort(pb.AbortRequest(request_ids=["unknown", "r1"]))
    (end,) = await read_all(call)
    assert end.finish_reason == "abort"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancelled_call_drops_its_request(routed: Routed, stream: bool) -> None:
    call = routed.stub.Generate(request(stream=stream))
    await submission(routed)
    call.cancel()
    assert await routed.engine.aborts.get() == "r1"


async def test_a_full_queue_is_told_with_when_to_try_again(routed: Routed) -> None:
    routed.engine.refusal = OverCapacity("9 requests are waiting", 9)
    code, message = await refusal(routed.stub.Generate(request()))
    assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "9 requests are waiting")


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"kv_transfer_params": pb.KvTransferParams()}, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"sampling_params": pb.SamplingParams(structural_tag="{}")}, "structural_tag"),
        ({"sampling_params": pb.SamplingParams(logprobs=-1)}, "logprobs"),
        ({"sampling_params": pb.SamplingParams(json_schema="[")}, "structured_outputs.json"),
        ({"sampling_params": pb.SamplingParams(choice=pb.ChoiceConstraint())}, "structured_outputs.choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_served_is_refused_by_name(routed: Routed, bad: dict[str, Any], name: str) -> None:
    code, message = await refusal(routed.stub.Generate(pb.GenerateRequest(tokenized=IDS, **bad)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith(f"{name}: ")


async def test_no_prompt_and_no_embeddings(routed: Routed) -> None:
    code, message = await refusal(routed.stub.Generate(pb.GenerateRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and message.startswith("input: ")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await routed.stub.Embed(pb.EmbedRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and "embeddings" in (caught.value.details() or "")


# -- sampling ---------------------------------------------------------------------------


def params(message: pb.SamplingParams, **defaults: Any) -> Any:
    return sampling_params(message, GenerationConfig(eos_token_ids=(), **defaults), 100)


def test_every_field_arrives() -> None:
    message = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.5, max_tokens=9, min_tokens=2, stop=["a"], stop_token_ids=[3], skip_special_tokens=True,
        ignore_eos=True, n=3, logprobs=1, prompt_logprobs=2, seed=7, include_stop_str_in_output=True,
        logit_bias={4: -1.5}, truncate_prompt_tokens=6, regex="a+",
    )  # fmt: skip
    got = params(message)
    for field, value in message.ListFields():
        if field.name not in ("regex", "stop", "stop_token_ids", "logit_bias"):
            assert getattr(got, field.name) == value, field.name
    assert (got.stop, got.stop_token_ids, got.logit_bias) == (("a",), (3,), {4: -1.5})
    assert got.structured_outputs == StructuredOutputs(regex="a+")


def test_what_is_unset_is_the_models_default_and_0_is_off() -> None:
    unset = params(pb.SamplingParams(), temperature=0.5, top_p=0.75, top_k=20)
    assert (unset.temperature, unset.top_p, unset.top_k, unset.n) == (0.5, 0.75, 0, 1)
    assert (unset.max_tokens, unset.seed, unset.repetition_penalty, unset.logprobs) == (None, None, 1.0, None)
    assert params(pb.SamplingParams(temperature=0, max_tokens=0), temperature=0.5).temperature == 0
    assert (params(pb.SamplingParams()).temperature, params(pb.SamplingParams()).top_p) == (1.0, 1.0)
    assert not unset.detokenize  # the router makes the text


def test_a_negative_seed_is_one_of_its_own() -> None:
    seeds = {params(pb.SamplingParams(seed=s)).seed for s in (-1, -(2**31), 0, 1, 2**31 - 1)}
    assert len(seeds) == 5 and min(seeds) >= 0


def test_truncation_to_what_the_model_takes() -> None:
    assert params(pb.SamplingParams(truncate_prompt_tokens=-1)).truncate_prompt_tokens == 99


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json_schema": '{"type": "object"}'}, StructuredOutputs(json='{"type": "object"}')),
        ({"json_object": True}, StructuredOutputs(json_object=True)),
        ({"json_object": False}, None),
        ({"grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"choice": pb.ChoiceConstraint(choices=["x", "y"])}, StructuredOutputs(choice=("x", "y"))),
    ],
)
def test_constraints(given: dict[str, Any], expected: StructuredOutputs | None) -> None:
    assert params(pb.SamplingParams(**given)).structured_outputs == expected


# -- facts ------------------------------------------------------------------------------


async def test_health_follows_the_server(routed: Routed) -> None:
    assert (await routed.stub.HealthCheck(pb.HealthCheckRequest())).healthy
    call = routed.stub.Generate(request())
    got = await submission(routed)
    routed.served.server.stop()
    await routed.engine.draining.wait()
    reply = await routed.stub.HealthCheck(pb.HealthCheckRequest())
    assert (reply.healthy, reply.message) == (False, "the engine is draining")
    late = await refusal(routed.stub.Generate(pb.GenerateRequest(tokenized=IDS)))
    assert late == (grpc.StatusCode.UNAVAILABLE, "the engine is draining")
    got.finish(ids=[1])
    routed.engine.all_ended.set()
    assert len(await read_all(call)) == 1


async def test_a_loading_engine_is_no_worker_yet(serving: Serving, model: Path) -> None:
    engine = RoutedEngine(model)
    engine.may_load.clear()
    async with (
        serving(engine, wait=False) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        for call in (
            stub.HealthCheck(pb.HealthCheckRequest()),
            stub.GetModelInfo(pb.GetModelInfoRequest()),
            stub.GetLoads(pb.GetLoadsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        code, _ = await refusal(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_model_info(routed: Routed) -> None:
    info = await routed.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.model_type, list(info.architectures)) == (
        "tiny", "llama", ["LlamaForCausalLM"]
    )  # fmt: skip
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (2048, 2047, 49152)
    assert (list(info.eos_token_ids), info.bos_token_id) == ([2], 1)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.0}
    assert info.is_generation and not info.supports_vision and info.tokenizer_path


async def test_server_info_and_loads(routed: Routed) -> None:
    info = await routed.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.active_requests, info.block_size, info.max_num_seqs, info.data_parallel_size) == (7, 16, 8, 1)
    assert (info.model_dtype, info.kv_cache_dtype) == (routed.engine.info.dtype, "int8")
    reply = await routed.stub.GetLoads(pb.GetLoadsRequest())
    (load,) = reply.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 4, 7)
    assert (load.max_total_num_tokens, load.num_used_tokens, load.token_usage) == (77 * 16, 77 * 4, 0.25)
    assert (load.cache_hit_rate, load.max_running_requests) == (pytest.approx(32 / 90), 8)
    assert (reply.dp_rank_count, reply.version) == (1, "0.1.0")


async def test_the_tokenizer_is_a_zip_that_is_always_the_same(routed: Routed) -> None:
    async def fetch() -> bytes:
        chunks = [c async for c in routed.stub.GetTokenizer(common.GetTokenizerRequest())]
        data = b"".join(c.data for c in chunks)
        assert [c.sha256 for c in chunks] == [""] * (len(chunks) - 1) + [sha256(data).hexdigest()]
        return data

    data = await fetch()
    files = zipfile.ZipFile(io.BytesIO(data))
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(files.namelist())
    assert not any(name.endswith(".safetensors") for name in files.namelist())
    assert json.loads(files.read("tokenizer_config.json"))["chat_template"] == TEMPLATE
    assert {entry.date_time[0] for entry in files.infolist()} == {1980}
    assert await fetch() == data


async def test_no_tokenizer_is_said(routed: Routed) -> None:
    engine: Any = routed.engine
    engine.tokenizer = None
    code, message = await refusal(routed.stub.GetTokenizer(common.GetTokenizerRequest()))
    assert (code, message) == (grpc.StatusCode.FAILED_PRECONDITION, "the model has no tokenizer")
    assert not (await routed.stub.GetModelInfo(pb.GetModelInfoRequest())).tokenizer_path


async def test_flush_and_profile(routed: Routed) -> None:
    assert (await routed.stub.FlushCache(common.FlushCacheRequest())).success
    assert routed.engine.flushed == [""]
    assert (await routed.stub.StartProfile(common.StartProfileRequest())).success
    reply = await routed.stub.StopProfile(common.StopProfileRequest())
    file = Path(reply.message.split(" iterations in ")[1])
    assert reply.success and "traceEvents" in json.loads(file.read_text())
    file.unlink()
    file.parent.rmdir()
    with pytest.raises(grpc.aio.AioRpcError, match="output_dir: "):
        await routed.stub.StartProfile(common.StartProfileRequest(output_dir="/somewhere"))


async def test_reflection_lists_the_service(routed: Routed) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{routed.served.port}") as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {s.name for s in (await call.read()).list_services_response.service}
        await call.done_writing()
        await asyncio.wait_for(call.read(), 30)
    assert "vllm.grpc.engine.VllmEngine" in names
