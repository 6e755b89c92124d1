"""GrpcMetrics: how many calls each gRPC method had, and with which status they ended, refused ones included.

The name and labels are go-grpc-prometheus', which dashboards for gRPC servers query. Invariant: no label comes from a
request: methods are those that are served. Read next: `rpc/http/metrics.py`, the same for HTTP.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import grpc
from prometheus_client.core import CounterMetricFamily, Metric

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LABELS = ("grpc_service", "grpc_method", "grpc_code")


class GrpcMetrics(grpc.aio.ServerInterceptor):
    """A collector for prometheus_client. Belongs first: what the others refuse is counted, too."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, ...]] = Counter()

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        calls = CounterMetricFamily("grpc_server_handled", "gRPC calls, by how they ended.", labels=_LABELS)
        for labels, count in self._ended.items():
            calls.add_metric(labels, count)
        yield calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Called by grpc in the task that then runs the handler."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.strip("/").partition("/")
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def counted(request: Any, context: Context) -> Any:
            code = grpc.StatusCode.CANCELLED
            try:
                answer = await inner(request, context)
                code = grpc.StatusCode.OK
                return answer
            except Exception as error:
                code = _code(context) if isinstance(error, grpc.aio.AbortError) else grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._ended[service, method, _NAMES[code]] += 1

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        made: Handler = make(counted, handler.request_deserializer, handler.response_serializer)
        return made


def _code(context: Context) -> grpc.StatusCode:
    """The status that an abort has set; grpc.aio keeps its number."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else _BY_NUMBER[code]


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
_NAMES = {code: "OK" if code is grpc.StatusCode.OK else code.name.title().replace("_", "") for code in grpc.StatusCode}
"""As go-grpc-prometheus spells them: InvalidArgument."""
