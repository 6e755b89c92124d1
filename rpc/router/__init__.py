"""What the `smg` router calls: `vllm.grpc.engine.VllmEngine`, on the server's gRPC port. Extra `router`.

The messages come from the package `smg-grpc-proto`; nothing outside this folder imports it.
Read next: `rpc/router/servicer.py`; `docs/scale-out.md`.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Whether the extra is there."""
    return find_spec("smg_grpc_proto") is not None
