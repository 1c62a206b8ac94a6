"""Tracebacks as users see them: the call that failed and the message, not the engine in between.

The engine raises its errors many frames deep, through threads and task groups. Python would print
all of that above the message, each group with the whole traceback again. The call, the message and
the cause are kept; the cause is an error of the system, of jax or of the user's own code. The log
has the rest at level DEBUG.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ckpt.errors import CheckpointError

logger = logging.getLogger("ckpt")

T = TypeVar("T")

_PACKAGE = str(Path(__file__).parent.parent)


def outcome(future: Future[T]) -> T:
    """Return the result of a future that is done, or raise its error with a short traceback."""
    error = future.exception()
    if error is not None:
        raise shortened(error)
    return future.result()


def shortened(error: BaseException) -> BaseException:
    """Return an error of this library without the frames and groups of the engine.

    Its cause keeps the frames from the last one of this library on. Other errors stay as they are.
    """
    if isinstance(error, CheckpointError):
        if error.__traceback__ is not None and logger.isEnabledFor(logging.DEBUG):
            logger.debug("raised by the engine: %s", error, exc_info=error)
        _shorten(error, [])
    return error


def _shorten(error: BaseException, seen: list[BaseException]) -> None:
    if any(each is error for each in seen):
        return
    seen.append(error)
    own = isinstance(error, CheckpointError)
    error.__traceback__ = None if own else _from_last_own(error.__traceback__)
    hidden = error.__suppress_context__
    cause = error.__cause__ or (None if hidden else error.__context__)
    # A group as the cause holds only the error itself and its `others`.
    error.__cause__ = None if isinstance(cause, BaseExceptionGroup) else cause
    if error.__cause__ is not None:
        _shorten(error.__cause__, seen)


def _from_last_own(traceback: TracebackType | None) -> TracebackType | None:
    found = frame = traceback
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            found = frame
        frame = frame.tb_next
    return found
