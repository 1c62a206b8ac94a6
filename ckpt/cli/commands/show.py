"""`ckpt show`: what a checkpoint holds: its figures, its leaves, or the values of one leaf."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import click
import msgspec

from ckpt._inspection.leaf_records import (
    CheckpointSummary,
    DroppedSummary,
    ItemSummary,
    LeafRecord,
    chosen_leaves,
    summarize,
)
from ckpt._inspection.locations import checkpoint_at
from ckpt._tree.table import format_bytes
from ckpt.cli import options, output
from ckpt.cli.output import count_text, fields, metric_text, printable, table, takes, time_text

if TYPE_CHECKING:
    from ckpt._inspection.values.shown_leaf import ArrayStatistics, PrintedArray, ShownLeaf

# Number of leaves that are named for their health.
_MOST_NAMED = 5
# Fewer elements have no histogram.
_LEAST_DRAWN = 10
# Characters of the longest bar, and of a line without a terminal.
_MOST_BAR, _USUAL_WIDTH = 40, 80


@click.command()
@options.path
@click.argument("leaf", required=False)
@click.option("--summary", is_flag=True, help="Print one line: numbers of leaves, bytes, dtypes.")
@options.as_json
def show(path: str, leaf: str | None, summary: bool, as_json: bool) -> None:
    """Show a checkpoint: who wrote it and when, its items, metrics and leaves.

    LEAF chooses leaves by a path or a pattern: params.dense, 'params.**' or '*.kernel'. Where
    several items have such a leaf, the name of one and a colon stand before it: 'model:params'.

    One leaf is shown with its values, figures and a histogram. A part of an array is written as in
    numpy: 'params.dense.kernel[3:5, 0]'. Only the chunks that hold it are read, piece by piece,
    whatever its size. Figures are of the finite elements; of complex numbers they are of their
    absolute values.
    """
    checkpoint = anyio.run(checkpoint_at, path)
    chosen = None if leaf is None else chosen_leaves(checkpoint, leaf)
    if leaf is not None and chosen is not None and len(chosen) == 1 and not summary:
        _show_values(path, leaf, as_json=as_json)
        return
    found = summarize(checkpoint, None if chosen is None else [each.record for each in chosen])
    view = _line if summary else partial(_view, chosen is None)
    output.show(found, view, as_json=as_json)


def _show_values(path: str, leaf: str, *, as_json: bool) -> None:
    # Imported only here: checkpoints are described without numpy's and jax's help.
    from ckpt._inspection.values.shown_leaf import show_leaf
    from ckpt._runtime.loop import call_once

    async def read() -> tuple[ShownLeaf, PrintedArray | None]:
        checkpoint = await checkpoint_at(path)
        return await show_leaf(checkpoint, chosen_leaves(checkpoint, leaf)[0])

    found, printed = call_once(read)
    output.show(found, partial(_values, printed), as_json=as_json)


def _line(found: CheckpointSummary) -> Iterator[str]:
    arrays = [leaf for leaf in found.leaves if leaf.is_array]
    dtypes: Counter[str] = Counter()
    for leaf in arrays:
        dtypes[leaf.dtype or ""] += leaf.nbytes
    parts = [
        count_text(len(found.leaves), "leaf", "leaves"),
        count_text(len(arrays), "array"),
        format_bytes(dtypes.total()),
        *(f"{name} {format_bytes(size)}" for name, size in dtypes.most_common()),
    ]
    yield f"{printable(found.path)}: {', '.join(parts)}"


def _view(is_whole: bool, found: CheckpointSummary) -> Iterator[str]:
    rows = [_cells(leaf) for leaf in found.leaves]
    if is_whole:
        yield from _summary(found)
        yield ""
        rows += [_item_cells(each) for each in found.items if not each.leaves]
    yield from table(("leaf", "type", "size", "sharding"), rows, right=("size",))
    total = sum(each.leaves for each in found.items)
    which = count_text(total, "leaf", "leaves")
    if len(found.leaves) != total:
        which = f"{len(found.leaves):,} of {which}"
    nbytes = found.nbytes if is_whole else sum(each.nbytes for each in found.leaves)
    yield click.style(f"{printable(found.path)}: {which}, {format_bytes(nbytes)}", dim=True)


def _cells(leaf: LeafRecord) -> tuple[str, str, str, str]:
    if not leaf.is_array:
        return leaf.name, leaf.kind, "", "" if leaf.value is None else f"= {leaf.value}"
    place = f"the array at {leaf.same_as}" if leaf.same_as else leaf.sharding
    size = format_bytes(leaf.nbytes)
    if leaf.codec is not None:
        place = "; ".join(filter(None, [place, f"{leaf.codec}: {format_bytes(leaf.stored_bytes)}"]))
    return leaf.name, leaf.type_text, size, place


def _item_cells(item: ItemSummary) -> tuple[str, str, str, str]:
    if item.handler == "pytree" and not item.nbytes:
        return item.name, "a tree without leaves", "", ""
    return item.name, f"an item ({item.handler})", format_bytes(item.nbytes), ""


def _summary(found: CheckpointSummary) -> Iterator[str]:
    metrics = (f"{name}={metric_text(value)}" for name, value in found.metrics.items())
    times = (f"{name} {seconds:.2f} s" for name, seconds in found.statistics.items())
    noted = ("metadata", found.metadata), ("contract", found.contract)
    writer = (f"{library} {version}" for library, version in found.writer.items())
    yield from fields(
        [
            ("path", found.path),
            ("step", "" if found.step is None else str(found.step)),
            ("format", "" if found.format == "ckpt" else found.format),
            ("committed", time_text(found.committed)),
            ("arrays", format_bytes(found.nbytes)),
            ("files", _files(found)),
            *(("item", _item(item)) for item in found.items),
            ("health", _health(found)),
            *(("dropped", _dropped(item)) for item in found.dropped),
            ("metrics", ", ".join(metrics)),
            *((name, msgspec.json.encode(it).decode()) for name, it in noted if it is not None),
            ("begun from", found.parent or ""),
            *(("source", path) for path in found.sources),
            ("save", ", ".join(times)),
            ("written by", ", ".join(writer)),
        ]
    )


def _item(item: ItemSummary) -> str:
    parts = [
        count_text(item.leaves, "leaf", "leaves"),
        count_text(item.arrays, "array"),
        format_bytes(item.nbytes),
    ]
    return f"{item.name} ({item.handler}): {', '.join(parts)}"


def _health(found: CheckpointSummary) -> str:
    """Return notes on NaN, infinite and unequal values; empty if there are none."""
    reasons = []
    if found.nonfinite:
        named = [f"{leaf} ({count})" for leaf, count in found.nonfinite.items()]
        reasons.append(f"NaN or infinite values in {_first(named)}")
    if found.unequal:
        reasons.append(f"replicas differ in {_first(found.unequal)}")
    known = "" if found.nonfinite is None else "healthy"
    return "; ".join(reasons) or known


def _first(named: Sequence[str]) -> str:
    return ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")


def _dropped(item: DroppedSummary) -> str:
    why = "by hand" if item.policy is None else f"by {item.policy}"
    return f"{item.name}: {format_bytes(item.stored_bytes)}, {time_text(item.dropped)}, {why}"


def _files(found: CheckpointSummary) -> str:
    if found.files is None or found.stored_bytes is None:
        return ""
    text = f"{count_text(found.files, 'file')}, {format_bytes(found.stored_bytes)}"
    if found.process_count > 1:
        text += f", written by {found.process_count} processes"
    if found.shared_bytes:
        text += f", of which {format_bytes(found.shared_bytes)} are those of the step before"
    return text + ("; its arrays lie in the sources" if found.is_virtual else "")


def _values(printed: PrintedArray | None, found: ShownLeaf) -> Iterator[str]:
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
    infinite = count_text(figures.inf, "infinity", "infinities")
    found.append(("not finite", f"{figures.nan:,} NaN, {infinite}"))
    return found


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


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
