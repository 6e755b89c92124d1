"""The flags that say which server a command asks, and by what right."""

import functools
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rpc.client import Client
    from rpc.tls import TlsFiles

Command = TypeVar("Command", bound=Callable[..., None])

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Server:
    """A server as the command line names it; `tls` is None for plain text."""

    address: str
    api_key: str | None
    tls: "TlsFiles | None"

    def connect(self) -> "Client":
        """A client of its gRPC interface; it belongs to the event loop that runs now."""
        from rpc.client import Client
        from rpc.tls import channel_credentials

        credentials = None if self.tls is None else channel_credentials(self.tls)
        return Client(self.address, api_key=self.api_key, credentials=credentials)

    @property
    def url(self) -> str:
        """Of its HTTP interface."""
        return self.address if "://" in self.address else f"{'http' if self.tls is None else 'https'}://{self.address}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; None leaves it to the client's defaults. Raises ConfigError."""
        if self.tls is None:
            return None
        self.tls.read()  # its errors name the flag
        context = ssl.create_default_context(cafile=self.tls.ca_certs)
        if self.tls.certfile is not None:
            context.load_cert_chain(self.tls.certfile, self.tls.keyfile)
        return context


def to_server(command: Command, *, positional: bool = False) -> Command:
    """Give a command the flags, and a `Server` as its argument `server`; `positional`: the address is no flag."""
    address = (
        click.argument("address", default=DEFAULT_ADDRESS)
        if positional
        else click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="Server to ask.")
    )

    @address
    @click.option("--api-key", envvar="ENGINE_API_KEY", help="Bearer token; ENGINE_API_KEY keeps it out of sight.")
    @click.option("--tls", is_flag=True, help="Use TLS, trusting the authorities that gRPC comes with.")
    @click.option("--ssl-ca-certs", help="PEM file of the authorities to trust instead; turns TLS on.")
    @click.option("--ssl-certfile", help="PEM file of the certificate to show to the server.")
    @click.option("--ssl-keyfile", help="PEM file of its key.")
    @functools.wraps(command)
    def run(
        address: str, api_key: str | None, tls: bool, ssl_ca_certs: str | None, ssl_certfile: str | None,
        ssl_keyfile: str | None, **kwargs: Any,
    ) -> None:  # fmt: skip
        from rpc.tls import TlsFiles

        files = TlsFiles(keyfile=ssl_keyfile, certfile=ssl_certfile, ca_certs=ssl_ca_certs)
        command(server=Server(address, api_key, files if tls or files != TlsFiles() else None), **kwargs)

    return run  # type: ignore[return-value]
