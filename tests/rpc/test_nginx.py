"""nginx as a gRPC proxy: TLS with certificates from both sides, before it and behind it."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from rpc.proto.engine.v1 import engine_pb2 as pb
from rpc.proto.engine.v1 import engine_pb2_grpc as pb_grpc
from rpc.tls import TlsFiles, channel_credentials
from tests.rpc.conftest import Served, Serving
from tests.rpc.test_tls import Identity, identity

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx: .ci/tools.sh")

# Unbuffered, as gRPC always is in nginx; the socket is a file, so that no port has to be found free.
CONFIG = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr notice;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen unix:{folder}/socket ssl http2;
        ssl_certificate {front.cert};
        ssl_certificate_key {front.key};
        ssl_client_certificate {user.ca};
        ssl_verify_client on;
        location / {{
            grpc_pass grpcs://127.0.0.1:{port};
            grpc_ssl_certificate {proxy.cert};
            grpc_ssl_certificate_key {proxy.key};
            grpc_ssl_verify on;
            grpc_ssl_name engine.test;
            grpc_ssl_trusted_certificate {engine.ca};
            grpc_read_timeout 1h;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    """Of the proxy's two sides, of the engine and of a user; each signed by an authority of its own."""
    hosts = {"front": "nginx.test", "proxy": "nginx.test", "engine": "engine.test", "user": "user.test"}
    return {name: identity(tmp_path_factory.mktemp(name), name, trustme.CA(), host) for name, host in hosts.items()}


@asynccontextmanager
async def proxied(
    serving: Serving, folder: Path, of: dict[str, Identity], *, shown_behind: Identity | None = None
) -> AsyncIterator[Served]:
    """An engine that talks to nothing but the proxy, and the proxy on `folder`/socket."""
    engine, proxy = of["engine"], of["proxy"]
    async with serving(
        wait=False, ssl_certfile=engine.cert, ssl_keyfile=engine.key, ssl_ca_certs=proxy.ca, ssl_cert_reqs=2
    ) as served:
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(folder=folder, port=served.port, **of | {"proxy": shown_behind or proxy}))
        process = await asyncio.create_subprocess_exec(
            str(NGINX), "-c", config, "-p", folder, "-e", "stderr", stderr=asyncio.subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            while b"start worker process " not in (line := await process.stderr.readline()):
                assert line, "nginx did not start"
            yield served
        finally:
            process.terminate()
            await process.communicate()


@asynccontextmanager
async def user_of(folder: Path, shown: TlsFiles) -> AsyncIterator["pb_grpc.EngineAsyncStub"]:
    """The proxy's name is in its certificate, and not in the name of a file."""
    options = [("grpc.ssl_target_name_override", "nginx.test")]
    async with grpc.aio.secure_channel(f"unix:{folder}/socket", channel_credentials(shown), options) as channel:
        yield pb_grpc.EngineStub(channel)


def certificate(ca: Identity, own: Identity) -> TlsFiles:
    return TlsFiles(ca_certs=ca.ca, certfile=own.cert, keyfile=own.key)


async def test_a_stream_passes_token_by_token(
    serving: Serving, tmp_path: Path, identities: dict[str, Identity]
) -> None:
    async with (
        proxied(serving, tmp_path, identities) as served,
        user_of(tmp_path, certificate(identities["front"], identities["user"])) as user,
    ):
        call = user.Generate(pb.GenerateRequest(text="hi", include_usage=True))
        answers = aiter(call)
        submission = await served.engine.submissions.get()
        assert submission.prompt == [1, *map(ord, "hi")]
        for text in ("one", "two", "three"):
            submission.push(text, [5])  # the next is not there before this one has been read
            assert (await anext(answers)).deltas[0].text == text
        submission.finish()
        last = await anext(answers)
        assert last.usage.completion_tokens == 3
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_cancels_has_its_request_aborted_behind_the_proxy(
    serving: Serving, tmp_path: Path, identities: dict[str, Identity]
) -> None:
    async with (
        proxied(serving, tmp_path, identities) as served,
        user_of(tmp_path, certificate(identities["front"], identities["user"])) as user,
    ):
        call = user.Generate(pb.GenerateRequest(text="hi", request_id="mine"))
        (await served.engine.submissions.get()).push("one", [5])
        await anext(aiter(call))
        call.cancel()
        assert await served.engine.aborts.get() == "mine"


async def test_a_wrong_certificate_or_none_is_refused(
    serving: Serving, tmp_path: Path, identities: dict[str, Identity]
) -> None:
    front = identities["front"]
    async with proxied(serving, tmp_path, identities) as served:
        for shown in (TlsFiles(ca_certs=front.ca), certificate(front, identities["engine"])):
            async with user_of(tmp_path, shown) as stranger:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stranger.GetInfo(pb.GetInfoRequest())
        assert served.engine.submissions.empty()


async def test_a_proxy_that_the_engine_does_not_know_gets_nothing(
    serving: Serving, tmp_path: Path, identities: dict[str, Identity]
) -> None:
    async with (
        proxied(serving, tmp_path, identities, shown_behind=identities["user"]),
        user_of(tmp_path, certificate(identities["front"], identities["user"])) as user,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await user.GetInfo(pb.GetInfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
