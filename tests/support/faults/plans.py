"""Plans of faults: effects on file operations, and plans that choose when they happen.

A plan is a function that is called before every operation and returns an effect, or None to let the
operation pass. `at`, `since` and `every` make the common plans. Any function will do, and it may
also do something else, such as cancel a task. `FaultyFiles` carries plans out.
"""

from __future__ import annotations

import errno as numbers
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "CHANGES",
    "SYNCS",
    "WRITES",
    "Crash",
    "Effect",
    "Fail",
    "FileOperation",
    "Plan",
    "Predicate",
    "Short",
    "Wait",
    "at",
    "every",
    "first_of",
    "named",
    "refused_by",
    "since",
]

WRITES = frozenset({"write", "writev", "pwrite", "pwritev"})
SYNCS = frozenset({"fsync", "fdatasync"})
_RENAMES = frozenset({"rename", "replace", "renameat2"})
_REMOVES = frozenset({"unlink", "remove", "rmdir"})
_MAKES = frozenset({"mkdir", "link", "symlink"})
# All functions that change the disk; `open` does so depending on its flags.
CHANGES = (
    WRITES
    | _RENAMES
    | _REMOVES
    | _MAKES
    | {"posix_fallocate", "truncate", "ftruncate", "chmod", "utime"}
)
_SPACE = WRITES | SYNCS | _RENAMES | _MAKES | {"posix_fallocate"}
_NAMES = _RENAMES | _REMOVES | _MAKES | {"open", "scandir", "listdir", "stat", "lstat"}


@dataclass(slots=True, eq=False)
class FileOperation:
    """One file operation.

    Attributes:
        name: Name of the function: `open`, `pwrite`, `renameat2`. Functions that do the same keep
            their own names (`unlink` and `remove`).
        path: The path, relative to the watched directory; `.` is that directory. For a file
            descriptor, the path that the file has at that moment, with ` (deleted)` behind it if it
            no longer has one.
        target: The second path of a rename or a link; `path` is the first one, even if only the
            second is below the watched directory. In that case, `path` is absolute.
        fd: The file descriptor argument, or None.
        offset: First byte of a write, a read or a reservation.
        data: The bytes that were written; before the write and if it failed, the bytes to write.
        nbytes: Number of bytes to read, reserve or keep.
        flags: The flags of `open` and `renameat2`.
        number: 1 for the first operation below the watched directory, and so on.
        began: Time of its beginning, on a clock that ticks at every beginning and end.
        ended: Time of its end, on the same clock; None until then.
        effect: The effect that the plan chose.
        error: The error that it raised.
    """

    name: str
    path: str
    target: str | None = None
    fd: int | None = None
    offset: int | None = None
    data: bytes | None = None
    nbytes: int | None = None
    flags: int = 0
    number: int = 0
    began: int = 0
    ended: int | None = None
    effect: Effect | None = None
    error: OSError | None = None

    @property
    def may_change(self) -> bool:
        """True if it changes the disk when it succeeds."""
        creates = self.name == "open" and self.flags & (os.O_CREAT | os.O_TRUNC)
        return self.name in CHANGES or bool(creates)

    def __str__(self) -> str:
        where = self.path if self.target is None else f"{self.path} -> {self.target}"
        what = "" if self.effect is None else f": {self.effect}"
        return f"{self.number} {self.name} {where}{what}"


class Gate(Protocol):
    """A gate to wait at, such as a `threading.Event`."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for at most `timeout` seconds; return a false value on timeout."""


@dataclass(frozen=True, slots=True)
class Fail:
    """An effect: the operation is not carried out and raises `OSError`.

    Attributes:
        errno: The error's number, such as `errno.ENOSPC`.
    """

    errno: int

    def __str__(self) -> str:
        return numbers.errorcode.get(self.errno, str(self.errno))


