"""HttpMetrics: how many calls each path of the API had, how they ended, how long they took.

Names and labels are those of prometheus-fastapi-instrumentator, which vLLM's server uses and its dashboards query.
Invariant: no label comes from a request: `handler` is a route, `status` a class such as 2xx.
Read next: `engine/observe/prometheus.py`.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.observe.counters import Histogram
from engine.observe.prometheus import histogram_family
from rpc.clock import Clock

STATUSES = ("2xx", "3xx", "4xx", "5xx")

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds in seconds; the last byte of a stream ends a call."""

CLIENT_GONE = 499
"""What counts for a client that left before an answer began; nginx' number for it."""


class HttpMetrics:
    """A collector for prometheus_client; `counted` wraps each path that counts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paths: list[_Path] = []

    def counted(self, method: str, path: str, app: ASGIApp) -> ASGIApp:
        """`app`, with its calls counted."""
        counts = _Path(method, path, app, self._clock)
        self._paths.append(counts)
        return counts

    def collect(self) -> Iterator[Metric]:
        """Both families."""
        labels = ("handler", "method")
        calls = CounterMetricFamily("http_requests", "Calls, by how they ended.", labels=(*labels, "status"))
        for path in self._paths:
            for status, count in path.ended.items():
                calls.add_metric((*path.labels, status), count)
        yield calls
        seconds = [(path.labels, path.seconds) for path in self._paths]
        yield histogram_family("http_request_duration_seconds", "From the headers to the last byte.", labels, seconds)


class _Path:
    """One path, as an ASGI app."""

    def __init__(self, method: str, path: str, app: ASGIApp, clock: Clock) -> None:
        self.labels = (path, method)
        self.ended = dict.fromkeys(STATUSES, 0)
        self.seconds = Histogram(BOUNDS)
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = self._clock.now(), CLIENT_GONE

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            self.ended[f"{status // 100}xx"] += 1
            self.seconds.observe(self._clock.now() - started)
