"""Lines of the terminal that change: progress, and a line below those that stay.

The progress of a command: one line on standard error, only on a terminal. It shows the share that
is done, the speed and the time left, in as many columns as there are. It is redrawn in place, and
removed before anything else is printed.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from rich.cells import cell_len, set_cell_size

from ckpt._events import Event
from ckpt._tree.table import format_bytes
from ckpt.cli.output import hide_line, printable, show_line, show_lines, takes

_CLEARED = "\r\x1b[K"


class LiveLine:
    """The changing line. If the output is not a terminal, only the lines that stay are written."""

    def __init__(self) -> None:
        self._is_shown = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._text = ""

    def above(self, line: str) -> None:
        """Write a line that stays."""
        self._clear()
        show_lines([line])
        self._draw()

    def show(self, text: str) -> None:
        """Change the text of the line."""
        if self._is_shown and printable(text) != self._text:
            self._clear()
            self._text = printable(text)
            self._draw()

    def _clear(self) -> None:
        if self._text:
            sys.stdout.write(_CLEARED)

    def _draw(self) -> None:
        if self._text:
            # The last column stays empty: when it is filled, some terminals go to the next line.
            width = shutil.get_terminal_size().columns - 1
            fits = cell_len(self._text) <= width
            sys.stdout.write(self._text if fits else set_cell_size(self._text, max(width, 0)))
            sys.stdout.flush()

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._text and kind is not BrokenPipeError:
            self._clear()
            self._text = ""
            sys.stdout.flush()


# Shorter work shows nothing, since a line would only flicker; and the pause between two drawings.
_DELAY_SECONDS, _PAUSE_SECONDS = 0.3, 0.1
_LEAST_BAR, _MOST_BAR = 10, 40
_MOST = 0.999


class ProgressLine:
    """One line about bytes that are moved. Calls may come from any thread, but only from one."""

    def __init__(self, name: str) -> None:
        """Show `name` at the beginning of the line."""
        self._name = name
        self._began = time.monotonic()
        self._drawn = self._began + _DELAY_SECONDS - _PAUSE_SECONDS
        self._total: int | None = None
        self._done = 0
        is_dumb = os.environ.get("TERM") in (None, "", "dumb")
        self._is_on = sys.stderr.isatty() and not is_dumb

    def name(self, text: str) -> None:
        """Change the name at the beginning of the line."""
        self._name = text

    def expect(self, nbytes: int) -> None:
        """Add to the expected bytes."""
        self._total = (self._total or 0) + nbytes
        self._draw()

    def move(self, nbytes: int) -> None:
        """Count bytes that were moved."""
        self._done += nbytes
        self._draw()

    def __call__(self, event: Event) -> None:
        """Receive an event of the library, as an observer."""
        if event.phase == "plan":
            self.expect(event.nbytes)
        elif event.phase in ("read", "stage"):
            self.move(event.nbytes)

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._is_on or now - self._drawn < _PAUSE_SECONDS:
            return
        self._drawn = now
        # The last column stays empty: when it is filled, some terminals go to the next line.
        show_line(self._text(now - self._began, shutil.get_terminal_size().columns - 1))

    def _text(self, seconds: float, width: int) -> str:
        rate = self._done / max(seconds, 1e-6)
        speed = f"{format_bytes(int(rate))}/s"
        name = printable(self._name)
        if not self._total:
            return _fitted(f"{name}  {format_bytes(self._done)}  {speed}", width)
        share = min(self._done / self._total, _MOST)
        left = (self._total - self._done) / rate if rate else 0.0
        part = f"{100 * share:3.0f}%"
        clock = f"{timedelta(seconds=max(int(left), 0))} left"
        amount = f"{part} of {format_bytes(self._total)}"
        # The first form that fits is shown; the most important figures are in all of them.
        for front, back in (
            (name, f"{amount}  {speed}  {clock}"),
            (name, f"{part}  {speed}  {clock}"),
            ("", f"{part}  {speed}  {clock}"),
        ):
            room = width - cell_len(front) - len(back) - (4 if front else 2)
            if room >= _LEAST_BAR:
                bar = _bar(share, min(room, _MOST_BAR))
                return "  ".join(filter(None, (front, bar, back)))
        return _fitted(f"{part}  {speed}  {clock}", width)


@contextmanager
def progress(name: str) -> Iterator[ProgressLine]:
    """Show the progress of the body, and remove the line afterwards."""
    line = ProgressLine(name)
    try:
        yield line
    finally:
        hide_line()


def _bar(share: float, width: int) -> str:
    done, rest = ("━", "─") if takes(sys.stderr, "━─") else ("#", "-")
    filled = int(share * width)
    return done * filled + rest * (width - filled)


def _fitted(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(width, 0))