@dataclass(frozen=True, slots=True)
class Short:
    """An effect: a write or read moves fewer bytes than requested. Every other operation passes.

    Attributes:
        nbytes: Limit of the bytes, 1 or more; None for half of them. Past the page cache (O_DIRECT)
            only whole sectors are moved.
    """

    nbytes: int | None = None

    def limit(self, asked: int) -> int:
        """Return the number of requested bytes to move. It is at least 1, as on a real system."""
        wanted = asked // 2 if self.nbytes is None else self.nbytes
        return min(max(wanted, 1), asked)

    def __str__(self) -> str:
        return "short"


@dataclass(frozen=True, slots=True)
class Wait:
    """An effect: the operation waits at a gate before it is carried out.

    Attributes:
        gate: A `threading.Event` or a `threading.Barrier`.
        then: Effect after the gate; None lets the operation pass.
        seconds: Longest wait; after that, RuntimeError is raised.
    """

    gate: Gate
    then: Fail | Short | None = None
    seconds: float = 60.0

    def pass_through(self) -> None:
        """Wait at the gate.

        Raises:
            RuntimeError: The gate was not opened in time.
        """
        try:
            opened = self.gate.wait(self.seconds) is not False
        except threading.BrokenBarrierError:
            opened = False
        if not opened:
            raise RuntimeError(f"a gate was not opened within {self.seconds} s")

    def __str__(self) -> str:
        return "waited" if self.then is None else f"waited, then {self.then}"


@dataclass(frozen=True, slots=True)
class Crash:
    """An effect: this and all later operations fail and change nothing, as if the process died."""

    def __str__(self) -> str:
        return "crash"


Effect = Fail | Short | Wait | Crash
Plan = Callable[[FileOperation], Effect | None]
Predicate = Callable[[FileOperation], bool]


def _all(operation: FileOperation) -> bool:
    return True


def at(number: int, effect: Effect, matching: Predicate = _all) -> Plan:
    """Return a plan with one effect on the `number`-th operation that matches, counted from 1."""
    return _counted(lambda count: count == number, effect, matching)


def since(number: int, effect: Effect, matching: Predicate = _all) -> Plan:
    """Return a plan with one effect on the `number`-th operation that matches and later ones."""
    return _counted(lambda count: count >= number, effect, matching)


def every(number: int, effect: Effect, matching: Predicate = _all) -> Plan:
    """Return a plan with one effect on every `number`-th operation that matches."""
    return _counted(lambda count: count % number == 0, effect, matching)


def _counted(chosen: Callable[[int], bool], effect: Effect, matching: Predicate) -> Plan:
    count = 0

    def plan(operation: FileOperation) -> Effect | None:
        nonlocal count
        if not matching(operation):
            return None
        count += 1
        return effect if chosen(count) else None

    return plan


def first_of(*plans: Plan) -> Plan:
    """Return a plan that calls all `plans` and takes the first effect."""

    def plan(operation: FileOperation) -> Effect | None:
        effects = [each(operation) for each in plans]
        return next((effect for effect in effects if effect is not None), None)

    return plan


def named(*names: str) -> Predicate:
    """Return a predicate that matches operations by name."""
    return lambda operation: operation.name in names


def refused_by(errno: int) -> Predicate:
    """Return a predicate that matches the operations that raise this error on a real system.

    A full disk (ENOSPC, EDQUOT) refuses operations that need space, a read-only disk (EROFS) every
    change. A process with too many open files (EMFILE) fails only in `open`, `scandir` and
    `listdir`, a process without rights (EACCES) in operations that look up or change names. Any
    other error may occur in every operation.
    """

    def matches(operation: FileOperation) -> bool:
        name = operation.name
        if errno in (numbers.ENOSPC, numbers.EDQUOT):
            creates = name == "open" and bool(operation.flags & os.O_CREAT)
            return creates or name in _SPACE
        if errno == numbers.EROFS:
            return operation.may_change
        if errno == numbers.EMFILE:
            return name in ("open", "scandir", "listdir")
        if errno in (numbers.EACCES, numbers.EPERM):
            return name in _NAMES
        return True

    return matches
