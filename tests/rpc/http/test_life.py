"""From the bound port to the last byte: probes, drain, clients that leave or do not read, ids, pages, TLS."""

import asyncio
import builtins
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client import Gauge

from engine.errors import ConfigError, DeviceFault
from rpc.http.own_site import allowed_hosts
from rpc.options import ServerOptions
from rpc.server import Server
from tests.rpc.fake_engine import FakeEngine
from tests.rpc.http.conftest import Http, HttpServing
from tests.rpc.http.stream import all_events
from tests.rpc.manual_clock import ManualClock

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def status(http: Http, path: str) -> tuple[int, str]:
    answer = await http.client.get(path)
    return answer.status_code, answer.json()["state"]


# -- probes ---------------------------------------------------------------------------------


async def test_a_server_is_ready_when_its_model_is_loaded(http_serving: HttpServing) -> None:
    engine = FakeEngine()
    engine.may_load.clear()
    async with http_serving(engine, wait=False) as http:
        assert (await status(http, "/health"), await status(http, "/ready")) == ((200, "starting"), (503, "starting"))
        for path, body in ((COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            assert (await http.refusal(path, **body))[0] == 503
        assert (await http.client.get("/v1/models")).status_code == 503
        engine.may_load.set()
        await http.served.client.wait_serving(30)
        assert (await status(http, "/health"), await status(http, "/ready")) == ((200, "serving"), (200, "serving"))


async def test_an_engine_that_stands_still_is_neither_ready_nor_well(http_serving: HttpServing) -> None:
    clock, engine = ManualClock(), FakeEngine()
    async with http_serving(engine, clock=clock, watchdog_seconds=4) as http:
        await clock.until_sleeping(1)
        engine.has_work = True
        for _ in range(5):
            clock.advance(1)
            await clock.until_sleeping(1)
        assert (await status(http, "/health"), await status(http, "/ready")) == ((503, "serving"), (503, "serving"))
        engine.num_iterations += 1
        clock.advance(1)
        await clock.until_sleeping(1)
        assert (await status(http, "/health"), await status(http, "/ready")) == ((200, "serving"), (200, "serving"))


async def test_a_model_of_several_names(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.engine.info, "served_model_names", ("tiny", "small"))
    models = (await http.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "small"]
    assert (await http.client.get("/v1/models/small")).json()["id"] == "small"
    call = asyncio.create_task(http.client.post("/v1/completions", json={"model": "small", "prompt": "x"}))
    (await http.next_request()).finish("y", [1])
    assert (await call).json()["model"] == "tiny"


async def test_the_version_the_models_and_the_metrics(http: Http) -> None:
    gauge = Gauge("vllm:num_requests_running", "Sequences that have a row.", registry=http.engine.metrics)
    gauge.set(3)
    metrics = await http.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running 3.0" in metrics.text.splitlines()
    assert (await http.client.get("/version")).json() == {"version": "0.1.0"}
    (model,) = (await http.client.get("/v1/models")).json()["data"]
    assert isinstance(model.pop("created"), int)
    assert model == {
        "id": "tiny",
        "object": "model",
        "owned_by": "engine-llm",
        "root": "/models/tiny",
        "parent": None,
        "max_model_len": 2048,
    }
    assert (await http.client.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await http.client.get("/v1/models/a/b")).status_code == 404
    assert (await http.client.head("/health")).status_code == 200


async def test_a_taken_port_is_an_error_that_names_it_and_cannot_be_shared(http: Http) -> None:
    port = http.served.server.http_port
    with pytest.raises(OSError, match=rf"^http port: cannot listen on 127\.0\.0\.1:{port}: address already in use"):
        await Server(FakeEngine(), ServerOptions(port=0, http_port=port)).start()
    with socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            second.bind(("127.0.0.1", port))
            second.listen()


async def test_text_and_ids(http: Http) -> None:
    body = {"prompt": "ab", "return_token_strs": True}
    assert (await http.client.post("/tokenize", json=body)).json() == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [1, 97, 98],
        "token_strs": ["\x01", "a", "b"],
    }
    body = {"prompt": "ab", "add_special_tokens": False}
    assert (await http.client.post("/tokenize", json=body)).json()["tokens"] == [97, 98]
    body = {"messages": [{"role": "u", "content": "x"}], "add_generation_prompt": False}
    assert (await http.client.post("/tokenize", json=body)).json()["tokens"] == [*map(ord, "<u>x")]
    assert (await http.client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}
    assert (await http.client.get("/tokenizer_info")).json() == {"bos_token": "<s>", "chat_template": None}


async def test_the_texts_of_tokens_are_made_off_the_loop(http: Http) -> None:
    threads: set[int] = set()

    def token_text(token_id: int) -> str:
        threads.add(threading.get_ident())
        return chr(token_id)

    http.engine.tokenizer = SimpleNamespace(token_text=token_text)
    body = {"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    assert (await http.client.post("/tokenize", json=body)).json()["token_strs"] == ["a", "b"]
    assert threads and threading.get_ident() not in threads


# -- the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_live_calls_finish_while_new_ones_are_refused(http: Http, stream: bool) -> None:
    call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": "x", "stream": stream}))
    request = await http.next_request()
    request.push("a", [1])
    http.served.server.stop()
    await http.engine.draining.wait()
    assert (await status(http, "/ready"), await status(http, "/health")) == ((503, "draining"), (200, "draining"))
    assert (await http.refusal(COMPLETIONS, prompt="y"))[0] == 503
    request.finish("b", [2])
    http.engine.all_ended.set()
    answer = await call
    bodies = (await all_events(answer))[:-1] if stream else [answer.json()]
    assert "".join(body["choices"][0]["text"] for body in bodies) == "ab"
    await http.served.run
    with pytest.raises(httpx.ConnectError):
        await http.client.get("/health")


async def test_when_the_grace_time_is_over_a_stream_ends_with_an_error(http: Http) -> None:
    call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": "x", "stream": True}))
    (await http.next_request()).push("a", [1])
    http.served.server.stop()
    await http.engine.draining.wait()
    http.engine.grace_over.set()
    *_, error = await all_events(await call)
    assert error["error"]["code"] == "service_unavailable"
    await http.served.run


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_end_hangs_up_on_those_who_stopped(
    http_serving: HttpServing, at_once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in the middle of a head, two of a body, and one that reads nothing of a long answer."""
    monkeypatch.setattr("rpc.server.FLUSH_SECONDS", 0.05)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    async with http_serving(grace=0) as http:
        stopped = []
        for sent in (
            b"GET /hea",
            post + b"content-length: 100\r\n\r\n{",
            post + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
            post + b"content-length: %d\r\n\r\n%b" % (len(body), body),
        ):
            stopped.append(socket.create_connection(("127.0.0.1", http.served.server.http_port)))
            stopped[-1].sendall(sent)
        request = await http.next_request()
        for i in range(3):
            request.push("x" * (5 << 20), [i])
            assert (await http.client.get("/health")).status_code == 200
        http.served.server.stop()
        await http.engine.draining.wait()
        if at_once:
            http.served.server.stop()
        http.engine.grace_over.set()
        await http.served.run
        for client in stopped:
            with client, contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 20):
                    pass
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_a_dead_engine_is_not_well(http: Http) -> None:
    call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": "x"}))
    await http.next_request()
    http.engine.fail(DeviceFault("the device died"))
    assert (await call).status_code == 500
    with pytest.raises(DeviceFault):
        await http.served.run


# -- clients --------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"stream": True}, {}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "stream": True}])
async def test_a_client_that_leaves_aborts_its_requests(http: Http, body: dict[str, Any]) -> None:
    body = {"prompt": "x"} | body
    call = asyncio.create_task(http.client.post(COMPLETIONS, json=body))
    submitted = {(await http.next_request()).request_id for _ in range(2 if isinstance(body["prompt"], list) else 1)}
    call.cancel()
    assert {await http.engine.aborts.get() for _ in submitted} == submitted


async def test_a_request_that_is_not_sent_to_its_end_is_dropped(http: Http) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", http.served.server.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await http.client.get("/health")).status_code == 200
    assert http.engine.submissions.empty()


async def test_a_head_that_does_not_come_to_its_end_is_given_up(
    http_serving: HttpServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all, half a head, half a second one, and one that comes in drops; an answer takes what it takes."""
    monkeypatch.setattr("rpc.http.server.KEEP_ALIVE_SECONDS", 0.1)
    async with http_serving() as http:

        async def connected(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", http.served.server.http_port)
            writer.write(sent)
            return reader, writer

        body = b'{"prompt": "x"}'
        served = await connected(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        request = await http.next_request()
        whole, half = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /version HTTP/1.1\r\nhost: "
        for sent, num_answers in ((b"", 0), (half, 0), (whole + half, 1)):
            reader, writer = await connected(sent)
            assert (await reader.read()).count(b"200 OK") == num_answers
            writer.close()
        reader, writer = await connected(half)
        while not reader.at_eof() and reader.exception() is None:  # a drop may meet a closed socket, which resets
            writer.write(b"h")
            await http.served.client.info()
        writer.close()
        request.finish("late", [1])
        reader, writer = served
        assert b"late" in await reader.read()
        writer.close()


async def test_a_slow_reader_costs_no_memory_and_loses_nothing(http: Http) -> None:
    """What it has not read stays in the request's channel, in deltas of their own."""
    tokens, text = 5_000, "x" * 4000
    reader, writer = await asyncio.open_connection("127.0.0.1", http.served.server.http_port, limit=1 << 16)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    request = await http.next_request()
    for i in range(tokens):
        request.push(text, [i])
        if i % 100 == 0:
            assert (await http.client.get("/health")).status_code == 200
    kept_by_sockets = 8 << 20
    assert request.channel.num_pending_tokens * len(text) > tokens * len(text) - kept_by_sockets
    request.finish(finish_reason="length")
    received = 0
    while piece := await reader.read(1 << 20):
        received += piece.count(b"x")
    assert received >= tokens * len(text)
    assert request.channel.num_pending_tokens == 0
    writer.close()


async def test_a_client_that_reads_nothing_at_all_is_given_up(http_serving: HttpServing) -> None:
    async with http_serving(keepalive_time=1, keepalive_timeout=0.1) as http:
        with socket.create_connection(("127.0.0.1", http.served.server.http_port)) as frozen:
            body = json.dumps({"prompt": "x", "stream": True}).encode()
            frozen.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            request = await http.next_request()
            for i in range(100):
                request.push("x" * 100_000, [i])
                assert (await http.client.get("/health")).status_code == 200
            assert await http.engine.aborts.get() == request.request_id


async def test_a_request_id_goes_with_the_call(http: Http) -> None:
    for given, kept in (("trace-7", True), ("trace-7", True), ("two words", False), ("x" * 257, False)):
        call = asyncio.create_task(http.client.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": given}))
        request = await http.next_request()
        again = asyncio.create_task(
            http.client.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": given})
        )
        beside = await http.next_request()  # the same id twice is no conflict
        for submission in (request, beside):
            submission.finish("x", [1])
        for answer in (await call, await again):
            returned = answer.headers["x-request-id"]
            assert (returned == given) is kept
            assert answer.json()["id"] == f"cmpl-{returned}"
        assert request.request_id.startswith("cmpl-trace-7-") is kept


async def test_pages_of_other_origins_need_a_flag(http_serving: HttpServing) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for allowed, names in ((None, None), ("https://a.example, https://b.example", "https://a.example"), ("*", "*")):
        async with http_serving(allowed_origins=allowed) as http:
            answer = await http.client.options(CHAT, headers=ask)
            assert answer.headers.get("access-control-allow-origin") == names
            answer = await http.client.get("/version", headers={"origin": "https://c.example"})
            assert answer.status_code == (200 if allowed == "*" else 403)
            own = {"origin": str(http.client.base_url).rstrip("/")}
            assert (await http.client.get("/version", headers=own)).status_code == 200


async def test_a_post_for_another_site_does_not_reach_the_engine(http: Http) -> None:
    """As a page may send it without leave."""
    headers = {"origin": "https://evil.example", "content-type": "text/plain"}
    answer = await http.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]["message"]
    assert http.engine.submissions.empty()


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (None, "localhost", 200),
        (None, "localhost:8000", 200),
        (None, "127.0.0.1:8000", 200),
        (None, "[::1]:8000", 200),
        (None, "engine.localhost", 200),
        (None, "evil.example:8000", 403),
        (None, "127.evil.example", 403),
        ("llm.example", "llm.example", 200),
        ("llm.example", "LLM.example:443", 200),
        ("llm.example", "localhost", 200),
        ("llm.example", "evil.example", 403),
        ("*", "evil.example", 200),
    ],
)
async def test_names_that_are_not_the_servers_are_refused(
    http_serving: HttpServing, allowed: str | None, host: str, status: int
) -> None:
    async with http_serving(allowed_hosts=allowed) as http:
        answer = await http.client.get("/version", headers={"host": host})
        assert answer.status_code == status
        if status == 403:
            assert "--allowed-hosts" in answer.json()["error"]["message"]


def test_an_address_that_others_reach_has_any_name() -> None:
    assert allowed_hosts(ServerOptions(host="0.0.0.0")) is None
    assert allowed_hosts(ServerOptions(host="::1")) == ()


@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 15\r\nContent-Length: 15\r\n",
        b"content-length: 15\r\ncontent-length: 16\r\n",
        b"Transfer-Encoding: chunked\r\ncontent-length: 15\r\n",
        b"content-length: x\r\n",
        b"content-length: 1" + b"0" * 30 + b"\r\n",
    ],
)
async def test_a_body_without_a_clear_end_is_refused_at_once(http: Http, lengths: bytes) -> None:
    status, body = await raw_answer(http, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + lengths + b"\r\n")
    assert status == 400 and body["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_far_too_long_is_refused_at_once(http: Http) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000000000000000000\r\n\r\n"
    status, body = await raw_answer(http, head)
    assert status == 413 and body["error"]["code"] == "request_too_large"


async def raw_answer(http: Http, request: bytes) -> tuple[int, Any]:
    """Status and JSON body of the answer to some bytes, after which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.served.server.http_port)
    writer.write(request)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# -- the port -------------------------------------------------------------------------------


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(FakeEngine(), ServerOptions(port=0, http_port=port))
        with pytest.raises(OSError, match=f"http port: cannot listen on 127.0.0.1:{port}: address already in use"):
            await server.start()


async def test_without_the_extra_the_port_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = builtins.__import__

    def without_uvicorn(name: str, *args: Any) -> Any:
        if name == "rpc.http.server":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_uvicorn)
    with pytest.raises(ConfigError, match=r"http_port: needs the extra http, pip install 'engine-llm\[http\]'"):
        Server(FakeEngine(), ServerOptions(port=0, http_port=0))
    Server(FakeEngine(), ServerOptions(port=0, http_port=None))
    assert Server(FakeEngine(), ServerOptions(port=0)).http_port is None  # nobody has asked for the default
    assert "HTTP is off: it needs the extra http" in caplog.text


@asynccontextmanager
async def tls_client(port: int | None, authority: trustme.CA, *, certificate: bool) -> AsyncIterator[httpx.AsyncClient]:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if certificate:
        authority.issue_cert("client@example.org").configure_cert(context)
    async with httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=context) as client:
        yield client


async def test_tls_is_the_grpc_ports(tmp_path: Any) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    files: dict[str, Any] = {}
    for name, blob in (
        ("ssl_certfile", issued.cert_chain_pems[0]),
        ("ssl_keyfile", issued.private_key_pem),
        ("ssl_ca_certs", authority.cert_pem),
    ):
        blob.write_to_path(tmp_path / name)
        files[name] = str(tmp_path / name)
    server = Server(FakeEngine(), ServerOptions(port=0, http_port=0, ssl_cert_reqs=2, **files))
    await server.start()
    run = asyncio.create_task(server.run())
    try:
        async with tls_client(server.http_port, authority, certificate=True) as client:
            assert (await client.get("/health")).status_code == 200
        async with tls_client(server.http_port, authority, certificate=False) as client:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await client.get("/health")
    finally:
        server.stop()
        server.stop()
        await run
