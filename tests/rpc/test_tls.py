"""TLS and mTLS, with certificates made for the test."""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from engine.errors import ConfigError
from rpc.client import Client
from rpc.options import ServerOptions
from rpc.server import Server
from rpc.tls import TlsFiles, channel_credentials
from tests.rpc.conftest import Serving
from tests.rpc.fake_engine import INFO, FakeEngine


@dataclass
class Identity:
    """A certificate, its key, and the authority that signed it, as files."""

    cert: str
    key: str
    ca: str


def identity(folder: Path, name: str, ca: trustme.CA, host: str) -> Identity:
    issued = ca.issue_cert(host)
    paths = Identity(*(str(folder / f"{name}.{kind}") for kind in ("cert", "key", "ca")))
    Path(paths.cert).write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths.key)
    ca.cert_pem.write_to_path(paths.ca)
    return paths


@pytest.fixture(scope="module")
def server_side(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity(tmp_path_factory.mktemp("server"), "server", trustme.CA(), "127.0.0.1")


@pytest.fixture(scope="module")
def client_side(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity(tmp_path_factory.mktemp("client"), "client", trustme.CA(), "somebody")


async def info_over(port: int, files: TlsFiles | None) -> str:
    credentials = None if files is None else channel_credentials(files)
    async with Client(f"127.0.0.1:{port}", credentials=credentials) as client:
        return (await client.info()).model


async def refused(port: int, files: TlsFiles | None) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await info_over(port, files)
    return caught.value.code()


async def test_tls(serving: Serving, server_side: Identity, client_side: Identity) -> None:
    options = {"ssl_certfile": server_side.cert, "ssl_keyfile": server_side.key}
    async with serving(wait=False, **options) as served:
        assert await info_over(served.port, TlsFiles(ca_certs=server_side.ca)) == INFO.model
        assert await refused(served.port, None) is grpc.StatusCode.UNAVAILABLE
        assert await refused(served.port, TlsFiles(ca_certs=client_side.ca)) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls(serving: Serving, server_side: Identity, client_side: Identity) -> None:
    options = {"ssl_certfile": server_side.cert, "ssl_keyfile": server_side.key, "ssl_ca_certs": client_side.ca}
    shown = TlsFiles(ca_certs=server_side.ca, certfile=client_side.cert, keyfile=client_side.key)
    stranger = TlsFiles(ca_certs=server_side.ca, certfile=server_side.cert, keyfile=server_side.key)
    async with serving(wait=False, ssl_cert_reqs=2, **options) as served:
        assert await info_over(served.port, shown) == INFO.model
        assert await refused(served.port, TlsFiles(ca_certs=server_side.ca)) is grpc.StatusCode.UNAVAILABLE
        assert await refused(served.port, stranger) is grpc.StatusCode.UNAVAILABLE


async def test_the_command_line_over_tls_with_a_token(
    serving: Serving, server_side: Identity, client_side: Identity, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("token-a acme\n")
    options = {"ssl_certfile": server_side.cert, "ssl_keyfile": server_side.key, "ssl_ca_certs": client_side.ca}
    shown = ["--ssl-ca-certs", server_side.ca, "--ssl-certfile", client_side.cert, "--ssl-keyfile", client_side.key]
    async with serving(wait=False, ssl_cert_reqs=2, api_key_file=str(tmp_path / "keys"), **options) as served:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine", "generate", "hi", "--address", f"127.0.0.1:{served.port}", *shown,
            env={**os.environ, "ENGINE_API_KEY": "token-a"}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        submission = await served.engine.submissions.get()
        assert submission.tenant == "acme"
        submission.finish("hello")
        assert (await process.communicate())[0] == b"hello\n"
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ssl_certfile": "cert"}, "one needs the other"),
        ({"ssl_keyfile": "key"}, "one needs the other"),
        ({"ssl_certfile": "none", "ssl_keyfile": "key"}, "none and .*key cannot be used: .*No such file"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "other"}, "key cannot be used: .*mismatch"),
        ({"ssl_certfile": "key", "ssl_keyfile": "cert"}, "cannot be used"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "none"}, "ssl_ca_certs: .*none cannot be used"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 2}, "2 needs ssl_ca_certs"),
        ({"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 1}, "ssl_cert_reqs: 1 is not 0"),
        ({"ssl_ca_certs": "ca"}, "need ssl_certfile"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
async def test_files_that_cannot_be_used_are_errors_at_start(
    options: dict[str, Any], says: str, server_side: Identity, client_side: Identity
) -> None:
    files = {"cert": server_side.cert, "key": server_side.key, "ca": server_side.ca, "other": client_side.key}
    given = {name: files.get(value, value) for name, value in options.items()}
    with pytest.raises(ConfigError, match=says):
        Server(FakeEngine(), ServerOptions(port=0, http_port=None, **given))


async def test_an_encrypted_key_is_an_error_and_asks_nobody(server_side: Identity, tmp_path: Path) -> None:
    """The ssl module would ask for the passphrase on the terminal."""
    pem = Path(server_side.key).read_text()
    locked = tmp_path / "locked"
    header = "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,0123456789ABCDEF0123456789ABCDEF\n\n"
    first, _, rest = pem.partition("\n")
    locked.write_text(f"{first}\n{header}{rest}")
    with pytest.raises(ConfigError, match="locked cannot be used"):
        TlsFiles(certfile=server_side.cert, keyfile=str(locked)).read()
