"""BadMessages: a request that is not its method's message ends with INVALID_ARGUMENT, over every service of the server.

grpc.aio itself would end it with UNKNOWN, which clients take for a fault of the server, and log a traceback.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from engine.errors import InvalidRequest
from rpc.errors import abort

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class BadMessages(grpc.aio.ServerInterceptor):
    """Belongs last, next to the handlers: it takes their place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Called by grpc in the task that then runs the handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        parse, serialize = handler.request_deserializer, handler.response_serializer

        def decode(raw: bytes) -> Any:
            """Here there is no call to end yet."""
            try:
                return parse(raw)
            except DecodeError as error:
                return error

        if handler.request_streaming:

            async def answer(requests: Any, context: Context) -> None:
                decoded = (await _decoded(request, context) async for request in requests)
                async for response in handler.stream_stream(decoded, context):
                    await context.write(response)

            return grpc.stream_stream_rpc_method_handler(answer, decode, serialize)

        async def serve(request: Any, context: Context) -> Any:
            return await (handler.unary_stream or handler.unary_unary)(await _decoded(request, context), context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(serve, decode, serialize)
        return grpc.unary_unary_rpc_method_handler(serve, decode, serialize)


async def _decoded(request: Any, context: Context) -> Any:
    if isinstance(request, DecodeError):
        await abort(context, InvalidRequest("request", str(request)))
    return request
