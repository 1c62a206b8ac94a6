"""Errors of one process as bytes for the others, and back."""

from __future__ import annotations

import json
from typing import Any

import anyio

from ckpt import errors
from ckpt._redaction import redact
from ckpt.errors import (
    CheckpointError,
    CoordinationError,
    CoordinationTimeoutError,
    StorageError,
    TargetMismatchError,
)

# Types of errors that another process may name; nothing else is looked up.
_KINDS: dict[str, type[CheckpointError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CheckpointError)
}
_MOST_CHARACTERS = 20_000
_MOST_PROBLEMS = 100


def pack_error(error: BaseException, who: str) -> bytes:
    """Return `error`, met by the process that messages call `who`, as bytes for the others.

    Call it in an event loop. An error of another library becomes a `CheckpointError` that names its
    type. Secrets are taken out.
    """
    error = _one_of(error)
    if isinstance(error, anyio.get_cancelled_exc_class()):
        error = errors.CommitCancelledError("it was cancelled there")
    elif not isinstance(error, CheckpointError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    # The nearest class that the others know, in case a user derived the class.
    kind = next(each for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
    said = {
        "kind": kind.__name__,
        "who": who,
        # Redacted again, since the message may have been changed; and redacted before it is cut.
        "message": redact(str(error.message))[:_MOST_CHARACTERS],
        "step": error.step,
        "item": error.item,
        "leaf": error.leaf,
        "errno": getattr(error, "errno", None),
        "missing": list(getattr(error, "missing", ())),
        "problems": [redact(each) for each in getattr(error, "problems", ())[:_MOST_PROBLEMS]],
    }
    return json.dumps(said).encode()


def unpack_error(data: bytes) -> CheckpointError:
    """Return the error that another process met; its message names the process.

    Bytes that `pack_error` did not make become a `CoordinationError`.
    """
    try:
        said = json.loads(data)
        message = f"{_checked_text(said['who'])}: {_checked_text(said['message'])}"
        step, errno = (_checked_number(said[name]) for name in ("step", "errno"))
        item, leaf = (
            _checked_text(said[name]) if said[name] is not None else None
            for name in ("item", "leaf")
        )
        problems = tuple(map(_checked_text, said["problems"]))
        missing = tuple(
            number for each in said["missing"] if (number := _checked_number(each)) is not None
        )
        kind = _KINDS[said["kind"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return CoordinationError(
            f"another process failed, and how it says so is not understood ({data[:200]!r}); all "
            "processes of a job have to run the same version of this library"
        )
    if issubclass(kind, StorageError):
        return kind(message, errno=errno, step=step, item=item, leaf=leaf)
    if issubclass(kind, TargetMismatchError):
        return kind(message, problems=problems, step=step, item=item, leaf=leaf)
    error = kind(message, step=step, item=item, leaf=leaf)
    if isinstance(error, CoordinationTimeoutError):
        error.missing = missing
    return error


def _one_of(error: BaseException) -> BaseException:
    """Return the most telling error of a group: the first of this library, or else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_one_of(each) for each in error.exceptions]
    return next((each for each in found if isinstance(each, CheckpointError)), found[0])


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _checked_number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError
    return value
