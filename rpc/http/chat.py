"""/v1/chat/completions: a conversation in, the next message out, whole or as events.

A choice's message is made of OpenAI's deltas in both cases; the whole one is their sum.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from engine.engine import Engine
from engine.request.outputs import Delta, FinishReason
from engine.text.tools import TextDelta, ToolCallArguments, ToolCallStart, ToolEvent
from rpc.errors import renamed
from rpc.http.endpoint import REQUEST_ID
from rpc.http.events import EventStream, Write
from rpc.http.fields import Fields
from rpc.http.large_json import json_response
from rpc.http.logprobs import chat_logprobs
from rpc.http.sampling import constraint_names, sampling_params
from rpc.http.service import Service
from rpc.http.tools import Tools, tools_of
from rpc.http.usage import UsageOptions, usage_body
from rpc.outputs import Outputs

_ENGINE_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}


async def chat_completions(service: Service, fields: Fields) -> ASGIApp:
    """The endpoint's handler. Raises InvalidRequest."""
    engine = service.serving_engine(fields)
    tools = tools_of(fields, service.tool_format, allow_auto=service.options.enable_auto_tool_choice)
    num_top = _top_logprobs(fields)
    usage, stream = UsageOptions.of(fields), fields.flag("stream")
    limit = "max_tokens" if fields.raw("max_completion_tokens") is None else "max_completion_tokens"
    names = {**_ENGINE_NAMES, "max_tokens": limit, **constraint_names(fields)}
    if tools.constraint is not None:
        names |= {"structured_outputs.json": "tools", "structured_outputs.grammar": "tools"}
    with renamed(names):
        params = sampling_params(
            fields,
            engine.checkpoint.generation,
            max_tokens=fields.get(limit, int),
            logprobs=num_top,
            constraint=tools.constraint,
            skip_special_tokens=not tools.reads_markers,
        )
    prompt = await render(engine, fields, tools.schemas)
    call_id = f"chatcmpl-{REQUEST_ID.get()}"
    with renamed(names):
        await engine.compile_grammar(params)
        outputs = service.submit(call_id, [prompt], params, fields, names)
    head = {
        "id": call_id,
        "object": "chat.completion.chunk" if stream else "chat.completion",
        "created": int(time.time()),
        "model": engine.info.served_model_name,
    }
    answer = ChatCompletion(outputs, [Choice(i, tools, num_top) for i in range(params.n)], head, usage)
    return EventStream(answer.stream) if stream else await json_response(await answer.whole())


async def render(engine: Engine, fields: Fields, tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
    """The conversation as token ids. Raises InvalidRequest."""
    messages = [_message(message) for message in fields.children("messages") or ()]
    if not messages:
        fields.refuse("messages", "at least one message is required")
    if fields.raw("chat_template") is not None:
        fields.refuse("chat_template", "is the model's; a template is a program, and none is taken from a request")
    documents = fields.children("documents")
    extra = fields.child("chat_template_kwargs")
    return await engine.render_chat(
        messages,
        add_generation_prompt=fields.flag("add_generation_prompt", True),
        continue_final_message=fields.flag("continue_final_message"),
        tools=tools,
        documents=None if documents is None else [d.as_dict() for d in documents],
        chat_template_kwargs=None if extra is None else extra.as_dict(),
    )


def _message(message: Fields) -> dict[str, Any]:
    """A message as templates take it: arguments of tool calls as mappings, where OpenAI has JSON text."""
    values = dict(message.as_dict())
    message.get("role", str)
    calls = message.children("tool_calls")
    if calls:
        values["tool_calls"] = [_tool_call(call) for call in calls]
    return values


def _tool_call(call: Fields) -> dict[str, Any]:
    """Arguments that are not JSON, as `max_tokens` may have left them, go to the template as the text they are."""
    function = call.child("function")
    if function is None:
        call.refuse("function", "is required")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {**call.as_dict(), "function": {**function.as_dict(), "arguments": arguments}}


def _top_logprobs(fields: Fields) -> int | None:
    """How many alternatives to report per token, None for no logprobs."""
    wanted, num_top = fields.flag("logprobs"), fields.get("top_logprobs", int)
    if num_top and not wanted:
        fields.refuse("top_logprobs", "needs logprobs")
    return (num_top or 0) if wanted else None


class Choice:
    """One choice's message as it grows."""

    def __init__(self, index: int, tools: Tools, num_top: int | None) -> None:
        self._index = index
        self._tools = tools
        self._parser = None if tools.make_parser is None else tools.make_parser()
        self._num_top = num_top
        self._has_begun = False
        self._has_calls = False

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What the engine's delta adds, as choices of chunks."""
        messages: list[dict[str, Any]] = [] if self._has_begun else [{"role": "assistant", "content": ""}]
        self._has_begun = True
        messages += self._messages(delta)
        if not messages and (delta.logprobs or delta.finish_reason):
            messages = [{}]
        chunks = [self._chunk(message) for message in messages]
        if delta.logprobs and self._num_top is not None:
            chunks[-1]["logprobs"] = {"content": chat_logprobs(delta.logprobs, self._num_top)}
        if delta.finish_reason is not None:
            chunks[-1] |= {"finish_reason": self._finish_reason(delta.finish_reason), "stop_reason": delta.stop_reason}
        return chunks

    def _chunk(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": message, "logprobs": None, "finish_reason": None}

    def _messages(self, delta: Delta) -> list[dict[str, Any]]:
        if self._parser is None:
            return [{"content": delta.text}] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        return [self._message(event) for event in events if not self._is_dropped(event)]

    def _is_dropped(self, event: ToolEvent) -> bool:
        return self._tools.one_call and not isinstance(event, TextDelta) and event.index > 0

    def _message(self, event: ToolEvent) -> dict[str, Any]:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ToolCallStart(index, name):
                self._has_calls = True
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
                return {"tool_calls": [call]}
            case ToolCallArguments(index, fragment):
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}

    def _finish_reason(self, reason: FinishReason) -> str:
        is_call = reason == "stop" and self._has_calls and self._tools.ends_in_calls
        return "tool_calls" if is_call else reason


class ChatCompletion:
    """The answer to one call."""

    def __init__(self, outputs: Outputs, choices: list[Choice], head: dict[str, Any], usage: UsageOptions) -> None:
        self._outputs = outputs
        self._choices = choices
        self._head = head
        self._usage = usage

    async def stream(self, write: Write) -> None:
        """Send every chunk."""
        async with self._outputs as outputs:
            while (read := await outputs.read()) is not None:
                chunks = self._choices[read[1].index].chunks(read[1])
                await write(*(self._usage.chunk(self._head, [chunk]) for chunk in chunks))
            await write(*self._usage.last_chunks(self._head, outputs))

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        chunks: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async with self._outputs as outputs:
            while (read := await outputs.read()) is not None:
                chunks[read[1].index] += self._choices[read[1].index].chunks(read[1])
            return {**self._head, "choices": [_whole(c) for c in chunks], "usage": usage_body(outputs.usage)}


def _whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice's chunks as one choice with a message."""
    deltas = [chunk["delta"] for chunk in chunks]
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            index, function = call["index"], call["function"]
            whole = calls.setdefault(index, {**call, "function": {**function, "arguments": ""}})
            whole["function"]["arguments"] += function["arguments"]
    text = "".join(delta.get("content", "") for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    if calls:
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls.values()]
    logprobs = [position for chunk in chunks if chunk["logprobs"] for position in chunk["logprobs"]["content"]]
    return {
        "index": chunks[-1]["index"],
        "message": message,
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1].get("stop_reason"),
    }
