"""Entries as directories of a local (POSIX) file system: the asynchronous face of it.

What is done is in `storage.attempts`, `storage.blocks` and `storage.sweeping`; here it is brought
to threads, and errors of the system become those of the library.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles.ospath
import anyio

from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError
from ckpt.storage._base import Attempt
from ckpt.storage._local import attempts, notes, posix
from ckpt.storage._local.attempts import LocalAttempt
from ckpt.storage._local.data_files import read_block, write_block
from ckpt.storage._local.errors import of_each, translated
from ckpt.storage._local.sweep import is_unfinished, sweep_root
from ckpt.storage._local.trash import move_to_trash, prepare_trash, set_aside

__all__ = ["LocalStorage"]

logger = logging.getLogger("ckpt")

P = ParamSpec("P")
T = TypeVar("T")
# Files read by one call of a thread: a cancelled call waits for it.
_BATCH = 256
# Not among the stubs, though it is what the whole module is made of.
_make_directory = aiofiles.ospath.wrap(posix.make_directory)  # type: ignore[attr-defined]
_LARGEST_FILE_BYTES = 1 << 44


class LocalStorage:
    """A root directory on a file system with atomic rename."""

    def __init__(
        self, root: Path, timeouts: Timeouts, *, create: bool = True, mode: int | None = None
    ) -> None:
        """Use `root`.

        Args:
            root: The directory.
            timeouts: How long leases last.
            create: Whether `prepare` makes it.
            mode: Permissions of new directories; files get those of them that files can have. None
                lets both follow the umask.
        """
        self._root = root
        self._timeouts = timeouts
        self._create = create
        self._mode = mode
        # Metadata operations wait on the disk, not on a core; a few at once share journal commits.
        self._limiter: anyio.CapacityLimiter | None = None
        self._prepared = False

    @property
    def location(self) -> str:
        """The root directory."""
        return str(self._root)

    @property
    def lease_seconds(self) -> float:
        """How long the attempts of a writer that does not renew its leases are left alone."""
        return self._timeouts.lease

    @property
    def usual_file_bytes(self) -> None:
        """As large as is best on a disk."""

    @property
    def largest_file_bytes(self) -> int:
        """As large as file systems have them."""
        return _LARGEST_FILE_BYTES

    @property
    def keeps_others(self) -> bool:
        """An entry is a directory, which goes with all that is in it."""
        return False

    async def prepare(self) -> None:
        """Make the root directory, and check that it is one."""
        with translated("make the directory", self._root):
            await self._run(self._prepare)

    def _prepare(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        if missing and not self._create:
            raise self._no_root()
        try:
            posix.make_directories(self._root, self._mode)
            # A root that a power cut takes away takes its steps along.
            for path in missing:
                posix.fsync_path(path.parent)
            if not missing and not self._prepared:
                # Whoever made it may have died before that was durable. Where the directory it is
                # in may not be opened, it was made by somebody else, long ago.
                with contextlib.suppress(PermissionError):
                    posix.fsync_path(self._root.parent)
            self._prepared = True
        except (FileExistsError, NotADirectoryError) as error:
            reason = "a file of that name is there, or on the way to it"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(self._root)) from error

    async def entries(self) -> list[str]:
        """Return the directories of the root that are not attempts; none if there is no root."""
        with translated("list the directory", self._root):
            return await self._run(self._list_entries)

    def _list_entries(self) -> list[str]:
        try:
            with os.scandir(self._root) as found:
                return [
                    entry.name
                    for entry in found
                    if not is_unfinished(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            if not self._create:
                raise self._no_root() from None
        return []

    def _no_root(self) -> FileNotFoundError:
        reason = "it is not there, and create=False was given"
        return FileNotFoundError(errno.ENOENT, reason, str(self._root))

    async def exists(self, entry: str) -> bool:
        """Tell whether anything bears the name of an entry."""
        target = self._root / entry
        with translated("look at", target):
            return await self._run(posix.is_there, target)

    async def files(self, entry: str) -> dict[str, int | None]:
        """Return the size of every file below an entry; see `Storage.files`."""
        target = self._root / entry
        with translated("list the directory", target):
            return await self._run(posix.list_files, target)

    async def read(self, entry: str, path: str, limit: int) -> bytes | None:
        """Return a small file of an entry, or None; see `Storage.read`."""
        target = self._root / entry / path
        with translated("read", target):
            try:
                return await self._run(posix.read_regular, self._root, f"{entry}/{path}", limit)
            except ValueError as error:
                raise CorruptCheckpointError(f"{target}: {error}") from error

    async def stamps(self, entries: Sequence[str], path: str) -> list[Hashable | None]:
        """Return identity, size and times of a file of each entry; see `Storage.stamps`."""
        top = str(self._root)

        def stamp(name: str) -> Hashable | None:
            return posix.stamp(f"{top}/{name}/{path}")

        return await self._run(of_each, "look at", top, entries, path, stamp)

    async def read_each(
        self, entries: Sequence[str], path: str, limit: int, parse: Callable[[bytes], T]
    ) -> list[T | None]:
        """Read a small file of each entry; see `Storage.read_each`."""

        def read(name: str) -> T | None:
            data = None
            with contextlib.suppress(ValueError):
                data = posix.read_regular(self._root, f"{name}/{path}", limit)
            return None if data is None else parse(data)

        every: list[T | None] = []
        for start in range(0, len(entries), _BATCH):
            names = entries[start : start + _BATCH]
            every += await self._run(of_each, "read", str(self._root), names, path, read)
        return every

    async def begin(self, entry: str) -> Attempt:
        """Make a locked attempt directory under a fresh random name."""
        with translated("begin an attempt at", self._root / entry):
            return await self._run(
                attempts.begin, self._root, entry, self._timeouts.lease, self._mode
            )

    async def join(self, entry: str, attempt: str) -> Attempt:
        """Open the directory of an attempt; see `Storage.join`."""
        with translated("join an attempt at", self._root / entry):
            return await self._run(attempts.join, self._root, entry, attempt, self._mode)

    async def renew(self, attempt: Attempt) -> None:
        """Let the lease of an attempt begin anew."""
        own = _local(attempt)
        with translated("renew the lease of", own.path):
            # Not behind other operations: a disk that is slow is no reason to lose the attempt.
            await anyio.to_thread.run_sync(attempts.renew, own)

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        """Write a new file of the attempt and make it durable."""
        await self._write(attempt, path, memoryview(data), self._limiter_of_small())

    async def write_block(self, attempt: Attempt, path: str, data: memoryview) -> None:
        """Write a new data file of the attempt, past the page cache if that works."""
        await self._write(attempt, path, data, None)

    async def _write(
        self,
        attempt: Attempt,
        path: str,
        data: memoryview,
        limiter: anyio.CapacityLimiter | None,
    ) -> None:
        own = _local(attempt)
        target = own.path / path
        with translated("write", target):
            if target.parent not in own.made:
                # Finished once begun: a thread cannot be stopped, only lost sight of.
                with anyio.CancelScope(shield=True):
                    await _make_directories(own, target.parent)
            await anyio.to_thread.run_sync(write_block, target, data, own.mode, limiter=limiter)

    async def link(self, attempt: Attempt, path: str, folder: str = "") -> None:
        """Give a file of the attempt's entry a second name; see `Storage.link`."""
        own = _local(attempt)
        source = self._root / own.entry / folder / path
        with translated("link", source):
            try:
                await self._run(attempts.link, own, path, folder)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"{source}: {error}. The step was damaged after it was committed"
                ) from error

    async def read_block(self, entry: str, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` from a data file of an entry; see `Storage.read_block`."""
        source = self._root / entry / path
        with translated("read", source):
            try:
                await anyio.to_thread.run_sync(
                    read_block, self._root, f"{entry}/{path}", offset, target
                )
            except (
                FileNotFoundError,
                NotADirectoryError,
                EOFError,
                ValueError,
            ) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CorruptCheckpointError(
                    f"{source}: {reason}. The step was damaged after it was committed; restore "
                    "another one"
                ) from error

    def database_spec(self, entry: str, path: str) -> str:
        """Return the URL of the directory `path` of an entry."""
        return (self._root / entry / path).absolute().as_uri() + "/"

    async def publish(
        self, attempt: Attempt, *, overwrite: bool, replacing: str | None = None
    ) -> None:
        """Rename the attempt to its entry, durably; with `overwrite` swap it with the old one."""
        own = _local(attempt)
        with translated("publish", self._root / own.entry):
            rename = partial(attempts.publish, overwrite=overwrite, replacing=replacing)
            replaced = await self._run(rename, own)
        if replaced:
            await self._finish_removal(attempts.remove_hidden, own.path, own.path)
        await self._run(attempts.end, own)

    async def discard(self, attempt: Attempt, *, joined: bool = False) -> None:
        """Remove the attempt's directory and give its lock back; nobody makes it anew."""
        own = _local(attempt)
        try:
            await self._finish_removal(attempts.discard, own, own.path)
        finally:
            await self._run(attempts.end, own)

    async def remove(self, entry: str, *, attempt: str | None = None) -> bool:
        """Rename the entry to a trash name, make that durable, then remove the bytes."""
        with translated("delete", self._root / entry):
            trash = await self._run(attempts.hide, self._root, entry, attempt)
        if trash is None:
            return False
        # Also when cancelled: it is gone for everybody, only its bytes are not.
        with anyio.CancelScope(shield=True):
            await self._finish_removal(attempts.remove_hidden, trash, trash)
        return True

    async def move(self, entry: str, trash: str) -> str | None:
        """Rename an entry into a folder; see `Storage.move`."""
        with translated("move to the trash", self._root / entry):
            try:
                path = await self._run(move_to_trash, self._root, entry, self._root / trash)
            except FileNotFoundError:
                # Not made yet, or somebody has emptied the trash by removing it.
                await self.prepare_trash(trash)
                path = await self._run(move_to_trash, self._root, entry, self._root / trash)
        return None if path is None else str(path)

    async def prepare_trash(self, trash: str) -> None:
        """Make the folder that entries are moved into."""
        with translated("use the trash folder", self._root / trash):
            await self._run(prepare_trash, self._root, self._root / trash, self._mode)

    async def set_aside(self, entry: str, paths: Sequence[str]) -> str:
        """Move files out of an entry; see `Storage.set_aside`."""
        with translated("move files of others out of", self._root / entry):
            return str(await self._run(set_aside, self._root, entry, list(paths), self._mode))

    async def sweep(self) -> list[str]:
        """Remove what dead writers left; see `storage.sweeping`."""
        with translated("clean up", self._root):
            return await self._run(sweep_root, self._root)

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        """Write a small file of the root; see `Storage.put_note`."""
        with translated("write", self._root / name):
            if not durable and not replace:
                return await self._run(notes.put_brief, self._root, name, data, self._mode)
            lease, mode = self._timeouts.lease, self._mode
            return await self._run(notes.put, self._root, name, data, lease, mode, replace=replace)

    async def read_note(self, name: str, limit: int) -> bytes | None:
        """Return a small file of the root, or None; see `Storage.read_note`."""
        folder, _, file = name.partition("/")
        return await self.read(folder, file, limit)

    async def notes(self, folder: str) -> dict[str, float]:
        """Return the ages of the files of a folder of the root; see `Storage.notes`."""
        with translated("list the directory", self._root / folder):
            return await self._run(notes.ages, self._root, folder)

    async def touch_note(self, name: str) -> bool:
        """Let the age of a file of the root begin anew."""
        with translated("renew", self._root / name):
            # Not behind other operations: a disk that is slow is no reason to lose a lease.
            return await anyio.to_thread.run_sync(notes.touch, self._root, name)

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        """Remove a file of the root."""
        with translated("remove", self._root / name):
            return await self._run(notes.drop, self._root, name, durable=durable)

    async def _finish_removal(self, remove: Callable[[T], object], what: T, path: Path) -> None:
        """Remove what is out of sight already; what will not go now, a later sweep removes."""
        try:
            await self._run(remove, what)
        except OSError as error:
            logger.warning("%s could not be removed, a later run will: %s", path, error)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Not abandoned on cancellation: a file operation that has begun is waited for.
        return await anyio.to_thread.run_sync(
            partial(function, *args, **kwargs), limiter=self._limiter_of_small()
        )

    def _limiter_of_small(self) -> anyio.CapacityLimiter:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(4)
        return self._limiter


async def _make_directories(attempt: LocalAttempt, path: Path) -> None:
    """Make the directories of an attempt down to `path`, level by level."""
    for directory in [*reversed(path.parents), path]:
        if directory.is_relative_to(attempt.path) and directory not in attempt.made:
            # Only this one: an attempt that somebody has removed is not made anew.
            with contextlib.suppress(FileExistsError):
                await _make_directory(directory, attempt.mode)
            attempt.made.add(directory)


def _local(attempt: Attempt) -> LocalAttempt:
    assert isinstance(attempt, LocalAttempt)
    return attempt
