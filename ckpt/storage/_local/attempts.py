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
from ckpt.storage._local.leases import attempt_name, lease_name, renew_lease, take_lease, trash_name

logger = logging.getLogger("ckpt")

# Longest file name in bytes on common file systems, for systems that do not tell it.
_LONGEST_NAME = 255
# Files that mark a checkpoint of this library or of Orbax; only such a directory is replaced.
MARKS = (FILE_NAME, "_CHECKPOINT_METADATA", "_METADATA")
# Number of lost files that a message names.
_NAMED = 5


class LocalAttempt(Struct):
    """One try at writing a step directory.

    Attributes:
        step_dir: Name of the step directory it will become.
        path: The directory, unless it was renamed.
        directory: File descriptor of the directory, whatever its name is by now.
        lease: File descriptor of the lease, which it keeps locked.
        made: Directories that exist. They are not made again, so that a directory that was
            removed stays removed.
        mode: Permissions of its directories; None follows the umask.
        joined: True if another process has begun it. That process has the lease, and `lease` is not
            a descriptor.
        folder: Empty: the files are in the step directory itself.
        keep: True if its directory must be left to a later cleaner.
        ended: True once the descriptors are closed. Hold `guard` to read it and to use them.
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
    """Begin an attempt under a new random name; `mode` is for its directories."""
    token = uuid.uuid4().hex
    path = root / attempt_name(step_dir, token)
    _check_length(root, step_dir, trash_name(path.name))
    # The lease comes first, so that the attempt never looks abandoned.
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
    """Raise if the longest name of an attempt, which it gets to be removed, is too long."""
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
    if path in attempt.made:
        return
    for directory in [*reversed(path.parents), path]:
        if directory.is_relative_to(attempt.path) and directory not in attempt.made:
            # Level by level, so that an attempt that was removed meanwhile is not made again.
            with contextlib.suppress(FileExistsError):
                posix.make_directory(directory, attempt.mode)
            attempt.made.add(directory)


def link(attempt: LocalAttempt, path: str, folder: str = "") -> None:
    """Link a regular file of the step directory, or of a folder in it, into the attempt.

    Raises:
        ValueError: The file does not exist, is not a regular file, or a part of its path is a link.
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
    """Link regular files of a step directory into the attempt; return the paths of the linked ones.

    Args:
        attempt: The attempt.
        step_dir: The step directory.
        files: Size in bytes of every file, by its path there. Files of another size are left out.

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
            # The file was deleted or damaged since. The caller writes files that are not shared.
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
            # The write that follows may succeed, or fail with a better error.
            continue
        finally:
            os.close(fd)
        shared.append(path)
    return shared


def take_over(attempt: LocalAttempt, left: str, paths: Sequence[str]) -> list[str]:
    """Move regular files of a dead attempt into this one; return the paths of the moved ones.

    Args:
        attempt: The attempt.
        left: Name of the directory of the dead attempt.
        paths: The files, which have the same paths in both.

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
            # A sweep has removed it.
            continue
        try:
            # The dead writer may have died after the last byte, before syncing it.
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
        overwrite: True replaces an existing step directory.
        replacing: Id of the attempt that the existing step directory came from; only that is
            replaced.
        files: Size in bytes of every file that the attempt must hold, by path.

    Returns:
        True if a step directory was replaced. The old one has the attempt's name now.

    Raises:
        StepExistsError: The step directory exists, and may not be replaced, or is not a checkpoint.
        StepDeletedError: The step directory of `replacing` is gone.
        OSError: The attempt could not be published, and is not.
    """
    target = attempt.root / attempt.step_dir
    with noticing_removal(attempt):
        posix.fsync_directories(attempt.path)
        if not _has_name(attempt.directory, attempt.path):
            # The attempt was removed or replaced. The name alone proves nothing: the directory may
            # be another writer's.
            raise FileNotFoundError
    _check_files(attempt, attempt.path, files or {})
    with noticing_removal(attempt):
        if replacing is None:
            replaced = _give_name(attempt, target, overwrite)
        else:
            replaced = _take_place(attempt, target, replacing)
    try:
        posix.fsync_directory(attempt.root)
        # A removal that began before the rename goes on under the new name.
        _check_files(attempt, target, files or {})
    except OSError:
        # The new name might not survive a power cut, or the step is not whole. The save has failed,
        # so its publication is undone.
        _take_back(attempt, target, replaced)
        raise
    return replaced


@contextlib.contextmanager
def noticing_removal(attempt: LocalAttempt) -> Iterator[None]:
    """Explain a file or directory that the body does not find by the removal of the attempt."""
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
    """Raise if a file of the attempt, whose directory is now `path`, is missing or was cut."""
    try:
        found = posix.list_files(path)
    except FileNotFoundError:
        # Something vanished during the listing, so each file is looked at.
        found = {}
    suspects = [name for name, size in files.items() if found.get(name) != size]
    # On a network file system a list may be out of date, but an opened file is not.
    lost = [name for name in suspects if not _is_whole(path, name, files[name])]
    # After publication, another writer may have deleted or replaced the step.
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
        # Held open to recognize the directory beyond doubt after the exchange.
        old = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _gone_error(target) from error
    try:
        if _attempt_of(target) != replacing:
            raise _gone_error(target)
        try:
            posix.exchange(attempt.path, target)
        except FileNotFoundError as error:
            if not _has_name(attempt.directory, attempt.path):
                raise
            raise _gone_error(target) from error
        if not _has_name(old, attempt.path):
            # Another step has taken the name since it was checked. It gets the name back.
            _take_back(attempt, target, replaced=True)
            raise _gone_error(target)
    finally:
        os.close(old)
    return True


def _gone_error(target: Path) -> StepDeletedError:
    return StepDeletedError(
        f"{target} was deleted or replaced meanwhile, or cannot be read any more, so it was not "
        "changed. Look at what is there now, and try again"
    )


def _refuse_to_replace(target: Path, overwrite: bool, error: OSError) -> None:
    """Raise unless an existing step directory may be replaced.

    Raises:
        StepExistsError: The step directory must not be replaced.
        FileNotFoundError: The step directory is gone.
    """
    if not overwrite:
        raise StepExistsError(
            f"{target} already exists and was not changed. Choose another step, or pass "
            "if_exists='replace' to replace it"
        ) from error
    if not stat.S_ISDIR(os.lstat(target).st_mode):
        # The exchange would swap a file or a link as well, and then it could not be removed.
        raise StepExistsError(
            f"{target} is a file or a link, not a checkpoint, and was not changed. Move it away, "
            "or choose another name"
        ) from error
    if not any(posix.is_there(target / name) for name in MARKS) and posix.is_there(target):
        raise StepExistsError(
            f"{target} exists and is not a checkpoint of this library, so it is never replaced. "
            "Move it away, or choose another name"
        ) from error


def _take_back(attempt: LocalAttempt, target: Path, replaced: bool) -> None:
    """Undo a publication that is not durable, without touching another writer's directory."""
    # A power cut may bring back either name until the undoing is durable.
    attempt.keep = True
    swap = posix.exchange if replaced else posix.rename_new
    try:
        if not _has_name(attempt.directory, target):
            # Another process has replaced or deleted it since.
            return
        swap(target, attempt.path)
        if not _has_name(attempt.directory, attempt.path):
            # Another process replaced it between the check and the swap. Its directory goes back.
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
        # The lease of an attempt that could not be removed stays, unlocked. A cleaner then sees at
        # once that the attempt has no owner.
        _end_lease(None if is_left else lease, attempt.lease)


