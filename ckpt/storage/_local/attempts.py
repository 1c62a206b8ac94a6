"""Attempts on a local file system: begun, published, taken back, given up.

An attempt is a directory under a name that Orbax too takes for unfinished, with a lease beside it.
Publishing is one rename that refuses to replace, or one atomic swap for `overwrite`. The order of
these operations is docs/design/001-commit-protocol.md. Blocking functions that raise `OSError`,
and `StepExistsError` where the name is taken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from ckpt._format.manifest import FILE_NAME, MAX_BYTES, peek
from ckpt.errors import StepDeletedError, StepExistsError
from ckpt.storage._local import posix
from ckpt.storage._local.leases import renew_lease, take_lease
from ckpt.storage._local.sweep import attempt_name, lease_name, trash_name

__all__ = [
    "LocalAttempt",
    "begin",
    "discard",
    "end",
    "hide",
    "join",
    "link",
    "publish",
    "remove_hidden",
    "renew",
]

logger = logging.getLogger("ckpt")

# Of a name in a directory, in bytes, on all common file systems.
_LONGEST_NAME = 255


@dataclass(slots=True)
class LocalAttempt:
    """One try at writing an entry.

    Attributes:
        root: The root.
        entry: Name of the entry it will become.
        id: Random hexadecimal id.
        path: The directory, as long as nobody renames it.
        directory: File descriptor of the directory, whatever its name is by now.
        lease: File descriptor of the lease, which it keeps locked.
        made: Directories that are there. They are not made again, so that what was removed by
            somebody stays removed.
        mode: Permissions of its directories; None follows the umask.
        joined: Whether another process has begun it: that one has the lease, and `lease` is no
            descriptor.
        folder: Its files lie in the entry itself.
        keep: Whether the bytes that bear its name must be left to a later cleaner.
        ended: Whether the descriptors were given back; `guard` is held to look at it and use them.
    """

    root: Path
    entry: str
    id: str
    path: Path
    directory: int
    lease: int
    made: set[Path] = field(default_factory=set)
    mode: int | None = None
    joined: bool = False
    folder: str = ""
    keep: bool = False
    ended: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


def begin(root: Path, entry: str, lease_seconds: float, mode: int | None = None) -> LocalAttempt:
    """Make an attempt under a fresh random name, with these permissions."""
    token = uuid.uuid4().hex
    path = root / attempt_name(entry, token)
    if len(os.fsencode(trash_name(path.name))) > _LONGEST_NAME:
        # It could be made, and then not be removed.
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(root / entry))
    # The lease comes first, so that there is no moment in which the attempt looks abandoned.
    lease = take_lease(root / lease_name(token), lease_seconds, mode)
    try:
        posix.make_directory(path, mode)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        _end_lease(root / lease_name(token), lease)
        raise
    return LocalAttempt(root, entry, token, path, directory, lease, {path}, mode)


def join(root: Path, entry: str, token: str, mode: int | None = None) -> LocalAttempt:
    """Open an attempt that another process has begun."""
    path = root / attempt_name(entry, token)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return LocalAttempt(root, entry, token, path, directory, -1, {path}, mode, joined=True)


def link(attempt: LocalAttempt, path: str, folder: str = "") -> None:
    """Give a regular file of the attempt's entry, or a folder of it, a second name in the attempt.

    Raises:
        ValueError: It is not there, or no regular file, or a part of its path is a link.
    """
    source = "/".join(filter(None, (attempt.entry, folder, path)))
    try:
        fd, _ = posix.open_regular(attempt.root, source)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("it is not there") from error
    try:
        target = attempt.path / path
        for directory in [*reversed(target.relative_to(attempt.path).parents)][1:]:
            made = attempt.path / directory
            if made not in attempt.made:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(made)
                    if attempt.mode is not None:
                        os.chmod(made, attempt.mode)
                attempt.made.add(made)
        posix.link_file(fd, attempt.root / source, target)
    finally:
        os.close(fd)


def publish(attempt: LocalAttempt, *, overwrite: bool, replacing: str | None = None) -> bool:
    """Give an attempt the name of its entry, durably.

    Args:
        attempt: The attempt.
        overwrite: Whether an entry that exists is replaced.
        replacing: Id of the attempt that became the entry: nothing but that is replaced.

    Returns:
        Whether an entry was replaced; it bears the attempt's name now.

    Raises:
        StepExistsError: The entry exists, and is not to be replaced or not ours to replace.
        StepDeletedError: What `replacing` became is not there any more.
        OSError: It could not be published, and is not.
    """
    target = attempt.root / attempt.entry
    posix.fsync_directories(attempt.path)
    if not _bears(attempt.directory, attempt.path):
        # Whoever removed or replaced it made what is there not ours: a write makes missing
        # directories, so the name alone proves nothing.
        raise FileNotFoundError(
            errno.ENOENT,
            "the attempt was removed while it was written, by hand or by a cleaner that took its "
            "writer for dead. Nothing was published; save again",
            str(attempt.path),
        )
    if replacing is None:
        replaced = _give_name(attempt, target, overwrite)
    else:
        replaced = _take_place(attempt, target, replacing)
    try:
        posix.fsync_path(attempt.root)
    except OSError:
        # Nobody knows whether the new name would outlive a power cut: the save has failed, so what
        # it published is taken back.
        _take_back(attempt, target, replaced)
        raise
    return replaced


def _give_name(attempt: LocalAttempt, target: Path, overwrite: bool) -> bool:
    while True:
        try:
            posix.rename_new(attempt.path, target)
        except FileExistsError as error:
            try:
                _refuse_to_replace(target, overwrite, error)
                posix.exchange(attempt.path, target)
            except FileNotFoundError:
                if not _bears(attempt.directory, attempt.path):
                    raise
                # The entry was deleted just now, so there is nothing to replace any more.
                continue
            return True
        return False


def _take_place(attempt: LocalAttempt, target: Path, replacing: str) -> bool:
    """Exchange an attempt with the entry that the attempt `replacing` became, and no other."""
    try:
        # Held open, so that what comes out of the exchange is known at once and without doubt.
        old = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _gone(target) from error
    try:
        if _attempt_of(target) != replacing:
            raise _gone(target)
        try:
            posix.exchange(attempt.path, target)
        except FileNotFoundError as error:
            if not _bears(attempt.directory, attempt.path):
                raise
            raise _gone(target) from error
        if not _bears(old, attempt.path):
            # Another step has taken the name since the look: it gets it back.
            _take_back(attempt, target, replaced=True)
            raise _gone(target)
    finally:
        os.close(old)
    return True


def _gone(target: Path) -> StepDeletedError:
    return StepDeletedError(
        f"{target} was deleted or replaced, or cannot be read any more, so what was made of it did "
        "not take its place. Look at what is there now, and try again"
    )


def _refuse_to_replace(target: Path, overwrite: bool, error: OSError) -> None:
    """Raise unless an existing entry may be replaced.

    Raises:
        StepExistsError: It may not.
        FileNotFoundError: It is gone.
    """
    if not overwrite:
        raise StepExistsError(
            f"{target} already exists; it was left as it is. Choose another step, or pass "
            "overwrite=True to replace it"
        ) from error
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        # The exchange would swap these as well, and hand back what cannot be removed.
        raise StepExistsError(
            f"{target} is a file or a link, not a checkpoint; it was left as it is. Move it away, "
            "or choose another name"
        ) from error
    if not posix.is_there(target / FILE_NAME) and posix.is_there(target):
        raise StepExistsError(
            f"{target} exists and is not a checkpoint of this library, so it is never replaced. "
            "Move it away, or choose another name"
        ) from error


def _take_back(attempt: LocalAttempt, target: Path, replaced: bool) -> None:
    """Undo a publication that is not durable; what is not surely ours is never removed."""
    # Until it is known to be durable, a power cut may bring any of the names back.
    attempt.keep = True
    swap = posix.exchange if replaced else posix.rename_new
    try:
        if not _bears(attempt.directory, target):
            # Somebody else has replaced or deleted it since; what is there is not ours.
            return
        swap(target, attempt.path)
        if not _bears(attempt.directory, attempt.path):
            # Somebody else came between the look and the swap: theirs goes back.
            swap(attempt.path, target)
            return
        posix.fsync_path(attempt.root)
        attempt.keep = False
    except OSError:
        if replaced and not _bears(attempt.directory, attempt.path):
            # Another step bears the attempt's name now; nobody may clean it up as one.
            kept = attempt.root / f"{attempt.entry}.replaced-{attempt.id}"
            with contextlib.suppress(OSError):
                os.rename(attempt.path, kept)
            logger.error("the step that was being replaced was left at %s", kept)


def renew(attempt: LocalAttempt) -> None:
    """Let the lease of an attempt begin anew, unless the attempt has ended."""
    with attempt.guard:
        if not attempt.ended and not attempt.joined:
            renew_lease(attempt.lease)


def end(attempt: LocalAttempt) -> None:
    """Give back what an attempt holds; it has been published or removed."""
    # The number of a descriptor that was closed may be that of another file a moment later.
    with attempt.guard:
        if attempt.ended:
            return
        attempt.ended = True
        with contextlib.suppress(OSError):
            os.close(attempt.directory)
        if attempt.joined:
            return
        lease = attempt.root / lease_name(attempt.id)
        try:
            is_left = posix.is_there(attempt.path)
        except OSError:
            is_left = True
        # What could not be removed is left with its lease, which tells the cleaner at once that
        # nobody owns it any more.
        _end_lease(None if is_left else lease, attempt.lease)


def discard(attempt: LocalAttempt) -> None:
    """Remove what bears the name of an attempt that was not published, if it was begun here."""
    if attempt.joined:
        return
    if attempt.keep:
        # Out of sight; its bytes are for the cleaner, once the names around it are durable.
        with contextlib.suppress(OSError):
            os.rename(attempt.path, attempt.path.with_name(trash_name(attempt.path.name)))
        return
    remove_hidden(attempt.path)


def _end_lease(path: Path | None, lease: int) -> None:
    # One that cannot be removed now is swept later: nobody holds its lock any more.
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(lease)


def hide(root: Path, entry: str, attempt: str | None = None) -> Path | None:
    """Rename an entry to a name of trash, durably; return its path there, None if not there.

    With `attempt`, an entry whose manifest is of another one stays: somebody has replaced it since
    it was looked at.
    """
    token = uuid.uuid4().hex
    trash = root / trash_name(attempt_name(entry, token))
    with contextlib.ExitStack() as stack:
        directory = None
        try:
            if attempt is not None:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                directory = os.open(root / entry, flags)
                stack.callback(os.close, directory)
                if _attempt_of(root / entry) != attempt:
                    return None
            os.rename(root / entry, trash)
        except FileNotFoundError:
            return None
        if directory is None or _bears(directory, trash):
            posix.fsync_path(root)
            return trash
        # Replaced between the look and the rename: it goes back.
        try:
            posix.rename_new(trash, root / entry)
        except FileExistsError:
            kept = root / f"{entry}.replaced-{token}"
            os.rename(trash, kept)
            logger.error("a step that somebody has replaced twice meanwhile is at %s", kept)
        posix.fsync_path(root)
        return None


def _attempt_of(path: Path) -> str | None:
    """Return the attempt that wrote the entry that lies at `path`; None where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        data = posix.read_regular(path, FILE_NAME, MAX_BYTES)
        summary = None if data is None else peek(data)
        return None if summary is None else summary.attempt
    return None


def remove_hidden(path: Path) -> None:
    """Remove what is no entry: an attempt, or trash."""
    # Under that name it can be told from an attempt whose writer may live, whatever happens.
    trash = path.with_name(trash_name(path.name))
    if trash != path:
        with contextlib.suppress(OSError):
            os.rename(path, trash)
    # By either name: a cleaner may have renamed it, and a late write made it anew.
    for each in {path, trash}:
        with contextlib.suppress(FileNotFoundError):
            posix.remove_tree(each)


def _bears(directory: int, path: Path) -> bool:
    """Tell whether `path` is the name of an open directory, at the moment."""
    kept = os.fstat(directory)
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (kept.st_dev, kept.st_ino) == (named.st_dev, named.st_ino)
