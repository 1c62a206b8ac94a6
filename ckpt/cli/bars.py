"""Bars of text, for histograms."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from ckpt.cli.text import takes

_MOST, _USUAL = 40, 80


def line_width() -> int:
    """Return the width of a line: that of the terminal, or 80 if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _USUAL


def bars(rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield one line for each label with a count, with a bar in proportion to the largest count."""
    texts = [f"{count:,}" for _, count in rows]
    labels = max((len(label) for label, _ in rows), default=0)
    numbers = max(map(len, texts), default=0)
    room = max(min(line_width() - labels - numbers - 4, _MOST), 1)
    most = max((count for _, count in rows), default=0) or 1
    mark = "█" if takes(sys.stdout, "█") else "#"
    for (label, count), text in zip(rows, texts, strict=True):
        # A count above 0 has a visible bar.
        length = max(round(count / most * room), 1) if count else 0
        yield f"{label:>{labels}}  {text:>{numbers}}  {mark * length}".rstrip()
