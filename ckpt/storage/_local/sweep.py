"""The sweep: it removes what dead writers left in a root; and the names of unfinished things.

A cleaner must never take an attempt away from a live writer, so it checks the attempt's lease. Then
it renames the attempt. Only one can succeed, that rename or the one that publishes, so a writer
that is alive after all gets an error and never publishes half a step.

No byte is removed before the rename that hides it is durable: otherwise a power cut could bring the
name back without the bytes. The functions block and raise `OSError`.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ckpt.storage._local.leases import WITHOUT_LEASE_SECONDS, is_abandoned, opened_lease
from ckpt.storage._local.posix import fsync_directory, remove_tree

# Orbax skips every name that contains this, and lists it as unfinished.
_MARK = ".orbax-checkpoint-tmp-"
_TRASH = ".trash"
_LEASE_PREFIX = ".ckpt-lease-"
_PROBE_PREFIX = ".ckpt-clock-"
_ATTEMPT = re.compile(re.escape(_MARK) + r"([0-9a-f]{32})(\.trash)?\Z")
_LEASE = re.compile("^" + re.escape(_LEASE_PREFIX) + r"([0-9a-f]{32})\Z")
_PROBE = re.compile("^" + re.escape(_PROBE_PREFIX) + r"[0-9a-f]{32}\Z")
# A folder of notes, except those that Orbax names; see `notes`.
_NOTES = re.compile(r"^\.ckpt-[a-z]+\Z")


def attempt_name(step_dir: str, token: str) -> str:
    """Return the name of the attempt at `step_dir` whose random id is `token`."""
    return f"{step_dir}{_MARK}{token}"


def lease_name(token: str) -> str:
    """Return the name of the lease of the attempt whose random id is `token`."""
    return f"{_LEASE_PREFIX}{token}"


def trash_name(name: str) -> str:
    """Return the name under which the directory of an attempt is removed."""
    return name if name.endswith(_TRASH) else f"{name}{_TRASH}"


def is_unfinished(name: str) -> bool:
    """Tell whether a directory of a root with that name is an attempt, trash, a probe or notes."""
    return any((_ATTEMPT.search(name), _PROBE.match(name), _NOTES.match(name)))


def sweep_root(root: Path) -> list[str]:
    """Remove what dead writers left in `root`, and trash; return the names of what was removed."""

    @cache
    def now() -> float:
        return store_time(root)

    attempts: dict[str, str | None] = {}
    trash, empty = [], []
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as found:
        for each in found:
            name = each.name
            if lease := _LEASE.match(name):
                attempts.setdefault(lease[1], None)
            elif not each.is_dir(follow_symlinks=False):
                continue
            elif match := _ATTEMPT.search(name):
                if match[2]:
                    trash.append(name)
                else:
                    attempts[match[1]] = name
            elif _PROBE.match(name) or _NOTES.match(name):
                empty.append(name)
    if trash and not _is_durable(root):
        trash = []
    swept = [name for name in trash if _removed(root / name)]
    for token, attempt in attempts.items():
        if _sweep(root, token, attempt, now):
            swept.append(attempt or lease_name(token))
    for name in empty:
        # Left by a process that died. One that is alive makes it again. Notes are not removed.
        with contextlib.suppress(OSError):
            os.rmdir(root / name)
    return swept


def _sweep(root: Path, token: str, name: str | None, now: Callable[[], float]) -> bool:
    """Remove an attempt, or the lease of one that is gone, unless it may have a live writer."""
    # Not taken from the listing, which may show an attempt and miss its lease.
    path = root / lease_name(token)
    try:
        with opened_lease(path) as lease:
            if lease is None:
                if name is None:
                    return False
                if now() - os.lstat(root / name).st_mtime <= WITHOUT_LEASE_SECONDS:
                    return False
            elif not is_abandoned(lease, now):
                return False
            if name is not None:
                trash = root / trash_name(name)
                os.rename(root / name, trash)
                fsync_directory(root)
                if not _removed(trash):
                    return False
            if lease is not None:
                os.unlink(path)
    except OSError:
        return False
    return True


def _is_durable(root: Path) -> bool:
    """Make the names in a root durable: the processes that gave them may have died before."""
    try:
        fsync_directory(root)
    except OSError:
        return False
    return True


def _removed(trash: Path) -> bool:
    """Remove a directory without a living writer. Several cleaners may try at once."""
    try:
        remove_tree(trash)
    except OSError:
        return False
    return True


def store_time(root: Path) -> float:
    """Return the time of the clock that stamps the files of `root`, in seconds."""
    probe = root / f"{_PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        os.mkdir(probe)
    except OSError:
        # On a full disk, where a sweep would help, times can still be set.
        os.utime(root)
        return os.stat(root).st_mtime
    try:
        return os.lstat(probe).st_mtime
    finally:
        # Another cleaner may have been quicker.
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(probe)
