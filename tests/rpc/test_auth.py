"""Bearer tokens: who gets in, as which tenant, and what one tenant can see of another."""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from engine.errors import ConfigError
from rpc.auth import ApiKeys
from rpc.client import Client
from rpc.proto.engine.v1 import engine_pb2 as pb
from tests.rpc.conftest import HealthStub, Served, ServerReflectionStub, Serving, code_of, read
from tests.rpc.fake_engine import profile

KEYS = """
# who pays
token-a acme  # the first
token-a2 acme

token-b\tbeta
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def client(served: Served, api_key: str | None) -> Client:
    return Client(f"127.0.0.1:{served.port}", api_key=api_key)


def test_tokens_name_their_tenants(keys: Path) -> None:
    names = [ApiKeys(keys).tenant_of(t) for t in ("token-a", "token-a2", "token-b", "token", "token-a ", "", "acme")]
    assert names == ["acme", "acme", "beta", None, None, None, None]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ok acme\nsecret-1\n", "line 2: expected"),
        ("secret-1 acme more", "line 1: expected"),
        ("secret-1 a/b", "line 1: expected"),
        ("secret-1 " + "t" * 65, "line 1: expected"),
        ("secret-1 acme\n\nsecret-1 beta", "line 3: the token is there already"),
        ("# nothing\n", "holds no token"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_line_and_no_token(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        ApiKeys(path)
    assert str(path) in str(caught.value) and "secret-1" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key_file: .*/none cannot be read"):
        ApiKeys(tmp_path / "none")


@pytest.mark.parametrize("api_key", [None, "token-c", "token-a\u0020x", "TOKEN-A"])
async def test_every_call_needs_a_known_token(serving: Serving, keys: Path, api_key: str | None) -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Engine"].methods}
    async with serving(api_key_file=str(keys)) as served, client(served, api_key) as stranger:
        calls = {
            "Generate": stranger.generate(pb.GenerateRequest(text="x")).read(),
            "Abort": stranger.abort("r"),
            "GetInfo": stranger.info(),
            "GetStats": stranger.stats(),
            "StreamStats": stranger.stream_stats(1).read(),
            "StartProfile": stranger.start_profile(),
            "StopProfile": stranger.stop_profile(),
            "Tokenize": stranger.tokenize("x"),
            "Detokenize": stranger.detokenize([1]),
        }
        assert calls.keys() == methods
        assert {name: await code_of(call) for name, call in calls.items()} == dict.fromkeys(
            methods, grpc.StatusCode.UNAUTHENTICATED
        )
        assert served.engine.submissions.empty()


async def test_a_header_of_another_scheme_is_no_token(serving: Serving, keys: Path) -> None:
    async with (
        serving(api_key_file=str(keys)) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel,
    ):
        call: Any = channel.unary_unary("/engine.v1.Engine/GetInfo", pb.GetInfoRequest.SerializeToString)
        for metadata in ((("authorization", "Basic token-a"),), (("authorization", "token-a"),)):
            assert await code_of(call(pb.GetInfoRequest(), metadata=metadata)) is grpc.StatusCode.UNAUTHENTICATED
        await call(pb.GetInfoRequest(), metadata=(("authorization", "bearer token-a"),))


async def test_health_stays_open_and_reflection_does_not(serving: Serving, keys: Path) -> None:
    async with (
        serving(api_key_file=str(keys)) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel,
    ):
        checked = await HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        stub = ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([ask]))
        assert await code_of(call.read()) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_token_names_the_tenant(serving: Serving, keys: Path) -> None:
    async with serving(api_key_file=str(keys)) as served:
        for token, tenant in (("token-a", "acme"), ("token-b", "beta"), ("token-a2", "acme")):
            async with client(served, token) as caller:
                call = caller.generate(pb.GenerateRequest(text="x", request_id=token, priority=-3, cache_salt="s"))
                submission = await served.engine.submissions.get()
                assert (submission.tenant, submission.priority, submission.cache_salt) == (tenant, -3, "s")
                submission.finish()
                assert [r.request_id async for r in call] == [token]


async def test_without_keys_everybody_is_one_tenant(served: Served) -> None:
    call = served.client.generate(pb.GenerateRequest(text="x"))
    submission = await served.engine.submissions.get()
    assert submission.tenant == ""
    submission.finish()
    await call.read()


async def test_one_tenant_cannot_abort_or_block_the_ids_of_another(serving: Serving, keys: Path) -> None:
    request = pb.GenerateRequest(text="x", request_id="r")
    async with (
        serving(api_key_file=str(keys)) as served,
        client(served, "token-a") as acme,
        client(served, "token-b") as beta,
    ):
        theirs = acme.generate(request)
        await served.engine.submissions.get()
        assert await beta.abort("r") is False
        own = beta.generate(request)  # the same id is no conflict
        await served.engine.submissions.get()
        assert await beta.abort("r") is True
        assert (await read(own)).deltas[0].finish_reason == pb.FINISH_REASON_ABORT
        assert await acme.abort("r") is True
        assert (await read(theirs)).deltas[0].finish_reason == pb.FINISH_REASON_ABORT


async def test_an_id_chosen_by_the_server_can_be_aborted(serving: Serving, keys: Path) -> None:
    async with serving(api_key_file=str(keys)) as served, client(served, "token-a") as caller:
        call = caller.generate(pb.GenerateRequest(text="x"))
        (await served.engine.submissions.get()).push("a", [1])
        request_id = (await read(call)).request_id
        assert request_id and await caller.abort(request_id) is True


async def test_numbers_and_profiles_show_a_tenant_its_own_only(serving: Serving, keys: Path) -> None:
    async with serving(api_key_file=str(keys)) as served, client(served, "token-b") as beta:
        stats = await beta.stats()
        assert [(t.tenant, t.num_running) for t in stats.tenants] == [("beta", 2)]
        assert stats.num_running == 3
        served.engine.profile = profile(3, "acme/r1", "beta/r2")
        trace = await beta.stop_profile()
        assert b"beta/r2" in trace and b"acme" not in trace
        json.loads(trace)


async def test_sighup_reads_the_file_again(serving: Serving, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(api_key_file=str(keys)) as served, client(served, "token-n") as new:
        assert await code_of(new.info()) is grpc.StatusCode.UNAUTHENTICATED
        keys.write_text("token-n acme\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await new.info()
        keys.write_text("secret-1\n")  # a slip does not lock everybody out
        os.kill(os.getpid(), signal.SIGHUP)
        await new.info()
    assert "line 1: expected" in caplog.text
    assert "secret-1" not in caplog.text and "token-n" not in caplog.text
