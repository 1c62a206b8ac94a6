"""A constant of the models, measured: how fast a host fetches a part of a snapshot from another.

Both ends are on this machine, over loopback: a process serves a part from a folder of /dev/shm, and
this one fetches it into another, compares its digests, and publishes it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import numpy as np
from msgspec.structs import replace

import ckpt.sync
from ckpt._format.manifest import decode, encode
from ckpt._settings import Timeouts
from ckpt._tiers.peers.parts import STEPS
from ckpt._tiers.peers.remote_part import Peer, fetch_part
from ckpt._tiers.peers.wire import PartOpenRequest, new_key
from ckpt.storage._local.storage import LocalStorage

__all__ = ["measured"]

_ROUNDS, _FILES = 9, 16
_SAVE = "0" * 32
_SERVER = """
import sys
from pathlib import Path

import anyio

from ckpt._tiers.peers.server import serving


async def main(folder: str, key: str) -> None:
    async with serving("127.0.0.1", 0, key, lambda: [(0, Path(folder))], print) as server:
        print(server.address[1], flush=True)
        await anyio.sleep_forever()


anyio.run(main, *sys.argv[1:])
"""


def measured(nbytes: int = 1 << 30, folder: Path = Path("/dev/shm")) -> float:
    """Returns bytes a second, of the fastest of several rounds: other work only makes it slower."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source, key = Path(name, "source"), new_key()
        _save(source / STEPS, nbytes)
        command = [sys.executable, "-c", _SERVER, str(source), key]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                peer = Peer(0, "127.0.0.1", int(server.stdout.readline()))
                return max(_rate(peer, key, Path(name, "target")) for _ in range(_ROUNDS))
            finally:
                server.kill()


def _save(root: Path, nbytes: int) -> None:
    """Saves a step as a process of a job does: with an id that all parts have in common."""
    values = np.random.default_rng(0).integers(0, 255, (_FILES, nbytes // _FILES), np.uint8)
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, dict(zip(map(str, range(_FILES)), values, strict=True))).result()
    path = root / "1" / "ckpt.json"
    path.write_bytes(encode(replace(decode(path.read_bytes(), where=str(path)), save=_SAVE)))


def _rate(peer: Peer, key: str, target: Path) -> float:
    storage = LocalStorage(target, Timeouts())
    began = time.perf_counter()
    nbytes = anyio.run(fetch_part, peer, key, PartOpenRequest(0, 1, _SAVE), storage, "1")
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return nbytes / seconds
