"""/v1/chat/completions: bodies as OpenAI publishes them, and what reaches the engine."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.grammar.calls import calls_grammar
from engine.request.outputs import Logprob
from engine.request.params import SamplingParams
from engine.text.tool_formats import TOOL_FORMATS
from rpc.options import ServerOptions
from tests.rpc.http.conftest import Http, HttpServing
from tests.rpc.http.stream import all_events

PATH = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "$defs": {"City": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": WEATHER["function"]["parameters"],
    "time": {"type": "object", "properties": {}},
}
ALLOWED = "tool_choice.allowed_tools"


async def post(http: Http, **body: Any) -> tuple[asyncio.Task[Any], Any]:
    """A call that has reached the engine."""
    call = asyncio.create_task(http.client.post(PATH, json=HELLO | body))
    return call, await http.next_request()


async def test_the_whole_answer(http: Http) -> None:
    call, request = await post(http)
    assert "".join(map(chr, request.prompt)) == "<user>hi<assistant>"
    assert request.params == SamplingParams(max_tokens=None)
    request.push("Hel", [1, 2], num_cached_tokens=16)
    request.finish("lo", [3], stop_reason=7)
    answer = await call
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert body.pop("id") == f"chatcmpl-{answer.headers['x-request-id']}"
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 7,
            }
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 3,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }
    ChatCompletion.model_validate(answer.json())


async def test_the_streamed_answer(http: Http) -> None:
    call, request = await post(http, stream=True, stream_options={"include_usage": True})
    request.push("", [1])  # half a character
    request.push("Hé", [2])
    request.finish("llo", [3], finish_reason="length")
    answer = await call
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = await all_events(answer)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert (chunk["object"], chunk["id"]) == ("chat.completion.chunk", f"chatcmpl-{answer.headers['x-request-id']}")
    *with_choices, last = chunks
    assert with_choices[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in with_choices) == "Héllo"
    assert [chunk["choices"][0]["finish_reason"] for chunk in with_choices] == [None] * (len(with_choices) - 1) + [
        "length"
    ]
    assert all(chunk["usage"] is None for chunk in with_choices)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 22


async def test_without_stream_options_no_chunk_has_usage(http: Http) -> None:
    call, request = await post(http, stream=True)
    request.finish("x", [1])
    assert all("usage" not in chunk for chunk in (await all_events(await call))[:-1])


async def test_choices_are_told_apart(http: Http) -> None:
    call, request = await post(http, n=2)
    request.push("a", [1], index=1)
    request.push("x", [1], index=0)
    request.finish("y", [2], index=0)
    request.finish("b", [2], index=1)
    choices = (await call).json()["choices"]
    assert [(c["index"], c["message"]["content"]) for c in choices] == [(0, "xy"), (1, "ab")]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(http: Http, stream: bool) -> None:
    call, request = await post(http, logprobs=True, top_logprobs=2, stream=stream)
    assert request.params.logprobs == 2
    e_acute, a_token = ("é", "é".encode()), ("a", b"a")
    position = {
        5: Logprob(-3.0, 9, *e_acute),
        6: Logprob(-0.5, 1, *a_token),
        7: Logprob(-1.0, 2, "\ufffd", b"\xc3"),  # a part of a character has bytes of its own
    }
    request.push("é", [5], logprobs=(position,))
    request.finish("a", [6], logprobs=({6: Logprob(-0.25, 1, *a_token), 5: Logprob(-2.0, 2, *e_acute)},))
    answer = await call
    bodies = (await all_events(answer))[:-1] if stream else [answer.json()]
    choices = [body["choices"][0] for body in bodies]
    content = [position for choice in choices if choice["logprobs"] for position in choice["logprobs"]["content"]]
    a, e = {"token": "a", "bytes": [97]}, {"token": "é", "bytes": [195, 169]}
    assert content == [
        {
            **e,
            "logprob": -3.0,
            "top_logprobs": [{**a, "logprob": -0.5}, {"token": "\ufffd", "logprob": -1.0, "bytes": [195]}],
        },
        {**a, "logprob": -0.25, "top_logprobs": [{**a, "logprob": -0.25}, {**e, "logprob": -2.0}]},
    ]


async def test_the_newer_limit_goes_before_the_older(http: Http) -> None:
    for body, limit in (({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 6}, 6), ({}, None)):
        call, request = await post(http, **body)
        assert request.params.max_tokens == limit
        request.finish()
        await call


async def test_what_the_template_sees(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"city": "Rome"}
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "c"},
    ]
    seen = []

    async def render_chat(messages: Any, **options: Any) -> list[int]:
        seen.append((messages, options))
        return [1]

    monkeypatch.setattr(http.engine, "render_chat", render_chat)
    call, request = await post(
        http, messages=messages, tools=[TIME], tool_choice="none", chat_template_kwargs={"enable_thinking": False}
    )
    request.finish()
    await call
    ((rendered, options),) = seen
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert rendered[2] == messages[2]
    assert options["tools"] is None and options["chat_template_kwargs"] == {"enable_thinking": False}


# -- tools ----------------------------------------------------------------------------------


@pytest.fixture
async def hermes(http_serving: HttpServing) -> Any:
    async with http_serving(tool_call_parser="hermes") as http:
        yield http


def tool_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """Calls put together from chunks as OpenAI's guide shows it."""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function" and call["index"] not in calls
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    return [(name, arguments) for _, (name, arguments) in sorted(calls.items())]


