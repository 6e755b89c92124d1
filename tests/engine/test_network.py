"""How addresses are written, and which are this machine."""

import pytest

from engine.network import host_port, is_loopback


def test_only_ipv6_has_brackets() -> None:
    assert host_port("127.0.0.1", 80) == "127.0.0.1:80"
    assert host_port("example.org", 80) == "example.org:80"
    assert host_port("::1", 80) == "[::1]:80"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *[(address, True) for address in ("127.0.0.1:50051", "127.8.9.1", "localhost:1", "[::1]:50051", "::1")],
        *[(address, True) for address in ("http://127.0.0.1:4317", "https://[::1]:4317/v1", "http://localhost/")],
        *[
            (address, False)
            for address in ("10.0.0.1:50051", "localhost.example.org:1", "[2001:db8::1]:1", "", "a:b:c")
        ],
        *[(address, False) for address in ("http://127.0.0.1.example.org/", "engine:50051", "unix:/run/engine")],
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected
