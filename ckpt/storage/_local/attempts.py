"""Attempts on a local file system: begun, published, taken back, discarded.

An attempt is a directory under a name that Orbax, too, takes for unfinished, with a lease beside
it. Publishing is one rename that refuses to replace, or one atomic swap for `overwrite`.
docs/design/001-commit-protocol.md explains the order of these operations. The functions block, and
raise `OSError`, or `StepExistsError` if the name is taken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, peek
from ckpt.errors import CheckpointError, StepDeletedError, StepExistsError
from ckpt.storage._local import posix
from ckpt.storage._local.data_files import write_block
from ckpt.storage._local.leases import renew_lease, take_lease
from ckpt.storage._local.sweep import attempt_name, lease_name, trash_name

logger = logging.getLogger("ckpt")

# The longest name of a file in bytes on common file systems, where the system does not tell it.
_LONGEST_NAME = 255
# How many lost files a message names.
_NAMED = 5


class LocalAttempt(Struct):
    """One try at writing a step directory.

    Attributes:
        root: The root.
        step_dir: Name of the step directory it will become.
        id: Random hexadecimal id.
        path: The directory, unless it was renamed.
        directory: File descriptor of the directory, whatever its name is by now.
        lease: File descriptor of the lease, which it keeps locked.
        made: Directories that exist. They are not made again, so that a directory that was
            removed stays removed.
        mode: Permissions of its directories; None follows the umask.
        joined: Whether another process has begun it. That process has the lease, and `lease` is
            not a descriptor.
        folder: Empty: the files are in the step directory itself.
        keep: Whether the directory of its name must be left to a later cleaner.
        ended: Whether the descriptors were closed. Hold `guard` to read it and to use them.
    """

    root: Path
    step_dir: str
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


def begin(root: Path, step_dir: str, lease_seconds: float, mode: int | None = None) -> LocalAttempt:
    """Begin an attempt under a new random name, with these permissions."""
    token = uuid.uuid4().hex
    path = root / attempt_name(step_dir, token)
    _check_length(root, step_dir, trash_name(path.name))
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
    return LocalAttempt(root, step_dir, token, path, directory, lease, {path}, mode)


def _check_length(root: Path, step_dir: str, longest: str) -> None:
    """Raise if an attempt could not be made, or could be made, but not renamed to be removed."""
    try:
        most = os.pathconf(root, "PC_NAME_MAX")
    except (OSError, ValueError):
        most = _LONGEST_NAME
    needed, nbytes = len(os.fsencode(longest)), len(os.fsencode(step_dir))
    if needed > most:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the name of the checkpoint is too long: it has {nbytes} bytes, and at most "
            f"{most - (needed - nbytes)} are possible, because the library adds "
            f"{needed - nbytes} while the checkpoint is written. Choose a shorter name",
            str(root / step_dir),
        )


def join(root: Path, step_dir: str, token: str, mode: int | None = None) -> LocalAttempt:
    """Open an attempt that another process has begun."""
    path = root / attempt_name(step_dir, token)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return LocalAttempt(root, step_dir, token, path, directory, -1, {path}, mode, joined=True)


def write(attempt: LocalAttempt, path: str, data: memoryview) -> None:
    """Write a new file of an attempt, and make the directories that it needs; the file is durable.

    The directories are made durable when the attempt is published.
    """
    target = attempt.path / path
    make_directories(attempt, target.parent)
    write_block(target, data, attempt.mode)


def make_directories(attempt: LocalAttempt, path: Path) -> None:
    """Make the directories of an attempt down to `path`."""
    if path in attempt.made:
        return
    for directory in [*reversed(path.parents), path]:
        if directory.is_relative_to(attempt.path) and directory not in attempt.made:
            # Level by level: an attempt that was removed meanwhile is not made again.
            with contextlib.suppress(FileExistsError):
                posix.make_directory(directory, attempt.mode)
            attempt.made.add(directory)


def link(attempt: LocalAttempt, path: str, folder: str = "") -> None:
    """Link a regular file of the step directory, or of a folder in it, into the attempt.

    Raises:
        ValueError: It does not exist, is not a regular file, or a part of its path is a link.
    """
    source = "/".join(filter(None, (attempt.step_dir, folder, path)))
    try:
        fd, _ = posix.open_regular(attempt.root, source)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError("it does not exist") from error
    try:
        target = attempt.path / path
        make_directories(attempt, target.parent)
        posix.link_file(fd, attempt.root / source, target)
    finally:
        os.close(fd)


class NoHardLinksError(Exception):
    """The file system has no hard links."""


def share(attempt: LocalAttempt, step_dir: str, files: Mapping[str, int]) -> list[str]:
    """Link regular files of a step directory into the attempt; return the paths of those it has.

    Args:
        attempt: The attempt.
        step_dir: The step directory.
        files: Size in bytes of every file, by its path there. One of another size stays out.

    Raises:
        NoHardLinksError: The file system has no links at all.
        OSError: The attempt was removed.
    """
    shared: list[str] = []
    for path, size in files.items():
        source = f"{step_dir}/{path}"
        try:
            fd, found = posix.open_regular(attempt.root, source)
        except (OSError, ValueError):
            # Deleted or damaged since. What cannot be read is not shared, but written.
            continue
        try:
            if found != size:
                continue
            target = attempt.path / path
            make_directories(attempt, target.parent)
            posix.add_name(fd, attempt.root / source, target)
        except ValueError:
            continue
        except OSError as error:
            if not posix.is_there(attempt.path):
                raise
            if not shared and error.errno in posix.WITHOUT_LINKS:
                raise NoHardLinksError(error.strerror) from error
            # What goes wrong here may go right, or wrong with a better error, in a write.
            continue
        finally:
            os.close(fd)
        shared.append(path)
    return shared


def take_over(attempt: LocalAttempt, left: str, paths: Sequence[str]) -> list[str]:
    """Move regular files of a dead attempt into this one; return the paths of those it has.

    Args:
        attempt: The attempt.
        left: Name of the directory of the dead one.
        paths: The files, by their paths there and here.

    Raises:
        OSError: The attempt was removed.
    """
    taken: list[str] = []
    for path in paths:
        target = attempt.path / path
        make_directories(attempt, target.parent)
        try:
            fd, _ = posix.open_regular(attempt.root, f"{left}/{path}")
        except (OSError, ValueError):
            # A sweep was quicker.
            continue
        try:
            # Its writer may have died between the last byte and this.
            os.fsync(fd)
            os.rename(attempt.root / left / path, target)
        except OSError:
            if not posix.is_there(attempt.path):
                raise
            continue
        finally:
            os.close(fd)
        taken.append(path)
    return taken


def publish(
    attempt: LocalAttempt,
    *,
    overwrite: bool,
    replacing: str | None = None,
    files: Mapping[str, int] | None = None,
) -> bool:
    """Give an attempt the name of its step directory, durably.

    Args:
        attempt: The attempt.
        overwrite: Whether an existing step directory is replaced.
        replacing: Id of the attempt that the existing step directory came from; only that is
            replaced.
        files: Size in bytes of every file that the attempt must hold, by path.

    Returns:
        Whether a step directory was replaced. The old one has the attempt's name now.

    Raises:
        StepExistsError: The step directory exists, and may not be replaced, or is not a checkpoint.
        StepDeletedError: The step directory of `replacing` is gone.
        OSError: It could not be published, and is not.
    """
    target = attempt.root / attempt.step_dir
    with noticing_removal(attempt):
        posix.fsync_directories(attempt.path)
        if not _has_name(attempt.directory, attempt.path):
            # It was removed or replaced. The name alone proves nothing: the directory may be
            # another writer's.
            raise FileNotFoundError
    _check_files(attempt, attempt.path, files or {})
    with noticing_removal(attempt):
        if replacing is None:
            replaced = _give_name(attempt, target, overwrite)
        else:
            replaced = _take_place(attempt, target, replacing)
    try:
        posix.fsync_directory(attempt.root)
        # A removal that had begun before goes on under the new name.
        _check_files(attempt, target, files or {})
    except OSError:
        # The new name might not survive a power cut, or the step is not whole. So the save has
        # failed, and what it published is taken back.
        _take_back(attempt, target, replaced)
        raise
    return replaced


@contextlib.contextmanager
def noticing_removal(attempt: LocalAttempt) -> Iterator[None]:
    """Tell of a removed attempt where the body does not find a file or a directory of it."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, CheckpointError):
            raise
        raise FileNotFoundError(
            errno.ENOENT,
            "the attempt, or a part of it, was removed while it was written: by hand, by another "
            "program, as Orbax does with cleanup_tmp_directories=True, or by a cleaner that took "
            "its writer for dead. Nothing was published; save again",
            str(attempt.path),
        ) from error


def _check_files(attempt: LocalAttempt, path: Path, files: Mapping[str, int]) -> None:
    """Raise if a file of the attempt, which has the name `path`, is gone or was cut."""
    try:
        found = posix.list_files(path)
    except FileNotFoundError:
        # Something vanished while it was listed, so each file is looked at.
        found = {}
    suspects = [name for name, size in files.items() if found.get(name) != size]
    # On a network file system a list may be out of date, but an opened file is not.
    lost = [name for name in suspects if not _is_whole(path, name, files[name])]
    # Once it was published, another writer may have deleted or replaced it.
    if not lost or not _has_name(attempt.directory, path):
        return
    some = ", ".join(map(repr, lost[:_NAMED])) + (", ..." if len(lost) > _NAMED else "")
    raise FileNotFoundError(
        errno.ENOENT,
        f"{len(lost)} of its {len(files)} files were removed or changed while it was saved: "
        f"{some}. Another program removes files of saves under way, as Orbax does with "
        "cleanup_tmp_directories=True. Nothing was published; stop that program, and save again",
        str(path),
    )


def _is_whole(top: Path, name: str, size: int) -> bool:
    try:
        fd, found = posix.open_regular(top, name)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    os.close(fd)
    return found == size


def _give_name(attempt: LocalAttempt, target: Path, overwrite: bool) -> bool:
    while True:
        try:
            posix.rename_new(attempt.path, target)
        except FileExistsError as error:
            try:
                _refuse_to_replace(target, overwrite, error)
                posix.exchange(attempt.path, target)
            except FileNotFoundError:
                if not _has_name(attempt.directory, attempt.path):
                    raise
                # The step directory was deleted just now, so there is nothing left to replace.
                continue
            return True
        return False


