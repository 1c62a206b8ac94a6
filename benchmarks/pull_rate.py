"""How fast one connection brings bytes from the shared memory of a host into that of another.

Both ends are on this machine, over loopback: one thread sends a file of /dev/shm, another receives
it in a file there and then takes the digest of what has come, all outside the interpreter.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

from ckpt._format.digests import digest

__all__ = ["measured"]

_PIECE = 8 << 20
_ROUNDS = 9


def measured(nbytes: int = 1 << 30, folder: Path = Path("/dev/shm")) -> float:
    """Returns bytes a second, of the fastest of several rounds: other work only makes it slower.

    Raises:
        ValueError: What has come is not what was sent.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source = Path(name, "source")
        source.write_bytes(os.urandom(min(nbytes, _PIECE)) * -(-nbytes // _PIECE))
        os.truncate(source, nbytes)
        sent = digest(source.read_bytes())
        rates = []
        for number in range(_ROUNDS):
            began = time.perf_counter()
            if _pulled(source, Path(name, f"copy-{number}"), nbytes) != sent:
                raise ValueError("what has come is not what was sent")
            rates.append(nbytes / (time.perf_counter() - began))
            Path(name, f"copy-{number}").unlink()
    return max(rates)


def _pulled(source: Path, target: Path, nbytes: int) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server, source))
        sender.start()
        with socket.create_connection(server.getsockname()) as ours, target.open("w+b") as file:
            file.truncate(nbytes)
            with mmap.mmap(file.fileno(), nbytes) as memory, memoryview(memory) as view:
                at = 0
                while at < nbytes and (came := ours.recv_into(view[at : at + _PIECE])):
                    at += came
                found = digest(view)
        sender.join()
    return found


def _send(server: socket.socket, source: Path) -> None:
    with server.accept()[0] as theirs, source.open("rb") as file:
        theirs.sendfile(file)
