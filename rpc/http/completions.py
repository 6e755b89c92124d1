"""/v1/completions: text or token ids in, one or more continuations out, whole or as events.

Choice `p * n + i` is the i-th of prompt p, as OpenAI numbers them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request.outputs import Delta
from engine.request.params import SamplingParams
from rpc.errors import renamed
from rpc.http.endpoint import REQUEST_ID
from rpc.http.events import EventStream, Write
from rpc.http.fields import Fields
from rpc.http.large_json import LARGE, json_response
from rpc.http.logprobs import CompletionLogprobs, joined
from rpc.http.sampling import constraint_names, sampling_params
from rpc.http.service import Service
from rpc.http.usage import UsageOptions, usage_body
from rpc.outputs import Outputs

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as ids and, where it is echoed, as text."""

    token_ids: list[int]
    text: str = ""


async def completions(service: Service, fields: Fields) -> ASGIApp:
    """The endpoint's handler. Raises InvalidRequest."""
    engine = service.serving_engine(fields)
    if fields.raw("suffix") is not None:
        fields.refuse("suffix", "is not supported: models that fill in the middle are not served")
    echo, stream = fields.flag("echo"), fields.flag("stream")
    logprobs, max_tokens = fields.get("logprobs", int), fields.get("max_tokens", int)
    usage = UsageOptions.of(fields)
    call_id = f"cmpl-{REQUEST_ID.get()}"
    names = {"text": "prompt", "token_ids": "prompt", **constraint_names(fields)}
    with renamed(names):
        params = sampling_params(
            fields,
            engine.checkpoint.generation,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
        )
        prompts = [await _prompt(engine, fields, value, params, echo) for value in _prompt_values(fields)]
        await engine.compile_grammar(params)
        outputs = service.submit(call_id, [p.token_ids for p in prompts], params, fields, names)
    choices = [
        Choice(index, engine, prompt if echo else None, params)
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(params.n))
    ]
    head = {
        "id": call_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": engine.info.served_model_name,
    }
    answer = Completion(outputs, choices, head, usage)
    return EventStream(answer.stream) if stream else await json_response(await answer.whole())


def _prompt_values(fields: Fields) -> Sequence[str | list[int]]:
    prompt = fields.raw("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        fields.refuse("prompt", "must be a text, token ids, or a list of either; it is required and not empty")
    if type(prompt[0]) is int:
        return [_token_ids("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        fields.refuse("prompt", f"{len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    return [p if isinstance(p, str) else _token_ids(f"prompt[{i}]", p) for i, p in enumerate(prompt)]


def _token_ids(path: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise InvalidRequest(path, "must be a text or a list of token ids")
    return value


async def _prompt(engine: Engine, fields: Fields, value: str | list[int], params: SamplingParams, echo: bool) -> Prompt:
    await asyncio.sleep(0)  # steps of the engine go on between the prompts of a long list
    if isinstance(value, str):
        ids = await engine.tokenize(value, add_special_tokens=fields.flag("add_special_tokens", True))
    else:
        ids = value
    kept = ids if params.truncate_prompt_tokens is None else ids[-params.truncate_prompt_tokens :]
    if not echo:
        return Prompt(kept)
    is_whole = isinstance(value, str) and len(kept) == len(ids)
    return Prompt(kept, value if is_whole else await engine.detokenize(kept))  # type: ignore[arg-type]


class Choice:
    """One choice as it grows. With `prompt` it begins with that prompt."""

    def __init__(self, index: int, engine: Engine, prompt: Prompt | None, params: SamplingParams) -> None:
        self.index = index
        self._engine = engine
        self._prompt = prompt
        self._logprobs = None if params.logprobs is None else CompletionLogprobs()

    def piece(self, delta: Delta, prompt_logprobs: Sequence[Any] | None) -> dict[str, Any]:
        """What a delta adds, as a choice of a chunk."""
        text, logprobs, prompt = delta.text, [], self._prompt
        if prompt is not None:
            self._prompt, text = None, prompt.text + text
            if self._logprobs is not None:
                logprobs.append(self._logprobs.prompt(self._token_text(prompt.token_ids[0]), prompt_logprobs or ()))
        if self._logprobs is not None:
            logprobs.append(self._logprobs.piece(delta.logprobs or ()))
        return {
            "index": self.index,
            "text": text,
            "logprobs": joined(*logprobs) if logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token_id)


class Completion:
    """The answer to one call."""

    def __init__(self, outputs: Outputs, choices: list[Choice], head: dict[str, Any], usage: UsageOptions) -> None:
        self._outputs = outputs
        self._choices = choices
        self._head = head
        self._usage = usage
        self._prompt_logprobs: dict[int, Sequence[Any] | None] = {}

    async def stream(self, write: Write) -> None:
        """Send a chunk for every piece that says something."""
        async with self._outputs as outputs:
            while (piece := await self._next_piece()) is not None:
                if piece["text"] or piece["finish_reason"] or (piece["logprobs"] or {}).get("tokens"):
                    await write(self._usage.chunk(self._head, [piece]))
            await write(*self._usage.last_chunks(self._head, outputs))

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        pieces: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async with self._outputs as outputs:
            while (piece := await self._next_piece()) is not None:
                pieces[piece["index"]].append(piece)
            return {**self._head, "choices": [_whole(p) for p in pieces], "usage": usage_body(outputs.usage)}

    async def _next_piece(self) -> dict[str, Any] | None:
        read = await self._outputs.read()
        if read is None:
            return None
        index, delta = read
        if delta.prompt_logprobs is not None:  # they come once, for every choice of the prompt
            self._prompt_logprobs[index] = delta.prompt_logprobs
        per_prompt = len(self._choices) // len(self._outputs.streams)
        choice, prompt_logprobs = self._choices[index * per_prompt + delta.index], self._prompt_logprobs.get(index)
        if delta.prompt_logprobs is None or len(delta.prompt_logprobs) <= LARGE:
            return choice.piece(delta, prompt_logprobs)
        return await asyncio.to_thread(choice.piece, delta, prompt_logprobs)


def _whole(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    return {
        **pieces[-1],
        "text": "".join(piece["text"] for piece in pieces),
        "logprobs": joined(*logprobs) if logprobs else None,
    }
