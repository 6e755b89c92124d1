"""Client: the async client of `engine.v1.Engine` that `engine generate` and the tests use.

Requests are the protobuf messages themselves. A call that is dropped or cancelled aborts its request.
Errors are grpc.aio.AioRpcError; `describe` makes one line of one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc


class Client:
    """One channel to one server. Use with `async with`."""

    def __init__(self, address: str) -> None:
        # Prompt logprobs of a long prompt exceed grpc's default of 4 MiB.
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._stub: pb_grpc.EngineAsyncStub = pb_grpc.EngineStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def wait_serving(self, timeout: float | None = None) -> None:
        """Wait until the server is up and its engine serves. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            watch = self._health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)  # type: ignore[attr-defined]
            async for reply in watch:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    watch.cancel()
                    return

    def generate(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Start a request; iterate the call for its responses, `cancel()` it to abort."""
        return self._stub.Generate(request, timeout=timeout)

    async def abort(self, request_id: str) -> bool:
        """Whether a live request had that id."""
        return (await self._stub.Abort(pb.AbortRequest(request_id=request_id))).aborted

    async def info(self) -> pb.GetInfoResponse:
        """Facts about the model and its server."""
        return await self._stub.GetInfo(pb.GetInfoRequest())

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        reply = await self._stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens))
        return list(reply.token_ids)

    async def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation under the model's chat template."""
        return list((await self._stub.Tokenize(pb.TokenizeRequest(chat=chat(messages)))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        return (await self._stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))).text


def chat(messages: Sequence[Mapping[str, str]]) -> pb.ChatMessages:
    """`{"role", "content"}` mappings as the message that carries them."""
    return pb.ChatMessages(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line: status code and message."""
    return f"{error.code().name}: {error.details()}"
