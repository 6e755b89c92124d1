"""The offline API over an engine whose answers are scripted; each request's channel is the real one."""

import asyncio
import gc
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import pytest

import engine.llm
from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.errors import ConfigError, DeviceFault, EngineStopped, InvalidRequest, OverCapacity, RequestFault
from engine.progress import prompt_progress
from engine.request import CompletionOutput, Delta, Logprob, RequestOutput
from engine.stream import OutputChannel, OutputStream
from engine.text.chat import ChatOptions, ChatTemplate, Message, render_chat
from engine.text.tokenizer import TextTokenizer
from tests.text import samples

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{{ tools | length if tools }}{{ x }}"
    "{% if add_generation_prompt %}>{% endif %}",
    {},
)
Answer = Callable[["ScriptedEngine", OutputChannel, list[int]], None]


def echo(engine: "ScriptedEngine", channel: OutputChannel, prompt: list[int]) -> None:
    """Answer with the prompt's ids, one delta each, in later turns of the event loop."""
    for n, i in enumerate(prompt):
        finish = "length" if n == len(prompt) - 1 else None
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
        return render_chat(TEMPLATE, {}, messages, **options)

    async def encode_chat(self, text: str) -> list[int]:
        return [1, *await self.tokenize(text)]

    async def compile_grammar(self, params: SamplingParams) -> None:
        pass

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> OutputStream:
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


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedEngine]:
    class Engine(ScriptedEngine):
        pass

    monkeypatch.setattr(engine.llm, "Engine", Engine)
    return Engine


def test_results_come_in_order_with_everything_the_deltas_said(scripted: type[ScriptedEngine]) -> None:
    top = {5: Logprob(-0.5, 1, "x")}

    def answer(_: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        first = Delta(0, "a", (5,), (top,), prompt_logprobs=(None, top), num_cached_tokens=16, cumulative_logprob=-0.5)
        channel.push(first)
        channel.push(Delta(0, "b", (6, 7), (top, top), "stop", "c", cumulative_logprob=-1.5))

    scripted.answer = answer
    with LLM(model="m") as llm:
        (out,) = llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(logprobs=0, prompt_logprobs=0))
    assert out == RequestOutput(
        request_id="r0",
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=[None, top],
        outputs=[CompletionOutput(0, "ab", [5, 6, 7], [top] * 3, -1.5, "stop", "c")],
        num_cached_tokens=16,
    )


def test_choices_come_by_index(scripted: type[ScriptedEngine]) -> None:
    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        deltas = [Delta(1, "x", (1,)), Delta(0, "a", (3,)), Delta(1, "y", (2,)), Delta(0, "b", (4,), None, "stop")]
        for delta in (*deltas, Delta(1, "", (), None, "length")):
            engine.later(channel.push, delta)

    scripted.answer = answer
    with LLM(model="m") as llm:
        (out,) = llm.generate("p", SamplingParams(n=2))
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in out.outputs] == [
        (0, "ab", [3, 4], "stop"),
        (1, "xy", [1, 2], "length"),
    ]


def test_prompts_of_every_kind(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        outs = llm.generate(["ab", {"prompt": "c"}, {"prompt_token_ids": (100, 101)}])
        (alone,) = llm.generate("xyz")
        assert llm.generate([]) == []
    assert [(o.prompt, o.prompt_token_ids, o.outputs[0].text) for o in outs] == [
        ("ab", [97, 98], "<97><98>"),
        ("c", [99], "<99>"),
        (None, [100, 101], "<100><101>"),
    ]
    assert (alone.prompt, alone.outputs[0].token_ids, alone.outputs[0].finish_reason) == (
        "xyz",
        [120, 121, 122],
        "length",
    )
    assert (alone.num_cached_tokens, alone.prompt_logprobs, alone.outputs[0].logprobs) == (7, None, None)


def test_parameters_for_all_or_one_each(scripted: type[ScriptedEngine]) -> None:
    one, two = SamplingParams(temperature=0), SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        llm.generate(["a", "b"])
        llm.generate(["c", "d"], one)
        llm.generate(["e", "f"], [one, two])
        with pytest.raises(InvalidRequest, match="sampling_params: 1 for 2 prompts"):
            llm.generate(["g", "h"], [one])
    assert [p for _, p in scripted.last.submitted] == [SamplingParams(), SamplingParams(), one, one, one, two]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (5, "found int"),
        ({"prompt": 5}, r"found keys \['prompt'\]"),
        ({"prompt_token_ids": "12"}, "found keys"),
        ({"prompt": "a", "prompt_token_ids": [1]}, r"found keys \['prompt', 'prompt_token_ids'\]"),
        ([1, 2], "found list"),
    ],
)
def test_malformed_prompts_are_refused_before_anything_runs(
    scripted: type[ScriptedEngine], prompt: Any, found: str
) -> None:
    with LLM(model="m") as llm, pytest.raises(InvalidRequest, match=rf"prompts: \[1\]: expected .*{found}"):
        llm.generate(["a", prompt])
    assert scripted.last.submitted == []


