"""Who may call a server, and what it shows: API keys and TLS files, read as the settings name them."""

from pathlib import Path

import grpc

from rpc.auth import ApiKeys
from rpc.options import ServerOptions
from rpc.tls import TlsFiles, server_credentials


def read_credentials(options: ServerOptions) -> tuple[ApiKeys | None, grpc.ServerCredentials | None]:
    """None where nothing is set. Raises ConfigError naming the setting and file."""
    keys = ApiKeys(Path(options.api_key_file)) if options.api_key_file else None
    files = TlsFiles(keyfile=options.ssl_keyfile, certfile=options.ssl_certfile, ca_certs=options.ssl_ca_certs)
    return keys, server_credentials(files, require_client_certificate=options.ssl_cert_reqs == 2)
