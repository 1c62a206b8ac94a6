"""`FaultyFiles`: file operations that fail when a plan says so, and a record of all of them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from tests.support.faults.interception import intercepted, path_of
from tests.support.faults.plans import SYNCS, Crash, Effect, Fail, FileOperation, Plan, Short, Wait

__all__ = ["FaultyFiles"]

T = TypeVar("T")


class FaultyFiles:
    """Intercepts the file operations of this process below one directory, in a `with` block.

    It sees operations of Python code on paths below the directory, and on file descriptors of such
    paths, in all threads: the functions of `os`, the built-in `open`, `fcntl.flock`, and this
    library's call of `renameat2`. It does not see operations of other processes, of C++ libraries
    (such as TensorStore), of `mmap`, the closing of files, and functions that were taken out of
    `os` before (`from os import stat`).

    Blocks may be nested, and must end in the opposite order; the inner one is asked first.

    Attributes:
        operations: All operations, in the order in which they began.
    """

    def __init__(
        self, directory: str | os.PathLike[str], plan: Plan | None = None, *, sync: bool = True
    ) -> None:
        """Watch `directory`, which need not exist.

        Args:
            directory: The directory, which is watched with everything below it.
            plan: Decides about every operation. It is called by one thread at a time. None lets all
                operations pass.
            sync: True to let `fsync` and `fdatasync` reach the disk. If false, they only seem to,
                which is faster, and enough unless the power is cut.
        """
        self.operations: list[FileOperation] = []
        self._plan = plan
        self._sync = sync
        self._top = os.path.abspath(directory)
        self._tops = {self._top, os.path.realpath(directory)}
        self._guard = threading.RLock()
        self._clock = 0
        self._crashed = False
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._patches.enter_context(intercepted(self.locate, self.perform))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._patches.close()

    @property
    def met(self) -> list[FileOperation]:
        """The operations on which the plan had an effect."""
        return [operation for operation in list(self.operations) if operation.effect is not None]

    @property
    def crashed(self) -> bool:
        """True if the plan has simulated the death of the process."""
        return self._crashed

    def now(self) -> int:
        """Return a time after the end of all operations so far; see `FileOperation.ended`."""
        with self._guard:
            return self._tick()

    def locate(self, path: object, dir_fd: int | None = None) -> str | None:
        """Return a path or a file descriptor relative to the watched directory; None outside."""
        try:
            full = path_of(path, dir_fd)
        except (OSError, TypeError, ValueError):
            # The function that was called raises its own error.
            return None
        for top in self._tops:
            if full == top:
                return "."
            if full.startswith(top.rstrip(os.sep) + os.sep):
                return full[len(top.rstrip(os.sep)) + 1 :]
        return None

    def perform(self, operation: FileOperation, call: Callable[[int | None], T], unsynced: T) -> T:
        """Carry out an operation as the plan demands.

        Args:
            operation: The operation.
            call: Carries it out; given a number, for at most that many bytes.
            unsynced: Result of an fsync that does not reach the disk.
        """
        limit = self._begin(operation)
        if operation.name in SYNCS and not self._sync:
            operation.ended = self.now()
            return unsynced
        # Changes of the disk are made one by one, so that the times are those of the effects.
        with self._guard if operation.may_change else contextlib.nullcontext():
            try:
                return call(limit)
            except OSError as error:
                operation.error = error
                raise
            finally:
                operation.ended = self.now()

    def _begin(self, operation: FileOperation) -> int | None:
        """Record an operation and apply its effect; return the number of bytes that it may move."""
        with self._guard:
            operation.number = len(self.operations) + 1
            operation.began = self._tick()
            self.operations.append(operation)
            effect: Effect | None = Crash() if self._crashed else None
            if effect is None and self._plan is not None:
                effect = self._plan(operation)
            operation.effect = effect
            self._crashed = isinstance(effect, Crash)
        if isinstance(effect, Wait):
            effect.pass_through()
            effect = effect.then
        if isinstance(effect, Crash):
            effect = Fail(errno.EIO)
        if isinstance(effect, Fail):
            self._refuse(operation, effect)
        if isinstance(effect, Short):
            asked = len(operation.data) if operation.data is not None else operation.nbytes
            return effect.limit(asked or 1)
        return None

    def _refuse(self, operation: FileOperation, effect: Fail) -> None:
        operation.ended = self.now()
        # Like the system, name no path for a descriptor.
        path = None
        if operation.fd is None:
            path = os.path.normpath(os.path.join(self._top, operation.path))
        operation.error = OSError(effect.errno, os.strerror(effect.errno), path)
        raise operation.error

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
