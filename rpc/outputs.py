"""Outputs: what the requests of one call produce, one request per prompt, read as one; the same on every interface.

Use with `async with`: its end aborts whatever still runs. Invariant: while it is open the call is live, so
shutdown waits for it.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

from engine.request.outputs import Delta
from engine.serving.stream import OutputStream
from rpc.calls import Calls
from rpc.errors import renamed


class Usage(NamedTuple):
    """Tokens of a call, over all of its requests and choices.

    Attributes:
        cached_tokens: the part of the prompts that the prefix cache served.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Outputs:
    """Streams of requests that have been submitted.

    Attributes:
        streams: one per prompt, in the order of the prompts.
    """

    def __init__(
        self, streams: Iterable[OutputStream], calls: Calls, names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`names` are the caller's, by the engine's, of fields that it may find wrong on the way."""
        self.streams = tuple(streams)
        self._calls = calls
        self._names = names
        self._stack = ExitStack()
        self._reads: dict[asyncio.Task[Delta | None], int] = {}
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(self.streams)

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._calls.live())
        if len(self.streams) > 1:
            for index in range(len(self.streams)):
                self._read_later(index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            for read in self._reads:
                if not read.cancel() and not read.cancelled():
                    read.exception()  # nobody will, and asyncio would complain of it
            for stream in self.streams:
                await stream.aclose()
                self._calls.pace.request_ended()

    async def read(self) -> tuple[int, Delta] | None:
        """The next delta and the index of its prompt; None when every request has ended. Raises EngineError."""
        with renamed(self._names):
            if len(self.streams) == 1:
                delta, index = await self.streams[0].read(self._calls.turnstile.enter), 0
            else:
                delta, index = await self._read_any()
        if delta is None:
            return None
        self._completion_tokens += len(delta.token_ids)
        self._cached_tokens[index] = max(self._cached_tokens[index], delta.num_cached_tokens)
        return index, delta

    async def _read_any(self) -> tuple[Delta | None, int]:
        while self._reads:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            read = done.pop()
            index = self._reads.pop(read)
            if (delta := read.result()) is not None:
                self._read_later(index)
                return delta, index
        return None, 0

    def _read_later(self, index: int) -> None:
        read = self.streams[index].read(self._calls.turnstile.enter)
        self._reads[asyncio.create_task(read)] = index

    @property
    def usage(self) -> Usage:
        """Of what has been read."""
        prompt_tokens = sum(len(s.prompt_token_ids) for s in self.streams)
        return Usage(prompt_tokens, self._completion_tokens, sum(self._cached_tokens))
