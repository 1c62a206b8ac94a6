"""The copy of one step: its files as they are, compared with their digests on the way.

It is an attempt like that of a save: published whole, or not at all. The manifest stays as it is,
byte by byte, unless items are left out, or the files are in a folder in one of the two places and
not in the other. In stores Orbax wants a mark in every item, which is added there and taken away on
the way back.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._conversion.copies.allowance import Allowance
from ckpt._conversion.copies.place import CopyPlace, CopySource, ReadPlace
from ckpt._conversion.copies.selection import Selection
from ckpt._engine.save.republication import republish
from ckpt._engine.save.request import SaveRequest
from ckpt._events import Event
from ckpt._format.digests import digest, new_digest
from ckpt._format.manifest import Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, OWN_DISKS, VIRTUAL, FileEntry, peek
from ckpt._plan.orbax_view import item_marks, step_view
from ckpt._runtime.mappings import map_memory
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.saves.overwrite import make_way
from ckpt.errors import CorruptCheckpointError, StepDeletedError, StorageError, located
from ckpt.storage._base import Attempt, LeavesFiles, Storage, WritesParts
from ckpt.storage._manifests import lies_in, while_read

# Four of these are all the memory that a copy takes, whatever the size of the files: while one is
# read, others are written.
_LANES, _PIECE_BYTES = 4, 16 << 20
# What a store takes as a whole, while it is written: two or three files as a disk has them. The
# client copies each several times.
_WHOLE_FILES_BYTES = 96 << 20
# What a disk says of one file that cannot be read.
_UNREADABLE = (errno.EIO, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CopyProgress(Protocol):
    """Who is told how a copy goes on."""

    def expect(self, nbytes: int) -> None:
        """Count on that many bytes more."""

    def move(self, nbytes: int) -> None:
        """Count bytes that were copied."""

    def __call__(self, event: Event) -> None:
        """Take an event of the save that writes a step anew."""


class Uncounted:
    """Takes the progress of a copy, and keeps nothing of it."""

    def expect(self, nbytes: int) -> None:
        """Do nothing."""

    def move(self, nbytes: int) -> None:
        """Do nothing."""

    def __call__(self, event: Event) -> None:
        """Do nothing."""


Pace = Callable[[int], Awaitable[None]]
"""Waits until so many bytes more may be moved."""


async def at_once(_nbytes: int) -> None:
    """A pace without a limit."""


class _NewFiles(Struct, frozen=True):
    """The files of a copy.

    Attributes:
        copied: Those that are copied.
        written: Those that are written anew.
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
    """Copies steps, one at a time; closing it frees its memory."""

    def __init__(
        self, progress: CopyProgress, *, pace: Pace = at_once, goes_on: bool = False
    ) -> None:
        """Copy at a pace.

        Args:
            progress: Told of the bytes.
            pace: Asked before each piece is moved.
            goes_on: Whether a copy that fails, or is cancelled, leaves its files to the next one of
                that step, where the storage can do that. The caller sweeps it in the end.
        """
        self._progress = progress
        self._pace = pace
        self._goes_on = goes_on
        self._regions = [map_memory(_PIECE_BYTES) for _ in range(_LANES)]
        self._whole_files = Allowance(_WHOLE_FILES_BYTES)

    def close(self) -> None:
        """Free the memory."""
        # An error in flight may still refer to some; then it is freed with the error.
        self._regions.clear()

    async def copy(
        self,
        source: CopySource,
        manifest: Manifest,
        selection: Selection,
        target: CopyPlace,
        *,
        overwrite: bool,
    ) -> int:
        """Copy a step, or whole items of one.

        Args:
            source: The step.
            manifest: Its manifest.
            selection: What of it is copied.
            target: Where it goes.
            overwrite: Whether what is there is replaced.

        Returns:
            The bytes of the files.

        Raises:
            CorruptCheckpointError: A file of it is damaged, or cannot be read; names it.
            StepDeletedError: It was deleted or replaced meanwhile.
            StepExistsError: There is something where it goes.
            StorageError: A storage refused.

        Cancellation: nothing is left behind but what the next copy takes over, unless the step was
        just being published.
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
            if is_left and isinstance(storage, LeavesFiles):
                await storage.leave(attempt)
            else:
                await storage.discard(attempt)

        nbytes = sum(file.size for file in selection.manifest.files.values())
        with located(step=manifest.step):
            await make_way(
                storage,
                SaveRequest(target.name, manifest.step, {}, False, None, None, overwrite),
            )
            self._progress.expect(nbytes)
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
        target: CopyPlace,
        attempt: Attempt,
    ) -> Mapping[str, int]:
        """Write all files of an attempt; return their sizes."""
        encoded = await source.storage.read(source.name, FILE_NAME, MAX_BYTES)
        head = None if encoded is None else await run_in_thread(peek, encoded)
        if encoded is None or head is None or head.attempt != manifest.attempt:
            raise StepDeletedError(f"{source.location} was deleted or replaced while it was copied")
        new = _new_files(selection, target.name, in_store=bool(attempt.folder))
        placed = selection.manifest
        same_files = not new.written and new.copied.keys() == manifest.files.keys()
        if attempt.folder or manifest.folder or not same_files:
            placed = _placed(placed, attempt, new)
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
        target: CopyPlace,
        attempt: Attempt,
    ) -> None:
        """Copy files of a step into an attempt that was begun.

        Args:
            source: The step.
            manifest: Its manifest.
            files: Those of its files that are copied.
            target: What the attempt is at.
            attempt: It gets the files, at the same paths.

        Raises:
            CorruptCheckpointError: A file is damaged, or cannot be read; names it.
            StorageError: A storage refused.

        Cancellation: the attempt has some of the files, and the beginnings of others.
        """
        place = ReadPlace(source.storage, lies_in(source.name, manifest))
        taken = await self._taken_over(files, target, attempt) if self._goes_on else set()
        # The largest first, so that no lane is busy with a large one when the others have ended.
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
        self, files: Mapping[str, FileEntry], target: CopyPlace, attempt: Attempt
    ) -> set[str]:
        """Take over whole files of copies that were cut; return those that the attempt has now."""
        storage = target.storage
        taken: set[str] = set()
        if not isinstance(storage, LeavesFiles):
            return taken
        for left in await storage.left_at(target.name):
            try:
                found = await storage.files(left)
            except StorageError:
                # A sweep was quicker.
                continue
            wanted = iter(
                [
                    (path, file)
                    for path, file in files.items()
                    if path not in taken and found.get(path) == file.size
                ]
            )
            whole: list[str] = []
            place = CopyPlace(storage, left)
            async with anyio.create_task_group() as lanes:
                for region in self._regions:
                    lanes.start_soon(self._look_at_left, place, wanted, region, whole)
            taken.update(await storage.take_over(attempt, left, whole))
        return taken

    async def _look_at_left(
        self,
        left: CopyPlace,
        files: Iterator[tuple[str, FileEntry]],
        region: memoryview,
        whole: list[str],
    ) -> None:
        """Add those files to `whole` whose bytes are as listed."""
        for path, file in files:
            digester = new_digest()
            try:
                for start in range(0, file.size, len(region)):
                    piece = region[: min(len(region), file.size - start)]
                    await self._pace(len(piece))
                    then = partial(digester.update, piece)
                    await left.storage.read_block(left.name, path, start, piece, then)
            except (CorruptCheckpointError, StorageError):
                # A sweep was quicker, or the disk gives it no more: it is copied.
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
        # Memory is bounded by this, or by one file that is larger, and not by several of them.
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
            # In the thread that has read them, while they are in its cache.
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
            self._progress.move(len(piece))
            start = end
            if start == file.size:
                return


async def _read(
    source: CopySource, path: str, start: int, piece: memoryview, then: Callable[[], None]
) -> None:
    try:
        await source.storage.read_block(source.name, path, start, piece, then)
    except StorageError as error:
        # A store says so of all that it has; a disk of one file, and others can be copied.
        if source.storage.keeps_others or error.errno not in _UNREADABLE:
            raise
        raise CorruptCheckpointError(f"{error.message}; the step was not copied") from error


def is_only_cut(error: BaseException) -> bool:
    """Tell whether a copy has failed for no reason of its own, so that the next one can go on."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_only_cut(each) for each in error.exceptions)
    if isinstance(error, StorageError):
        # What lies on a full disk keeps it full.
        return error.errno not in _FULL
    return isinstance(error, anyio.get_cancelled_exc_class())


