"""A changing line at the bottom of a terminal, below lines that stay."""

from __future__ import annotations

import os
import shutil
import sys
from types import TracebackType

from rich.cells import cell_len, set_cell_size

from ckpt.cli.output import printable, show_lines

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