TWO_CALLS = (
    "Let me see. <tool_call>\n",
    '{"name": "weather", "arguments": {"ci',
    'ty": "Rome"}}\n</tool_call>\n<tool_call>{"name": "time", ',
    '"arguments": {}}</tool_call>',
)


async def test_the_model_may_call_tools(hermes: Http) -> None:
    call, request = await post(hermes, tools=[WEATHER, TIME])
    assert hermes.engine.chat_options["tools"] == [WEATHER, TIME]
    assert request.params.structured_outputs is None
    assert not request.params.skip_special_tokens  # a marker may be one
    for text in TWO_CALLS[:-1]:
        request.push(text, [1])
    request.finish(TWO_CALLS[-1], [1])
    answer = ChatCompletion.model_validate((await call).json())
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("weather", {"city": "Rome"}),
        ("time", {}),
    ]
    assert len({c.id for c in calls}) == 2


async def test_arguments_stream_as_they_come(hermes: Http) -> None:
    call, request = await post(hermes, tools=[WEATHER, TIME], stream=True)
    for text in TWO_CALLS[:-1]:
        request.push(text, [1])
        await asyncio.sleep(0)
    request.finish(TWO_CALLS[-1], [1])
    *chunks, done = await all_events(await call)
    assert done == "[DONE]"
    assert tool_calls(chunks) == [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Let me see."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_at_a_time(hermes: Http) -> None:
    call, request = await post(hermes, tools=[WEATHER, TIME], parallel_tool_calls=False)
    request.finish("".join(TWO_CALLS), [1])
    message = (await call).json()["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]


async def test_an_answer_without_a_call_is_text(hermes: Http) -> None:
    call, request = await post(hermes, tools=[TIME])
    request.finish("No need.", [1])
    choice = (await call).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "No need."} and choice["finish_reason"] == "stop"


async def test_required_calls_are_a_constraint(http: Http) -> None:
    call, request = await post(http, tools=[WEATHER, TIME], tool_choice="required", stream=True)
    wanted = request.params.structured_outputs
    assert wanted == calls_grammar(TOOL_FORMATS["llama3_json"], FUNCTIONS, several=True)
    request.push('{"name": "weather", "param', [1])
    request.finish('eters": {"city": "Rome"}}; {"name": "time", "parameters": {}}', [1])
    chunks = (await all_events(await call))[:-1]
    assert tool_calls(chunks) == [("weather", '{"city": "Rome"}'), ("time", "{}")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_required_call_in_the_models_own_format(hermes: Http) -> None:
    call, request = await post(hermes, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    wanted = request.params.structured_outputs
    assert wanted == calls_grammar(TOOL_FORMATS["hermes"], FUNCTIONS, several=False)
    request.finish('<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', [1])
    assert (await call).json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "time"


@pytest.mark.parametrize("mode", ["required", "auto"])
async def test_allowed_tools(hermes: Http, mode: str) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    call, request = await post(hermes, tools=[WEATHER, TIME], tool_choice=choice)
    only_time = calls_grammar(TOOL_FORMATS["hermes"], {"time": FUNCTIONS["time"]}, several=True)
    assert request.params.structured_outputs == (only_time if mode == "required" else None)
    request.finish("".join(TWO_CALLS), [1])
    message = (await call).json()["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["time"]
    assert '"name": "weather"' in message["content"]


async def test_a_response_format_leaves_calls_possible(hermes: Http) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    call, request = await post(hermes, tools=[WEATHER, TIME], response_format=wanted)
    otherwise = {"type": "array"}
    expected = calls_grammar(TOOL_FORMATS["hermes"], FUNCTIONS, several=True, otherwise=otherwise)
    assert request.params.structured_outputs == expected
    request.finish("[1]", [1])
    assert (await call).json()["choices"][0]["message"]["content"] == "[1]"


async def test_a_call_that_was_cut_off_may_come_back(http: Http) -> None:
    cut = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}}
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "tool_calls": [cut]},
        {"role": "user", "content": "?"},
    ]
    call, request = await post(http, messages=messages)
    request.finish("ok", [1])
    assert (await call).status_code == 200


async def test_a_named_function_is_its_arguments(http: Http) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    call, request = await post(http, tools=[WEATHER, TIME], tool_choice=choice, stream=True)
    assert json.loads(request.params.structured_outputs.json) == WEATHER["function"]["parameters"]
    request.push('{"city"', [1])
    request.finish(': "Rome"}', [1])
    chunks = (await all_events(await call))[:-1]
    assert tool_calls(chunks) == [("weather", '{"city": "Rome"}')]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TIME]}, "tool_choice"),  # the model's format is not known
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"function": {"name": "nope"}}}, "tool_choice.function.name"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, ALLOWED + ".mode"),
        (
            {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            ALLOWED + ".tools",
        ),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_tools_that_cannot_be(shared_http: Http, body: dict[str, Any], param: str) -> None:
    assert (await shared_http.refusal(PATH, **HELLO | body))[:2] == (400, param)


async def test_auto_can_be_switched_off(http_serving: HttpServing) -> None:
    async with http_serving(tool_call_parser="hermes", enable_auto_tool_choice=False) as http:
        status, param, message = await http.refusal(PATH, **HELLO, tools=[TIME])
        assert (status, param) == (400, "tool_choice") and "--no-enable-auto-tool-choice" in message


def test_the_flag_offers_the_formats_there_are() -> None:
    from engine.config import kinds_of
    from engine.text.tool_formats import TOOL_PARSERS

    assert kinds_of(ServerOptions)["tool_call_parser"].choices == ("auto", *TOOL_PARSERS)
