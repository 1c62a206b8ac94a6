"""Entries as directories of a local (POSIX) file system.

An attempt is written in `<entry>.orbax-checkpoint-tmp-<id>`, a name that Orbax too takes for
unfinished, locked by its writer for as long as the writer lives. It is published by a rename that
refuses to replace, or by an atomic swap for `overwrite`. What is deleted is first renamed to
`<entry>.orbax-checkpoint-tmp-<id>.trash`, so that nothing half-deleted bears a step's name.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import aiofiles
import aiofiles.os
import anyio

from ckpt.errors import CheckpointError, CorruptCheckpointError, StepExistsError, StorageError
from ckpt.manifest import FILE_NAME
from ckpt.storage import posix
from ckpt.storage.base import Attempt
from ckpt.storage.blocks import read_block, write_block

__all__ = ["LocalStorage"]

logger = logging.getLogger("ckpt")

P = ParamSpec("P")
T = TypeVar("T")

# Orbax skips (and lists as unfinished) every name that contains this.
_ATTEMPT_MARK = ".orbax-checkpoint-tmp-"
_ATTEMPT = re.compile(re.escape(_ATTEMPT_MARK) + r"[0-9a-f]{32}(\.trash)?\Z")
_NURSERY_SECONDS = 3600
_NURSERY = re.compile(r"^\.ckpt-new-[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class _LocalAttempt:
    entry: str
    id: str
    path: Path
    lock: int


class LocalStorage:
    """A root directory on a file system with atomic rename."""

    def __init__(self, root: Path) -> None:
        """Use `root`, made by `prepare`; new files and directories follow the umask."""
        self._root = root
        # Metadata operations wait on the disk, not on a core; a few at once share journal commits.
        self._limiter: anyio.CapacityLimiter | None = None

    @property
    def location(self) -> str:
        """The root directory."""
        return str(self._root)

    async def prepare(self) -> None:
        """Make the root directory, and check that it is one."""
        with _translated("make the directory", self._root):
            await self._run(self._prepare)

    def _prepare(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        try:
            os.makedirs(self._root, exist_ok=True)
            # A root that a power cut takes away takes its steps along.
            for path in missing:
                posix.fsync_path(path.parent)
        except (FileExistsError, NotADirectoryError) as error:
            reason = "a file of that name is there, or on the way to it"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(self._root)) from error

    async def entries(self) -> list[str]:
        """Return the directories of the root that are not attempts; none if there is no root."""
        with _translated("list the directory", self._root):
            return await self._run(self._list_entries)

    def _list_entries(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as found:
            return [
                entry.name
                for entry in found
                if not _ATTEMPT.search(entry.name)
                and not _NURSERY.match(entry.name)
                and entry.is_dir(follow_symlinks=False)
            ]
        return []

    async def read(self, entry: str, path: str, limit: int) -> bytes | None:
        """Return a small file of an entry, or None; see `Storage.read`."""
        target = self._root / entry / path
        with _translated("read", target):
            try:
                return await self._run(posix.read_regular, target, limit)
            except ValueError as error:
                raise CorruptCheckpointError(f"{target}: {error}") from error

    async def begin(self, entry: str) -> Attempt:
        """Make a locked attempt directory under a fresh random name."""
        token = uuid.uuid4().hex
        path = self._root / f"{entry}{_ATTEMPT_MARK}{token}"
        nursery = self._root / f".ckpt-new-{token}"
        with _translated("make the directory", path):
            lock = await self._run(posix.make_locked_directory, path, nursery)
        return _LocalAttempt(entry, token, path, lock)

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        """Write a new file of the attempt and make it durable."""
        target = _local(attempt).path / path
        # A write that has begun is finished: its thread could not be stopped, only lost sight of.
        with _translated("write", target), anyio.CancelScope(shield=True):
            await aiofiles.os.makedirs(target.parent, exist_ok=True)
            async with aiofiles.open(target, "xb") as file:
                await file.write(data)
                await file.flush()
                await self._run(os.fsync, file.fileno())

    async def write_block(self, attempt: Attempt, path: str, data: memoryview) -> None:
        """Write a new data file of the attempt, past the page cache if that works."""
        target = _local(attempt).path / path

        def write() -> None:
            os.makedirs(target.parent, exist_ok=True)
            write_block(target, data)

        with _translated("write", target):
            await anyio.to_thread.run_sync(write)

    async def read_block(self, entry: str, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` from a data file of an entry; see `Storage.read_block`."""
        source = self._root / entry / path
        with _translated("read", source):
            try:
                await anyio.to_thread.run_sync(read_block, source, offset, target)
            except (FileNotFoundError, NotADirectoryError, EOFError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CorruptCheckpointError(
                    f"{source}: {reason}. The step was damaged after it was committed; restore "
                    "another one"
                ) from error

    def database_url(self, entry: str, path: str) -> str:
        """Return the URL of the directory `path` of an entry."""
        return _url(self._root / entry / path)

    async def publish(self, attempt: Attempt, *, overwrite: bool) -> None:
        """Rename the attempt to its entry, durably; with `overwrite` swap it with the old one."""
        own = _local(attempt)
        target = self._root / own.entry
        with _translated("publish", target):
            replaced = await self._run(self._publish, own, target, overwrite)
        with contextlib.suppress(OSError):
            os.close(own.lock)
        if replaced:
            await self._finish_removal(own.path)

    def _publish(self, attempt: _LocalAttempt, target: Path, overwrite: bool) -> bool:
        posix.fsync_directories(attempt.path)
        # Whoever removed or replaced the attempt under its name made what is there not ours:
        # a write makes missing directories, so the name alone proves nothing.
        kept, named = os.fstat(attempt.lock), os.stat(attempt.path)
        if (kept.st_dev, kept.st_ino) != (named.st_dev, named.st_ino):
            raise FileNotFoundError(errno.ENOENT, "the attempt was removed", str(attempt.path))
        replaced = False
        try:
            posix.rename_new(attempt.path, target)
        except FileExistsError as error:
            if not overwrite:
                raise StepExistsError(
                    f"{target} already exists; it was left as it is. Choose another step, or pass "
                    "overwrite=True to replace it"
                ) from error
            if not stat.S_ISDIR(os.lstat(target).st_mode):
                # The exchange would swap these as well, and hand back what cannot be removed.
                raise StepExistsError(
                    f"{target} is a file or a link, not a checkpoint; it was left as it is. Move "
                    "it away, or choose another name"
                ) from error
            if not os.path.lexists(target / FILE_NAME):
                raise StepExistsError(
                    f"{target} exists and is not a checkpoint of this library, so it is never "
                    "replaced. Move it away, or choose another name"
                ) from error
            posix.exchange(attempt.path, target)
            replaced = True
        try:
            posix.fsync_path(self._root)
        except OSError:
            # Nobody knows whether the new name would outlive a power cut: the save has failed, so
            # what it published is taken back.
            self._take_back(attempt, target, replaced)
            raise
        return replaced

    def _take_back(self, attempt: _LocalAttempt, target: Path, replaced: bool) -> None:
        try:
            if replaced:
                posix.exchange(attempt.path, target)
            else:
                os.rename(target, attempt.path)
        except OSError:
            if replaced:
                # The old step bears the attempt's name now; nobody may clean it up as one.
                kept = self._root / f"{attempt.entry}.replaced-{attempt.id}"
                with contextlib.suppress(OSError):
                    os.rename(attempt.path, kept)
                logger.error("the step that was being replaced was left at %s", kept)

    async def discard(self, attempt: Attempt) -> None:
        """Remove the attempt's directory and give its lock back."""
        own = _local(attempt)
        try:
            await self._finish_removal(own.path)
        finally:
            with contextlib.suppress(OSError):
                os.close(own.lock)

    async def remove(self, entry: str) -> bool:
        """Rename the entry to a trash name, make that durable, then remove the bytes."""
        target = self._root / entry
        trash = self._root / f"{entry}{_ATTEMPT_MARK}{uuid.uuid4().hex}.trash"

        def hide() -> bool:
            try:
                os.rename(target, trash)
            except FileNotFoundError:
                return False
            posix.fsync_path(self._root)
            return True

        with _translated("delete", target):
            if not await self._run(hide):
                return False
        # Also when cancelled: it is gone for everybody, only its bytes are not.
        with anyio.CancelScope(shield=True):
            await self._finish_removal(trash)
        return True

    async def sweep(self) -> list[str]:
        """Remove attempts whose writer is dead, and trash.

        A writer holds a lock on its attempt for as long as it lives, so an attempt that can be
        locked is dead. Where the file system has no such locks nothing is swept.
        """
        with _translated("clean up", self._root):
            return await self._run(self._sweep)

    def _sweep(self) -> list[str]:
        removed: list[str] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as found:
            names = [e.name for e in found if e.is_dir(follow_symlinks=False)]
            ours = [name for name in names if _ATTEMPT.search(name) or _NURSERY.match(name)]
            removed = [name for name in ours if self._sweep_one(name)]
        return removed

    def _sweep_one(self, name: str) -> bool:
        path = self._root / name
        try:
            # The maker of a nursery is between mkdir and lock for a moment; an old one is dead.
            if _NURSERY.match(name) and time.time() - path.stat().st_mtime < _NURSERY_SECONDS:
                return False
            lock = posix.lock_directory(path)
        except OSError:
            return False
        if lock is None:
            return False
        try:
            if _NURSERY.match(name):
                os.rmdir(path)
                return True
            trash = path if name.endswith(".trash") else self._root / f"{name}.trash"
            if trash != path:
                # Out of its writer's reach first: should the writer live after all (locks that do
                # not reach across hosts), its publishing fails cleanly instead of half.
                os.rename(path, trash)
            posix.remove_tree(trash)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    async def _finish_removal(self, path: Path) -> None:
        """Remove what is out of sight already; what will not go now, a later sweep removes."""
        try:
            await self._run(posix.remove_tree, path)
        except OSError as error:
            logger.warning("%s could not be removed, a later run will: %s", path, error)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(4)
        # Not abandoned on cancellation: a file operation that has begun is waited for.
        return await anyio.to_thread.run_sync(
            partial(function, *args, **kwargs), limiter=self._limiter
        )


def _local(attempt: Attempt) -> _LocalAttempt:
    assert isinstance(attempt, _LocalAttempt)
    return attempt


def _url(path: Path) -> str:
    return path.absolute().as_uri() + "/"


@contextlib.contextmanager
def _translated(what: str, path: Path) -> Iterator[None]:
    """Turn every `OSError` of the body into a `StorageError` that names the path."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {what} {path}: {reason}", errno=error.errno) from error
