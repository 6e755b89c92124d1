"""What a call that fails is told: status, OpenAI's error body, and the name of the field."""

import asyncio
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.errors import DeviceFault, EngineStopped, InvalidRequest, OverCapacity, RequestFault
from rpc.http.endpoint import _read_body
from rpc.http.errors import TooLarge, TooSlow
from tests.rpc.http.conftest import Http, HttpServing
from tests.rpc.http.stream import all_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def tools(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("top_k", "no"), 400, "invalid_request_error", None),
        (OverCapacity("full", num_queued=3), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineStopped("the engine is draining"), 503, "server_error", "service_unavailable"),
        (RequestFault("no usable logits"), 500, "server_error", None),
        (DeviceFault("gone"), 500, "server_error", None),
    ],
)
async def test_a_refusal_has_its_status(http: Http, error: Exception, status: int, kind: str, code: str | None) -> None:
    http.engine.refusal = error
    for path, stream in itertools.product((CHAT, COMPLETIONS), (False, True)):
        answer = await http.client.post(path, json=HELLO | {"prompt": "x", "stream": stream})
        assert answer.status_code == status
        assert answer.json() == {
            "error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}
        }
        assert "x-request-id" in answer.headers


async def test_an_unknown_error_says_its_type_only(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    http.engine.refusal = ValueError("a secret path")
    status, _, message = await http.refusal(COMPLETIONS, prompt="x")
    assert (status, message) == (500, "internal error: ValueError")
    assert "a secret path" in caplog.text


async def test_a_full_queue_says_when_to_try_again(http: Http) -> None:
    http.engine.refusal = OverCapacity("full", num_queued=3)
    answer = await http.client.post(COMPLETIONS, json={"prompt": "x"})
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")


async def test_an_error_in_mid_stream_is_the_last_event(http: Http) -> None:
    call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": "x", "stream": True}))
    request = await http.next_request()
    request.push("so far", [1])
    request.channel.fail(RequestFault("no usable logits"))
    answer = await call
    assert answer.status_code == 200
    chunk, error = await all_events(answer)
    assert chunk["choices"][0]["text"] == "so far"
    assert error["error"]["message"] == "no usable logits" and error["error"]["type"] == "server_error"


async def test_an_error_before_the_whole_answer_is_a_status(http: Http) -> None:
    call = asyncio.create_task(http.client.post(CHAT, json=HELLO))
    request = await http.next_request()
    request.push("so far", [1])
    request.channel.fail(DeviceFault("gone"))
    assert (await call).status_code == 500


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_constraint_that_fails_on_the_way_is_the_callers_mistake(
    http: Http, stream: bool, prompts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": prompts, "guided_regex": "a", "stream": stream}
    call = asyncio.create_task(http.client.post(COMPLETIONS, json=body))
    request = await http.next_request()
    request.push("so far", [1])
    request.channel.fail(InvalidRequest("structured_outputs.regex", "too complex"))
    answer = await call
    if stream:
        assert answer.status_code == 200
        error = (await all_events(answer))[-1]["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error == {
        "message": "guided_regex: too complex",
        "type": "invalid_request_error",
        "param": "guided_regex",
        "code": None,
    }
    assert not caplog.records


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": 5}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", [1.5]]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "temperature": 3e400}, "body"),
        (COMPLETIONS, {"prompt": "x", "top_p": True}, "top_p"),
        (COMPLETIONS, {"prompt": "x", "top_p": 1.5}, "top_p"),
        (COMPLETIONS, {"prompt": "x", "n": 1.0}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "x", "best_of": 0}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop[0]"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": 5}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": "1"}}, "logit_bias.5"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 10**400}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"\u0663": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "temperature": 10**400}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "top_k": 1 << 31}, "top_k"),
        (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "x", "seed": -1}, "seed"),
        (COMPLETIONS, {"prompt": "x", "priority": "high"}, "priority"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": 5}, "cache_salt"),
        (CHAT, HELLO | {"cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"prompt": "x", "model": 1}, "model"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"structural_tag": "{}"}},
         "structured_outputs.structural_tag"),
        (COMPLETIONS, {"prompt": "x", "guided_json": "{"}, "guided_json"),
        (COMPLETIONS, {"prompt": "x", "guided_choice": []}, "guided_choice"),
        (COMPLETIONS, {"prompt": "x", "guided_choice": [1]}, "guided_choice[0]"),
        (COMPLETIONS, {"prompt": "x", "guided_json": False}, "guided_json"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": 5}, "guided_regex"),
        (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": 0}}, "structured_outputs.json"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": {}}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (CHAT, HELLO | {"max_tokens": -1}, "max_tokens"),
        (CHAT, HELLO | {"max_tokens": 5, "max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, HELLO | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        (CHAT, HELLO | {"chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, HELLO | {"response_format": "json"}, "response_format"),
        *[(CHAT, HELLO | {"tools": tools({"$defs": given}), "tool_choice": "required"},
           "tools[0].function.parameters.$defs") for given in (5, [1], "x", False)],
        (CHAT, HELLO | {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, HELLO | {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x"} | HELLO, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_field_is_named(shared_http: Http, path: str, body: dict[str, Any], param: str) -> None:
    if 3e400 in body.values():  # JSON has no infinity, but a number may overflow into one
        content = b'{"prompt": "x", "temperature": Infinity}'
        answer = await shared_http.client.post(path, content=content)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    else:
        status, found, message = await shared_http.refusal(path, **body)
        assert (status, found) == (400, param) and message.startswith(f"{param}: ")
    assert shared_http.engine.submissions.empty()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_no_object(shared_http: Http, body: bytes) -> None:
    answer = await shared_http.client.post(CHAT, content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


SCHEMA: dict[str, Any] = {"type": "string"}


@pytest.mark.parametrize(
    ("path", "kind", "given", "named"),
    [
        (COMPLETIONS, "json", {"guided_json": SCHEMA}, "guided_json"),
        (COMPLETIONS, "regex", {"guided_regex": "a"}, "guided_regex"),
        (COMPLETIONS, "json", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (CHAT, "choice", {"guided_choice": ["a"]}, "guided_choice"),
        (CHAT, "json", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
         "response_format.json_schema.schema"),
        (CHAT, "json", {"tools": tools({}), "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
async def test_what_cannot_be_compiled_is_named_as_the_caller_gave_it(
    http: Http, path: str, kind: str, given: dict[str, Any], named: str
) -> None:
    http.engine.refusal = InvalidRequest(f"structured_outputs.{kind}", "no")
    assert await http.refusal(path, **HELLO | {"prompt": "x"} | given) == (400, named, f"{named}: no")


async def test_what_ids_are_out_of_range_is_named_as_the_caller_gave_it(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(ids: object) -> str:
        raise InvalidRequest("token_ids", "no")

    monkeypatch.setattr(http.engine, "detokenize", refuse)
    assert await http.refusal("/detokenize", tokens=[1]) == (400, "tokens", "tokens: no")
    assert await http.refusal(COMPLETIONS, prompt=[1], echo=True) == (400, "prompt", "prompt: no")


@pytest.mark.parametrize(
    ("path", "field", "given"),
    [
        (CHAT, "messages", [{}] * ((1 << 16) + 1)),
        (CHAT, "tools", [{}] * ((1 << 16) + 1)),
        ("/detokenize", "tokens", [1] * ((1 << 20) + 1)),
        (COMPLETIONS, "logit_bias", {str(i): 0 for i in range((1 << 18) + 1)}),
    ],
)
async def test_lists_that_would_hold_up_the_loop(http_serving: HttpServing, path: str, field: str, given: Any) -> None:
    async with http_serving(max_message_bytes=16 << 20) as http:
        status, named, message = await http.refusal(path, **HELLO | {"prompt": "x", field: given})
        assert (status, named) == (400, field) and f"{len(given)} i" in message


async def test_an_error_that_quotes_a_lone_surrogate_can_be_sent(http: Http) -> None:
    """JSON can hold half of a character, UTF-8 cannot."""
    content = json.dumps({"prompt": "x", "model": "\ud800"})
    answer = await http.client.post(COMPLETIONS, content=content)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404, "model")
    assert "\\ud800" in error["message"]


@pytest.mark.parametrize(("field", "named"), [("prompt", "messages"), ("logprobs", "top_logprobs")])
async def test_a_chat_knows_other_names_than_the_engine(http: Http, field: str, named: str) -> None:
    http.engine.refusal = InvalidRequest(field, "too much")
    assert await http.refusal(CHAT, **HELLO) == (400, named, f"{named}: too much")


async def test_a_bad_schema_is_named_as_the_caller_gave_it(http: Http) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"pattern": "x" * (1 << 16)}}}
    assert (await http.refusal(CHAT, **HELLO, response_format=format))[:2] == (
        400,
        "response_format.json_schema.schema",
    )


async def test_fields_that_nobody_knows_and_nulls_are_ignored(http: Http) -> None:
    body = HELLO | {"user": "me", "store": 1, "temperature": None, "stop": None, "tools": None, "stream": None}
    call = asyncio.create_task(http.client.post(CHAT, json=body))
    (await http.next_request()).finish("x", [1])
    assert (await call).status_code == 200


async def test_unknown_fields_are_told_of_once(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        call = asyncio.create_task(http.client.post(CHAT, json=HELLO | {"temprature": 1, "x\ny": 2, "seed": 3}))
        (await http.next_request()).finish("x", [1])
        assert (await call).status_code == 200
    (record,) = caplog.records
    assert record.getMessage().endswith("no effect with the others: 'temprature', 'x\\ny'")


async def test_max_tokens_that_the_context_cannot_hold(http: Http) -> None:
    for path, body, name in (
        (CHAT, HELLO | {"max_tokens": 2040}, "max_tokens"),
        (CHAT, HELLO | {"max_completion_tokens": 2048}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": ["x", "xyz" * 20], "max_tokens": 2000}, "max_tokens"),
    ):
        status, param, message = await http.refusal(path, **body)
        assert (status, param) == (400, name) and "more than max_model_len 2048" in message
    call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": [1] * 2040}))  # 16 by itself
    (await http.next_request()).finish("x", [1])
    assert (await call).status_code == 200


async def test_another_model_is_not_found(http: Http) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        answer = await http.client.post(path, json={"model": "gpt", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_paths_and_methods_that_do_not_exist(http: Http) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        answer = await http.client.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("options", "limit"), [({}, 2 << 20), ({"max_message_bytes": 2048}, 2048)])
async def test_a_body_above_the_limit(http_serving: HttpServing, options: dict[str, int], limit: int) -> None:
    async with http_serving(**options) as http:
        longest = b'{"messages": "' + b"x" * (limit - 16) + b'"}'
        assert len(longest) == limit
        assert (await http.client.post(CHAT, content=longest)).status_code == 400
        answer = await http.client.post(CHAT, content=longest + b" ")
        assert answer.status_code == 413
        assert answer.json()["error"] == {
            "message": f"the body is longer than max_message_bytes, {limit}",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        }
        # Far above it, when the client still sends: the answer reaches it all the same.
        assert (await http.client.post(CHAT, content=b"x" * (24 << 20))).status_code == 413


@pytest.mark.parametrize("head", ["content-length: 100\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n5\r\n{"])
async def test_a_body_that_stops_is_given_up(http_serving: HttpServing, head: str) -> None:
    async with http_serving(keepalive_time=1, keepalive_timeout=0.1) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.served.server.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{head}".encode())
        answer = await reader.read()  # to the end: the connection is closed, too
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer


@pytest.mark.parametrize(("piece", "error"), [(b"", TooSlow), (b"x" * 1025, TooLarge)])
async def test_a_body_that_does_not_end_is_given_up(piece: bytes, error: type[Exception]) -> None:
    """In drops or in floods, each piece in time."""
    pieces = itertools.repeat({"type": "http.request", "body": piece, "more_body": True}, 1_000_000)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return next(pieces, {"type": "http.disconnect"})

    with pytest.raises(error):
        await _read_body(receive, limit=2048, patience=0.05)


# -- keys -----------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("token-a acme\n")
    return str(path)


async def test_who_may_call(http_serving: HttpServing, keys: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with http_serving(api_key_file=keys) as http:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await http.client.get(path)).status_code == 200
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            for header in ({}, {"authorization": "Bearer token-b"}, {"authorization": "Basic token-a"}):
                answer = await http.client.post(path, json={}, headers=header)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/v1/models/tiny", "/tokenizer_info"):
            assert (await http.client.get(path)).status_code == 401
    assert "token-" not in caplog.text


async def test_the_key_names_the_tenant(http_serving: HttpServing, keys: str) -> None:
    async with http_serving(api_key_file=keys) as http:
        header = {"authorization": "Bearer token-a"}
        call = asyncio.create_task(
            http.client.post(CHAT, json=HELLO | {"priority": -2, "cache_salt": "s"}, headers=header)
        )
        request = await http.next_request()
        assert (request.tenant, request.priority, request.cache_salt) == ("acme", -2, "s")
        assert request.request_id.startswith("acme/chatcmpl-")
        request.finish("x", [1])
        assert (await call).status_code == 200
