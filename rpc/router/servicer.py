"""RouterServicer: the calls of `vllm.grpc.engine.VllmEngine`, each a thin path to the engine.

What the router does, and this relies on:
- It sends no deadline. A client that leaves a stream reaches us as the Abort call, one that leaves a
  unary answer as the cancellation of Generate.
- It takes a worker out when SubscribeKvEvents has sent no metadata after 2 s, so they go first, whatever the
  engine is doing. A stream of events has no end of its own: it ends when the server stops serving.
- It subscribes anew after OUT_OF_RANGE (a number it wants to go on from) and DATA_LOSS (it was too slow).

Invariants are those of `rpc/servicer.py`. Read next: `rpc/router/params.py`, `rpc/router/kv_events.py`.
"""

import asyncio
import json
import tempfile
import time
import uuid
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.engine import Engine
from engine.errors import ConfigError, EngineStopped, InvalidRequest
from engine.kv.events import BlockFeed
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream, merge
from loader.checkpoint import CONFIG_FILE
from loader.fields import read_json_object
from rpc.auth import CLIENT, TENANT, note_peer
from rpc.calls import Calls, loaded, own_id, serving
from rpc.clock import Clock
from rpc.errors import reported, within_deadline
from rpc.outputs import Outputs
from rpc.router.answers import Answers
from rpc.router.kv_events import KvEventBatches
from rpc.router.params import check_supported, sampling_params
from rpc.router.tokenizer import tokenizer_archive
from rpc.servicer import MAX_REQUEST_ID_CHARS, PROFILE_ITERATIONS, trace_json

MAX_PENDING_EVENTS = 1 << 16
"""Events that a subscriber may be behind, about 10 MiB; then it starts again from a snapshot."""

