"""Parts of one leaf: the index that people write, and the pieces that are read.

Leaf indexes: the part of an array that `kernel[3:5, 0]` names, in pieces of whole chunks. Pure,
without jax.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckpt._inspection.locations import Checkpoint
from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*\Z")
_INDEXED = re.compile(r"(?P<path>.+)\[(?P<index>[^\[\]]*)\]\s*\Z", re.DOTALL)

Shape = tuple[int, ...]


class LeafIndex(Struct, frozen=True):
    """An indexed part of an array.

    Attributes:
        axes: For every axis, the indexes that are taken, in their order.
        kept: The axes of the part; the others were indexed with an integer.
    """

    axes: tuple[range, ...]
    kept: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the part."""
        return tuple(len(self.axes[axis]) for axis in self.kept)

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return math.prod(len(axis) for axis in self.axes)


class ArrayBox(Struct, frozen=True):
    """A box of an array that is read at once, with the elements to take from it.

    Attributes:
        offset: Its first corner.
        shape: Its shape.
        within: The elements to take from it.
    """

    offset: Shape
    shape: Shape
    within: tuple[slice, ...]


def split_index(text: str) -> tuple[str, str | None]:
    """Return the leaf path of a text such as `params.w[0]`, and its text in brackets or None."""
    found = _INDEXED.match(text)
    return (found["path"], found["index"]) if found else (text, None)


def whole_index(shape: Sequence[int]) -> LeafIndex:
    """Return the index of all elements of an array."""
    return LeafIndex(tuple(map(range, shape)), tuple(range(len(shape))))


def parse_index(text: str, shape: Sequence[int]) -> LeafIndex:
    """Return the part of an array that a text such as `3:5, 0` names by the rules of numpy.

    Raises:
        InvalidArgumentError: The text has other parts than integers, slices and `...`, or too many
            of them, or leads out of the array.
    """
    texts = [each.strip() for each in text.split(",")]
    if len(texts) > 1 and not texts[-1]:
        texts.pop()
    dots = texts.count("...")
    given = len(texts) - dots
    if given > len(shape) or dots > 1:
        has = f"has the shape {list(shape)}" if shape else "is a scalar"
        raise InvalidArgumentError(f"[{text:.80}] has too many parts: the leaf {has}")
    place = texts.index("...") if dots else len(texts)
    texts[place : place + 1] = [":"] * (len(shape) - given)
    axes, kept = [], []
    for axis, (part, length) in enumerate(zip(texts, shape, strict=True)):
        if ":" in part:
            kept.append(axis)
            axes.append(_slice(part, length))
        else:
            number = _integer(part)
            if number is None:
                raise _not_understood(part)
            if not -length <= number < length:
                raise InvalidArgumentError(
                    f"[{text:.80}] leads out of the array: axis {axis} has the length {length}"
                )
            axes.append(range(number % length, number % length + 1))
    return LeafIndex(tuple(axes), tuple(kept))


def _slice(part: str, length: int) -> range:
    texts = part.split(":")
    numbers = [_integer(each) if each.strip() else None for each in texts]
    unclear = any(
        number is None and each.strip() for number, each in zip(numbers, texts, strict=True)
    )
    if unclear or len(texts) > 3:
        raise _not_understood(part)
    if len(numbers) == 3 and numbers[2] == 0:
        raise InvalidArgumentError(f"[{part:.80}]: the step of a slice cannot be 0")
    return range(*slice(*numbers).indices(length))


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.match(text) else None


def _not_understood(part: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"[{part:.80}] is no slice: write integers, slices and '...', such as [3:5, 0] or [..., -1]"
    )


