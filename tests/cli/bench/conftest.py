"""The server over a fake engine, as tests/rpc has it."""

from tests.rpc.conftest import serving

__all__ = ["serving"]