TOKENIZER_PIECE_BYTES = 1 << 18

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class RouterServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves one engine to routers; `set_serving` says whether it takes work."""

    def __init__(self, engine: Engine, calls: Calls, clock: Clock) -> None:
        self._engine = engine
        self._calls = calls
        self._clock = clock
        self._started = clock.now()
        self._last_request = 0.0
        self._is_serving = False
        self._feeds: set[BlockFeed] = set()
        self._profile_file: Path | None = None

    def register(self, server: grpc.aio.Server) -> str:
        """Serve on `server`; returns the name of the service."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        return pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

    def set_serving(self, is_serving: bool) -> None:
        """What HealthCheck answers. Streams of events end when it becomes False."""
        self._is_serving = is_serving
        if not is_serving:
            for feed in self._feeds:
                feed.close()

    # -- requests ---------------------------------------------------------------------------

    # Coroutines that write, not generators: see `rpc.servicer.EngineServicer.Generate`.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with reported(context, self._calls.pace), within_deadline(context):
            self._last_request = time.time()
            note_peer(context)
            with self._calls.live():
                params, stream = await self._submit(request)
                outputs = Outputs([stream], self._calls)
            answer = _stream if request.stream else _answer
            async with outputs:
                await answer(outputs, Answers(params, stream.prompt_token_ids), context)

    async def _submit(self, request: pb.GenerateRequest) -> tuple[SamplingParams, OutputStream]:
        engine = serving(self._engine)
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"longer than {MAX_REQUEST_ID_CHARS} characters")
        check_supported(request)
        params = sampling_params(request.sampling_params, engine.checkpoint.generation, engine.info.max_model_len)
        match request.WhichOneof("input"):
            case "tokenized":
                token_ids = list(request.tokenized.input_ids)
            case "text":
                token_ids = await engine.tokenize(request.text)
            case _:
                raise InvalidRequest("input", "one of tokenized and text is required")
        await engine.compile_grammar(params)
        request_id = own_id(request.request_id or uuid.uuid4().hex)
        stream = engine.generate(token_ids, params, request_id=request_id, tenant=TENANT.get(), client=CLIENT.get())
        return params, stream

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with reported(context):
            engine = loaded(self._engine)
            for request_id in request.request_ids:
                engine.abort(own_id(request_id))
            return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Embed: the engine generates text, it makes no embeddings")

    # -- facts ------------------------------------------------------------------------------

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """An error while the engine starts: the router would take any answer for a worker and ask what it serves."""
        async with reported(context):
            state = loaded(self._engine).state
            return pb.HealthCheckResponse(healthy=self._is_serving, message=f"the engine is {state}")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        async with reported(context):
            engine = loaded(self._engine)
            info, checkpoint = engine.info, engine.checkpoint
            defaults = {k: v for k, v in asdict(checkpoint.generation).items() if v is not None and "token" not in k}
            return pb.GetModelInfoResponse(
                model_path=info.model,
                is_generation=True,
                max_context_length=info.max_model_len,
                max_req_input_len=info.max_model_len - 1,
                vocab_size=info.vocab_size,
                served_model_name=info.served_model_name,
                tokenizer_path="" if engine.tokenizer is None else info.model,
                model_type=str(read_json_object(checkpoint.path / CONFIG_FILE).get("model_type", "")),
                architectures=[info.architecture],
                eos_token_ids=checkpoint.generation.eos_token_ids,
                bos_token_id=checkpoint.generation.bos_token_id or 0,
                default_sampling_params_json=json.dumps(defaults) if defaults else "",
            )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        async with reported(context), within_deadline(context):
            engine = loaded(self._engine)
            stats = await engine.stats()
            return pb.GetServerInfoResponse(
                active_requests=stats.num_running + stats.num_waiting,
                last_receive_timestamp=self._last_request,
                uptime_seconds=self._clock.now() - self._started,
                server_type="vllm-grpc",
                data_parallel_size=1,
                block_size=engine.info.block_size,
                model_dtype=engine.info.dtype,
                kv_cache_dtype=engine.config.kv_cache_dtype,
                max_num_seqs=engine.config.max_num_seqs,
                constrained_decoding_start="first_token",
            )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        async with reported(context), within_deadline(context):
            engine = loaded(self._engine)
            stats = await engine.stats()
            capacity = stats.num_blocks * engine.info.block_size
            load = pb.SchedulerLoad(
                num_running_reqs=stats.num_running,
                num_waiting_reqs=stats.num_waiting,
                num_total_reqs=stats.num_running + stats.num_waiting,
                num_used_tokens=round(stats.kv_cache_usage * capacity),
                max_total_num_tokens=capacity,
                token_usage=stats.kv_cache_usage,
                cache_hit_rate=stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
                utilization=stats.num_running / engine.config.max_num_seqs,
                max_running_requests=engine.config.max_num_seqs,
            )
            return pb.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=engine.info.version,
                dp_rank_count=1,
                loads=[load],
            )

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        async with reported(context), within_deadline(context):
            engine = loaded(self._engine)
            if engine.tokenizer is None:
                raise ConfigError("the model has no tokenizer")
            data, digest = await asyncio.to_thread(tokenizer_archive, engine.checkpoint.path)
            for start in range(0, len(data), TOKENIZER_PIECE_BYTES):
                end = start + TOKENIZER_PIECE_BYTES
                sha256 = digest if end >= len(data) else ""
                await context.write(common_pb2.GetTokenizerChunk(data=data[start:end], sha256=sha256))

    # -- prefix cache -----------------------------------------------------------------------

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        async with reported(context), within_deadline(context):
            if not self._is_serving:
                raise EngineStopped(f"the engine is {self._engine.state}, or stands still")
            if request.start_sequence_number:
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, "nothing to resume from; start_sequence_number: 0")
            await context.send_initial_metadata(())
            news = asyncio.Event()
            feed = BlockFeed(MAX_PENDING_EVENTS, news.set)
            self._feeds.add(feed)
            try:
                await self._forward_events(feed, news, context)
            finally:
                self._feeds.remove(feed)
                feed.close()

    async def _forward_events(self, feed: BlockFeed, news: asyncio.Event, context: Context) -> None:
        batches = KvEventBatches(TENANT.get(), self._engine.info.block_size)
        contents = await self._engine.follow_blocks(feed)
        for chunk in await asyncio.to_thread(batches.snapshot, contents):
            await context.write(chunk)
        del contents
        while not feed.closed:
            await news.wait()
            news.clear()
            batch = batches.changes(feed.take())
            if batch is not None:
                await context.write(batch)
        if feed.overflowed:
            await context.abort(grpc.StatusCode.DATA_LOSS, f"more than {MAX_PENDING_EVENTS} events behind; subscribe")
        raise EngineStopped("the engine does not serve any more")

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """At once, whatever runs: what is in use stays with its requests."""
        async with reported(context):
            await serving(self._engine).reset_prefix_cache(TENANT.get())
            return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")

    # -- profile ----------------------------------------------------------------------------

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        async with reported(context):
            for name in ("output_dir", "start_step", "num_steps"):
                if request.HasField(name):
                    raise InvalidRequest(name, "cannot be chosen: a profile begins now and StopProfile writes its file")
            loaded(self._engine).start_profile()
            return common_pb2.ProfileResponse(success=True, message="recording")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        async with reported(context):
            profile = loaded(self._engine).stop_profile()
            trace = await asyncio.to_thread(trace_json, profile, PROFILE_ITERATIONS)
            if self._profile_file is None:
                self._profile_file = Path(tempfile.mkdtemp(prefix="engine-profile-")) / "trace.json"
            await asyncio.to_thread(self._profile_file.write_bytes, trace)
            return common_pb2.ProfileResponse(
                success=True, message=f"{len(profile.iterations)} iterations in {self._profile_file}"
            )


async def _stream(outputs: Outputs, answers: Answers, context: Context) -> None:
    while (read := await outputs.read()) is not None:
        delta = read[1]
        if delta.token_ids:
            await context.write(answers.chunk(delta))
        if delta.finish_reason is not None:
            await context.write(answers.complete(delta))


async def _answer(outputs: Outputs, answers: Answers, context: Context) -> None:
    choices: dict[int, list[Delta]] = {}
    while (read := await outputs.read()) is not None:
        choices.setdefault(read[1].index, []).append(read[1])
    for index in sorted(choices):
        await context.write(answers.complete(merge(choices[index])))
