"""OpenAI's own client against `engine serve`."""

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel

from rpc.client import Client
from tests.clients.conftest import GOLDEN_FILE, MODEL, Addresses

QUESTION: Any = [{"role": "user", "content": "What is gravity?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
async def client(demo_server: Addresses) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.http}/v1", api_key="none is asked for", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == MODEL
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another/model")


async def test_chat_whole_and_streamed_agree(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = await client.chat.completions.create(**asked)
    text, finish, usage = "", None, None
    async for chunk in await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    choice = whole.choices[0]
    assert "Gravity" in text and text == choice.message.content
    assert finish == choice.finish_reason == "length"
    assert usage is not None and whole.usage is not None and whole.usage.completion_tokens == 24
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16  # whole blocks


async def test_a_completion_of_ids_is_the_golden_one(client: openai.AsyncOpenAI) -> None:
    prompts = [GOLDEN_FILE[f"prompt_{k}"].tolist() for k in range(3)]
    answer = await client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=24)
    greedy = [GOLDEN_FILE[f"greedy_{k}"][:24].tolist() for k in range(3)]
    for choice, ids in zip(answer.choices, greedy, strict=True):
        written: Any = await client.post("/../detokenize", body={"tokens": ids}, cast_to=object)
        assert choice.text == written["prompt"]


@pytest.mark.parametrize("k", range(5))
async def test_echo_scores_a_prompt_as_the_golden_model_does(client: openai.AsyncOpenAI, k: int) -> None:
    text = str(GOLDEN_FILE[f"text_{k}"])
    answer = await client.completions.create(model=MODEL, prompt=text, echo=True, logprobs=0, max_tokens=0)
    choice: Any = answer.choices[0]
    assert choice.text == text == "".join(choice.logprobs.tokens)
    first, *rest = choice.logprobs.token_logprobs
    assert first is None
    assert np.abs(np.array(rest) - GOLDEN_FILE[f"prompt_logprobs_{k}"]).max() < 0.02
    for start, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert text.startswith(token, start)


async def test_chat_logprobs_are_ordered_and_begin_with_the_greedy_token(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content: Any = answer.choices[0].logprobs.content
    assert "".join(position.token for position in content) == answer.choices[0].message.content
    for position in content:
        values = [token.logprob for token in position.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 3
        assert position.top_logprobs[0].token == position.token
        assert bytes(position.bytes).decode() == position.token


async def test_a_stop_string_and_a_seed(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "max_tokens": 40, "seed": 7}
    first, again = [await client.chat.completions.create(**asked) for _ in range(2)]
    text = first.choices[0].message.content
    assert text == again.choices[0].message.content
    stop = text.split()[4]
    cut = await client.chat.completions.create(**asked, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


# -- constraints ----------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    age: int


async def test_an_answer_is_parsed_into_a_type(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Make up a person."}],
        response_format=Person,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


async def test_a_schema_holds_while_streaming(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    format: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = ""
    async for chunk in await client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=format, max_tokens=50, stream=True, seed=3
    ):
        text += chunk.choices[0].delta.content or ""
    assert json.loads(text)["n"] in (1, 2)


async def test_a_choice_among_texts(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, max_tokens=10
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_tool_call(client: openai.AsyncOpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    whole = await client.chat.completions.create(**asked, max_tokens=100)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2, 3)
    async with client.chat.completions.stream(**asked, max_tokens=100) as stream:
        pieces = [
            event.arguments_delta async for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = await stream.get_final_completion()
    assert len(pieces) > 2 and json.loads("".join(pieces)) == arguments
    (parsed,) = final.choices[0].message.tool_calls or []
    assert parsed.function.arguments == call.function.arguments
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


# -- errors and leaving ---------------------------------------------------------------------


async def test_errors_have_the_clients_own_types(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="word " * 2000)
    assert refused.value.param == "prompt" and "1024" in refused.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_has_its_request_aborted(
    client: openai.AsyncOpenAI, demo_server: Addresses, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    async with Client(demo_server.grpc) as engine:
        if stream:
            answer = await client.chat.completions.create(**asked, stream=True)
            await anext(aiter(answer))
            assert (await engine.stats()).num_running == 1
            await answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**asked, timeout=0.5)
        while (stats := await engine.stats()).num_running:
            pass
    assert stats.num_waiting == 0
