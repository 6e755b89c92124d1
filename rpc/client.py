"""Client: the async client of `engine.v1.Engine` that `engine generate` and the tests use.

Requests are the protobuf messages themselves. A call that is dropped or cancelled aborts its request.
Errors are grpc.aio.AioRpcError; `describe` makes one line of one, `retry_delay` reads when to try again.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from engine.network import is_loopback
from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc


class Client:
    """One channel to one server. Use with `async with`."""

    def __init__(
        self, address: str, *, api_key: str | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`api_key` goes with every call, as its bearer token; `credentials` turn TLS on (see `rpc.tls`)."""
        options = [("grpc.max_receive_message_length", -1)]  # ids of a long text exceed grpc's default of 4 MiB
        if is_loopback(address):
            options.append(("grpc.enable_http_proxy", 0))
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options)
        self._stub: pb_grpc.EngineAsyncStub = pb_grpc.EngineStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

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

    async def health(self, *, timeout: float | None = None) -> str:
        """Name of the server's status: SERVING, or NOT_SERVING while it loads, drains or stands still."""
        reply = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)  # type: ignore[attr-defined]
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def generate(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Start a request; iterate the call for its responses, `cancel()` it to abort."""
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata)

    async def abort(self, request_id: str) -> bool:
        """Whether a live request had that id."""
        return (await self._stub.Abort(pb.AbortRequest(request_id=request_id), metadata=self._metadata)).aborted

    async def info(self) -> pb.GetInfoResponse:
        """Facts about the model and its server."""
        return await self._stub.GetInfo(pb.GetInfoRequest(), metadata=self._metadata)

    async def stats(self) -> pb.Stats:
        """The engine's numbers now."""
        return await self._stub.GetStats(pb.GetStatsRequest(), metadata=self._metadata)

    def stream_stats(self, interval: float) -> grpc.aio.UnaryStreamCall[pb.StreamStatsRequest, pb.Stats]:
        """The numbers every `interval` seconds, until the call is cancelled."""
        return self._stub.StreamStats(pb.StreamStatsRequest(interval_seconds=interval), metadata=self._metadata)

    async def start_profile(self) -> None:
        """Have the engine record every iteration and request."""
        await self._stub.StartProfile(pb.StartProfileRequest(), metadata=self._metadata)

    async def stop_profile(self, max_iterations: int = 0) -> bytes:
        """End the recording; a Chrome trace as JSON, of the latest iterations (0 leaves the number to the server)."""
        call = self._stub.StopProfile(pb.StopProfileRequest(max_iterations=max_iterations), metadata=self._metadata)
        return b"".join([piece.trace_json async for piece in call])

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._stub.Tokenize(request, metadata=self._metadata)).token_ids)

    async def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation under the model's chat template."""
        request = pb.TokenizeRequest(chat=chat(messages))
        return list((await self._stub.Tokenize(request, metadata=self._metadata)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return (await self._stub.Detokenize(request, metadata=self._metadata)).text


def chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> pb.ChatMessages:
    """`{"role", "content"}` mappings, and what belongs to tools, as the message that carries them."""
    return pb.ChatMessages(messages=map(_chat_message, messages), tools=json.dumps(tools) if tools else "")


def _chat_message(message: Mapping[str, Any]) -> pb.ChatMessage:
    calls = message.get("tool_calls")
    return pb.ChatMessage(**{**message, "tool_calls": json.dumps(calls) if calls else ""})


def describe(error: grpc.aio.AioRpcError, address: str = "") -> str:
    """One line: status code and message, and the address where no server of ours is there."""
    details = error.details() or ""
    at = f" at {address}" if address else ""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        if "Connection refused" in details:
            return f"UNAVAILABLE: no server answers{at}; `engine serve MODEL` starts one, --address names another"
        if "http1" in details.lower():
            return f"UNAVAILABLE: what answers{at} speaks HTTP, not gRPC; `engine serve` prints both addresses"
        return f"UNAVAILABLE: the server{at}: {details}"
    return f"{error.code().name}: {details}"


def retry_delay(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds after which the server expects to have room again, where it says so."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.ToMilliseconds() / 1000)
    return None