def _take_place(attempt: LocalAttempt, target: Path, replacing: str) -> bool:
    """Exchange an attempt with the step directory that came from the attempt `replacing` only."""
    try:
        # Held open, to recognize the directory after the exchange beyond doubt.
        old = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _gone(target) from error
    try:
        if _attempt_of(target) != replacing:
            raise _gone(target)
        try:
            posix.exchange(attempt.path, target)
        except FileNotFoundError as error:
            if not _has_name(attempt.directory, attempt.path):
                raise
            raise _gone(target) from error
        if not _has_name(old, attempt.path):
            # Another step has taken the name since it was checked. It gets the name back.
            _take_back(attempt, target, replaced=True)
            raise _gone(target)
    finally:
        os.close(old)
    return True


def _gone(target: Path) -> StepDeletedError:
    return StepDeletedError(
        f"{target} was deleted or replaced meanwhile, or cannot be read any more, so it was not "
        "changed. Look at what is there now, and try again"
    )


def _refuse_to_replace(target: Path, overwrite: bool, error: OSError) -> None:
    """Raise unless an existing step directory may be replaced.

    Raises:
        StepExistsError: It may not.
        FileNotFoundError: It is gone.
    """
    if not overwrite:
        raise StepExistsError(
            f"{target} already exists and was not changed. Choose another step, or pass "
            "overwrite=True to replace it"
        ) from error
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        # The exchange would swap these as well, and then they could not be removed.
        raise StepExistsError(
            f"{target} is a file or a link, not a checkpoint, and was not changed. Move it away, "
            "or choose another name"
        ) from error
    if not posix.is_there(target / FILE_NAME) and posix.is_there(target):
        raise StepExistsError(
            f"{target} exists and is not a checkpoint of this library, so it is never replaced. "
            "Move it away, or choose another name"
        ) from error


