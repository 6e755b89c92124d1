"""An engine whose answers are scripted, for the offline API; each request's channel is the real one."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Self, Unpack

import pytest

import engine.llm
from engine.config import EngineConfig
from engine.errors import EngineStopped, InvalidRequest, OverCapacity
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from engine.serving.stream import OutputChannel, OutputStream
from engine.text.chat import ChatOptions, Message
from engine.text.chat_renderer import ChatRenderer
from engine.text.tokenizer import TextTokenizer
from loader.generation import GenerationConfig
from tests.text import samples

CHAT = ChatRenderer(
    {
        "default": "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{{ tools | length if tools }}{{ x }}{% if add_generation_prompt %}>{% endif %}"
    },
    {},
)
Answer = Callable[["ScriptedEngine", OutputChannel, list[int]], None]


def echo(engine: "ScriptedEngine", channel: OutputChannel, prompt: list[int]) -> None:
    """Answer with the prompt's ids, one delta each, in later turns of the event loop."""
    for n, i in enumerate(prompt):
        finish: Any = "length" if n == len(prompt) - 1 else None
        engine.later(channel.push, Delta(0, f"<{i}>", (i,), finish_reason=finish, num_cached_tokens=7))


def hang(engine: "ScriptedEngine", channel: OutputChannel, prompt: list[int]) -> None:
    """Never answer."""


class ScriptedEngine:
    """Answers as `answer` says; refuses more live requests than its queue holds."""

    answer: ClassVar[Answer] = echo
    start_error: ClassVar[Exception | None] = None
    last: ClassVar["ScriptedEngine"]

    def __init__(self, config: EngineConfig) -> None:
        type(self).last = self
        self.config = config
        self.live: dict[str, OutputChannel] = {}
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.most_live = 0
        self.is_open = False
        self.resets = 0
        self.checkpoint = SimpleNamespace(generation=GenerationConfig())
        self.tokenizer: TextTokenizer | None = samples.byte_level()

    async def __aenter__(self) -> Self:
        if self.start_error is not None:
            raise self.start_error
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False
        for channel in list(self.live.values()):
            channel.fail(EngineStopped("the engine has stopped"))

    def later(self, callback: Callable[..., object], *args: object) -> None:
        asyncio.get_running_loop().call_soon(callback, *args)

    async def tokenize(self, text: str) -> list[int]:
        await asyncio.sleep(0)
        return [ord(c) for c in text]

    def chat_text(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        return CHAT.render(messages, **options)

    async def encode_chat(self, text: str) -> list[int]:
        return [1, *await self.tokenize(text)]

    async def compile_grammar(self, params: SamplingParams) -> None:
        pass

    def generate(self, prompt: str | Sequence[int], params: SamplingParams, *, cache_salt: str = "") -> OutputStream:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("prompt", "is empty")
        self.live = {k: c for k, c in self.live.items() if not c.ended}
        if len(self.live) >= self.config.max_queued_requests:
            raise OverCapacity("too many")
        name = f"r{len(self.submitted)}"
        self.submitted.append((ids, params))
        channel = self.live[name] = OutputChannel(params.n)
        self.most_live = max(self.most_live, len(self.live))
        self.answer(channel, ids)
        return OutputStream(name, ids, channel, self.abort)

    def abort(self, name: str) -> None:
        channel = self.live[name]
        for index in range(self.submitted[int(name[1:])][1].n):
            channel.push(Delta(index, "", (), finish_reason="abort"))

    @property
    def num_live(self) -> int:
        return sum(not c.ended for c in self.live.values())

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedEngine]:
    """What every LLM of the test runs."""

    class Engine(ScriptedEngine):
        pass

    monkeypatch.setattr(engine.llm, "Engine", Engine)
    return Engine
