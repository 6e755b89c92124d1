"""ServerOptions: settings of the gRPC server; `engine serve` derives its flags from the fields."""

from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError


def _setting(default: Any, help: str, **bounds: float) -> Any:
    """A field; `bounds` may hold `min` and `max`, both inclusive."""
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the server; the engine's own are in `engine.config.EngineConfig`."""

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(50051, "Port to listen on; 0 takes a free one. The port taken is printed.", min=0, max=65535)
    metrics_port: int | None = _setting(
        None, "Port of the Prometheus metrics, on the same host; off if unset, 0 takes a free one.", min=0, max=65535
    )
    grace: float = _setting(30.0, "Seconds that live streams have to finish at shutdown.", min=0)
    max_message_bytes: int = _setting(64 << 20, "Longest request message.", min=1024, max=(1 << 31) - 1)

    def __post_init__(self) -> None:
        if self.metrics_port and self.metrics_port == self.port:
            raise ConfigError(f"metrics_port: {self.metrics_port} is the gRPC port; the two need ports of their own")

    def channel_arguments(self) -> list[tuple[str, int]]:
        """Arguments of the grpc server."""
        return [
            # Linux would otherwise let a second server bind the same port and share its calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # A client that vanished without a word is found, and its requests aborted, within 40 s.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ]
