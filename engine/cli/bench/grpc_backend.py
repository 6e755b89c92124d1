"""gRPC as a way for `engine bench` to send a load. Read next: `engine/cli/bench/load.py`."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from engine.cli.bench.load import Answer, BackendError, Target
from engine.cli.bench.workload import PlannedRequest
from rpc.client import Client, describe
from rpc.proto.engine.v1 import engine_pb2 as pb

_ENDED_EARLY = {pb.FINISH_REASON_ABORT: "abort", pb.FINISH_REASON_ERROR: "error"}


class GrpcBackend:
    """One channel to one server. Use with `async with`."""

    def __init__(self, connect: Callable[[], Client], model: str | None, sampling: pb.SamplingParams) -> None:
        """`sampling` goes into every request; `model` is who should answer."""
        self._connect = connect
        self._model = model
        self._sampling = sampling

    async def __aenter__(self) -> Self:
        self._client = await self._connect().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def target(self) -> Target:
        """The server's model. Raises BackendError."""
        try:
            info = await self._client.info()
        except grpc.aio.AioRpcError as error:
            raise BackendError(describe(error)) from error
        if self._model not in (None, info.served_model_name, info.model):
            raise BackendError(f"model: {self._model!r} is not served there; {info.served_model_name} is")
        facts = {"device": info.device, "dtype": info.dtype, "engine": info.version}
        return Target(info.served_model_name, info.vocab_size, info.max_model_len, facts)

    async def prepare(self, request: PlannedRequest) -> pb.GenerateRequest:
        """The message."""
        message = pb.GenerateRequest(sampling=self._sampling, include_usage=True)
        message.sampling.max_tokens = request.output_len
        message.token_ids.ids.extend(request.prompt)
        return message

    async def send(self, prepared: pb.GenerateRequest, answer: Answer) -> None:
        """Read a stream to its end. Raises BackendError."""
        try:
            async for response in self._client.generate(prepared):
                for delta in response.deltas:
                    if delta.token_ids:
                        answer.came()
                        answer.output_tokens += len(delta.token_ids)
                    if delta.finish_reason in _ENDED_EARLY:
                        raise BackendError(f"the answer ended early: {_ENDED_EARLY[delta.finish_reason]}")
        except grpc.aio.AioRpcError as error:
            raise BackendError(describe(error)) from error
