"""The case of the checks of stores, and helpers to write and read steps of known bytes.

`ckpt.testing.conformance.stores` uses this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import anyio

from ckpt._format.manifest import Manifest, decode, encode
from ckpt._format.manifest_head import FILE_NAME, FOLDER, MAX_BYTES, FileEntry, digest
from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import files_folder

__all__ = [
    "DATA",
    "SMALL",
    "StoreCase",
    "assert_whole",
    "content",
    "files_of",
    "let_go",
    "manifest_of",
    "opened",
    "publish",
    "read_all",
    "refused",
    "together",
    "write",
]

T = TypeVar("T")
# The files of every step directory: a small one, and a data file.
SMALL, DATA = "item/small.json", "item/d/0"
_LONG_LEASE = 3600.0


def let_go(attempt: Attempt) -> None:
    """Do nothing: the writer simply never continues."""


@dataclass(frozen=True, slots=True)
class StoreCase:
    """A kind of store.

    Attributes:
        fresh: Makes an empty root, and returns a function that opens it: given timeouts, it makes a
            new storage each time, as another process would have; see `ckpt.storage.open_root`.
        abandon: Releases an attempt as the death of its writer would.
        lease_seconds: Duration of leases in the checks of dead writers. These checks take a few
            times as long, and a store that is slower than a fourth of it fails them.
    """

    fresh: Callable[[], Callable[[Timeouts], Storage]]
    abandon: Callable[[Attempt], None] = let_go
    lease_seconds: float = 1.0


@contextlib.asynccontextmanager
async def opened(
    case: StoreCase, count: int = 1, lease: float = _LONG_LEASE
) -> AsyncIterator[list[Storage]]:
    """Open a new root `count` times, as that many processes would."""
    opens = case.fresh()
    storages = [opens(Timeouts(lease=lease)) for _ in range(count)]
    for storage in storages:
        await storage.prepare()
    yield storages


def content(seed: object, nbytes: int) -> bytes:
    """Return bytes that differ for every seed."""
    return Random(str(seed)).randbytes(nbytes)


def manifest_of(attempt: Attempt, files: dict[str, bytes]) -> bytes:
    """Return the manifest of an attempt with these files."""
    return encode(
        Manifest(
            format="ckpt",
            version=1,
            requires=[FOLDER] if attempt.folder else [],
            step=None,
            attempt=attempt.id,
            folder=attempt.folder,
            unnamed=True,
            items={},
            created_ns=1,
            committed_ns=1,
            writer={},
            process_count=1,
            files={
                path: FileEntry(size=len(data), digest=digest(memoryview(data)))
                for path, data in files.items()
            },
        )
    )


async def write(
    storage: Storage, step_dir: str, seed: object = 0, nbytes: int = 5000, *, manifest: bool = True
) -> Attempt:
    """Write an attempt with files made from `seed`, without publishing it."""
    attempt = await storage.begin(step_dir)
    files = {SMALL: content(f"{seed} small", 100), DATA: content(seed, nbytes)}
    await storage.write(attempt, SMALL, files[SMALL])
    await storage.write_block(attempt, DATA, memoryview(files[DATA]))
    if manifest:
        await storage.write(attempt, FILE_NAME, manifest_of(attempt, files))
    return attempt


async def publish(
    storage: Storage,
    step_dir: str,
    seed: object = 0,
    *,
    overwrite: bool = False,
    nbytes: int = 5000,
) -> Attempt:
    """Write an attempt and publish it; discard it if that fails."""
    attempt = await write(storage, step_dir, seed, nbytes)
    try:
        await storage.publish(attempt, overwrite=overwrite)
    except CheckpointError:
        await storage.discard(attempt)
        raise
    return attempt


async def read_all(storage: Storage, step_dir: str) -> tuple[Manifest, dict[str, bytes]] | None:
    """Return the manifest of a step directory and its files, or None if it does not exist.

    Raises:
        CorruptCheckpointError: A file is missing or cut. A reader during writes should look again,
            as readers do.
    """
    data = await storage.read(step_dir, FILE_NAME, MAX_BYTES)
    if data is None:
        return None
    manifest = decode(data, where=step_dir)
    folder = files_folder(step_dir, manifest).removeprefix(step_dir).strip("/")
    found = {}
    for path, known in manifest.files.items():
        block = bytearray(known.size)
        place = f"{folder}/{path}" if folder else path
        with memoryview(block) as target:
            await storage.read_block(step_dir, place, 0, target)
        if digest(memoryview(block)) != known.digest:
            raise CorruptCheckpointError(f"{step_dir}/{place}: other bytes than were written")
        found[path] = bytes(block)
    return manifest, found


async def files_of(storage: Storage, step_dir: str) -> list[str]:
    """Return the files of a step; none if it does not exist, even if the store then raises."""
    try:
        return [*await storage.files(step_dir)]
    except StorageError:
        assert not await storage.exists(step_dir), "the files of a step that exists"
        return []


async def assert_whole(
    storage: Storage, step_dir: str, seed: object = 0, attempt: Attempt | None = None
) -> None:
    """Check that the step directory is of the attempt and has the files made from `seed`."""
    found = await read_all(storage, step_dir)
    assert found is not None, f"{step_dir} is not there"
    manifest, files = found
    assert attempt is None or manifest.attempt == attempt.id, f"{step_dir} is of another attempt"
    wanted = {SMALL: content(f"{seed} small", 100), DATA: content(seed, len(files[DATA]))}
    assert files == wanted, f"{step_dir} holds other bytes"


@contextlib.contextmanager
def refused(kind: type[BaseException], what: str, *names: str) -> Iterator[None]:
    """Check that the body raises an error of the class, with the names in its message."""
    try:
        yield
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"asked to {what}, the store did")
    unnamed = [name for name in names if name not in message]
    assert not unnamed, f"asked to {what}, the error does not name {unnamed}: {message}"


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Run calls at once; return the result of each, or the error of this library that it raised."""
    results: list[Any] = [None] * len(calls)

    async def run(place: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            results[place] = await call()
        except CheckpointError as error:
            results[place] = error

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(run, place, call)
    return results
