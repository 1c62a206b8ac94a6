"""Ports that nothing listens at, nor will by chance."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

__all__ = ["free_port"]

# Below those that the system gives to connections and to who asks for any port.
_LOWEST = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
# Each process of the tests has its own.
_FIRST = 1024 + os.getpid() % 97 * 97
_candidates = itertools.cycle(range(_FIRST, max(_LOWEST, _FIRST + 100)))


def free_port() -> int:
    """Return a port of the loopback that only who is given it will use."""
    for port in _candidates:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable")