def discard(attempt: LocalAttempt) -> None:
    """Remove the directory of an attempt that was not published, if it was begun here."""
    if attempt.joined:
        return
    if attempt.keep:
        # Only hidden. A cleaner removes its bytes once the names in the root are durable.
        with contextlib.suppress(OSError):
            os.rename(attempt.path, attempt.path.with_name(trash_name(attempt.path.name)))
        return
    remove_hidden(attempt.path)


def _end_lease(path: Path | None, lease: int) -> None:
    # A sweep removes a lease that cannot be removed now, since its lock is free by then.
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
        # The step was replaced between the check and the rename, and goes back.
        try:
            posix.rename_new(trash, root / step_dir)
        except FileExistsError:
            kept = root / f"{step_dir}.replaced-{token}"
            os.rename(trash, kept)
            logger.error("a step that was replaced twice while it was deleted is at %s", kept)
        posix.fsync_directory(root)
        return None


def _attempt_of(path: Path) -> str | None:
    """Return the id of the attempt that wrote the directory at `path`; None if unknown."""
    with contextlib.suppress(OSError, ValueError):
        data = posix.read_regular(path, FILE_NAME, MAX_BYTES)
        summary = None if data is None else peek(data)
        return None if summary is None else summary.attempt
    return None


def remove_hidden(path: Path) -> None:
    """Remove the directory of an attempt or of a deleted step."""
    # Under the trash name it is never taken for the attempt of a live writer.
    trash = path.with_name(trash_name(path.name))
    if trash != path:
        with contextlib.suppress(OSError):
            os.rename(path, trash)
    # Both names: a cleaner may have renamed it, and a late write may have made it again.
    for each in {path, trash}:
        with contextlib.suppress(FileNotFoundError):
            posix.remove_tree(each)


def _has_name(directory: int, path: Path) -> bool:
    """Return True if `path` is the name of an open directory at this moment."""
    kept = os.fstat(directory)
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (kept.st_dev, kept.st_ino) == (named.st_dev, named.st_ino)
