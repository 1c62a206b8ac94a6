"""Parts of snapshots that a host shows to the others of its job, and a raw end of a connection."""

from __future__ import annotations

import contextlib
import hmac
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
from ckpt._tiers.peers.wire import Hello, PartOpenRequest, PartOpenResult, new_key
from ckpt.storage import Local
from ckpt.storage._local.storage import LocalStorage

__all__ = ["ADDRESS", "SAVE", "Host", "Raw", "Tagging", "target_of"]

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


class Tagging:
    """The tags of one side of a connection, as the protocol describes them."""

    def __init__(self, key: str, role: str, server_nonce: str, client_nonce: str) -> None:
        said = f"ckpt parts 2 {role} {server_nonce} {client_nonce}"
        self._key = hmac.digest(bytes.fromhex(key), said.encode(), "sha256")
        self.count = 0

    def next(self, data: bytes) -> bytes:
        self.count += 1
        return hmac.digest(self._key, self.count.to_bytes(8, "big") + data, "sha256")


class Raw:
    """One end of a connection that sends what the test wants.

    Attributes:
        sent, received: The tags of either side, once `introduced` has been called.
    """

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._rest = b""
        self.sent: Tagging | None = None
        self.received: Tagging | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: tuple[str, int]) -> AsyncIterator[Raw]:
        """Connect to a server."""
        async with await anyio.connect_tcp(*address) as stream:
            yield cls(stream)

    async def send(self, what: object) -> None:
        """Send bytes as they are, or a message as a line; the other side may be gone."""
        data = what if isinstance(what, bytes) else self.lined(what)
        with contextlib.suppress(anyio.BrokenResourceError):
            await self._stream.send(data)

    def lined(self, message: object) -> bytes:
        """Return a message as a line, with its tag."""
        line = msgspec.json.encode(message)
        if self.sent is not None:
            line += b" " + self.sent.next(line).hex().encode()
        return line + b"\n"

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

    async def introduced(self, key: str, role: str = "client", nonce: str = "0c" * 32) -> Raw:
        """Exchange random numbers, as one that knows the key."""
        await self.send(Hello(nonce))
        hello = msgspec.json.decode(await self.line(), type=Hello)
        nonces = (hello.nonce, nonce) if role == "client" else (nonce, hello.nonce)
        ends = Tagging(key, "client", *nonces), Tagging(key, "server", *nonces)
        self.sent, self.received = ends if role == "client" else ends[::-1]
        return self

    async def message(self) -> bytes:
        """Return the next message without its tag, which is right; empty at the end."""
        line = await self.line()
        said, _, tag = line.rpartition(b" ")
        assert not line or (self.received and tag.decode() == self.received.next(said).hex())
        return said

    async def bytes_of(self, nbytes: int) -> bytes:
        """Return the bytes of a file, whose tag is right."""
        found, tag = await self.exactly(nbytes), await self.exactly(32)
        assert self.received is not None
        assert tag == self.received.next(found)
        return found

    async def opened(self, wanted: PartOpenRequest) -> PartOpenResult:
        """Ask for a part."""
        await self.send(wanted)
        return msgspec.json.decode(await self.message(), type=PartOpenResult)
