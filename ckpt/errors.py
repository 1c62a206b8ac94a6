"""Errors: the one tree of exceptions that this library raises.

    CheckpointError
    ├── InvalidArgumentError (ValueError)       a step, name, option or path is invalid
    ├── UnsupportedLeafError (TypeError)        a leaf or a tree node cannot be stored
    ├── TargetMismatchError (ValueError)        `like=` differs from what is stored
    ├── ContractMismatchError (ValueError)      the step was saved by a run of another contract
    ├── StepNotFoundError (FileNotFoundError)   the step does not exist, or is not committed
    │   └── StepDeletedError                    it was deleted or replaced while it was read
    ├── ItemDroppedError (LookupError)          the step has lost the item, and has others
    ├── NotACheckpointError (FileNotFoundError) the path holds no committed checkpoint
    ├── StepExistsError (FileExistsError)       the step or path exists, and was not changed
    ├── StepPinnedError                         the step is pinned, and was not deleted
    ├── CorruptCheckpointError                  stored bytes are missing, cut or changed
    ├── DeviceMismatchError                     restored arrays are not what devices had
    ├── NotRepeatedError                        a step that was run again is not what it was
    ├── UnsupportedFormatError                  a newer version or a handler is needed
    ├── HandlerError                            a handler, or an object it saves, raised an error
    ├── StorageError (OSError)                  the file system or store failed; has `errno`
    ├── ReadOnlyError                           the manager was opened read-only
    ├── ClosedError (RuntimeError)              the manager is closed
    ├── ForkedProcessError (RuntimeError)       used in a child process after `fork()`
    ├── CoordinationError                       the processes of a job disagree, or cannot talk
    │   └── CoordinationTimeoutError (TimeoutError)  a process gave no sign of life in time
    ├── NotInRootError                          a step of a tier is not copied to the root
    ├── SaveSkippedError                        a policy skipped the save whose step is awaited
    ├── CommitCancelledError                    the commit was cancelled before it was published
    └── CommitTimeoutError (TimeoutError)       `result(timeout)` timed out; the commit goes on

Catch `CheckpointError` for all of them, or a built-in exception (`FileNotFoundError`, `ValueError`)
where the caller handles that already. The exceptions of other libraries are the `__cause__`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckpt._redaction import redact

__all__ = [
    "CheckpointError",
    "ClosedError",
    "CommitCancelledError",
    "CommitTimeoutError",
    "ContractMismatchError",
    "CoordinationError",
    "CoordinationTimeoutError",
    "CorruptCheckpointError",
    "DeviceMismatchError",
    "ForkedProcessError",
    "HandlerError",
    "InvalidArgumentError",
    "ItemDroppedError",
    "NotACheckpointError",
    "NotInRootError",
    "NotRepeatedError",
    "ReadOnlyError",
    "SaveSkippedError",
    "StepDeletedError",
    "StepExistsError",
    "StepNotFoundError",
    "StepPinnedError",
    "StorageError",
    "TargetMismatchError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "located",
]


def __dir__() -> list[str]:
    return __all__


# Path of a leaf that is the whole item: it has no keys to name.
WHOLE_ITEM = "%root"
# Most notes of an error: a damaged checkpoint may have thousands of broken leaves.
_MOST_NOTES = 20


class CheckpointError(Exception):
    """The base class of all errors of this library.

    Attributes:
        message: What happened, what was expected, and what to do.
        step: The step concerned, or None.
        item: The name of the item concerned, or None.
        leaf: The path of the leaf concerned (`params.layers.0.kernel`), or None.
        others: Further errors of the same call, such as those of other leaves. The first of them
            are in the notes, too.
    """

    others: tuple[BaseException, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        item: str | None = None,
        leaf: str | None = None,
    ) -> None:
        # The answers of stores repeat URLs and headers, and users give paths that hold passwords.
        self.message: str = redact(message)
        super().__init__(self.message)
        self.step = step
        self.item = item
        self.leaf = leaf

    def add_note(self, note: str, /) -> None:
        """Add a note to the traceback, without the secrets in it."""
        super().add_note(redact(note))

    def locate(
        self, *, step: int | None = None, item: str | None = None, leaf: str | None = None
    ) -> None:
        """Fill in the step, the item and the leaf where they are not known yet."""
        self.step = step if self.step is None else self.step
        self.item = item if self.item is None else self.item
        self.leaf = leaf if self.leaf is None else self.leaf

    def __str__(self) -> str:
        where = ", ".join(
            text
            for text in (
                f"step {self.step}" if self.step is not None else "",
                f"item {self.item!r}" if self.item is not None else "",
                # A name may have tens of thousands of characters.
                f"leaf {self.leaf!r:.1000}" if self.leaf not in (None, WHOLE_ITEM) else "",
            )
            if text
        )
        return f"{where}: {self.message}" if where else self.message


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument is invalid. Nothing was changed."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A leaf or a tree node is of a type that cannot be stored. Nothing was saved."""


