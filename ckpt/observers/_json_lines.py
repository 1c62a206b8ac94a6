"""`JsonLines`: an observer that writes events as lines of JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from ckpt._arguments import invalid
from ckpt._events import Event, unix_offset_ns
from ckpt.errors import StorageError
from ckpt.observers._tracing.timeline import END
from ckpt.observers._tracing.trace import PathLike, Value, plain

logger = logging.getLogger("ckpt")


class TextFile(Protocol):
    """The part of an open file that `JsonLines` needs."""

    def write(self, text: str, /) -> object:
        """Write text."""

    def flush(self) -> object:
        """Flush what was written."""


class JsonLines:
    """Appends one JSON object to a file for every operation that has ended.

    Each is a line with the keys `time` (of the end, in seconds since 1970), `operation`, `phase`,
    `step`, `seconds` and `nbytes`, and if known `outcome`, `reason`, `lane` and `batch`. Every line
    is flushed. With `phases=True` each has `clock_ns`, too: its end on the monotonic clock of the
    machine, which is never set. `ckpt trace` draws such a file.

    Any number of managers may share one observer, from any thread. If a line cannot be written, the
    error is logged and the line is lost. Events after `close` are ignored. No operation fails
    because of the observer.

    Args:
        file: The path of the file, which is made if it does not exist, or an open text file, which
            `close` leaves open.
        phases: True writes a line for every phase, too.

    Raises:
        InvalidArgumentError: `file` is neither a path nor a file that is open for writing text.
        StorageError: The file cannot be opened.

    Example:
        ```python
        with ckpt.observers.JsonLines("saves.jsonl") as lines:
            with ckpt.sync.CheckpointManager(root, observers=[lines]) as mgr:
                mgr.save(step, state)
        ```
    """

    def __init__(self, file: PathLike | TextFile, *, phases: bool = False) -> None:
        self._lock = threading.Lock()
        self._phases = phases
        self._owned = None
        self._file: TextFile | None
        if isinstance(file, str | os.PathLike):
            try:
                self._owned = open(file, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise StorageError(
                    f"cannot open {os.fspath(file)}: {error.strerror or error}. Give the path of a "
                    "file in a directory that exists, that you may write to",
                    errno=error.errno,
                ) from error
            self._file = self._owned
        elif _takes_text(file):
            self._file = file
        else:
            raise invalid("file", file, "a path, or a file open for writing text", of="JsonLines")

    def __call__(self, event: Event) -> None:
        """Write one event; called by the library.

        Raises:
            OSError: The file could not be written.
        """
        if event.phase != END and not self._phases:
            return
        fields: dict[str, Value] = {
            "time": round((event.ended_ns + unix_offset_ns()) / 1e9, 6),
            "operation": event.operation,
            "phase": event.phase,
            "step": event.step,
            "seconds": (event.ended_ns - event.began_ns) / 1e9,
            "nbytes": event.nbytes,
        }
        if self._phases:
            fields["clock_ns"] = event.ended_ns
        for name in ("outcome", "reason", "lane", "batch"):
            value = getattr(event, name)
            if value is not None:
                fields[name] = plain(value)
        self._write(fields)

    @contextmanager
    def span(self, name: str, /, **args: object) -> Iterator[None]:
        """Time the body as a piece of your own work, also if it raises; written with `phases` only.

        Its line has the keys `time`, `span`, `seconds`, `thread`, `args` and `clock_ns`. With spans
        around train steps, `ckpt trace` can tell how much of a save overlapped with training. If
        the line cannot be written, the error is logged.

        Args:
            name: Name of the work, such as `"train step"`.
            args: Values to show with it: numbers and texts; other values as their `str()`.

        Example:
            ```python
            with ckpt.observers.JsonLines("saves.jsonl", phases=True) as lines:
                with lines.span("train step", step=step):
                    state = train_step(state)
            ```
        """
        shown = {key: plain(value) for key, value in args.items()}
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            ended = time.perf_counter_ns()
            if self._phases:
                self._write_span(name, began, ended, shown)

    def _write_span(self, name: str, began: int, ended: int, args: dict[str, Value]) -> None:
        try:
            self._write(
                {
                    "time": round((ended + unix_offset_ns()) / 1e9, 6),
                    "span": str(name),
                    "seconds": (ended - began) / 1e9,
                    "thread": threading.current_thread().name,
                    "args": args,
                    "clock_ns": ended,
                }
            )
        except (OSError, ValueError):
            # The train step inside the span must go on.
            logger.exception("the span %r was not written", name)

    def _write(self, fields: Mapping[str, Value | dict[str, Value]]) -> None:
        line = json.dumps(fields, allow_nan=False) + "\n"
        with self._lock:
            if self._file is not None:
                self._file.write(line)
                self._file.flush()

    def close(self) -> None:
        """Close the file if it was given by its path. Later events are ignored.

        Raises:
            StorageError: Earlier lines could not be stored.

        Example:
            ```python
            lines = ckpt.observers.JsonLines("saves.jsonl")
            lines.close()
            ```
        """
        with self._lock:
            owned, self._owned, self._file = self._owned, None, None
        if owned is None:
            return
        try:
            owned.close()
        except OSError as error:
            raise StorageError(
                f"cannot write {owned.name}: {error.strerror or error}", errno=error.errno
            ) from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _takes_text(file: object) -> bool:
    methods = (getattr(file, name, None) for name in ("write", "flush"))
    return all(map(callable, methods)) and not isinstance(file, io.RawIOBase | io.BufferedIOBase)
