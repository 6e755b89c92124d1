"""Addresses: how a host and a port are written, and which hosts are this machine."""

import ipaddress


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets, as URLs and gRPC have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether HOST, HOST:PORT or a URL of either is this machine, so that no proxy can lead there."""
    host = address.rpartition("://")[2].partition("/")[0]
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
