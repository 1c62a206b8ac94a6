"""The copy of one step: its files as they are, compared with their digests on the way.

It is an attempt like that of a save: published whole, or not at all. The manifest stays as it is,
byte by byte, unless the files are in a folder in one of the two places and not in the other.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping
from functools import partial
from typing import Literal, Protocol

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.save.republication import republish
from ckpt._engine.save.request import SaveRequest
from ckpt._engine.save.step_manifest import features
from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._format.digests import new_digest
from ckpt._format.manifest import Manifest, encode, sizes
from ckpt._format.manifest_head import (
    FILE_NAME,
    FOLDER,
    MAX_BYTES,
    OWN_DISKS,
    VIRTUAL,
    FileEntry,
    peek,
)
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.saves.overwrite import make_way
from ckpt.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StepDeletedError,
    StepExistsError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import Attempt, Storage, WritesParts
from ckpt.storage._manifests import lies_in, read_manifest, while_read

# Four of these are all the memory that a copy takes, whatever the size of the files: while one is
# read, others are written. Stores that take an object as a whole need that much more.
_LANES, _PIECE_BYTES = 4, 16 << 20

# What is where a copy goes: nothing, the same step, the same one with files missing, or another.
Presence = Literal["nothing", "same", "damaged", "other"]


class CopyProgress(Protocol):
    """Who is told how a copy goes on."""

    def expect(self, nbytes: int) -> None:
        """Count on that many bytes more."""

    def move(self, nbytes: int) -> None:
        """Count bytes that were copied."""


class CopyPlace(Struct, frozen=True):
    """A step directory, or the place of one.

    Attributes:
        storage: The root.
        name: Its name there.
    """

    storage: Storage
    name: str

    @property
    def location(self) -> str:
        """Its path or URL."""
        return f"{self.storage.location}/{self.name}"


async def presence_of(manifest: Manifest, target: CopyPlace) -> Presence:
    """Return what is at a place where a step is to be copied to; names and sizes are compared."""
    try:
        found = await read_manifest(target.storage, target.name)
    except NotACheckpointError:
        return "nothing"
    except (CorruptCheckpointError, UnsupportedFormatError):
        return "other"
    if await run_in_thread(_content, found) != await run_in_thread(_content, manifest):
        return "other"
    report = await verify_step_dir(target.storage, target.name, None, False, (), may_write=False)
    return "same" if report.ok else "damaged"


def _content(manifest: Manifest) -> bytes:
    """Return a manifest without what says where its files are."""
    requires = [each for each in manifest.requires if each != FOLDER]
    return encode(replace(manifest, attempt="", folder="", requires=requires))


class StepCopier:
    """Copies steps, one at a time; closing it frees its memory."""

    def __init__(self, progress: CopyProgress) -> None:
        """Tell `progress` of the bytes."""
        self._progress = progress
        self._regions = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(_LANES)]

    def close(self) -> None:
        """Free the memory."""
        for region in self._regions:
            # An error in flight may still refer to it; then it is freed with the error.
            with contextlib.suppress(BufferError):
                region.close()

    async def copy(
        self, source: CopyPlace, manifest: Manifest, target: CopyPlace, *, overwrite: bool
    ) -> None:
        """Copy a step.

        Args:
            source: The step.
            manifest: Its manifest.
            target: Where it goes.
            overwrite: Whether what is there is replaced.

        Raises:
            CorruptCheckpointError: A file of it is damaged; names it.
            StepDeletedError: It was deleted or replaced meanwhile.
            StepExistsError: There is something where it goes.
            StorageError: A storage refused.

        Cancellation: nothing is left behind, unless the step was just being published.
        """
        write = partial(self._write, source, manifest, target.storage)
        with located(step=manifest.step):
            await make_way(
                target.storage,
                SaveRequest(target.name, manifest.step, {}, False, None, None, overwrite),
            )
            self._progress.expect(sum(file.size for file in manifest.files.values()))
            async with while_read(source.storage, source.name, manifest):
                with located(step=manifest.step):
                    await republish(target.storage, target.name, write, overwrite=overwrite)

    async def _write(
        self, source: CopyPlace, manifest: Manifest, target: Storage, attempt: Attempt
    ) -> Mapping[str, int]:
        """Write all files of an attempt; return their sizes."""
        encoded = await source.storage.read(source.name, FILE_NAME, MAX_BYTES)
        head = None if encoded is None else await run_in_thread(peek, encoded)
        if encoded is None or head is None or head.attempt != manifest.attempt:
            raise StepDeletedError(f"{source.location} was deleted or replaced while it was copied")
        if attempt.folder or manifest.folder:
            manifest_there = _placed(manifest, attempt)
            encoded = await run_in_thread(encode, manifest_there)
        place = CopyPlace(source.storage, lies_in(source.name, manifest))
        # The largest first, so that no lane is busy with a large one when the others have ended.
        files = iter(sorted(manifest.files.items(), key=lambda each: -each[1].size))

        async def lane(region: mmap.mmap) -> None:
            for path, file in files:
                await self._copy_file(place, path, file, target, attempt, region)

        async with anyio.create_task_group() as lanes:
            for region in self._regions:
                lanes.start_soon(lane, region)
        await target.write(attempt, FILE_NAME, encoded)
        return sizes(manifest, encoded)

    async def _copy_file(
        self,
        source: CopyPlace,
        path: str,
        file: FileEntry,
        target: Storage,
        attempt: Attempt,
        region: mmap.mmap,
    ) -> None:
        """Copy a file, and compare it with its digest before its last byte is written."""
        digester = new_digest()
        # A store without parts takes an object at once, and its client holds all of it.
        most = _PIECE_BYTES if isinstance(target, WritesParts) else max(file.size, _PIECE_BYTES)
        memory = memoryview(region if most == _PIECE_BYTES else mmap.mmap(-1, most))
        start = 0
        while True:
            piece = memory[: min(most, file.size - start)]
            end = start + len(piece)
            # In the thread that has read them, while they are in its cache.
            digest = partial(digester.update, piece)
            await source.storage.read_block(source.name, path, start, piece, digest)
            if end == file.size and digester.hexdigest() != file.digest:
                raise CorruptCheckpointError(
                    f"{source.location}/{path} was changed after it was saved, so the step was not "
                    "copied. verify says what is hit"
                )
            if isinstance(target, WritesParts):
                is_last = end == file.size
                await target.write_part(attempt, path, start, piece, is_last=is_last)
            else:
                await target.write_block(attempt, path, piece)
            self._progress.move(len(piece))
            start = end
            if start == file.size:
                return


def _placed(manifest: Manifest, attempt: Attempt) -> Manifest:
    """Return a manifest of the same files, which are where an attempt has them."""
    requires = features(
        manifest.items,
        attempt.folder,
        own_disks=OWN_DISKS in manifest.requires,
        virtual=VIRTUAL in manifest.requires,
    )
    return replace(manifest, attempt=attempt.id, folder=attempt.folder, requires=requires)


async def others_in(source: CopyPlace, manifest: Manifest) -> list[str]:
    """Return the files in a step directory that are not of the step."""
    found = await source.storage.files(source.name)
    return sorted(found.keys() - manifest.sizes.keys() - {FILE_NAME})


async def copied_meanwhile(error: StepExistsError, manifest: Manifest, target: CopyPlace) -> None:
    """Raise the error of a copy, unless another process has just made the same one."""
    if await presence_of(manifest, target) != "same":
        raise error