def _take_back(attempt: LocalAttempt, target: Path, replaced: bool) -> None:
    """Undo a publication that is not durable, without touching what may be another writer's."""
    # Until that is durable, a power cut may bring back either name.
    attempt.keep = True
    swap = posix.exchange if replaced else posix.rename_new
    try:
        if not _has_name(attempt.directory, target):
            # Another process has replaced or deleted it since.
            return
        swap(target, attempt.path)
        if not _has_name(attempt.directory, attempt.path):
            # Another process replaced it between the check and the swap. Theirs goes back.
            swap(attempt.path, target)
            return
        posix.fsync_directory(attempt.root)
        attempt.keep = False
    except OSError:
        if replaced and not _has_name(attempt.directory, attempt.path):
            # Another step has the attempt's name now, and must not be swept as an attempt.
            kept = attempt.root / f"{attempt.step_dir}.replaced-{attempt.id}"
            with contextlib.suppress(OSError):
                os.rename(attempt.path, kept)
            logger.error("the step that was being replaced was left at %s", kept)


def renew(attempt: LocalAttempt) -> None:
    """Renew the lease of an attempt, unless the attempt has ended."""
    with attempt.guard:
        if not attempt.ended and not attempt.joined:
            renew_lease(attempt.lease)


def end(attempt: LocalAttempt) -> None:
    """Release the descriptors and the lease of an attempt that was published or removed."""
    # A closed descriptor's number may belong to another file a moment later.
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
        # If the attempt could not be removed, its lease stays, unlocked: that shows a cleaner at
        # once that the attempt has no owner any more.
        _end_lease(None if is_left else lease, attempt.lease)


def discard(attempt: LocalAttempt) -> None:
    """Remove the directory of an attempt that was not published, if it was begun here."""
    if attempt.joined:
        return
    if attempt.keep:
        # Hidden only. A cleaner removes its bytes once the names in the root are durable.
        with contextlib.suppress(OSError):
            os.rename(attempt.path, attempt.path.with_name(trash_name(attempt.path.name)))
        return
    remove_hidden(attempt.path)


def _end_lease(path: Path | None, lease: int) -> None:
    # A lease that cannot be removed now is swept later, since its lock is free by then.
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(lease)


def hide(root: Path, step_dir: str, attempt: str | None = None) -> Path | None:
    """Rename a step directory to a trash name, durably; return that path, None if there is none.

    With `attempt`, a step directory whose manifest is of another attempt stays: another writer has
    replaced it since it was checked.
    """
    token = uuid.uuid4().hex
    trash = root / trash_name(attempt_name(step_dir, token))
    with contextlib.ExitStack() as stack:
        directory = None
        try:
            if attempt is not None:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                directory = os.open(root / step_dir, flags)
                stack.callback(os.close, directory)
                if _attempt_of(root / step_dir) != attempt:
                    return None
            os.rename(root / step_dir, trash)
        except FileNotFoundError:
            return None
        if directory is None or _has_name(directory, trash):
            posix.fsync_directory(root)
            return trash
        # It was replaced between the check and the rename, and goes back.
        try:
            posix.rename_new(trash, root / step_dir)
        except FileExistsError:
            kept = root / f"{step_dir}.replaced-{token}"
            os.rename(trash, kept)
            logger.error("a step that was replaced twice while it was deleted is at %s", kept)
        posix.fsync_directory(root)
        return None


def _attempt_of(path: Path) -> str | None:
    """Return the id of the attempt that wrote the directory at `path`; None if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        data = posix.read_regular(path, FILE_NAME, MAX_BYTES)
        summary = None if data is None else peek(data)
        return None if summary is None else summary.attempt
    return None


def remove_hidden(path: Path) -> None:
    """Remove an attempt, or trash."""
    # Under that name it cannot be taken for an attempt whose writer is alive, whatever happens.
    trash = path.with_name(trash_name(path.name))
    if trash != path:
        with contextlib.suppress(OSError):
            os.rename(path, trash)
    # Both names: a cleaner may have renamed it, and a late write may have made it again.
    for each in {path, trash}:
        with contextlib.suppress(FileNotFoundError):
            posix.remove_tree(each)


def _has_name(directory: int, path: Path) -> bool:
    """Tell whether `path` is the name of an open directory at this moment."""
    kept = os.fstat(directory)
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (kept.st_dev, kept.st_ino) == (named.st_dev, named.st_ino)
