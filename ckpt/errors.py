"""The one tree of errors this library raises.

    CheckpointError
    ├── InvalidArgumentError (ValueError)       a step, name, option or path that cannot be meant
    ├── UnsupportedLeafError (TypeError)        a leaf or a tree node that cannot be stored
    ├── TargetMismatchError (ValueError)        `like=` differs from what is stored
    ├── StepNotFoundError (FileNotFoundError)   no such committed step
    │   └── StepDeletedError                    it was deleted or replaced while it was read
    ├── NotACheckpointError (FileNotFoundError) a path that holds no committed checkpoint
    ├── StepExistsError (FileExistsError)       the step or path is taken, and stays as it is
    ├── StepPinnedError                         a pinned step is not deleted; it stays as it is
    ├── CorruptCheckpointError                  stored bytes are missing, cut or changed
    ├── UnsupportedFormatError                  written by a newer library or a missing handler
    ├── HandlerError                            a handler, or an object it keeps, raised an error
    ├── StorageError (OSError)                  the file system or store refused; has `errno`
    ├── ReadOnlyError                           a write was asked of a read-only manager
    ├── ClosedError (RuntimeError)              use after close
    ├── ForkedProcessError (RuntimeError)       use in a forked child
    ├── CoordinationError                       the processes of a job cannot agree or talk
    │   └── CoordinationTimeoutError (TimeoutError)  a process gave no sign of life in time
    ├── CommitCancelledError                    the commit was cancelled before it was published
    └── CommitTimeoutError (TimeoutError)       `result(timeout)` ran out; the commit goes on

Catch `CheckpointError` for all of them, or a built-in (`FileNotFoundError`, `ValueError`) where
that is what the caller already handles. Foreign exceptions arrive as `__cause__`.
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
    "CoordinationError",
    "CoordinationTimeoutError",
    "CorruptCheckpointError",
    "ForkedProcessError",
    "HandlerError",
    "InvalidArgumentError",
    "NotACheckpointError",
    "ReadOnlyError",
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


# Of a damaged checkpoint thousands of leaves may be broken.
_MOST_NOTES = 20


class CheckpointError(Exception):
    """Any failure of this library.

    Attributes:
        message: What happened, what was expected, and what to do.
        step: The step concerned, or None.
        item: The name of the item concerned, or None.
        leaf: The path of the leaf concerned (`params.layers.0.kernel`), or None.
        others: Further errors of the same call, such as those of other leaves; the first of them
            are among the notes, too.
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
        # Stores echo URLs and headers, and users give paths with passwords in them.
        self.message = redact(message)
        super().__init__(self.message)
        self.step = step
        self.item = item
        self.leaf = leaf

    def add_note(self, note: str, /) -> None:
        """Add a note to the traceback; secrets are taken out of it."""
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
                f"leaf {self.leaf!r:.1000}" if self.leaf is not None else "",
            )
            if text
        )
        return f"{where}: {self.message}" if where else self.message


class InvalidArgumentError(CheckpointError, ValueError):
    """An argument cannot be meant as given; nothing was done."""


class UnsupportedLeafError(CheckpointError, TypeError):
    """A leaf or tree node of a kind that cannot be stored; nothing was written."""


class TargetMismatchError(CheckpointError, ValueError):
    """The target `like=` does not fit what is stored.

    No array byte was read, unless stored integers are too large for the dtype that is wanted.

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


class StepNotFoundError(CheckpointError, FileNotFoundError):
    """The step asked for is not among the committed ones."""


class StepDeletedError(StepNotFoundError):
    """The step was deleted or replaced while it was read; the latest one can be taken instead."""


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """The path holds no committed checkpoint of this library."""


class StepExistsError(CheckpointError, FileExistsError):
    """The step (or the one-shot path) is already there; it was left as it is."""


class StepPinnedError(CheckpointError):
    """The step is pinned by somebody, so it was not deleted."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are missing, cut short or changed since they were committed."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint needs a newer version of this library, or something not installed."""


class HandlerError(CheckpointError):
    """A handler, or the object it saves or loads, raised an error of its own: the `__cause__`."""


class StorageError(CheckpointError, OSError):
    """The file system or object store refused an operation.

    Attributes:
        errno: The system's error number where there is one, else None.
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
    """A write was asked of a manager opened with `read_only=True`."""


class ClosedError(CheckpointError, RuntimeError):
    """The manager was closed before this call."""


class ForkedProcessError(CheckpointError, RuntimeError):
    """An object made before `fork()` was used in the child, where its threads do not exist."""


class CoordinationError(CheckpointError):
    """The processes of a job do not agree, or what they talk through does not work."""


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """A process of the job gave no sign of life in time; the message says which, and when.

    Attributes:
        missing: The numbers of the processes that were waited for; empty where it was the service
            that all of them share which did not answer.
    """

    missing: tuple[int, ...] = ()


class CommitCancelledError(CheckpointError):
    """The commit was cancelled before its step was published; nothing of it is left."""


class CommitTimeoutError(CheckpointError, TimeoutError):
    """Waiting for a commit ran out of time; the commit itself goes on."""


@contextlib.contextmanager
def located(
    *, step: int | None = None, item: str | None = None, leaf: str | None = None
) -> Iterator[None]:
    """Raise one located error for whatever the body raises, a group of several included.

    The first of this library's errors is chosen, and every other is added to it (`others`) and to
    its notes, so that callers catch the type they expect and no failure is lost. Where they do not
    yet say which step, item or leaf they are about, they are told.
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
