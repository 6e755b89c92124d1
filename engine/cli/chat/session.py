"""`engine chat`: a conversation with a running server.

Every turn sends the whole conversation; the server's prefix cache recognizes what it has seen. The loop is
synchronous, and each answer one run of the event loop, so that Ctrl-C ends an answer and not the session.
Read next: `engine/cli/chat/conversation.py`, `engine/cli/chat/screen.py`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from engine.cli.chat.conversation import Conversation, Quit
from engine.cli.chat.screen import Answer, Screen
from rpc.client import Client, chat, describe
from rpc.proto.engine.v1 import engine_pb2 as pb


def run_chat(connect: Callable[[], Client], sampling: pb.SamplingParams, system: str | None) -> None:
    """Chat until the user leaves. Raises ClickException when the server can't be reached."""

    async def open_client() -> Client:
        return await connect().__aenter__()  # a channel belongs to the loop that runs when it is made

    with asyncio.Runner() as runner:
        client = runner.run(open_client())
        try:
            Session(runner, client, sampling, Conversation(system), Screen()).run()
        finally:
            runner.run(client.__aexit__(None, None, None))


@dataclass(slots=True)
class Numbers:
    """Measurements of one answer."""

    started: float
    first: float | None = None
    last: float = 0.0
    usage: pb.Usage | None = None
    is_cut: bool = False

    def line(self) -> str:
        """Cached and prompt tokens, time to the first token and speed after it."""
        if self.usage is None or self.first is None:
            return "no answer"
        prompt, made = self.usage.prompt_tokens, self.usage.completion_tokens
        parts = [f"{prompt} prompt tokens, {self.usage.cached_tokens} cached", f"{made} tokens"]
        parts.append(f"first after {self.first - self.started:.2f} s")
        if made > 1 and self.last > self.first:
            parts.append(f"{(made - 1) / (self.last - self.first):.1f} tok/s")
        if self.is_cut:
            parts.append("cut at the longest allowed (--max-tokens, or the model's limit)")
        return " · ".join(parts)


class Session:
    """The loop: read a line, run a command or ask, show the answer."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: Client,
        sampling: pb.SamplingParams,
        conversation: Conversation,
        screen: Screen,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._client = client
        self._sampling = sampling
        self._conversation = conversation
        self._screen = screen
        self._clock = clock

    def run(self) -> None:
        """Until the user leaves."""
        info = self._runner.run(self._client.info())
        self._screen.note(f"{info.served_model_name} on {info.device}, at most {info.max_model_len} tokens; /help")
        while True:
            try:
                line = self._screen.read()
            except EOFError:
                self._screen.new_line()
                return
            except KeyboardInterrupt:
                self._screen.new_line()
                continue
            try:
                self._take(line)
            except Quit:
                return

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        reply = self._conversation.command(line)
        if reply is not None:
            self._screen.note(reply)
            return
        numbers = Numbers(self._clock())
        answer = Answer()
        try:
            with self._screen.answer() as answer:
                self._runner.run(self._ask(line, answer, numbers))
        except KeyboardInterrupt:
            self._conversation.answer(line, answer.text)
            self._screen.note("stopped")
        except grpc.aio.AioRpcError as error:
            self._screen.error(describe(error))
        else:
            self._conversation.answer(line, answer.text)
            self._screen.note(numbers.line())

    async def _ask(self, line: str, answer: Answer, numbers: Numbers) -> None:
        messages = chat(self._conversation.ask(line))
        request = pb.GenerateRequest(chat=messages, sampling=self._sampling, include_usage=True)
        call = self._client.generate(request)
        try:
            async for response in call:
                for delta in response.deltas:
                    if delta.token_ids:
                        numbers.last = self._clock()
                        numbers.first = numbers.first or numbers.last
                    answer.add(delta.text)
                    numbers.is_cut |= delta.finish_reason == pb.FINISH_REASON_LENGTH
                if response.HasField("usage"):
                    numbers.usage = response.usage
        finally:
            call.cancel()  # of no effect on a call that has ended
