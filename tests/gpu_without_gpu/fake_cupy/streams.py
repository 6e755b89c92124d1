"""Streams, events and graphs that do nothing until something waits for them.

    push      appends work to a stream
    wait      runs a stream up to some point, after what that work depends on

So a missing synchronisation is seen: the host reads poison, a kernel reads what nobody has written yet. `progress`
"eager" shows the opposite mistakes: buffers overwritten while the host still reads them.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from types import TracebackType

from tests.gpu_without_gpu.fake_cupy.device import CUDARuntimeError, gpu

Work = Callable[[], None]
_POINTERS = itertools.count(0x1000, 0x10)
_local = threading.local()
_random = random.Random(0)


class Stream:
    """As `cupy.cuda.Stream`. `non_blocking=False` orders it with the null stream, as CUDA does."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int = 0) -> None:
        if ptds:
            raise NotImplementedError("the double has no per-thread default stream")
        self.ptr = 0 if null else next(_POINTERS)
        self.non_blocking = non_blocking
        self._queue: list[Work] = []
        self._pushed = self._ran = 0
        self.capture: Capture | None = None
        STREAMS[self.ptr] = self

    # ---- queueing

    def push(self, work: Work) -> None:
        with gpu().lock:
            if self.capture is not None:
                self.capture.add(self, work)
                return
            self._wait_for_legacy_order()
            self._append(work)

    def _append(self, work: Work) -> None:
        self._queue.append(work)
        self._pushed += 1
        progress = gpu().settings.progress
        if progress == "eager" or (progress == "random" and _random.random() < 0.5):
            self.run_to(self._pushed)

    def _wait_for_legacy_order(self) -> None:
        """The null stream waits for all blocking streams, and they for it."""
        others = [Stream.null] if self.ptr else [s for s in STREAMS.values() if s.ptr]
        if self.non_blocking:
            return
        for other in others:
            if not other.non_blocking and other._pushed > other._ran:
                point = other._pushed
                self._append(lambda other=other, point=point: other.run_to(point))  # type: ignore[misc]

    def run_to(self, point: int) -> None:
        with gpu().lock:
            while self._ran < point:
                gpu().check()
                work = self._queue.pop(0)
                self._ran += 1
                try:
                    work()
                except BaseException as error:
                    gpu().fault = error
                    raise
            gpu().check()

    # ---- CuPy's surface

    def synchronize(self) -> None:
        with gpu().lock:
            if self.capture is not None:
                raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
            self.run_to(self._pushed)

    @property
    def done(self) -> bool:
        """Each query lets one piece of work happen: a GPU makes progress while it is polled."""
        with gpu().lock:
            self.run_to(min(self._pushed, self._ran + 1))
            return self._ran == self._pushed

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        with gpu().lock:
            event.mark(self, self._pushed)
            event.captured_in = self.capture
        return event

    def wait_event(self, event: Event) -> None:
        with gpu().lock:
            stream, point = event.stream, event.point
            if stream is None:
                return
            if event.captured_in is not None and not event.captured_in.ended:
                event.captured_in.waits(self, stream)
            elif stream is not self:
                self.push(lambda: stream.run_to(point))

    def begin_capture(self, mode: object = None) -> None:
        if not self.ptr:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        self.capture = Capture(self)

    def end_capture(self) -> Graph:
        if self.capture is None:
            raise CUDARuntimeError("cudaErrorIllegalState")
        return self.capture.end(self)

    def is_capturing(self) -> bool:
        return self.capture is not None

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _stack().pop()

    def use(self) -> Stream:
        _stack()[-1] = self
        return self


class Event:
    """As `cupy.cuda.Event`. One that was never recorded counts as done."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.disable_timing = disable_timing
        self.stream: Stream | None = None
        self.point = 0
        self.captured_in: Capture | None = None
        self.ptr = next(_POINTERS)

    def mark(self, stream: Stream, point: int) -> None:
        self.stream, self.point, self.captured_in = stream, point, None

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record(self)

    def synchronize(self) -> None:
        if self.captured_in is not None:
            raise CUDARuntimeError("cudaErrorCapturedEvent")
        if self.stream is not None:
            self.stream.run_to(self.point)

    @property
    def done(self) -> bool:
        if self.stream is None:
            return True
        with gpu().lock:
            self.stream.run_to(min(self.point, self.stream._ran + 1))
            return self.stream._ran >= self.point


class Capture:
    """Work recorded instead of queued, from one stream and those that waited for its events."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.work: list[Work] = []
        self.ended = False
        self._unjoined: set[Stream] = set()  # forked streams with work that the origin has not waited for

    def add(self, stream: Stream, work: Work) -> None:
        self.work.append(work)
        if stream is not self.origin:
            self._unjoined.add(stream)

    def waits(self, stream: Stream, recorded_on: Stream) -> None:
        """`stream` waits for an event that `recorded_on` has recorded in this capture."""
        if stream is self.origin:
            self._unjoined.discard(recorded_on)
        else:
            stream.capture = self

    def end(self, stream: Stream) -> Graph:
        if stream is not self.origin:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnmatched")
        if self._unjoined:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")
        self.ended = True
        for other in STREAMS.values():
            if other.capture is self:
                other.capture = None
        return Graph(self.work)


class Graph:
    """As `cupy.cuda.Graph`: the captured work, with the scalars it was captured with."""

    def __init__(self, work: list[Work]) -> None:
        self._work = tuple(work)

    def launch(self, stream: Stream | None = None) -> None:
        target = stream or current_stream()
        for work in self._work:
            target.push(work)

    def upload(self, stream: Stream | None = None) -> None:
        """Nothing to do."""


STREAMS: dict[int, Stream] = {}
Stream.null = Stream(null=True)


def _stack() -> list[Stream]:
    if not hasattr(_local, "stack"):
        _local.stack = [Stream.null]
    return _local.stack


def current_stream() -> Stream:
    return _stack()[-1]


def stream_of(pointer: int) -> Stream:
    return STREAMS[pointer]


def device_synchronize() -> None:
    for stream in list(STREAMS.values()):
        stream.synchronize()


def elapsed_ms(start: Event, end: Event) -> float:
    """As `cupy.cuda.get_elapsed_time`, in a world where every piece of work takes a millisecond."""
    if start.disable_timing or end.disable_timing:
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle")
    if not (start.done and end.done):
        raise CUDARuntimeError("cudaErrorNotReady")
    return float(end.point - start.point) if start.stream is end.stream else 1.0


def reset(seed: int) -> None:
    """Forget all streams but the null stream, and everything queued."""
    _random.seed(seed)
    STREAMS.clear()
    Stream.null.__init__(null=True)  # type: ignore[misc]
