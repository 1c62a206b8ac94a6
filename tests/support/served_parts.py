"""Parts of snapshots that a host shows to the others of its job, and a raw end of a connection."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import numpy as np
from msgspec.structs import replace

import ckpt.sync
from ckpt._format.manifest import decode, encode
from ckpt._runtime.loop import call_once
from ckpt._settings import Timeouts
from ckpt._tiers.peers import server
from ckpt._tiers.peers.remote_part import Peer, fetch_part
from ckpt._tiers.peers.server import PartServer
from ckpt._tiers.peers.wire import (
    ClientProof,
    PartOpenRequest,
    PartOpenResult,
    ServerHello,
    ServerProof,
    new_key,
    new_nonce,
    proof_of,
)
from ckpt.storage import Local
from ckpt.storage._local.storage import LocalStorage

__all__ = ["ADDRESS", "SAVE", "Host", "Raw", "target_of"]

PATIENCE_S = 120
ADDRESS = "127.0.0.1"
SAVE = "5a" * 16


def target_of(path: Path) -> LocalStorage:
    """Return a root in which fetched parts are put."""
    return LocalStorage(Local(path, permission_mode=0o700), Timeouts())


class Host:
    """A host that shows the parts of process 1; the test is process 0.

    Attributes:
        folder: Where the parts are.
        key: The key of the job.
        refused: What was wrong with connections.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = new_key()
        self.refused: list[str] = []

    def take(self, step: int, items: Mapping[str, Any] | None = None, save: str = SAVE) -> Path:
        """Take a snapshot; return its directory."""
        with ckpt.sync.CheckpointManager(self.folder / "steps") as mgr:
            mgr.save(step, items=dict(items or {"w": {"w": np.arange(1000.0) + step}})).result()
        path = self.folder / f"steps/{step}/ckpt.json"
        manifest = decode(path.read_bytes(), where=str(path))
        path.write_bytes(encode(replace(manifest, save=save)))
        return path.parent

    def run(self, body: Callable[[PartServer], Any]) -> None:
        """Run a body while the parts are served."""

        async def main() -> None:
            with anyio.fail_after(PATIENCE_S):
                async with self.serving() as served:
                    await body(served)

        call_once(main)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[PartServer]:
        """Serve the parts."""
        folders = [(1, self.folder)]
        async with server.serving(
            ADDRESS, 0, self.key, lambda: folders, self.refused.append
        ) as served:
            yield served

    async def fetch(
        self, served: PartServer, step: int, target: Path, *, key: str = "", save: str = SAVE
    ) -> int:
        """Fetch the part of a snapshot from a server, as process 0 does."""
        wanted = PartOpenRequest(1, step, save)
        peer = Peer(1, *served.address)
        return await fetch_part(peer, key or self.key, wanted, target_of(target), str(step))

    async def says(self, problem: str) -> None:
        """Wait until a connection was refused for that reason."""
        with anyio.fail_after(PATIENCE_S):
            while not any(problem in each for each in self.refused):  # noqa: ASYNC110
                await anyio.sleep(0.01)


class Raw:
    """One end of a connection that sends what the test wants."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._rest = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: tuple[str, int]) -> AsyncIterator[Raw]:
        """Connect to a server."""
        async with await anyio.connect_tcp(*address) as stream:
            yield cls(stream)

    async def send(self, what: object) -> None:
        """Send bytes as they are, or a message as a line; the other side may be gone."""
        data = what if isinstance(what, bytes) else msgspec.json.encode(what) + b"\n"
        with contextlib.suppress(anyio.BrokenResourceError):
            await self._stream.send(data)

    async def line(self) -> bytes:
        """Return the next line; empty at the end."""
        while b"\n" not in self._rest:
            piece = await self._piece()
            if not piece:
                return b""
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def exactly(self, nbytes: int) -> bytes:
        """Return so many bytes, or less at the end."""
        while len(self._rest) < nbytes and (piece := await self._piece()):
            self._rest += piece
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return found

    async def _piece(self) -> bytes:
        try:
            return await self._stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return b""

    async def is_over(self) -> bool:
        """Wait for the end of the connection; tell whether nothing comes before it."""
        return await self.line() == b"" and self._rest == b""

    async def introduced(self, key: str) -> Raw:
        """Do the handshake as a client that knows the key."""
        hello = msgspec.json.decode(await self.line(), type=ServerHello)
        nonce = new_nonce()
        await self.send(ClientProof(nonce, proof_of(key, "client", hello.nonce, nonce)))
        welcome = msgspec.json.decode(await self.line(), type=ServerProof)
        assert welcome.proof == proof_of(key, "server", hello.nonce, nonce)
        return self

    async def opened(self, wanted: PartOpenRequest) -> PartOpenResult:
        """Ask for a part."""
        await self.send(wanted)
        return msgspec.json.decode(await self.line(), type=PartOpenResult)
