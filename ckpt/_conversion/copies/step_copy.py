"""The copy of one step: its files as they are, compared with their digests on the way.

A copy is an attempt like that of a save: published whole, or not at all. The manifest stays the
same, byte by byte, unless items are left out, or the files are in a folder in only one of the two
places. Files for other readers that only one of the places has (in stores, Orbax requires a mark in
every item) are added on the way there, and left out on the way back.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._conversion.copies.selection import Selection
from ckpt._conversion.copies.step_location import CopySource, StepLocation
from ckpt._engine.save.republication import republish
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import Event
from ckpt._format.manifest import Manifest, encode, features, sizes
from ckpt._format.manifest_head import (
    FILE_NAME,
    MAX_BYTES,
    OWN_DISKS,
    VIRTUAL,
    FileEntry,
    digest,
    new_digest,
    peek,
)
from ckpt._format.step_files import ITEM_FILES
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._runtime.mappings import map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.saves.save_arguments import clear_target
from ckpt.errors import CorruptCheckpointError, StepDeletedError, StorageError, located
from ckpt.storage._base import Attempt, HasDirectories, LeavesFiles, Storage, WritesParts
from ckpt.storage._manifests import files_folder, while_read


class Allowance:
    """A limit of bytes in use at once; a task that asks for more than the limit gets all of it."""

    def __init__(self, nbytes: int) -> None:
        self._all = self._left = nbytes
        self._changed = anyio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are left, and take them for the body."""
        share = min(nbytes, self._all)
        async with self._changed:
            while self._left < share:
                await self._changed.wait()
            self._left -= share
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._changed:
                    self._left += share
                    self._changed.notify_all()


