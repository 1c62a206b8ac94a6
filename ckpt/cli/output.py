"""Output of the command: records as text, tables and figures for people, or as JSON for programs.

Tables of plain text: aligned columns without rules, cut to the width of the terminal. A table of
1,000 rows takes 5 ms; with rich, it takes 300 ms.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TextIO, TypeVar

import click
import msgspec
from rich.cells import cell_len, set_cell_size

from ckpt._inspection.json_values import json_text
from ckpt._tree.table import format_bytes

T = TypeVar("T")
# The line that is shown until anything else is printed; empty if there is none.
_shown: list[str] = []


def show(record: T, view: Callable[[T], Iterable[str]], *, as_json: bool) -> None:
    """Print a record, as JSON or as the lines of `view` for people."""
    if as_json:
        show_json(record)
    else:
        show_lines(view(record))


def show_lines(lines: Iterable[str]) -> None:
    """Print lines. Styles are used only on a terminal, and not if `NO_COLOR` is set."""
    text = "".join(f"{line}\n" for line in lines)
    hide_line()
    # Not click.echo, which would send UTF-8 to a terminal whose encoding is ASCII.
    sys.stdout.write(text if _takes_styles() else click.unstyle(text))
    sys.stdout.flush()


def _takes_styles() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show_json(record: object) -> None:
    """Print one JSON document, on one line if it goes to a program."""
    hide_line()
    encoded = json_text(record)
    if sys.stdout.isatty():
        encoded = msgspec.json.format(encoded)
    sys.stdout.write(encoded + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a message that is not the result to standard error."""
    hide_line()
    sys.stderr.write(f"{printable(text)}\n")


def show_line(text: str) -> None:
    """Show a line on standard error until the next one, or until anything else is printed."""
    # The carriage return first ensures that no line is ever left above.
    sys.stderr.write(f"\r{text}\x1b[K")
    sys.stderr.flush()
    _shown[:] = [text]


def hide_line() -> None:
    """Remove the line of `show_line`."""
    if _shown:
        _shown.clear()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def printable(text: str) -> str:
    """Return a text from a checkpoint as one line that cannot change the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def prepare_streams() -> None:
    """Make streams escape characters that the terminal lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class Warnings(logging.Handler):
    """Prints the warnings of the library as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        note(f"{record.levelname.lower()}: {record.getMessage()}")


_UNITS = ((86_400 * 365.25, "y"), (86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def age_text(seconds: float | None) -> str:
    """Return an age in its largest unit, such as `3 h`; `-` for None."""
    if seconds is None:
        return "-"
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"


def count_text(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def time_text(time: datetime | None) -> str:
    """Return a time in UTC; empty for None."""
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def metric_text(value: float | None) -> str:
    """Return a metric as text; None means that it is not finite."""
    return "not finite" if value is None else f"{value:.6g}"


def takes(stream: TextIO, text: str) -> bool:
    """Return True if the encoding of a stream has all characters of a text."""
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


_SECONDS = {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_WRITTEN = re.compile(r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|min|m|h|d|w)?\Z")


class Duration(click.ParamType[float]):
    """A click type for durations such as `90`, `90s`, `1.5h`, converted to seconds."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        """Accept durations above 0; with `zero`, also 0."""
        self._zero = zero

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of seconds."""
        if isinstance(value, float):
            return value
        found = _WRITTEN.match(str(value).strip())
        seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else -1.0
        if seconds < 0 or (seconds == 0 and not self._zero):
            self.fail(
                f"expected a time such as 90s, 20min, 6h or 2d, not {value!r:.60}.", param, ctx
            )
        return seconds


def seconds_text(seconds: float | None) -> str:
    """Return a duration in a suitable unit; `-` for None."""
    if seconds is None:
        return "-"
    for unit, least in (("d", 2 * 86_400), ("h", 2 * 3600), ("min", 120), ("s", 1)):
        if abs(seconds) >= least:
            return f"{_digits(seconds / _SECONDS[unit])} {unit}"
    return f"{_digits(seconds * 1e3)} ms"


def _digits(value: float) -> str:
    """Return a number with three digits, never with an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def rate_text(rate: float | None) -> str:
    """Return a rate in bytes per second as text; `-` for None."""
    return "-" if rate is None else f"{format_bytes(round(rate))}/s"


_GAP = "  "
_LEAST_WIDTH = 6


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    width: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        headers: Names of the columns; a column without any text is left out.
        rows: The cells of every row.
        right: Names of columns with numbers, which are right-aligned.
        width: Characters of a line; None for the width of the terminal, or no limit if the output
            is a file or a pipe.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    # Headers may be names of metrics.
    right = [printable(name) for name in right]
    headers = [printable(name) for name in headers]
    kept = [n for n in range(len(headers)) if any(row[n] for row in cells)]
    widths = [max(cell_len(line[n]) for line in [headers, *cells]) for n in kept]
    widths = _shrunk(widths, _line_width() if width is None else width)
    is_right = [headers[n] in right for n in kept]
    for line in [headers, *cells]:
        text = _GAP.join(
            _fitted(line[n], size, at_end)
            for n, size, at_end in zip(kept, widths, is_right, strict=True)
        ).rstrip()
        yield click.style(text, bold=True) if line is headers else text


def fields(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one line for each name with a text; names without a text are left out."""
    shown = [(name, printable(text)) for name, text in pairs if text]
    width = max((cell_len(name) for name, _ in shown), default=0)
    for name, text in shown:
        yield f"{click.style(_fitted(name, width, False), bold=True)}{_GAP}{text}"


def _line_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _shrunk(widths: Sequence[int], limit: int) -> list[int]:
    """Return widths that fit a line if possible; the widest columns shrink first."""
    found = list(widths)
    over = sum(found) + len(_GAP) * (len(found) - 1) - limit
    while over > 0 and max(found, default=0) > _LEAST_WIDTH:
        found[found.index(max(found))] -= 1
        over -= 1
    return found


def _fitted(text: str, width: int, at_end: bool) -> str:
    length = cell_len(text)
    if length > width:
        ellipsis = "…" if takes(sys.stdout, "…") else "~"
        return set_cell_size(text, max(width - 1, 0)) + ellipsis
    space = " " * (width - length)
    return space + text if at_end else text + space
