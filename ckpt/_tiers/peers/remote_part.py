"""`RemotePart`: a part of a snapshot on another host, read over TCP, and copied to a root here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
from msgspec import Struct

from ckpt._conversion.copies.selection import everything
from ckpt._conversion.copies.step_copy import ByteCounter, StepCopier
from ckpt._conversion.copies.step_location import CopySource, StepLocation, is_copy
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.peers.wire import (
    HELLO_SECONDS,
    MOST_FILES_BYTES,
    PartOpenRequest,
    PartOpenResult,
    PartReadRequest,
    Wire,
    WireError,
    connected,
)
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


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
                await wire.introduce(key, "client")
            if scope.cancelled_caught:
                raise WireError(f"does not answer within {HELLO_SECONDS:.0f} s")
            await wire.send(wanted)
            opened = await wire.receive(PartOpenResult, MOST_FILES_BYTES)
            if opened is None:
                raise WireError("has ended the connection, as it does where keys differ")
            if opened.problem:
                raise WireError(f"says that {opened.problem}")
            yield RemotePart(wire, peer, opened.files)


@contextlib.contextmanager
def _naming_peer(peer: Peer) -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise StorageError(f"{peer} {error}") from error


async def fetch_part(
    peer: Peer, key: str, wanted: PartOpenRequest, target: Storage, step_dir: str
) -> int:
    """Copy a part that another process has, unless it is here already.

    Another snapshot of the same step is replaced.

    Args:
        peer: The other process.
        key: The key of the job.
        wanted: The wanted part.
        target: The root for the copy.
        step_dir: Directory of the copy there.

    Returns:
        The number of copied bytes.

    Raises:
        StorageError: The peer cannot be reached, or has no such part; or there is no room.
        CorruptCheckpointError: The part of the peer is damaged, or is another part.

    Cancellation: nothing of the copy is visible.
    """
    await target.prepare()
    # Remove leftovers of an interrupted fetch.
    await target.sweep()
    async with opened_part(peer, key, wanted) as remote:
        manifest = await read_manifest(remote, step_dir, step=wanted.step)
        if manifest.save != wanted.save:
            raise CorruptCheckpointError(f"{peer} gave another snapshot", step=wanted.step)
        found = await _manifest_if_there(target, step_dir)
        if found is not None and await run_in_thread(is_copy, manifest, found):
            return 0
        with contextlib.closing(StepCopier(ByteCounter())) as copier:
            return await copier.copy(
                CopySource(remote, step_dir),
                manifest,
                everything(manifest),
                StepLocation(target, step_dir),
                overwrite=True,
            )


async def _manifest_if_there(target: Storage, step_dir: str) -> Manifest | None:
    try:
        return await read_manifest(target, step_dir)
    except CheckpointError:
        # There is no step, or a damaged one, which is replaced.
        return None
