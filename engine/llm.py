"""LLM: the engine offline, as a blocking call; names and results follow vLLM.

The engine runs on an event loop of its own in a background thread, so that `LLM` works in scripts,
in Jupyter (whose thread has a running loop) and from several threads at once. Invariants: no more
requests are in flight than the engine's queue holds, however many prompts a call has; whatever ends
a call early (an error, Ctrl-C), its other requests have left the engine when it returns.
Read next: `engine/engine.py`.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401 (its own exit hook must be there first, to run after LLM's)
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack, overload

import uvloop

from engine.config import EngineConfig, config_from_mapping
from engine.engine import Engine
from engine.errors import EngineStopped, InvalidRequest
from engine.request.outputs import CompletionOutput, Delta, RequestOutput
from engine.request.params import SamplingParams
from engine.serving.stream import OutputStream
from engine.text.chat import ChatOptions, Message
from engine.text.tokenizer import TextTokenizer
from loader.generation import SAMPLING_DEFAULTS

Prompt = str | Mapping[str, Any]
"""Text, or {"prompt": text}, or {"prompt_token_ids": ids}; a mapping may have a "cache_salt", too."""

T = TypeVar("T")


class LLM:
    """A model loaded for offline use; `close` (or `with`, or dropping it) gives its memory back."""

    def __init__(self, model: str, **config: Any) -> None:
        """Load the model; `config` are fields of EngineConfig.

        Raises ConfigError, loader.errors.CheckpointError or DeviceFault.
        """
        settings = config_from_mapping({"model": model, **config})
        self._thread = _EngineThread(settings)
        queue = settings.max_queued_requests
        self._slots = asyncio.Semaphore(min(queue, settings.max_queued_requests_per_tenant or queue))
        self._finalizer = weakref.finalize(self, self._thread.close)
        # At exit, before executors stop taking work: an engine that closes needs one. atexit would be too late.
        threading._register_atexit(self._finalizer)  # type: ignore[attr-defined]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        Args:
            sampling_params: one for all, or one for each; None is `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr, if that is a terminal.

        Raises:
            InvalidRequest: a prompt or its parameters can't be served; a note says which prompt.
                No other prompt's result is returned.
            EngineStopped: the LLM was closed.
            RequestFault, DeviceFault: the engine failed.
        """
        many = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._complete("prompts", [_prompt_of(i, p) for i, p in enumerate(many)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the chat template.

        Args:
            messages: `{"role", "content"}` mappings. A result's `prompt` is the rendered text.
            options: `add_generation_prompt`, `continue_final_message`, `tools`, `documents`, `chat_template`,
                `chat_template_kwargs`; engine.text.chat.ChatOptions says more.

        Raises what `generate` raises.
        """
        if not isinstance(messages, Sequence):
            raise InvalidRequest("messages", f"expected a list, found {type(messages).__name__}")
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self._complete("messages", [_Prompt(_Chat(each, options)) for each in many], sampling_params, use_tqdm)

    def _complete(
        self,
        field: str,
        prompts: "Sequence[_Prompt]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_of_each(
            field, len(prompts), self.get_default_sampling_params() if sampling_params is None else sampling_params
        )
        requests = [_Request(f"{field}[{i}]", *each) for i, each in enumerate(zip(prompts, params, strict=True))]
        with prompt_progress(len(requests), use_tqdm) as advance:
            return self._thread.run(lambda engine: _generate(engine, self._slots, requests, advance))

    @overload
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    @overload
    def encode(self, text: list[str], *, add_special_tokens: bool = True) -> list[list[int]]: ...

    def encode(self, text: str | list[str], *, add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each of several. Raises InvalidRequest when the model has no tokenizer."""
        tokenizer = self.get_tokenizer()
        if isinstance(text, str):
            return tokenizer.encode(text, add_special_tokens)
        return [tokenizer.encode(each, add_special_tokens) for each in text]

    def get_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. Raises InvalidRequest when it has none."""
        tokenizer = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("tokenizer", "the model has none")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's folder recommends (generation_config.json), vLLM's defaults elsewhere."""
        generation = self._thread.engine.checkpoint.generation
        found = {name: getattr(generation, name) for name in SAMPLING_DEFAULTS}
        return SamplingParams(**{name: value for name, value in found.items() if value is not None})

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; True if that was possible."""
        return self._thread.run(lambda engine: engine.reset_prefix_cache())

    def close(self) -> None:
        """Stop the engine and wait until it has; idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class _EngineThread:
    """An engine and its event loop in a daemon thread. Holds no reference to the LLM, which its finalizer needs."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._main: asyncio.Task[None]
        self._loop_runs = threading.Event()
        self._lock = threading.Lock()
        self._takes_jobs = True
        self._started: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(config,), name="engine", daemon=True)
        self._thread.start()
        self._loop_runs.wait()
        try:
            self.engine = self._started.result()
        except BaseException:
            self.close()
            raise

    def run(self, job: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait; if the wait is interrupted, cancel it and wait until it has ended."""
        result: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(job(self.engine)))
            tasks[0].add_done_callback(lambda task: _copy_outcome(task, result))

        def cancel() -> None:  # comes after start(), if that was scheduled at all
            if tasks:
                tasks[0].cancel()
            else:
                result.cancel()

        try:
            with self._lock:
                if self._takes_jobs:
                    self._loop.call_soon_threadsafe(start)
                else:
                    result.set_exception(EngineStopped("the LLM is closed"))
            return result.result()
        except BaseException:
            if not result.done():
                try:
                    self._loop.call_soon_threadsafe(cancel)
                except RuntimeError:  # the loop has closed since
                    result.cancel()
                wait([result])
            raise

    def close(self) -> None:
        """Stop the engine and end the thread; does not wait when a finalizer runs it in that very thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._main.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, config: EngineConfig) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._serve(config))

    async def _serve(self, config: EngineConfig) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        self._loop_runs.set()
        try:
            async with Engine(config) as engine:
                self._started.set_result(engine)
                await asyncio.Event().wait()  # until cancelled by close()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            with self._lock:
                self._takes_jobs = False
            await asyncio.sleep(0)  # jobs taken before that become tasks, which the runner cancels


def _copy_outcome(task: asyncio.Task[T], result: Future[T]) -> None:
    if task.cancelled():
        result.set_exception(EngineStopped("the LLM was closed"))
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


class _Chat(NamedTuple):
    messages: Sequence[Message]
    options: ChatOptions


class _Prompt(NamedTuple):
    content: str | list[int] | _Chat
    cache_salt: str = ""


class _Request(NamedTuple):
    name: str  # as the caller knows it
    prompt: _Prompt
    params: SamplingParams


async def _generate(
    engine: Engine, slots: asyncio.Semaphore, requests: Sequence[_Request], advance: Callable[[RequestOutput], None]
) -> list[RequestOutput]:
    """All requests, or the first error after every other request has ended."""

    def end(task: asyncio.Task[RequestOutput]) -> None:
        slots.release()
        if not task.cancelled() and task.exception() is None:
            advance(task.result())

    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        async with asyncio.TaskGroup() as group:
            # One after another: unseeded requests draw their seeds in the order of submission.
            for request in requests:
                text, stream = await _submit(engine, slots, request)
                tasks.append(group.create_task(_collect(stream, text)))
                tasks[-1].add_done_callback(end)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # here, where the group is not its context


async def _submit(engine: Engine, slots: asyncio.Semaphore, request: _Request) -> tuple[str | None, OutputStream]:
    """Queue a request as soon as a slot is free; the slot stays taken unless this fails."""
    await slots.acquire()
    try:
        text, token_ids = await _read(engine, request.prompt.content)
        await engine.compile_grammar(request.params)
        return text, engine.generate(token_ids, request.params, cache_salt=request.prompt.cache_salt)
    except BaseException as error:
        slots.release()
        error.add_note(f"in {request.name}")
        raise


async def _read(engine: Engine, prompt: str | list[int] | _Chat) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its ids."""
    if isinstance(prompt, _Chat):
        text = engine.chat_text(prompt.messages, **prompt.options)
        return text, await engine.encode_chat(text)
    if isinstance(prompt, str):
        return prompt, await engine.tokenize(prompt)
    return None, prompt


async def _collect(stream: OutputStream, text: str | None) -> RequestOutput:
    output = RequestOutput(stream.request_id, text, stream.prompt_token_ids, None, [])
    texts: dict[int, list[str]] = {}
    try:
        async for delta in stream:
            _add(output, texts, delta)
    except asyncio.CancelledError:  # which aborted the request
        async for _ in stream:  # until the engine has let go of it
            pass
        raise
    for choice in output.outputs:
        choice.text = "".join(texts[choice.index])
    return output


def _add(output: RequestOutput, texts: dict[int, list[str]], delta: Delta) -> None:
    if not output.outputs:
        output.num_cached_tokens = delta.num_cached_tokens
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = list(delta.prompt_logprobs)
    if delta.index not in texts:
        texts[delta.index] = []
        output.outputs.append(CompletionOutput(delta.index))
        output.outputs.sort(key=lambda choice: choice.index)
    choice = next(c for c in output.outputs if c.index == delta.index)
    texts[delta.index].append(delta.text)
    choice.token_ids += delta.token_ids
    if delta.cumulative_logprob is not None:
        choice.cumulative_logprob = delta.cumulative_logprob
    if delta.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + list(delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason


def _params_of_each(
    field: str, count: int, sampling_params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    params = [sampling_params] * count if isinstance(sampling_params, SamplingParams) else list(sampling_params)
    if len(params) != count:
        raise InvalidRequest("sampling_params", f"{len(params)} for {count} {field}; give one, or one for each")
    return params


def _prompt_of(i: int, prompt: Prompt) -> _Prompt:
    """Raises InvalidRequest."""
    if isinstance(prompt, str):
        return _Prompt(prompt)
    keys = sorted(prompt) if isinstance(prompt, Mapping) else None
    if keys is not None and isinstance(salt := prompt.get("cache_salt", ""), str):
        content = [key for key in keys if key != "cache_salt"]
        if content == ["prompt"] and isinstance(prompt["prompt"], str):
            return _Prompt(prompt["prompt"], salt)
        if content == ["prompt_token_ids"] and not isinstance(prompt["prompt_token_ids"], str):
            return _Prompt(list(prompt["prompt_token_ids"]), salt)
    found = f"keys {keys}" if keys is not None else type(prompt).__name__
    raise InvalidRequest(
        "prompts", f'[{i}]: expected a string, {{"prompt": string}} or {{"prompt_token_ids": list}}, found {found}'
    )


@contextmanager
def prompt_progress(
    total: int, show: bool, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[RequestOutput], None]]:
    """Yields what to call, from any thread, with each finished prompt. Silent when stderr is no terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda output: None
        return
    # rich takes 60 ms to import, for a bar that few calls show
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        *(TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("in {task.fields[speed_in]:.0f} tok/s, out {task.fields[speed_out]:.0f} tok/s"),
    )
    tokens_in = tokens_out = 0
    with Progress(*columns, console=Console(stderr=True), get_time=clock) as progress:
        bar = progress.add_task("", total=total, speed_in=0.0, speed_out=0.0)

        def advance(output: RequestOutput) -> None:
            nonlocal tokens_in, tokens_out
            tokens_in += len(output.prompt_token_ids)
            tokens_out += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = progress.tasks[bar].elapsed or 1e-9
            progress.update(bar, advance=1, speed_in=tokens_in / elapsed, speed_out=tokens_out / elapsed)

        yield advance