def _new_files(selection: Selection, step_dir: str, *, in_store: bool) -> _NewFiles:
    """Return the files of a copy: those of the selection, and what Orbax wants of them there."""
    kept = selection.manifest
    items = [*kept.items, *(["metrics"] if kept.metrics is not None else [])]
    marks = item_marks(step_dir, items)
    written: Mapping[str, bytes] = {}
    if not {OWN_DISKS, VIRTUAL} & set(kept.requires):
        if not selection.is_all:
            written = step_view(
                step_dir,
                kept.items,
                kept.metrics,
                kept.metadata,
                kept.created_ns,
                kept.committed_ns,
                kept.files,
                in_store=in_store,
            )
        elif in_store:
            written = {path: data for path, data in marks.items() if path not in kept.files}
    dropped = frozenset(written) | frozenset(() if in_store else marks)
    copied = {path: file for path, file in kept.files.items() if path not in dropped}
    return _NewFiles(copied, written)


def _placed(manifest: Manifest, attempt: Attempt, new: _NewFiles) -> Manifest:
    """Return the manifest of a copy, whose files are where an attempt has them."""
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


async def others_in(source: CopyPlace, manifest: Manifest) -> list[str]:
    """Return the files in a step directory that are not of the step."""
    found = await source.storage.files(source.name)
    return sorted(found.keys() - manifest.sizes.keys() - {FILE_NAME})
