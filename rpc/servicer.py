"""EngineServicer: the calls of `engine.v1.Engine`, each a thin path to the engine.

Invariants: a call that ends for any reason (client gone, deadline, error, shutdown) closes its output
stream, which aborts the request; nothing here blocks the loop, prompts are tokenised by the engine
off it; every error leaves through `rpc/errors.py`; with API keys a tenant sees and aborts its own
requests only, since the engine knows them as `tenant/request_id`.
Read next: `rpc/server.py`, `rpc/convert.py`.
"""

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import TypeAlias

import grpc

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.observe.chrome_trace import chrome_trace
from engine.observe.records import Profile
from engine.serving.stream import OutputStream
from rpc import convert
from rpc.auth import CLIENT, TENANT, note_peer
from rpc.calls import Calls, loaded, own_id, serving
from rpc.clock import Clock
from rpc.errors import reported, within_deadline
from rpc.outputs import Outputs
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc

MAX_REQUEST_ID_CHARS = 256
MIN_STATS_INTERVAL = 0.1
PROFILE_ITERATIONS = 10_000
PROFILE_PIECE_BYTES = 1 << 20

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"


class EngineServicer(pb_grpc.EngineServicer):
    """Serves one engine, in whatever state it is; one that does not serve answers UNAVAILABLE."""

    def __init__(self, engine: Engine, calls: Calls, clock: Clock) -> None:
        self._engine = engine
        self._calls = calls
        self._clock = clock

    # -- requests ---------------------------------------------------------------------------

    # A coroutine that writes, not an async generator as the generated base has it: grpc.aio never
    # closes a generator it stops reading, so a cancelled call would keep its stream until collected.
    async def Generate(self, request: pb.GenerateRequest, context: GenerateContext) -> None:  # type: ignore[override]
        async with reported(context, self._calls.pace), within_deadline(context):
            request_id = request.request_id or uuid.uuid4().hex
            note_peer(context)
            with self._calls.live():
                outputs = Outputs([await self._submit(request, request_id)], self._calls)
            async with outputs:
                await self._forward(outputs, request, request_id, context)

    async def _submit(self, request: pb.GenerateRequest, request_id: str) -> OutputStream:
        engine = serving(self._engine)
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"longer than {MAX_REQUEST_ID_CHARS} characters")
        params = convert.sampling_params(request.sampling, engine.checkpoint.generation)
        token_ids = await self._prompt_token_ids(engine, request)
        await engine.compile_grammar(params)
        return engine.generate(
            token_ids,
            params,
            request_id=own_id(request_id),
            priority=request.priority,
            tenant=TENANT.get(),
            client=CLIENT.get(),
            cache_salt=request.cache_salt,
        )

    async def _prompt_token_ids(self, engine: Engine, request: pb.GenerateRequest) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await engine.tokenize(request.text)
            case "token_ids":
                return request.token_ids.ids
            case "chat":
                return await _render(engine, request.chat)
        raise InvalidRequest("prompt", "one of text, token_ids and chat is required")

    async def _forward(
        self, outputs: Outputs, request: pb.GenerateRequest, request_id: str, context: GenerateContext
    ) -> None:
        open_choices = request.sampling.n or 1
        while (read := await outputs.read()) is not None:
            delta = read[1]
            open_choices -= delta.finish_reason is not None
            for message in convert.delta_messages(delta):
                response = pb.GenerateResponse(request_id=request_id, deltas=[message])
                if open_choices == 0 and message.finish_reason and request.include_usage:
                    response.usage.CopyFrom(pb.Usage(**outputs.usage._asdict()))
                await context.write(response)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        async with reported(context):
            if not request.request_id:
                raise InvalidRequest("request_id", "is required")
            return pb.AbortResponse(aborted=loaded(self._engine).abort(own_id(request.request_id)))

    # -- facts ------------------------------------------------------------------------------

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[pb.GetInfoRequest, pb.GetInfoResponse]
    ) -> pb.GetInfoResponse:
        async with reported(context):
            info = loaded(self._engine).info
            return pb.GetInfoResponse(
                **{name: getattr(info, name) for name in pb.GetInfoResponse.DESCRIPTOR.fields_by_name}
            )

    async def GetStats(
        self, request: pb.GetStatsRequest, context: grpc.aio.ServicerContext[pb.GetStatsRequest, pb.Stats]
    ) -> pb.Stats:
        async with reported(context), within_deadline(context):
            return await self._stats()

    async def StreamStats(  # type: ignore[override]
        self, request: pb.StreamStatsRequest, context: grpc.aio.ServicerContext[pb.StreamStatsRequest, pb.Stats]
    ) -> None:
        async with reported(context), within_deadline(context):
            interval = request.interval_seconds if request.HasField("interval_seconds") else 1.0
            if not MIN_STATS_INTERVAL <= interval < float("inf"):
                raise InvalidRequest("interval_seconds", f"{interval:g} is below {MIN_STATS_INTERVAL} or infinite")
            while True:
                await context.write(await self._stats())
                await self._clock.sleep(interval)

    async def _stats(self) -> pb.Stats:
        return convert.stats_message(await loaded(self._engine).stats(), tenant=TENANT.get() or None)

    # -- profile ----------------------------------------------------------------------------

    async def StartProfile(
        self,
        request: pb.StartProfileRequest,
        context: grpc.aio.ServicerContext[pb.StartProfileRequest, pb.StartProfileResponse],
    ) -> pb.StartProfileResponse:
        async with reported(context):
            loaded(self._engine).start_profile()
            return pb.StartProfileResponse()

    async def StopProfile(  # type: ignore[override]
        self,
        request: pb.StopProfileRequest,
        context: grpc.aio.ServicerContext[pb.StopProfileRequest, pb.StopProfileResponse],
    ) -> None:
        async with reported(context), within_deadline(context):
            profile = loaded(self._engine).stop_profile()
            trace = await asyncio.to_thread(trace_json, profile, request.max_iterations or PROFILE_ITERATIONS)
            for start in range(0, len(trace), PROFILE_PIECE_BYTES):
                await context.write(pb.StopProfileResponse(trace_json=trace[start : start + PROFILE_PIECE_BYTES]))

    # -- text -------------------------------------------------------------------------------

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        async with reported(context):
            engine = serving(self._engine)
            if request.WhichOneof("input") == "chat":
                return pb.TokenizeResponse(token_ids=await _render(engine, request.chat))
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return pb.TokenizeResponse(token_ids=await engine.tokenize(request.text, add_special_tokens=special))

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        async with reported(context):
            return pb.DetokenizeResponse(text=await serving(self._engine).detokenize(list(request.token_ids)))


def trace_json(profile: Profile, max_iterations: int) -> bytes:
    """A Chrome trace of the latest iterations and of the calling tenant's requests."""
    iterations = profile.iterations[-max_iterations:]
    since = iterations[0].start if iterations else profile.started
    requests = [r for r in profile.requests if r.request_id.startswith(own_id("")) and r.ended >= since]
    return json.dumps(chrome_trace(iterations, requests), separators=(",", ":")).encode()


async def _render(engine: Engine, chat: pb.ChatMessages) -> list[int]:
    if not chat.messages:
        raise InvalidRequest("chat", "at least one message is required")
    prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    messages, tools = convert.chat_messages(chat), convert.chat_tools(chat)
    return await engine.render_chat(messages, add_generation_prompt=prompt, tools=tools)
