"""EngineServicer: the five calls of `engine.v1.Engine`, each a thin path to the engine.

Invariants: a call that ends for any reason (client gone, deadline, error, shutdown) closes its output
stream, which aborts the request; nothing here blocks the loop, prompts are tokenised by the engine
off it; every error leaves through `rpc/errors.py`. Read next: `rpc/server.py`, `rpc/convert.py`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from engine.engine import Engine
from engine.errors import EngineStopped, InvalidRequest
from engine.stream import OutputStream
from rpc import convert
from rpc.errors import reported, within_deadline
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc

MAX_REQUEST_ID_CHARS = 256

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"


class EngineServicer(pb_grpc.EngineServicer):
    """Serves one engine, in whatever state it is; one that does not serve answers UNAVAILABLE."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no Generate call is live."""
        await self._idle.wait()

    # A coroutine that writes, not an async generator as the generated base has it: grpc.aio never
    # closes a generator it stops reading, so a cancelled call would keep its stream until collected.
    async def Generate(self, request: pb.GenerateRequest, context: GenerateContext) -> None:  # type: ignore[override]
        async with reported(context), within_deadline(context):
            with self._live():
                async with await self._submit(request) as stream:
                    await self._forward(stream, request, context)

    async def _submit(self, request: pb.GenerateRequest) -> OutputStream:
        engine = self._serving_engine()
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"longer than {MAX_REQUEST_ID_CHARS} characters")
        params = convert.sampling_params(request.sampling)
        token_ids = await self._prompt_token_ids(engine, request)
        return engine.generate(token_ids, params, request_id=request.request_id or None)

    async def _prompt_token_ids(self, engine: Engine, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await engine.tokenize(request.text)
            case "token_ids":
                return list(request.token_ids.ids)
            case "chat":
                return await _render(engine, request.chat)
        raise InvalidRequest("prompt", "one of text, token_ids and chat is required")

    async def _forward(self, stream: OutputStream, request: pb.GenerateRequest, context: GenerateContext) -> None:
        completion_tokens = cached_tokens = 0
        open_choices = request.sampling.n or 1
        async for delta in stream:
            response = pb.GenerateResponse(request_id=stream.request_id, deltas=[convert.delta_message(delta)])
            completion_tokens += len(delta.token_ids)
            cached_tokens = max(cached_tokens, delta.num_cached_tokens)
            open_choices -= delta.finish_reason is not None
            if open_choices == 0 and request.include_usage:
                response.usage.prompt_tokens = len(stream.prompt_token_ids)
                response.usage.completion_tokens = completion_tokens
                response.usage.cached_tokens = cached_tokens
            await context.write(response)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        async with reported(context):
            if not request.request_id:
                raise InvalidRequest("request_id", "is required")
            return pb.AbortResponse(aborted=self._loaded_engine().abort(request.request_id))

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[pb.GetInfoRequest, pb.GetInfoResponse]
    ) -> pb.GetInfoResponse:
        async with reported(context):
            info = self._loaded_engine().info
            return pb.GetInfoResponse(
                **{name: getattr(info, name) for name in pb.GetInfoResponse.DESCRIPTOR.fields_by_name}
            )

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        async with reported(context):
            engine = self._serving_engine()
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
            return pb.DetokenizeResponse(text=await self._serving_engine().detokenize(list(request.token_ids)))

    def _serving_engine(self) -> Engine:
        if self._engine.state != "serving":
            raise EngineStopped(f"the engine is {self._engine.state}")
        return self._engine

    def _loaded_engine(self) -> Engine:
        """Also while draining: live requests can be looked at and aborted until the end."""
        if self._engine.state == "starting":
            raise EngineStopped("the engine is starting")
        return self._engine

    @contextmanager
    def _live(self) -> Iterator[None]:
        self._live_streams += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._live_streams -= 1
            if self._live_streams == 0:
                self._idle.set()


async def _render(engine: Engine, chat: pb.ChatMessages) -> list[int]:
    if not chat.messages:
        raise InvalidRequest("chat", "at least one message is required")
    prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return await engine.render_chat(convert.chat_messages(chat), add_generation_prompt=prompt)
