"""A folder for trials that is removed afterwards, however they end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ckpt.storage._local.posix import remove_tree

# Steps, attempts and notes have no such names.
_PREFIX = ".ckpt-trial-"
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder that others leave alone; remove it even if a signal ends the program.

    Raises:
        OSError: The parent directory cannot be written.
    """
    folder = parent / f"{_PREFIX}{uuid.uuid4().hex}"
    with _ended_by_signals():
        try:
            # Within the `try`, since Ctrl-C may come as soon as the folder exists.
            os.mkdir(folder)
            yield folder
        finally:
            with _undisturbed():
                remove_tree(folder)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make signals that would end the process at once end the body first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {each: signal.signal(each, _end) for each in _ENDS}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and other signals that end the process during the body."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
