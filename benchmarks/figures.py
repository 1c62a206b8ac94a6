"""How figures are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.results import BYTES, PER_SECOND, SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.results import Sample


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, first: str = "---", align: str = "---:"
) -> str:
    """Returns a Markdown table; its first column is text, and the others are figures."""
    lines = [head, [first, *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(page: Path, start: str, end: str, text: str) -> None:
    """Puts `text` in the place of what stands between two marks of a page."""
    head, _, rest = page.read_text(encoding="utf-8").partition(start)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{start}\n{text}\n{end}{tail}", encoding="utf-8")


def digits(value: float) -> str:
    """Returns a number with three digits, or with all of its whole ones."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """Returns a ratio such as 2.5x."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Returns the factor and the unit in which a value reads best."""
    if unit == SECONDS:
        return (1.0, " s") if abs(value) >= 1 else (1e3, " ms")
    if unit == BYTES:
        return 1 / 2**20, " MiB"
    return 1.0, "/s" if unit == PER_SECOND else ""


def value(amount: float | None, unit: str = SECONDS) -> str:
    """Returns one value with its unit, or nothing for None."""
    if amount is None:
        return ""
    factor, name = _scale(amount, unit)
    return f"{digits(amount * factor)}{name}"


def spread(sample: Sample | None) -> str:
    """Returns the median, and the lowest and the highest round; nothing for None."""
    if sample is None:
        return ""
    if len(sample.rounds) == 1:
        return value(sample.median, sample.unit)
    factor, name = _scale(sample.median, sample.unit)
    median, low, high = (digits(x * factor) for x in (sample.median, sample.low, sample.high))
    return f"{median}{name} ({low} to {high})"


def size(count: float) -> str:
    """Returns bytes as MiB or GiB."""
    return f"{count / 2**30:g} GiB" if count >= 2**30 else f"{count / 2**20:,.3g} MiB"
