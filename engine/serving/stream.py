"""OutputStream and its channel: how results leave the loop, and how their reader cancels.

The loop pushes into an `OutputChannel` and never waits: what a slow reader has not taken yet
merges, bounded by the request's own max_tokens. A delta read has at most `MERGE_TOKENS` ids (more
only where the engine made them at once, as beam search does), so that with logprobs it stays well
below the 4 MiB that gRPC clients accept by default. The reader holds an `OutputStream`. Leaving its
`async for` early, `aclose`, the end of `async with`, cancellation of the reading task and dropping
the object all abort the request. Read next: `engine/loop.py`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from engine.errors import EngineError
from engine.request.outputs import Delta, FinishReason

MERGE_TOKENS = 512


def merge(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one choice."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    has_logprobs = any(d.logprobs is not None for d in deltas)
    return Delta(
        index=first.index,
        text="".join(d.text for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        logprobs=tuple(m for d in deltas for m in d.logprobs or ()) if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        cumulative_logprob=last.cumulative_logprob,
    )


class _Pending:
    """What one choice has for the reader: deltas, and behind them the bare tokens, made into a delta when read.

    A token costs its step two appends (0.1 us) where a Delta of its own takes 1.2 us and merging it as much.
    """

    __slots__ = ("begun", "deltas", "ids", "num_cached_tokens", "num_in_deltas", "texts")

    def __init__(self) -> None:
        self.deltas: deque[Delta] = deque()
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.num_cached_tokens = 0
        self.num_in_deltas = 0
        self.begun = False

    @property
    def num_tokens(self) -> int:
        return self.num_in_deltas + len(self.ids)

    def add(self, delta: Delta) -> None:
        while self.ids:
            self._append(self._bare(delta.index, MERGE_TOKENS))
        self._append(delta)
        self.num_cached_tokens = delta.num_cached_tokens

    def _append(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.num_in_deltas += len(delta.token_ids)

    def is_ready(self, interval: int) -> bool:
        if not self.deltas and not self.ids:
            return False
        return not self.begun or self.num_tokens >= interval or self._has_ended

    @property
    def _has_ended(self) -> bool:
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    def take(self, index: int) -> Delta:
        taken, size = list[Delta](), 0
        while self.deltas and (not taken or size + len(self.deltas[0].token_ids) <= MERGE_TOKENS):
            size += len(self.deltas[0].token_ids)
            taken.append(self.deltas.popleft())
        self.num_in_deltas -= size
        if self.ids and not self.deltas and size < MERGE_TOKENS:
            taken.append(self._bare(index, MERGE_TOKENS - size))
        self.begun = True
        return merge(taken)

    def _bare(self, index: int, limit: int) -> Delta:
        text, ids = "".join(self.texts[:limit]), tuple(self.ids[:limit])
        del self.texts[:limit], self.ids[:limit]
        return Delta(index, text, ids, num_cached_tokens=self.num_cached_tokens)


class OutputChannel:
    """One writer (the loop), one reader; ends with the last delta of every choice or with an error.

    The reader gets a choice's first tokens at once, then `interval` tokens or more at a time, and what
    is left when the choice or the channel ends.

    Attributes:
        finish_reason: of the choice that ended last; "error" after an error; None while none has ended.
    """

    def __init__(self, num_choices: int = 1, interval: int = 1) -> None:
        self.finish_reason: FinishReason | None = None
        self._num_open = num_choices
        self._interval = interval
        self._pending: dict[int, _Pending] = {}
        self._error: EngineError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """The writer has said its last word; it may not have been read yet."""
        return self._ended

    @property
    def num_pending_tokens(self) -> int:
        """Tokens pushed and not read yet."""
        return sum(p.num_tokens for p in self._pending.values())

    def push(self, delta: Delta) -> None:
        """Add a delta; one with a finish reason is the last of its choice."""
        if self._ended:
            return
        pending = self._pending.get(delta.index)
        if pending is None:
            pending = self._pending[delta.index] = _Pending()
        pending.add(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._num_open -= 1
            self._ended = self._num_open == 0
        if pending.is_ready(self._interval):
            self._wake()

    def plain_sink(self, index: int, text_of: Callable[[int], str]) -> Callable[[int], None]:
        """What adds a token that has nothing but its text to a choice that has had a delta and has not ended.

        Made once for a choice: a token costs its step one call of it and one of `text_of`.
        """
        pending = self._pending[index]
        add_text, add_id = pending.texts.append, pending.ids.append

        def push(token_id: int) -> None:
            add_text(text_of(token_id))
            add_id(token_id)
            if self._waiter is not None and pending.is_ready(self._interval):
                self._wake()

        return push

    @property
    def error(self) -> EngineError | None:
        """What it ended with, if that was an error."""
        return self._error

    def fail(self, error: EngineError) -> None:
        """End with an error, after what was pushed before."""
        if not self._ended:
            self._ended = True
            self.finish_reason = "error"
            self._error = error
            self._wake()

    async def wait(self) -> None:
        """Wait until `get` has an answer."""
        while self._next_ready() is None and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def get(self) -> Delta | None:
        """What is ready of one choice, as one delta; the choices take turns. None at the end.

        Raises the writer's error.
        """
        await self.wait()
        index = self._next_ready()
        if index is None:
            if self._error is not None:
                raise self._error
            return None
        pending = self._pending.pop(index)
        self._pending[index] = pending
        return pending.take(index)

    def _next_ready(self) -> int | None:
        interval = 0 if self._ended else self._interval
        return next((i for i, p in self._pending.items() if p.is_ready(interval)), None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputStream:
    """The reader's end of one request.

    Attributes:
        request_id: names the request in `Engine.abort`.
        prompt_token_ids: the prompt as the model sees it.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], channel: OutputChannel, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._channel = channel
        self._abort = abort

    def cancel(self) -> None:
        """Abort the request unless it has ended. Callable from any thread, more than once."""
        if not self._channel.ended:
            self._abort(self.request_id)

    def __aiter__(self) -> "OutputIterator":
        return OutputIterator(self)

    async def read(self, gate: Callable[[], Awaitable[object]] | None = None) -> Delta | None:
        """The next delta, None at the end; cancellation of the reader aborts the request.

        `gate` is awaited when there is something to read: what comes until it opens is in the delta, too.
        """
        try:
            if gate is not None:
                await self._channel.wait()
                await gate()
            return await self._channel.get()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self.cancel()


class OutputIterator:
    """What `async for` holds: leaving the loop drops it, although the stream still has a name."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._stream.read()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def __del__(self) -> None:
        self._stream.cancel()
