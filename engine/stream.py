"""OutputStream and its channel: how results leave the loop, and how their reader cancels.

The loop pushes into an `OutputChannel` and never waits: what a slow reader has not taken yet
merges, bounded by the request's own max_tokens. The reader holds an `OutputStream`. Leaving its
`async for` early, `aclose`, the end of `async with`, cancellation of the reading task and dropping
the object all abort the request. Read next: `engine/loop.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from engine.errors import EngineError
from engine.request import Delta, FinishReason


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


class OutputChannel:
    """One writer (the loop), one reader; ends with the last delta of every choice or with an error.

    Attributes:
        finish_reason: of the choice that ended last; "error" after an error; None while none has ended.
    """

    def __init__(self, num_choices: int = 1) -> None:
        self.finish_reason: FinishReason | None = None
        self._num_open = num_choices
        self._deltas: list[Delta] = []
        self._error: EngineError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """The writer has said its last word; it may not have been read yet."""
        return self._ended

    def push(self, delta: Delta) -> None:
        """Add a delta; one with a finish reason is the last of its choice."""
        if self._ended:
            return
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self._num_open -= 1
            self._ended = self._num_open == 0
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End with an error, after what was pushed before."""
        if not self._ended:
            self._ended = True
            self.finish_reason = "error"
            self._error = error
            self._wake()

    async def get(self) -> Delta | None:
        """What was pushed for one choice since it was last read, as one delta; None at the end.

        Raises the writer's error.
        """
        while not self._deltas:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index = self._deltas[0].index
        of_choice = [d for d in self._deltas if d.index == index]
        self._deltas = [d for d in self._deltas if d.index != index]
        return merge(of_choice)

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

    async def read(self) -> Delta | None:
        """The next delta, None at the end; cancellation of the reader aborts the request."""
        try:
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
