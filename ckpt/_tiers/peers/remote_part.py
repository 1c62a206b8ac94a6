"""`RemotePart`: a part of a snapshot on another host, read over TCP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
from msgspec import Struct

from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.peers.handshake import is_proof, new_nonce, proof_of
from ckpt._tiers.peers.protocol import (
    HELLO_SECONDS,
    MOST_FILES_BYTES,
    MOST_HELLO_BYTES,
    ClientProof,
    PartOpenRequest,
    PartOpenResult,
    PartReadRequest,
    ServerHello,
    ServerProof,
)
from ckpt._tiers.peers.wire import Wire, WireError, connected
from ckpt.errors import CorruptCheckpointError, StorageError


class Peer(Struct, frozen=True):
    """The agent of another process of the job, as a network address.

    Attributes:
        process: Number of the process.
        host: Address of its host.
        port: Its port.
    """

    process: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} at {self.host}:{self.port}"


class RemotePart:
    """The files of a part; made by `opened_part`. It is a `ReadsSteps` of one step."""

    def __init__(self, wire: Wire, peer: Peer, files: dict[str, int]) -> None:
        self._wire = wire
        self._peer = peer
        self._files = files
        self._turn = anyio.Lock()

    @property
    def location(self) -> str:
        return str(self._peer)

    async def exists(self, step_dir: str) -> bool:
        return True

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        size = self._files.get(path)
        if size is None:
            return None
        if size > limit:
            raise CorruptCheckpointError(f"{self.location}: {path} has {size} bytes")
        found = bytearray(size)
        await self.read_block(step_dir, path, 0, memoryview(found))
        return bytes(found)

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        size = self._files.get(path, -1)
        if offset + len(target) > size:
            raise CorruptCheckpointError(
                f"{self.location}: {path} is missing, or shorter than its manifest says"
            )
        with _naming_peer(self._peer):
            async with self._turn:
                await self._wire.send(PartReadRequest(path, offset, len(target)))
                await self._wire.fill(target)
        if then is not None:
            await run_in_thread(then)


@contextlib.asynccontextmanager
async def opened_part(peer: Peer, key: str, wanted: PartOpenRequest) -> AsyncIterator[RemotePart]:
    """Open a part that another process has.

    Args:
        peer: The other process.
        key: The key of the job.
        wanted: The wanted part.

    Raises:
        StorageError: The peer cannot be reached, does not know the key, or has no such part; the
            error names the peer.
    """
    with _naming_peer(peer):
        async with connected(peer.host, peer.port) as wire:
            with anyio.move_on_after(HELLO_SECONDS) as scope:
                await _introduce(wire, key)
            if scope.cancelled_caught:
                raise WireError(f"does not answer within {HELLO_SECONDS:.0f} s")
            await wire.send(wanted)
            opened = await wire.receive(PartOpenResult, MOST_FILES_BYTES)
            if opened is None:
                raise WireError("has ended the connection")
            if opened.problem:
                raise WireError(f"says that {opened.problem}")
            yield RemotePart(wire, peer, opened.files)


async def _introduce(wire: Wire, key: str) -> None:
    """Prove to the other side that this one knows the key, and check the proof of the other."""
    hello = await wire.receive(ServerHello, MOST_HELLO_BYTES)
    if hello is None:
        raise WireError("has ended the connection")
    nonce = new_nonce()
    await wire.send(ClientProof(nonce, proof_of(key, "client", hello.nonce, nonce)))
    welcome = await wire.receive(ServerProof, MOST_HELLO_BYTES)
    if welcome is None or not is_proof(welcome.proof, key, "server", hello.nonce, nonce):
        raise WireError("does not know the key of this job, or is of another job")


@contextlib.contextmanager
def _naming_peer(peer: Peer) -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise StorageError(f"{peer} {error}") from error
