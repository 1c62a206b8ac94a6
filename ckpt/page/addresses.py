"""Addresses of this machine: those that the page listens on, and those that a browser opens."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# Addresses reserved for documentation: nothing is ever sent there.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def place_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the address of a socket that listens on a host.

    Raises:
        OSError: There is no such host.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, address


def reachable(family: socket.AddressFamily, host: str) -> str:
    """Return a host in the form of a URL, for a socket that listens on it.

    A browser cannot open "all addresses". Instead of them, the result is the address of this
    machine in its network, or the loopback address on a machine without a network.
    """
    if is_everywhere(host):
        host = _own_address(family)
    return f"[{host}]" if family == socket.AF_INET6 else host


def is_everywhere(host: str) -> bool:
    """Return True if a host means all addresses of this machine."""
    try:
        return ipaddress.ip_address(host or "0.0.0.0").is_unspecified
    except ValueError:
        return False


def _own_address(family: socket.AddressFamily) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            # Connecting a datagram socket sends nothing. It selects a route, whose source address
            # is known.
            asked.connect((_ELSEWHERE[family], 9))
        except OSError:
            return _LOOPBACK[family]
        host: str = asked.getsockname()[0]
        return host
