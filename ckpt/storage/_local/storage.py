"""Local file systems as a `Storage`: every step is a directory, published by one rename.

The modules beside this one do the work. This one runs it in threads, and turns errors of the system
into those of the library. Small files and directories go through aiofiles, data files through
threads of their own, so that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import anyio
import anyio.lowlevel
from aiofiles.base import wrap

from ckpt._runtime.threads import run_in_thread, threads_of_loop
from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError
from ckpt.storage._base import (
    Attempt,
    AttemptEntry,
    FileStamp,
    StorageTraits,
    TrashEntry,
    undelete_exists,
    undelete_missing,
)
from ckpt.storage._local import attempts, data_files, notes, posix
from ckpt.storage._local import trash as trash_folder
from ckpt.storage._local.attempts import LocalAttempt
from ckpt.storage._local.config import Local, of_each, translated
from ckpt.storage._local.leases import attempts_in, is_unfinished, sweep_root

logger = logging.getLogger("ckpt")

P = ParamSpec("P")
T = TypeVar("T")
# Files that one call of a thread reads; a cancelled caller waits for the call.
_BATCH = 256
_LARGEST_FILE_BYTES = 1 << 44


class _DataFiles(Protocol):
    """A module that writes and reads data files."""

    def write_block(self, path: Path, data: memoryview, mode: int | None = None) -> None: ...

    def read_block(
        self,
        top: Path,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None: ...


class LocalStorage:
    """A root directory in a file system with atomic rename."""

    def __init__(
        self,
        root: Path | Local,
        timeouts: Timeouts,
        *,
        create: bool = True,
    ) -> None:
        """Use `root`.

        Args:
            root: The directory, with settings if it is a `Local`.
            timeouts: Durations of leases.
            create: True lets `prepare` make the directory.
        """
        own = root if isinstance(root, Local) else Local(root)
        self._root = Path(own.path)
        self._files: _DataFiles = data_files
        if own.io != "direct":
            from ckpt.storage._local import tensorstore_files

            self._files = tensorstore_files
        self._hard_links = own.hard_links
        self._timeouts = timeouts
        self._create = create
        self._mode = own.permission_mode
        # Device and inode of the root when it was prepared.
        self._identity: tuple[int, int] | None = None

    @property
    def location(self) -> str:
        return str(self._root)

    @property
    def traits(self) -> StorageTraits:
        return StorageTraits(
            self._timeouts.lease, _LARGEST_FILE_BYTES, None, self._hard_links, shares_at_once=True
        )

    async def prepare(self) -> None:
        with translated("make the directory", self._root):
            await self._in_thread(self._prepare)

    def _prepare(self) -> None:
        missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
        if missing and not self._create:
            raise self._no_root()
        try:
            posix.make_directories(self._root, self._mode)
        except (FileExistsError, NotADirectoryError) as error:
            reason = "it, or a part of its path, is a file"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(self._root)) from error
        # Made durable: a root that a power cut removes takes its steps with it.
        with translated("sync the directories that hold", self._root):
            for path in missing:
                posix.fsync_directory(path.parent)
            if not missing and self._identity is None:
                # The process that made the root may have died before its name was durable. If the
                # directory above may not be opened, another user made the root long ago.
                with contextlib.suppress(PermissionError):
                    posix.fsync_directory(self._root.parent)
        self._identity = _identity_of(self._root)

    async def step_dirs(self) -> list[str]:
        with translated("list the directory", self._root):
            return await self._in_thread(self._list_step_dirs)

    def _list_step_dirs(self) -> list[str]:
        self._refuse_another_root()
        try:
            with os.scandir(self._root) as found:
                return [
                    each.name
                    for each in found
                    if not is_unfinished(each.name)
                    and (each.is_dir(follow_symlinks=False) or _may_be_step(each))
                ]
        except FileNotFoundError:
            if not self._create:
                raise self._no_root() from None
        return []

    def _no_root(self) -> FileNotFoundError:
        reason = "it does not exist, and may not be made here (mode='r+')"
        return FileNotFoundError(errno.ENOENT, reason, str(self._root))

    async def exists(self, step_dir: str) -> bool:
        target = self._root / step_dir
        with translated("look at", target):
            return await self._in_thread(posix.is_there, target)

    async def files(self, step_dir: str) -> dict[str, int | None]:
        target = self._root / step_dir
        with translated("list the directory", target):
            return await self._in_thread(posix.list_files, target)

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        return await self._read_small(posix.read_regular, _below(step_dir, path), limit)

    async def read_tail(self, step_dir: str, path: str, most: int) -> tuple[bytes, int] | None:
        return await self._read_small(posix.read_tail, _below(step_dir, path), most)

    async def _read_small(self, read: Callable[[Path, str, int], T], path: str, most: int) -> T:
        target = self._root / path
        with translated("read", target):
            try:
                return await self._in_thread(read, self._root, path, most)
            except ValueError as error:
                raise CorruptCheckpointError(f"{target}: {error}") from error

    async def stamps(self, step_dirs: Sequence[str], path: str) -> list[FileStamp | None]:
        top = str(self._root)

        def stamp(name: str) -> FileStamp | None:
            return posix.stamp(f"{top}/{name}/{path}")

        return await self._in_thread(of_each, "look at", top, step_dirs, path, stamp)

    async def read_each(
        self,
        step_dirs: Sequence[str],
        path: str,
        limit: int,
        head: int,
        parse: Callable[[bytes, int], T | None],
    ) -> list[T | None]:

        def read(name: str) -> T | None:
            with contextlib.suppress(ValueError):
                found = posix.read_head(self._root, f"{name}/{path}", limit, head)
                parsed = None if found is None else parse(*found)
                if found is None or parsed is not None or len(found[0]) == found[1]:
                    return parsed
                data = posix.read_regular(self._root, f"{name}/{path}", limit)
                return None if data is None else parse(data, len(data))
            return None

        return await self._of_each("read", step_dirs, path, read)

    async def cut_files(self, expected: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        def look(name: str) -> str | None:
            return posix.cut_file(f"{self._root}/{name}", expected[name])

        cut = await self._of_each("look at", list(expected), "", look)
        return {name: text for name, text in zip(expected, cut, strict=True) if text}

    async def _of_each(
        self, what: str, step_dirs: Sequence[str], path: str, act: Callable[[str], T]
    ) -> list[T]:
        every: list[T] = []
        for start in range(0, len(step_dirs), _BATCH):
            names = step_dirs[start : start + _BATCH]
            every += await self._in_thread(of_each, what, str(self._root), names, path, act)
        return every

    async def begin(self, step_dir: str) -> Attempt:
        with translated("begin an attempt at", self._root / step_dir):
            return await self._in_thread(self._begin, step_dir)

    def _begin(self, step_dir: str) -> Attempt:
        self._refuse_another_root()
        return attempts.begin(self._root, step_dir, self._timeouts.lease, self._mode)

    def _refuse_another_root(self) -> None:
        """Raise if the root that was prepared was removed, unmounted or replaced."""
        now = _identity_of(self._root)
        # A file system that is mounted again may have another device, and the same inodes; some
        # have no inodes that last.
        if self._identity is not None and (
            now is None or all(one != other for one, other in zip(now, self._identity, strict=True))
        ):
            raise FileNotFoundError(
                errno.ENOENT,
                f"the directory {self._root} was removed or unmounted since it was opened, and is "
                "not made anew: its steps would be missing. Put it back, or open it again to begin "
                "without them",
            )

    async def join(self, step_dir: str, attempt: str) -> Attempt:
        with translated("join an attempt at", self._root / step_dir):
            return await self._in_thread(attempts.join, self._root, step_dir, attempt, self._mode)

    async def renew(self, attempt: Attempt) -> None:
        own = _local(attempt)
        with translated("renew the lease of", own.path):
            # Renewals do not queue behind other operations: a slow disk must not cost the attempt.
            await run_in_thread(attempts.renew, own)

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        own = _local(attempt)
        with translated("write", own.path / path), attempts.noticing_removal(own):
            await self._in_thread(attempts.write, own, path, memoryview(data))

    async def write_block(self, attempt: Attempt, path: str, data: memoryview) -> None:
        own = _local(attempt)
        target = own.path / path
        with translated("write", target), attempts.noticing_removal(own):
            if target.parent not in own.made:
                await self._in_thread(attempts.make_directories, own, target.parent)
            await run_in_thread(self._files.write_block, target, data, own.mode)

    async def write_part(
        self, attempt: Attempt, path: str, offset: int, data: memoryview, *, is_last: bool
    ) -> None:
        own = _local(attempt)
        target = own.path / path
        with translated("write", target), attempts.noticing_removal(own):
            if target.parent not in own.made:
                await self._in_thread(attempts.make_directories, own, target.parent)
            write = partial(data_files.write_block, offset=offset, is_last=is_last)
            await run_in_thread(write, target, data, own.mode)

    async def link(self, attempt: Attempt, path: str, folder: str = "") -> None:
        own = _local(attempt)
        source = self._root / own.step_dir / folder / path
        with translated("link", source):
            try:
                await self._in_thread(attempts.link, own, path, folder)
            except ValueError as error:
                raise CorruptCheckpointError(
                    f"{source}: {error}. The step was damaged after it was committed"
                ) from error

    async def share(
        self, attempt: Attempt, step_dir: str, files: Mapping[str, int]
    ) -> Sequence[str]:
        if not self._hard_links:
            return []
        own = _local(attempt)
        with (
            translated("link files of", self._root / step_dir),
            attempts.noticing_removal(own),
        ):
            try:
                return await self._in_thread(attempts.share, own, step_dir, files)
            except attempts.NoHardLinksError as error:
                self._hard_links = False
                logger.warning(
                    "%s: the file system makes no hard links (%s), so arrays that do not change "
                    "are written with every step",
                    self._root,
                    error,
                )
        return []

    async def take_over(self, attempt: Attempt, left: str, paths: Sequence[str]) -> Sequence[str]:
        own = _local(attempt)
        with (
            translated("take over files of", self._root / left),
            attempts.noticing_removal(own),
        ):
            return await self._in_thread(attempts.take_over, own, left, paths)

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        where = _below(step_dir, path)
        read = partial(self._files.read_block, self._root, where, offset, target)
        await self._read(step_dir, path, read, then or (lambda: None))

    async def map_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        nbytes: int,
        then: Callable[[memoryview], None],
    ) -> None:
        where = _below(step_dir, path)
        read = partial(data_files.map_block, self._root, where, offset, nbytes)
        await self._read(step_dir, path, read, then)

    async def _read(
        self, step_dir: str, path: str, read: Callable[..., None], then: Callable[..., None]
    ) -> None:
        """Have `read` read a data file and call `then`, in a thread of its own."""
        source = self._root / step_dir / path
        failed: list[Exception] = []

        def follow(*found: memoryview) -> None:
            try:
                then(*found)
            except Exception as error:
                # An error of `then` says nothing about the file.
                failed.append(error)

        with translated("read", source):
            try:
                await run_in_thread(read, follow)
            except (
                FileNotFoundError,
                NotADirectoryError,
                EOFError,
                ValueError,
            ) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CorruptCheckpointError(
                    f"{source}: {reason}. It was damaged after it was written; take another "
                    "checkpoint"
                ) from error
        if failed:
            raise failed[0]

    async def publish(
        self,
        attempt: Attempt,
        *,
        overwrite: bool,
        replacing: str | None = None,
        files: Mapping[str, int] | None = None,
    ) -> None:
        own = _local(attempt)
        with translated("publish", self._root / own.step_dir):
            replaced = await self._in_thread(
                attempts.publish, own, overwrite=overwrite, replacing=replacing, files=files
            )
        if replaced:
            await self._finish_removal(attempts.remove_hidden, own.path, own.path)
        await self._in_thread(attempts.end, own)

    async def discard(
        self, attempt: Attempt, *, joined: bool = False, keep_files: bool = False
    ) -> None:
        own = _local(attempt)
        try:
            if not keep_files:
                await self._finish_removal(attempts.discard, own, own.path)
        finally:
            await self._in_thread(attempts.end, own)

    async def remove(self, step_dir: str, *, attempt: str | None = None) -> bool:
        with translated("delete", self._root / step_dir):
            trash = await self._in_thread(attempts.hide, self._root, step_dir, attempt)
        if trash is None:
            return False
        # Shielded: the name is gone, and only the bytes are left to be removed.
        with anyio.CancelScope(shield=True):
            await self._finish_removal(attempts.remove_hidden, trash, trash)
        return True

    async def move(self, step_dir: str, trash: str, *, listed: bool = True) -> str | None:
        def note(name: str, data: bytes) -> None:
            notes.put(self._root, name, data, self._timeouts.lease, self._mode, replace=False)

        folder = self._root / trash
        move = partial(
            trash_folder.move_to_trash, self._root, step_dir, folder, note if listed else None
        )
        with translated("move to the trash", self._root / step_dir):
            try:
                path = await self._in_thread(move)
            except FileNotFoundError:
                # The folder was not made yet, or was removed to empty the trash.
                await self.prepare_trash(trash)
                path = await self._in_thread(move)
        return None if path is None else str(path)

    async def prepare_trash(self, trash: str) -> None:
        with translated("use the trash folder", self._root / trash):
            await self._in_thread(
                trash_folder.prepare_trash, self._root, self._root / trash, self._mode
            )

    async def trashed(self, trash: str) -> list[TrashEntry]:
        with translated("list the trash folder", self._root / trash):
            return await self._in_thread(trash_folder.trashed, self._root, self._root / trash)

    async def undelete(self, trash: str, name: str, step_dir: str) -> None:
        path = self._root / trash / name
        with translated("undelete", path):
            try:
                await self._in_thread(trash_folder.undelete, self._root, path, step_dir)
            except FileExistsError:
                raise undelete_exists(f"{self._root}/{step_dir}") from None
            except FileNotFoundError:
                raise undelete_missing(str(path)) from None

    async def purge(self, trash: str, name: str) -> None:
        path = self._root / trash / name
        with translated("remove", path):
            hidden = await self._in_thread(trash_folder.hide, self._root, path)
            await self._in_thread(trash_folder.forget, self._root)
        if hidden is not None:
            with anyio.CancelScope(shield=True):
                await self._finish_removal(attempts.remove_hidden, hidden, hidden)

    async def set_aside(self, step_dir: str, paths: Sequence[str]) -> str:
        with translated("move files of others out of", self._root / step_dir):
            return str(
                await self._in_thread(
                    trash_folder.set_aside, self._root, step_dir, list(paths), self._mode
                )
            )

    async def attempts(self) -> list[AttemptEntry]:
        with translated("list the directory", self._root):
            return await self._in_thread(attempts_in, self._root)

    async def sweep(self) -> list[str]:
        with translated("clean up", self._root):
            return await self._in_thread(sweep_root, self._root)

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        with translated("write", self._root / name):
            if not durable and not replace:
                return await self._in_thread(notes.put_brief, self._root, name, data, self._mode)
            lease, mode = self._timeouts.lease, self._mode
            return await self._in_thread(
                notes.put, self._root, name, data, lease, mode, replace=replace
            )

    async def notes(self, folder: str) -> dict[str, float]:
        with translated("list the directory", self._root / folder):
            return await self._in_thread(notes.ages, self._root, folder)

    async def touch_note(self, name: str) -> bool:
        with translated("renew", self._root / name):
            # Renewals do not queue behind other operations: a slow disk must not cost the lease.
            return await run_in_thread(notes.touch, self._root, name)

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        with translated("remove", self._root / name):
            return await self._in_thread(notes.drop, self._root, name, durable=durable)

    async def _finish_removal(self, remove: Callable[[T], object], what: T, path: Path) -> None:
        """Remove a directory that is hidden already; if that fails, a later sweep removes it."""
        try:
            await self._in_thread(remove, what)
        except OSError as error:
            logger.warning("%s could not be removed, and is left to a later run: %s", path, error)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a small file operation in a thread of aiofiles, and wait for it once it has begun."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        # A thread cannot be stopped; without the shield it would go on unseen.
        with anyio.CancelScope(shield=True):
            result: T = await _wrapped_call(function, args, options, executor=threads_of_loop())
        return result


def _may_be_step(entry: os.DirEntry[str]) -> bool:
    """Return True if a file may be a step of another library, whose name ends in a number.

    Hidden files belong to this library; their random names may end in a digit, too.
    """
    name = entry.name
    is_named = name[-1].isdecimal() and not name.startswith(".")
    return is_named and entry.is_file(follow_symlinks=False)


def _below(step_dir: str, path: str) -> str:
    """Return the path from the root of a file in a step directory, or in the root itself."""
    return f"{step_dir}/{path}" if step_dir else path


def _call(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*args, **options)


# One hop to a thread opens, reads and closes a file; `aiofiles.open` would take three.
_wrapped_call = wrap(_call)


def _identity_of(root: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(root)
        return found.st_dev, found.st_ino
    return None


def _local(attempt: Attempt) -> LocalAttempt:
    assert isinstance(attempt, LocalAttempt)
    return attempt
