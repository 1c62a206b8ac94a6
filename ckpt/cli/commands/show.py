"""`ckpt show`: the values of one leaf."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import click

from ckpt._inspection.locations import checkpoint_at
from ckpt._inspection.values.shown_leaf import ArrayStatistics, PrintedArray, ShownLeaf, show_leaf
from ckpt._runtime.loop import call_once
from ckpt._tree.table import format_bytes
from ckpt.cli import options, output
from ckpt.cli.output import count_text, fields, takes

# Fewer elements have no histogram.
_LEAST_DRAWN = 10
# Characters of the longest bar, and of a line without a terminal.
_MOST_BAR, _USUAL_WIDTH = 40, 80


@click.command()
@options.path
@click.argument("leaf")
@options.as_json
def show(path: str, leaf: str, as_json: bool) -> None:
    """Show the values of one leaf, with figures and a histogram.

    LEAF is a leaf path, such as params.dense.kernel, or a part of an array:
    'params.dense.kernel[3:5, 0]'. Only the chunks that hold this part are read. Where several items
    have such a leaf, the name of one and a colon stand before it: 'model:params.dense.kernel'.

    Min, max, mean, std and the histogram are of the finite elements; of complex numbers they are
    of their absolute values. The array is read once, piece by piece, whatever its size.
    """
    found, printed = call_once(partial(_shown, path, leaf))
    output.show(found, partial(_view, printed), as_json=as_json)


async def _shown(path: str, leaf: str) -> tuple[ShownLeaf, PrintedArray | None]:
    return await show_leaf(await checkpoint_at(path), leaf)


def _view(printed: PrintedArray | None, found: ShownLeaf) -> Iterator[str]:
    leaf = found.leaf
    figures = found.statistics
    is_part = found.index is not None
    yield from fields(
        [
            ("path", found.path),
            ("leaf", leaf.name),
            ("type", leaf.type_text),
            ("part", f"[{found.index}], of shape {list(found.shape)}" if is_part else ""),
            ("size", format_bytes(leaf.nbytes) if leaf.is_array else ""),
            ("stored", _stored(found)),
            ("sharding", leaf.sharding),
            ("value", "" if leaf.is_array else _value(found)),
            *([] if figures is None else _figures(figures)),
        ]
    )
    if printed is not None:
        yield ""
        yield from _elements(printed)
    if figures is not None:
        yield from _histogram(figures)


def _value(found: ShownLeaf) -> str:
    if found.leaf.kind == "callable":
        return f"the function {found.values}, of which only the name is stored"
    return repr(found.values) if found.leaf.kind in ("str", "numpy_str") else str(found.values)


def _stored(found: ShownLeaf) -> str:
    leaf = found.leaf
    if leaf.same_as is not None:
        return f"as the array at {leaf.same_as}"
    is_cut = leaf.nbytes and leaf.kind != "key" and leaf.chunks != leaf.shape
    parts = [f"in chunks of {list(leaf.chunks)}"] if is_cut else []
    if leaf.codec is not None:
        parts.append(f"{leaf.codec}: {format_bytes(leaf.stored_bytes)}")
    return ", ".join(parts)


def _figures(figures: ArrayStatistics) -> list[tuple[str, str]]:
    names = ("min", "max", "mean", "std")
    found = [(name, _number(getattr(figures, name))) for name in names]
    found.append(("not finite", _not_finite(figures)))
    return found


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _not_finite(figures: ArrayStatistics) -> str:
    return f"{figures.nan:,} NaN, {count_text(figures.inf, 'infinity', 'infinities')}"


def _elements(printed: PrintedArray) -> Iterator[str]:
    import numpy as np

    array = printed.elements
    if array.dtype.isbuiltin != 1:
        # Converted to a dtype that numpy can print.
        with np.errstate(invalid="ignore"):
            array = array.astype(np.int64 if "int" in array.dtype.name else np.float32)
    text = np.array2string(
        array,
        max_line_width=_line_width(),
        separator=", ",
        threshold=0 if printed.is_cut else array.size,
    )
    yield from text.split("\n")


def _histogram(figures: ArrayStatistics) -> Iterator[str]:
    # A few values, or a single one, say more than their distribution.
    number = sum(each.count for each in figures.histogram)
    if number < _LEAST_DRAWN or figures.min == figures.max:
        return
    is_whole = isinstance(figures.min, int)
    rows = []
    for each in figures.histogram:
        low, high = each.low, each.high
        alone = is_whole and high - low == 1
        label = f"{low:.6g}" if alone else f"{low:.6g} to {high:.6g}"
        rows.append((label, each.count))
    yield ""
    yield from _bars(rows)


def _line_width() -> int:
    """Return the width of a line: that of the terminal, or 80 if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _USUAL_WIDTH


def _bars(rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield one line for each label with a count, with a bar in proportion to the largest count."""
    texts = [f"{count:,}" for _, count in rows]
    labels = max((len(label) for label, _ in rows), default=0)
    numbers = max(map(len, texts), default=0)
    room = max(min(_line_width() - labels - numbers - 4, _MOST_BAR), 1)
    most = max((count for _, count in rows), default=0) or 1
    mark = "█" if takes(sys.stdout, "█") else "#"
    for (label, count), text in zip(rows, texts, strict=True):
        # A count above 0 has a visible bar.
        length = max(round(count / most * room), 1) if count else 0
        yield f"{label:>{labels}}  {text:>{numbers}}  {mark * length}".rstrip()