class TargetMismatchError(CheckpointError, ValueError):
    """The target `like=` does not match what is stored.

    No array was read, unless stored integers turned out to be too large for the requested dtype.

    Attributes:
        problems: One line for every leaf that differs.
    """

    def __init__(
        self,
        message: str,
        *,
        problems: tuple[str, ...] = (),
        step: int | None = None,
        item: str | None = None,
        leaf: str | None = None,
    ) -> None:
        super().__init__(message, step=step, item=item, leaf=leaf)
        self.problems = problems


class ContractMismatchError(CheckpointError, ValueError):
    """A step was saved by a run of another contract; see `ckpt.extensions.Contract`.

    Attributes:
        problems: One line for every field that differs.
    """

    problems: tuple[str, ...] = ()


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """The requested step does not exist, or is not committed."""


class StepDeletedError(StepNotFoundError):
    """The step was deleted or replaced while it was read. Read the latest step instead."""


class ItemDroppedError(CheckpointError, LookupError):
    """The item was dropped from the step, whose other items stay. The message says when and why."""


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """The path holds no committed checkpoint of this library."""


class StepExistsError(CheckpointError, FileExistsError):
    """The step, or the path of a one-shot checkpoint, exists already. It was not changed."""


class StepPinnedError(CheckpointError):
    """The step is pinned, so it was not deleted. The message says by whom."""


class CorruptCheckpointError(CheckpointError):
    """Stored data is missing, truncated, or has changed since it was committed."""


class DeviceMismatchError(CheckpointError):
    """Restored arrays are not what the devices had when the step was saved.

    The stored bytes fit their digests. So either they were wrong before the digests were computed,
    or a device is faulty, or the way to it.
    """


class NotRepeatedError(CheckpointError):
    """A step that was run again after a restart is not what it was in the run before."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint needs a newer version of this library, or a handler that is missing."""


class HandlerError(CheckpointError):
    """A handler, or an object that it saves or loads, raised an error: the `__cause__`."""


class StorageError(CheckpointError, OSError):
    """An operation of the file system or the object store failed.

    Attributes:
        errno: The error number of the system, or None if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        step: int | None = None,
        item: str | None = None,
        leaf: str | None = None,
    ) -> None:
        super().__init__(message, step=step, item=item, leaf=leaf)
        self.errno = errno


class ReadOnlyError(CheckpointError):
    """The manager was opened with `mode="r"` and cannot write."""


class ClosedError(CheckpointError, RuntimeError):
    """The manager is closed and cannot be used."""


class ForkedProcessError(CheckpointError, RuntimeError):
    """An object made before `fork()` was used in the child, which does not have its threads."""


class CoordinationError(CheckpointError):
    """The processes of a job disagree, or cannot communicate."""


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """A process of the job was silent for too long. The message says which, and since when.

    Attributes:
        missing: The numbers of the silent processes. Empty if the service that they all share did
            not answer.
    """

    missing: tuple[int, ...] = ()


class NotInRootError(CheckpointError):
    """A step of a tier is not copied to the root. It stays where it is, and is read from there."""


class SaveSkippedError(CheckpointError):
    """The save policy or the backlog skipped the save, so there is no step.

    A commit is false then, so ask `if commit:` before you await it; or pass `force=True`.
    """


class CommitCancelledError(CheckpointError):
    """The commit was cancelled before its step was published. Nothing of it is left."""


class CommitTimeoutError(CheckpointError, TimeoutError):
    """Waiting for a commit timed out. The commit itself goes on."""


class DeadlineExceededError(CheckpointError, TimeoutError):
    """A save was not durable at its deadline, and was given up. Its memory is free again."""


@contextlib.contextmanager
def located(
    *, step: int | None = None, item: str | None = None, leaf: str | None = None
) -> Iterator[None]:
    """Raise a single error for all errors of the body, and name the step, item or leaf in it.

    From a group of exceptions, the first one of this library is raised. All others are in its
    `others` and its notes, so callers catch the type they expect and no failure is lost. A step,
    item or leaf that an error already names stays.

    Example:
        ```python
        with ckpt.errors.located(step=100, item="config"):
            read_config(Path("config.json"))
        ```
    """
    try:
        yield
    except (CheckpointError, BaseExceptionGroup) as error:
        errors = _flatten(error)
        first = next((each for each in errors if isinstance(each, CheckpointError)), errors[0])
        for each in errors:
            if isinstance(each, CheckpointError):
                each.locate(step=step, item=item, leaf=leaf)
        others = [other for other in errors if other is not first]
        for other in others[:_MOST_NOTES]:
            first.add_note(f"also failed: {type(other).__name__}: {other}")
        if len(others) > _MOST_NOTES:
            first.add_note(f"and {len(others) - _MOST_NOTES} more, in its `others`")
        if isinstance(first, CheckpointError):
            first.others += tuple(others)
        if first is error:
            raise
        raise first from (first.__cause__ or error)


def _flatten(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _flatten(each)]
    return [error]
