"""One leaf of a checkpoint with its values and statistics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckpt._inspection.leaf_records import LeafRecord, records_of
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.values.leaf_index import (
    LeafIndex,
    parse_index,
    pieces_of,
    split_index,
    whole_index,
)
from ckpt._inspection.values.piece_reader import PIECE_BYTES, PieceReader, WantedPiece
from ckpt._inspection.values.statistics import ArrayStatistics, RunningStatistics
from ckpt._tree.item_leaves import split_leaf
from ckpt._tree.suggestions import suggestion
from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# numpy prints so many elements in full, and so many at both ends of longer axes.
_MOST_PRINTED, _EDGE = 1000, 3
# Python refuses to print integers of more bits in decimal by default.
_MOST_BITS = 14_000
# With more axes, the corners alone would be many elements.
_MOST_EDGE_AXES = 5


class ShownLeaf(Struct, frozen=True):
    """A leaf, or a part of one.

    Attributes:
        path: Path of the checkpoint.
        step: Its number, or None.
        leaf: Record of the leaf.
        index: The requested part, or None for the whole leaf.
        shape: Shape of that part; for PRNG keys, with the axis of their data.
        values: Its elements in nested lists, if there are at most 1,000; else None. Values that
            JSON has no numbers for (NaN, infinities, complex numbers) are text. For a leaf that is
            not an array, its value.
        statistics: Statistics of an array of numbers with at least one element; else None.
    """

    path: str
    step: int | None
    leaf: LeafRecord
    index: str | None
    shape: tuple[int, ...]
    values: Any
    statistics: ArrayStatistics | None


class PrintedArray(Struct, frozen=True):
    """An array for people: its elements, or only those at its edges if there are many.

    Attributes:
        elements: The elements; for a cut axis the first three, a placeholder for those left out,
            and the last three.
        is_cut: True if elements are left out.
    """

    elements: Array
    is_cut: bool


async def show_leaf(checkpoint: Checkpoint, text: str) -> tuple[ShownLeaf, PrintedArray | None]:
    """Return a leaf with its values and statistics; for an array, also the elements to print.

    An array is read once, in pieces of 32 MiB, or of one chunk if that is larger.

    Args:
        checkpoint: The checkpoint.
        text: A leaf path, with or without an index in brackets. If several items have such a leaf,
            the name of its item and a colon come first.

    Raises:
        InvalidArgumentError: There is no such leaf, or it has no such part.
        CorruptCheckpointError: A chunk is damaged; names the leaf.
    """
    item, number, record, index = _find(checkpoint, text)
    manifest = checkpoint.opened.manifest
    if not record.is_array:
        if index is not None:
            raise InvalidArgumentError(
                f"{checkpoint.location}: {record.path!r:.200} is no array ({record.kind}), so that "
                f"there is no [{index:.80}] of it"
            )
        value = _value(checkpoint, item, number)
        return ShownLeaf(checkpoint.location, manifest.step, record, None, (), value, None), None
    part = whole_index(record.shape) if index is None else parse_index(index, record.shape)
    if record.kind == "key":
        data = (
            manifest.items[item]
            .leaves.forms[int(manifest.items[item].leaves.form[number])]
            .shape[-1]
        )
        part = LeafIndex((*part.axes, range(data)), (*part.kept, len(part.axes)))
    printed, statistics = await _read(PieceReader(checkpoint, item), number, record, part)
    values = None if printed.is_cut else _json(printed.elements)
    shown = ShownLeaf(
        checkpoint.location, manifest.step, record, index, part.shape, values, statistics
    )
    return shown, printed


def _find(checkpoint: Checkpoint, text: str) -> tuple[str, int, LeafRecord, str | None]:
    """Return the item, the number and the record of a leaf, and the requested index."""
    manifest = checkpoint.opened.manifest
    leaves = [
        (name, number, record)
        for name, item in manifest.items.items()
        for number, record in enumerate(records_of(manifest, name, range(len(item.leaves))))
    ]
    items = () if manifest.unnamed else manifest.items
    path, index = split_index(text)
    # A key may have brackets, so the whole text is tried as a path first.
    for wanted, part in ((text, None), (path, index)):
        owner, name = split_leaf(wanted, items)
        found = [
            (item, number, each, part)
            for item, number, each in leaves
            if owner in (None, item) and each.path == name
        ]
        if len(found) == 1:
            return found[0]
        if found:
            listed = ", ".join(each.name for _, _, each, _ in found)
            raise InvalidArgumentError(
                f"{checkpoint.location} has several leaves {wanted!r:.200}: {listed:.400}"
            )
    names = [each.path for item, _, each in leaves if owner in (None, item)]
    below = [each for each in names if each.startswith(f"{name}.")]
    hint = suggestion(name, dict.fromkeys(names))
    if below:
        hint = f": it is a branch with {len(below):,} of them, such as {below[0]!r:.200}"
    raise InvalidArgumentError(f"{checkpoint.location} has no leaf {path!r:.200}{hint}")


def _value(checkpoint: Checkpoint, item: str, number: int) -> Any:
    from ckpt._tree.leaf_kinds import CALLABLE, decode_scalar

    leaf = checkpoint.opened.manifest.items[item].leaves.bare(number)
    value = leaf.value if leaf.kind == CALLABLE else decode_scalar(leaf)
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        # Python refuses to print thousands of decimal digits.
        return hex(value)
    return str(value)


async def _read(
    arrays: PieceReader, number: int, record: LeafRecord, part: LeafIndex
) -> tuple[PrintedArray, ArrayStatistics | None]:
    import numpy as np

    from ckpt._format.dtypes import parse_dtype
    from ckpt._runtime.threads import run_in_thread

    dtype = parse_dtype(record.dtype)
    chunk = record.chunks
    pieces = [
        WantedPiece(number, each, math.prod(each.shape) * dtype.itemsize)
        for each in pieces_of(part, chunk, dtype.itemsize, PIECE_BYTES)
    ]
    edges = [_edges(axis, part, record) for axis in part.axes]
    elements = np.zeros([len(axis) for axis in edges], dtype)
    statistics = None if record.kind == "key" else RunningStatistics(dtype)

    def take(batch: list[WantedPiece], found: list[Array]) -> None:
        for wanted, array in zip(batch, found, strict=True):
            _take_edges(elements, edges, wanted, array)
            if statistics is not None:
                statistics.add(array)

    async for batch, found in arrays.batches(pieces):
        await run_in_thread(take, batch, found)
    shape = [len(edges[axis]) for axis in part.kept]
    is_cut = elements.size < part.size
    has_figures = statistics is not None and part.size > 0
    figures = statistics.result() if statistics is not None and has_figures else None
    return PrintedArray(elements.reshape(shape), is_cut), figures


def _edges(axis: range, part: LeafIndex, record: LeafRecord) -> list[int]:
    """Return the indexes of an axis that are printed."""
    edge = _EDGE if len(part.kept) <= _MOST_EDGE_AXES else 1
    if part.size <= _MOST_PRINTED or len(axis) <= 2 * edge:
        return list(axis)
    # The index between both ends is the placeholder for those left out.
    return [*axis[: edge + 1], *axis[-edge:]]


def _take_edges(elements: Array, edges: list[list[int]], wanted: WantedPiece, array: Array) -> None:
    """Copy the elements of a piece that are printed."""
    import numpy as np

    piece = wanted.piece
    into, source = [], []
    for axis, start, length, within in zip(
        edges, piece.offset, piece.shape, piece.within, strict=True
    ):
        step = within.step or 1
        places = [n for n, index in enumerate(axis) if start <= index < start + length]
        into.append(places)
        source.append([(axis[n] - start - within.start) // step for n in places])
    if all(into):
        if into:
            elements[np.ix_(*into)] = array[np.ix_(*source)]
        else:
            elements[...] = array


def _json(array: Array) -> Any:
    import numpy as np

    kind = array.dtype.kind
    if kind in "biu":
        return array.tolist()
    if kind == "c":
        return np.vectorize(str, otypes=[object])(array).tolist() if array.size else array.tolist()
    if "int" in array.dtype.name:
        return array.astype(np.int64).tolist()
    with np.errstate(invalid="ignore"):
        plain = array.astype(np.float64)
    if np.isfinite(plain).all():
        return plain.tolist()
    texts = np.vectorize(lambda x: x if math.isfinite(x) else str(x), otypes=[object])
    return texts(plain).tolist()
