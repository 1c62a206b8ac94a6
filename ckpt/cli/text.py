"""Figures as text for people."""

from __future__ import annotations

from typing import TextIO

from ckpt._tree.table import format_bytes as format_bytes

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