# Four of these are all the memory of a copy, whatever the size of the files: while one is being
# read, others are being written.
_LANES, _PIECE_BYTES = 4, 16 << 20
# Limit of files in memory for a store that takes only whole files: two or three of the size that
# files have on a disk. The client copies each of them several times.
_WHOLE_FILES_BYTES = 96 << 20
# Errors of a disk about one file that cannot be read.
_UNREADABLE = (errno.EIO, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CopyProgress(Protocol):
    """Receives the progress of a copy."""

    def expect(self, nbytes: int) -> None:
        """Add to the expected bytes."""

    def move(self, nbytes: int) -> None:
        """Count bytes that were copied."""

    def __call__(self, event: Event) -> None:
        """Receive an event of the save that writes a step anew."""


class ByteCounter:
    """Counts the bytes of a copy, in `nbytes`."""

    def __init__(self) -> None:
        self.nbytes = 0

    def expect(self, nbytes: int) -> None:
        """Do nothing."""

    def move(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def __call__(self, event: Event) -> None:
        """Do nothing."""


Pace = Callable[[int], Awaitable[None]]
"""Waits until so many bytes more may be moved."""


async def at_once(_nbytes: int) -> None:
    """A pace without a limit."""


class _NewFiles(Struct, frozen=True):
    """The files of a copy.

    Attributes:
        copied: Files that are copied.
        written: Contents of files that are written anew.
    """

    copied: Mapping[str, FileEntry]
    written: Mapping[str, bytes]

    @property
    def entries(self) -> dict[str, FileEntry]:
        made = {
            path: FileEntry(size=len(data), digest=digest(data))
            for path, data in self.written.items()
        }
        return {**self.copied, **made}


class StepCopier:
    """Copies steps, one at a time; closing it frees its memory.

    Attributes:
        progress: Receives the progress.
    """

    def __init__(
        self, progress: CopyProgress, *, pace: Pace = at_once, goes_on: bool = False
    ) -> None:
        """Copy at a pace.

        Args:
            progress: Receives the progress.
            pace: Awaited before each piece is moved.
            goes_on: True to let a failed or cancelled copy leave its files to the next copy of the
                same step, if the storage supports it. The caller must sweep the target in the end.
        """
        self.progress: CopyProgress = progress
        self._pace = pace
        self._goes_on = goes_on
        self._regions = [map_memory(_PIECE_BYTES) for _ in range(_LANES)]
        self._whole_files = Allowance(_WHOLE_FILES_BYTES)

    def close(self) -> None:
        """Free the memory."""
        # An error in flight may still refer to a region, which is then freed with the error.
        self._regions.clear()

    async def copy(
        self,
        source: CopySource,
        manifest: Manifest,
        selection: Selection,
        target: StepLocation,
        *,
        overwrite: bool,
    ) -> int:
        """Copy a step, or whole items of one.

        Args:
            source: The step.
            manifest: Its manifest.
            selection: The part to copy.
            target: The place of the copy.
            overwrite: True to replace a step at that place.

        Returns:
            The bytes of the files.

        Raises:
            CorruptCheckpointError: A file of the step is damaged, or cannot be read; names it.
            StepDeletedError: The step was deleted or replaced meanwhile.
            StepExistsError: There is a step at the place of the copy.
            StorageError: A storage refused.

        Cancellation: nothing is left behind but files that the next copy takes over, unless the
        step was just being published.
        """
        storage = target.storage
        is_left = False

        async def write(attempt: Attempt) -> Mapping[str, int]:
            nonlocal is_left
            try:
                return await self._write(source, manifest, selection, target, attempt)
            except BaseException as error:
                is_left = self._goes_on and is_only_cut(error)
                raise

        async def give_up(attempt: Attempt) -> None:
            await storage.discard(attempt, keep_files=is_left)

        nbytes = sum(file.size for file in selection.manifest.files.values())
        with located(step=manifest.step):
            await clear_target(
                storage,
                SaveRequest(
                    target.name,
                    manifest.step,
                    {},
                    False,
                    None,
                    None,
                    "replace" if overwrite else "error",
                ),
            )
            self.progress.expect(nbytes)
            async with while_read(source.storage, source.name, manifest):
                with located(step=manifest.step):
                    await republish(
                        storage, target.name, write, overwrite=overwrite, give_up=give_up
                    )
        return nbytes

    async def _write(
        self,
        source: CopySource,
        manifest: Manifest,
        selection: Selection,
        target: StepLocation,
        attempt: Attempt,
    ) -> Mapping[str, int]:
        """Write all files of an attempt; return their sizes."""
        encoded = await source.storage.read(source.name, FILE_NAME, MAX_BYTES)
        head = None if encoded is None else await run_in_thread(peek, encoded)
        if encoded is None or head is None or head.attempt != manifest.attempt:
            raise StepDeletedError(f"{source.location} was deleted or replaced while it was copied")
        new = await run_in_thread(_new_files, selection, target.name, attempt.folder)
        placed = selection.manifest
        same_files = not new.written and new.copied.keys() == manifest.files.keys()
        if attempt.folder or manifest.folder or not same_files:
            placed = _manifest_of_copy(placed, attempt, new)
            encoded = await run_in_thread(encode, placed)
        async with anyio.create_task_group() as writes:
            for path, data in new.written.items():
                writes.start_soon(target.storage.write, attempt, path, data)
            await self.copy_files(source, manifest, new.copied, target, attempt)
        await target.storage.write(attempt, FILE_NAME, encoded)
        return sizes(placed, encoded)

    async def copy_files(
        self,
        source: CopySource,
        manifest: Manifest,
        files: Mapping[str, FileEntry],
        target: StepLocation,
        attempt: Attempt,
    ) -> None:
        """Copy files of a step into an attempt.

        Args:
            source: The step.
            manifest: Its manifest.
            files: The files to copy.
            target: The place of the attempt.
            attempt: An attempt that was begun; gets the files at the same paths.

        Raises:
            CorruptCheckpointError: A file is damaged, or cannot be read; names it.
            StorageError: A storage refused.

        Cancellation: the attempt has some of the files, and the beginnings of others.
        """
        place = CopySource(source.storage, files_folder(source.name, manifest))
        taken = await self._taken_over(files, target, attempt) if self._goes_on else set()
        # Largest first, so that no lane is still busy with a large file when the others have ended.
        left = iter(
            sorted(
                (each for each in files.items() if each[0] not in taken),
                key=lambda each: -each[1].size,
            )
        )

        async def lane(region: memoryview) -> None:
            for path, file in left:
                await self._copy_file(place, path, file, target.storage, attempt, region)

        async with anyio.create_task_group() as lanes:
            for region in self._regions:
                lanes.start_soon(lane, region)

    async def _taken_over(
        self, files: Mapping[str, FileEntry], target: StepLocation, attempt: Attempt
    ) -> set[str]:
        """Take over whole files of cut copies; return the paths that the attempt has now."""
        storage = target.storage
        taken: set[str] = set()
        if not isinstance(storage, LeavesFiles):
            return taken
        for dead in await storage.attempts():
            if dead.step_dir != target.name or not dead.directory:
                continue
            try:
                found = await storage.files(dead.directory)
            except StorageError:
                # A sweep removed them first.
                continue
            wanted = (
                (path, file)
                for path, file in files.items()
                if path not in taken and found.get(path) == file.size
            )
            whole: list[str] = []
            place = StepLocation(storage, dead.directory)
            async with anyio.create_task_group() as lanes:
                for region in self._regions:
                    lanes.start_soon(self._look_at_left, place, wanted, region, whole)
            taken.update(await storage.take_over(attempt, dead.directory, whole))
        return taken

    async def _look_at_left(
        self,
        left: StepLocation,
        files: Iterator[tuple[str, FileEntry]],
        region: memoryview,
        whole: list[str],
    ) -> None:
        """Add the files whose bytes match their digests to `whole`."""
        for path, file in files:
            digester = new_digest()
            try:
                for start in range(0, file.size, len(region)):
                    piece = region[: min(len(region), file.size - start)]
                    await self._pace(len(piece))
                    then = partial(digester.update, piece)
                    await left.storage.read_block(left.name, path, start, piece, then)
            except (CorruptCheckpointError, StorageError):
                # A sweep removed the file, or the disk can no longer read it: it is copied again.
                continue
            if digester.hexdigest() == file.digest:
                whole.append(path)

    async def _copy_file(
        self,
        source: CopySource,
        path: str,
        file: FileEntry,
        target: Storage,
        attempt: Attempt,
        region: memoryview,
    ) -> None:
        """Copy a file, and compare it with its digest before its last byte is written."""
        # A store without parts takes an object at once, and its client holds all of it.
        if isinstance(target, WritesParts) or file.size <= _PIECE_BYTES:
            await self._move(source, path, file, target, attempt, region)
            return
        # The allowance bounds memory to its limit, or to one larger file, rather than several
        # files.
        async with self._whole_files.taken(file.size):
            await self._move(source, path, file, target, attempt, map_memory(file.size))

    async def _move(
        self,
        source: CopySource,
        path: str,
        file: FileEntry,
        target: Storage,
        attempt: Attempt,
        memory: memoryview,
    ) -> None:
        digester = new_digest()
        start = 0
        while True:
            piece = memory[: min(len(memory), file.size - start)]
            end = start + len(piece)
            await self._pace(len(piece))
            # Hashed in the thread that read the bytes, while they are in its cache.
            await _read(source, path, start, piece, partial(digester.update, piece))
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
            self.progress.move(len(piece))
            start = end
            if start == file.size:
                return


async def _read(
    source: CopySource, path: str, start: int, piece: memoryview, then: Callable[[], None]
) -> None:
    try:
        await source.storage.read_block(source.name, path, start, piece, then)
    except StorageError as error:
        # An error of a store concerns all of its files. On a disk it concerns one file, and other
        # steps can be copied.
        if not isinstance(source.storage, HasDirectories) or error.errno not in _UNREADABLE:
            raise
        raise CorruptCheckpointError(f"{error.message}; the step was not copied") from error


def is_only_cut(error: BaseException) -> bool:
    """Return True if a copy failed for an outside reason, so that the next one can go on."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_only_cut(each) for each in error.exceptions)
    if isinstance(error, StorageError):
        # Files that are left on a full disk would keep it full.
        return error.errno not in _FULL
    return isinstance(error, anyio.get_cancelled_exc_class())


def _new_files(selection: Selection, step_dir: str, folder: str) -> _NewFiles:
    """Return the files of a copy: those of the selection, and the files for other readers.

    `folder` is that of the copy; see `Manifest.folder`.
    """
    kept = selection.manifest
    if selection.is_all and bool(folder) == bool(kept.folder):
        return _NewFiles(kept.files, {})
    sidecars = OrbaxSidecars()
    here = sidecars.of_step(step_dir, kept)
    written = there = sidecars.of_step(step_dir, replace(kept, folder=folder))
    if selection.is_all:
        added = there.keys() - here.keys() - kept.files.keys()
        written = {path: there[path] for path in added}
    left_out = written.keys() | (here.keys() - there.keys())
    if not selection.is_all:
        # In the directory of the step itself, these may show leaves that are left out.
        left_out |= ITEM_FILES
    copied = {path: file for path, file in kept.files.items() if path not in left_out}
    return _NewFiles(copied, written)


def _manifest_of_copy(manifest: Manifest, attempt: Attempt, new: _NewFiles) -> Manifest:
    """Return the manifest of a copy whose files are placed as in an attempt."""
    requires = features(
        manifest.items,
        attempt.folder,
        own_disks=OWN_DISKS in manifest.requires,
        virtual=VIRTUAL in manifest.requires,
    )
    return replace(
        manifest,
        attempt=attempt.id,
        folder=attempt.folder,
        requires=requires,
        files=new.entries,
    )


async def others_in(source: StepLocation, manifest: Manifest) -> list[str]:
    """Return the files in a step directory that do not belong to the step."""
    found = await source.storage.files(source.name)
    return sorted(found.keys() - manifest.sizes.keys() - {FILE_NAME})
