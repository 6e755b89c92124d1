"""ServerOptions: settings of the server; `engine serve` derives its flags from the fields."""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from engine.config import check_settings, setting
from engine.errors import ConfigError

MAX_PENDING_CALLS = 1 << 16
DEFAULT_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the server; the engine's own are in `engine.config.EngineConfig`."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(50051, "Port to listen on; 0 takes a free one. The port taken is printed.", min=0, max=65535)
    metrics_port: int | None = setting(
        None, "Port of the Prometheus metrics, on the same host; off if unset, 0 takes a free one.", min=0, max=65535
    )
    http_port: int | None = setting(
        DEFAULT_HTTP_PORT,
        "Port of the OpenAI-compatible HTTP interface and the page, on the same host; none is off, 0 takes a free one.",
        min=0,
        max=65535,
    )
    allowed_origins: str | None = setting(
        None, "Origins, separated by commas, whose pages may call over HTTP; * is any, none if unset."
    )
    allowed_hosts: str | None = setting(
        None,
        "Names, separated by commas, that a Host header over HTTP may have; * is any. "
        "If unset, those of loopback where --host is, else any.",
    )
    enable_auto_tool_choice: bool = setting(True, "HTTP: let the model decide whether it calls a tool.")
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = setting(
        "auto", "HTTP: how the model writes tool calls; auto is what its chat template shows."
    )
    grace: float = setting(30.0, "Seconds that live streams have to finish at shutdown.", min=0)
    # The event loop takes messages apart: for 0.1 s if there are 2 MiB of small values.
    max_message_bytes: int = setting(2 << 20, "Longest request, over gRPC and HTTP.", min=1024, max=(1 << 31) - 1)

    keepalive_time: float = setting(
        30.0,
        "Seconds of silence after which the server pings a client; one that is gone has its requests aborted.",
        min=1,
    )
    keepalive_timeout: float = setting(10.0, "Seconds a client has to answer a ping.", min=0.1)
    keepalive_permit_without_calls: bool = setting(True, "Ping, and let clients ping, while no call is live.")
    min_ping_interval: float = setting(
        10.0, "Seconds between a client's pings; one that pings more often is sent away.", min=0
    )
    watchdog_seconds: float = setting(
        60.0, "Health turns NOT_SERVING when the engine has work and makes no step for so long.", min=0.1
    )
    api_key_file: str | None = setting(
        None, "File of `token tenant` lines; calls then need one as bearer token. Read again at SIGHUP."
    )
    ssl_keyfile: str | None = setting(None, "PEM file of the server's private key.")
    ssl_certfile: str | None = setting(None, "PEM file of the server's certificate chain; turns TLS on.")
    ssl_ca_certs: str | None = setting(None, "PEM file of the authorities that sign clients' certificates.")
    ssl_cert_reqs: int = setting(
        0, "Clients need a certificate: 0 no, 2 yes (the ssl module's numbers; gRPC has no 1).", min=0, max=2
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.ssl_cert_reqs not in (0, 2):
            raise ConfigError(f"ssl_cert_reqs: {self.ssl_cert_reqs} is not 0 (no certificate) or 2 (required)")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs: 2 needs ssl_ca_certs, to check the certificates against")
        if (self.ssl_cert_reqs or self.ssl_ca_certs) and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs, ssl_cert_reqs: need ssl_certfile and ssl_keyfile, to turn TLS on")
        ports = {"port": self.port, "metrics_port": self.metrics_port, "http_port": self.http_port}
        for (name, port), (other, same) in combinations(ports.items(), 2):
            if port and port == same:
                raise ConfigError(f"{name}, {other}: both are {port}, but each needs a port of its own")

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Arguments of the grpc server."""
        return [
            # Linux would otherwise let a second server bind the same port and share its calls.
            ("grpc.so_reuseport", 0),
            # Calls that wait for Python to take them; above 1,000 grpc cancels some at random, and the engine's own
            # queue, which says RESOURCE_EXHAUSTED and when to try again, never sees them.
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", round(self.keepalive_time * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_interval * 1000)),
        ]