USER = {"role": "user", "content": "ab"}


def test_chat_of_one_conversation(scripted: type[ScriptedEngine]) -> None:
    params = SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        (out,) = llm.chat([{"role": "system", "content": "S"}, USER], params)
    assert (out.prompt, out.prompt_token_ids) == ("sSuab>", [1, *map(ord, "sSuab>")])
    assert scripted.last.submitted == [(out.prompt_token_ids, params)]
    assert out.outputs[0].text == "<1><115><83><117><97><98><62>"


def test_chat_of_several_conversations(scripted: type[ScriptedEngine]) -> None:
    one, two = SamplingParams(temperature=0), SamplingParams(max_tokens=3)
    with LLM(model="m") as llm:
        outs = llm.chat(
            [[USER], [USER, {"role": "assistant", "content": "c"}]], [one, two], add_generation_prompt=False
        )
        assert llm.chat([]) == []
        with pytest.raises(InvalidRequest, match="sampling_params: 1 for 2 messages"):
            llm.chat([[USER], [USER]], [one])
    assert [o.prompt for o in outs] == ["uab", "uabac"]
    assert [p for _, p in scripted.last.submitted] == [one, two]


def test_chat_options_reach_the_template(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        (tools,) = llm.chat([USER], tools=[{}, {}], chat_template_kwargs={"x": "!"})
        (template,) = llm.chat([USER], chat_template="{{ messages[0].role }}")
        (more,) = llm.chat([USER], add_generation_prompt=False, continue_final_message=True, tools=[{}])
    assert (tools.prompt, template.prompt, more.prompt) == ("uab2!>", "user", "uab")


@pytest.mark.parametrize(
    ("messages", "says", "note"),
    [
        ([{"role": "user"}], "content", "in messages[0]"),
        ([[USER], [{"content": "x"}]], "role", "in messages[1]"),
        ([[USER], "hi"], "non-empty list", "in messages[1]"),
        ([[USER], []], "non-empty list", "in messages[1]"),
    ],
    ids=str,
)
def test_malformed_conversations_are_refused_by_place(
    scripted: type[ScriptedEngine], messages: Any, says: str, note: str
) -> None:
    with LLM(model="m") as llm:
        with pytest.raises(InvalidRequest, match=f"messages: .*{says}") as caught:
            llm.chat(messages)
        assert caught.value.__notes__ == [note]
        assert scripted.last.num_live == 0
        with pytest.raises(InvalidRequest, match="messages: expected a list, found int"):
            llm.chat(5)  # type: ignore[arg-type]


def test_encode(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        ids = samples.byte_level().encode("Hello world!")
        assert llm.encode("Hello world!") == ids
        assert llm.encode(["Hello world!", ""]) == [ids, []]
        assert llm.get_tokenizer().decode(ids) == "Hello world!"
        scripted.last.tokenizer = samples.metaspace()
        assert [len(llm.encode("Hello", add_special_tokens=add)) for add in (True, False)] == [2, 1]
        with pytest.raises(InvalidRequest, match="prompt: expected str, found int"):
            llm.encode([5])  # type: ignore[list-item]
        scripted.last.tokenizer = None
        with pytest.raises(InvalidRequest, match="tokenizer: the model has none"):
            llm.encode("a")


def test_more_prompts_than_the_queue_holds(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=3) as llm:
        outs = llm.generate([{"prompt_token_ids": [i, i, i]} for i in range(50)])
    assert [o.outputs[0].token_ids for o in outs] == [[i, i, i] for i in range(50)]
    assert [ids[0] for ids, _ in scripted.last.submitted] == list(range(50))
    assert scripted.last.most_live == 3


def test_the_bound_of_a_tenant_counts_as_well(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=9, max_queued_requests_per_tenant=2) as llm:
        llm.generate([{"prompt_token_ids": [i]} for i in range(20)])
    assert scripted.last.most_live == 2


def test_calls_from_several_threads_share_the_queue(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=2) as llm:
        results: dict[str, list[RequestOutput]] = {}
        threads = [threading.Thread(target=lambda c=c: results.update({c: llm.generate([c * 3] * 20)})) for c in "abc"]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert {c: [o.prompt for o in outs] for c, outs in results.items()} == {c: [c * 3] * 20 for c in "abc"}


def test_failing_prompt_raises_after_the_others_are_aborted(scripted: type[ScriptedEngine]) -> None:
    cause = OSError("broken pipe")

    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        if prompt == [2]:
            error = RequestFault("no finite logits")
            error.__cause__ = cause
            engine.later(channel.fail, error)

    scripted.answer = answer
    with LLM(model="m", max_queued_requests=3) as llm:
        with pytest.raises(RequestFault, match="no finite logits") as caught:
            llm.generate([{"prompt_token_ids": [i]} for i in range(5)])
        assert caught.value.__cause__ is cause
        assert scripted.last.num_live == 0
        assert len(scripted.last.submitted) == 3
        scripted.answer = echo
        assert len(llm.generate(["a"] * 3)) == 3  # every slot came back


def test_refused_prompt_raises_after_the_others_are_aborted(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m", max_queued_requests=3) as llm:
        for n in range(1, 5):  # more often than there are slots
            scripted.answer = hang
            with pytest.raises(InvalidRequest, match="prompt: is empty") as caught:
                llm.generate(["a", "b", "", "c"])
            assert caught.value.__notes__ == ["in prompts[2]"]
            assert scripted.last.num_live == 0
            assert len(scripted.last.submitted) == 2 * n
        scripted.answer = echo
        assert len(llm.generate(["a"] * 4)) == 4


def test_interrupt_aborts_everything(scripted: type[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = threading.Event()

    class Interrupted(Future[Any]):
        """The wait of a call that Ctrl-C interrupts. (A real signal is lost if it comes just before the wait.)"""

        def result(self, timeout: float | None = None) -> Any:
            submitted.wait()
            raise KeyboardInterrupt

    def answer(engine: ScriptedEngine, channel: OutputChannel, prompt: list[int]) -> None:
        if len(engine.submitted) == 4:
            submitted.set()

    scripted.answer = answer
    with LLM(model="m", max_queued_requests=4) as llm:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine.llm, "Future", Interrupted)
            llm.generate(["a"] * 6)
        assert scripted.last.num_live == 0
        assert len(scripted.last.submitted) == 4
        scripted.answer = echo
        assert len(llm.generate(["a"] * 6)) == 6


async def test_works_where_a_loop_is_running_as_in_jupyter() -> None:
    with LLM(model="m") as llm:
        assert llm.generate("ab")[0].outputs[0].text == "<97><98>"


def test_reset_prefix_cache(scripted: type[ScriptedEngine]) -> None:
    with LLM(model="m") as llm:
        assert llm.reset_prefix_cache() is True
    assert scripted.last.resets == 1


def test_close_ends_the_engine_and_its_thread(scripted: type[ScriptedEngine]) -> None:
    llm = LLM(model="m")
    thread = llm._thread._thread
    assert scripted.last.is_open
    llm.close()
    llm.close()
    assert not scripted.last.is_open
    assert not thread.is_alive()
    with pytest.raises(EngineStopped, match="closed"):
        llm.generate("a")


def test_close_while_another_thread_generates(scripted: type[ScriptedEngine]) -> None:
    submitted = threading.Event()
    scripted.answer = lambda *_: submitted.set()
    llm = LLM(model="m")
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate("a")
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=generate)
    other.start()
    submitted.wait()
    llm.close()
    other.join()
    assert [type(e) for e in errors] == [EngineStopped]


def test_dropping_the_llm_closes_it(scripted: type[ScriptedEngine]) -> None:
    llm = LLM(model="m")
    thread = llm._thread._thread
    llm.generate("a")
    del llm
    gc.collect()
    assert not scripted.last.is_open
    assert not thread.is_alive()


GOLDEN = Path(__file__).parent / "golden" / "llama"
ROOT = Path(__file__).parent.parent


def run_script(folder: Path, code: str) -> tuple[int, str, str]:
    """A user's script in `folder`, run from a working directory that has an engine/ of its own."""
    (folder / "script").mkdir()
    (folder / "script" / "main.py").write_text(code)
    (folder / "work" / "engine").mkdir(parents=True)
    (folder / "work" / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')")
    done = subprocess.run(
        [sys.executable, folder / "script" / "main.py"],
        cwd=folder / "work", env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_exit_without_close_closes_the_engine(tmp_path: Path) -> None:
    code = """
import engine.llm

class Engine:
    def __init__(self, config): pass
    async def __aenter__(self): return self
    async def __aexit__(self, *_): print("closed")

engine.llm.Engine = Engine
llm = engine.llm.LLM(model="m")
"""
    assert run_script(tmp_path, code) == (0, "closed\n", "")


def test_exit_without_close_ends_the_cpu_worker(tmp_path: Path) -> None:
    code = f"""
from engine import LLM, SamplingParams
llm = LLM(model={str(GOLDEN)!r}, device="cpu", max_model_len=64, kv_cache_memory_bytes=1 << 20, cpu_threads=1)
print(len(llm.generate({{"prompt_token_ids": [1, 2]}}, SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
"""
    assert run_script(tmp_path, code) == (0, "3\n", "")


def test_error_at_start_is_raised_and_leaves_no_thread(scripted: type[ScriptedEngine]) -> None:
    scripted.start_error = DeviceFault("no memory")
    before = threading.active_count()
    with pytest.raises(DeviceFault, match="no memory"):
        LLM(model="m")
    assert threading.active_count() == before


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory"):
        LLM(model="m", gpu_memory=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal(scripted: type[ScriptedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with LLM(model="m") as llm:
        llm.generate(["a", "b"], use_tqdm=False)
        assert screen.getvalue() == ""
        llm.generate(["a", "b"])
        assert "2/2" in screen.getvalue()
        assert "tok/s" in screen.getvalue()
        llm.chat([[{"role": "user", "content": "a"}]] * 3)
        assert "3/3" in screen.getvalue()


def test_no_progress_bar_elsewhere(scripted: type[ScriptedEngine], capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model="m") as llm:
        llm.generate(["a", "b"], use_tqdm=True)
    assert capsys.readouterr() == ("", "")


def test_speeds_on_the_progress_bar_are_tokens_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    now = 100.0
    output = RequestOutput("r", None, [1] * 30, None, [CompletionOutput(i, token_ids=[1] * 5) for i in range(2)])
    with prompt_progress(1, show=True, clock=lambda: now) as advance:
        now += 2.0
        advance(output)
    assert "in 15 tok/s, out 5 tok/s" in screen.getvalue()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine; names = set(sys.modules); "
        "assert not names & {'asyncio', 'numpy', 'tokenizers', 'jinja2', 'grpc', 'uvloop'}, names; "
        "assert not any(n.startswith('engine.') for n in names); "
        "from engine import EngineConfig, SamplingParams; assert 'uvloop' not in sys.modules; "
        "assert {'LLM', 'Engine', '__version__'} <= set(dir(engine)); print(engine.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        engine.LMM  # noqa: B018
