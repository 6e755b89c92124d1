"""TLS of both ends, from PEM files; the ssl module checks them first, since grpc's own errors name no file."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths as the settings `ssl_keyfile`, `ssl_certfile` and `ssl_ca_certs` name them; None is unset."""

    keyfile: str | None = None
    certfile: str | None = None
    ca_certs: str | None = None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Contents of key, certificates and CA certificates. Raises ConfigError naming the setting and file."""
        if (self.keyfile is None) != (self.certfile is None):
            raise ConfigError("ssl_keyfile, ssl_certfile: one needs the other")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        certfile, keyfile, ca_certs = self.certfile, self.keyfile, self.ca_certs
        try:
            if certfile is not None:  # an encrypted key must not ask for its passphrase on the terminal
                context.load_cert_chain(certfile, keyfile, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_certfile, ssl_keyfile: {certfile} and {keyfile} cannot be used: {error}") from error
        try:
            if ca_certs is not None:
                context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs: {ca_certs} cannot be used: {error}") from error
        key, certificates, roots = (None if f is None else Path(f).read_bytes() for f in (keyfile, certfile, ca_certs))
        return key, certificates, roots


def server_credentials(files: TlsFiles, *, require_client_certificate: bool) -> grpc.ServerCredentials | None:
    """Credentials of the server's port; None when there is no certificate. Raises ConfigError."""
    key, certificates, roots = files.read()
    if key is None or certificates is None:
        return None
    return grpc.ssl_server_credentials(
        [(key, certificates)], root_certificates=roots, require_client_auth=require_client_certificate
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a client: trusts `ca_certs`, or grpc's own roots, and shows its certificate if it has one."""
    key, certificates, roots = files.read()
    return grpc.ssl_channel_credentials(roots, key, certificates)