def pieces_of(
    index: LeafIndex, chunk: Sequence[int], itemsize: int, most_bytes: int
) -> Iterator[ArrayBox]:
    """Yield the pieces in which a part is read. Pieces are whole chunks, so that each is read once.

    A piece has at most `most_bytes`, unless a single chunk has more. Chunks without an element of
    the part are left out.
    """
    if not index.size:
        return
    ascending = [axis if axis.step > 0 else axis[::-1] for axis in index.axes]
    bounds = [(axis[0], axis[-1] + 1) for axis in ascending]
    # Pieces grow along the last axes first: neighbours in memory are neighbours in the files.
    nbytes = itemsize * math.prod(
        min(length, high - low) for length, (low, high) in zip(chunk, bounds, strict=True)
    )
    boxes: list[list[tuple[int, int, slice]]] = []
    for axis, length, (low, high) in reversed(list(zip(ascending, chunk, bounds, strict=True))):
        cells = (high - 1) // length - low // length + 1
        together = max(min(cells, most_bytes // max(nbytes, 1)), 1)
        nbytes *= together
        boxes.append(list(_boxes(axis, low, high, length * together, low // length * length)))
    for box in itertools.product(*reversed(boxes)):
        starts, lengths, within = zip(*box, strict=True) if box else ((), (), ())
        yield ArrayBox(starts, lengths, within)


def _boxes(
    axis: range, low: int, high: int, step: int, first: int
) -> Iterator[tuple[int, int, slice]]:
    """Yield the start and length of every box along an axis, and the slice to take from it."""
    for cell in range(first, high, step):
        start, end = max(cell, low), min(cell + step, high)
        # Position of the first index that is not before the box.
        number = -(-(start - axis.start) // axis.step)
        if number < len(axis) and axis[number] < end:
            taken = slice(axis[number] - start, None, axis.step)
            yield start, end - start, taken


# Bytes that are read at once, and processed before the next are read.
PIECE_BYTES = 32 << 20


class WantedPiece(Struct, frozen=True):
    """A piece of a leaf of an item.

    Attributes:
        leaf: Number of the leaf.
        piece: The piece.
        nbytes: Its bytes.
    """

    leaf: int
    piece: ArrayBox
    nbytes: int


class PieceReader:
    """The arrays of one item of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, item: str) -> None:
        """Read from `item`.

        Raises:
            CorruptCheckpointError: The entry of the item contradicts itself.
            UnsupportedFormatError: Every process has a part of the item on a disk of its own.
        """
        # Imported only here: they import jax, for which readers of manifests alone need not wait.
        from ckpt._engine.restore.item_reader import RegionReader
        from ckpt._format.manifest_head import OWN_DISKS
        from ckpt._plan.leaf_entries import check_leaves
        from ckpt._settings import Staging
        from ckpt._steps.restore_arguments import context_of
        from ckpt._steps.service import make_engine
        from ckpt.errors import UnsupportedFormatError, located

        manifest = checkpoint.opened.manifest
        with located(step=manifest.step, item=item):
            if OWN_DISKS in manifest.requires:
                raise UnsupportedFormatError(
                    "every process has a part of this step on a disk of its own: its values can "
                    "be read in a job of as many processes only"
                )
            check_leaves(manifest.items[item])
        context = context_of(checkpoint.opened, make_engine(Staging(), ()))
        self._reader = RegionReader(context, item, None)

    async def read(self, wanted: Sequence[WantedPiece]) -> list[Array]:
        """Return the elements to take from each piece.

        Raises:
            CorruptCheckpointError: A chunk is damaged or missing; names the leaf.
        """
        from ckpt._format.regions import Region

        found = await self._reader.read(
            [(each.leaf, Region(each.piece.offset, each.piece.shape)) for each in wanted]
        )
        # With the dots, indexing without axes gives a view instead of a value.
        indexes: list[tuple[Any, ...]] = [(*each.piece.within, ...) for each in wanted]
        return [array[index] for array, index in zip(found, indexes, strict=True)]

    async def batches(
        self, wanted: Sequence[WantedPiece]
    ) -> AsyncIterator[tuple[list[WantedPiece], list[Array]]]:
        """Yield pieces in batches that are read at once: many small pieces, or one large piece.

        Raises:
            CorruptCheckpointError: As in `read`.
        """
        for batch in batched(wanted):
            yield batch, await self.read(batch)


def batched(wanted: Sequence[WantedPiece]) -> list[list[WantedPiece]]:
    """Return pieces in batches of at most `PIECE_BYTES`, unless a single piece has more."""
    found: list[list[WantedPiece]] = []
    total = PIECE_BYTES
    for each in wanted:
        if not found or total + each.nbytes > PIECE_BYTES:
            found.append([])
            total = 0
        found[-1].append(each)
        total += each.nbytes
    return found
