"""Differences between the arrays of two checkpoints, which are both read piece by piece."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckpt._inspection.differences import CheckpointDifferences, ComparedArray, PairedArray, compare
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.values.array_changes import ArrayChange, RunningChanges
from ckpt._inspection.values.leaf_index import pieces_of, whole_index
from ckpt._inspection.values.piece_reader import PIECE_BYTES, PieceReader, WantedPiece, batched
from ckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


async def compare_values(before: Checkpoint, after: Checkpoint) -> CheckpointDifferences:
    """Return how two checkpoints differ; arrays that digests do not call the same are read.

    Raises:
        CorruptCheckpointError: A chunk is damaged; names the checkpoint and the leaf.
    """
    found, pairs = compare(before, after)
    by_item: dict[str, list[PairedArray]] = {}
    for pair in pairs:
        by_item.setdefault(pair.item, []).append(pair)
    compared: list[ComparedArray] = []
    for item, members in by_item.items():
        changes = await _changes(before, after, item, members)
        compared += [
            replace(pair.compared, change=change)
            for pair, change in zip(members, changes, strict=True)
        ]
    unlike = [each for each in compared if _is_change(each)]
    unlike.sort(key=_weight, reverse=True)
    same = found.same - len(found.same_by_fingerprint) + len(compared) - len(unlike)
    found = replace(
        found,
        contents=unlike,
        not_compared=[],
        same=same,
        values_read=True,
        same_by_fingerprint=[],
    )
    lists = (found.removed, found.added, found.types, found.values, found.items, found.contents)
    return replace(found, is_same=not any((*lists, found.metrics, found.metadata)))


def _is_change(compared: ComparedArray) -> bool:
    assert compared.change is not None
    return compared.change.different + compared.change.bits > 0


def _weight(compared: ComparedArray) -> tuple[bool, float, int]:
    """Return the sort key of a change: numbers that are not finite in one array count most."""
    change = compared.change
    assert change is not None
    return change.nan + change.inf > 0, float(change.max or 0), change.different


async def _changes(
    before: Checkpoint, after: Checkpoint, item: str, pairs: list[PairedArray]
) -> list[ArrayChange]:
    """Return the differences between arrays of an item, in the order of `pairs`."""
    from ckpt._format.dtypes import parse_dtype
    from ckpt._runtime.threads import run_in_thread

    first, second = PieceReader(before, item), PieceReader(after, item)
    numbers = {pair.numbers[0]: pair for pair in pairs}
    running = {}
    wanted = []
    for number, pair in numbers.items():
        form = pair.form
        dtype = parse_dtype(form.dtype)
        running[number] = RunningChanges(dtype, is_key=form.kind == "key")
        index = whole_index(form.shape)
        wanted += [
            WantedPiece(number, each, math.prod(each.shape) * dtype.itemsize)
            for each in pieces_of(index, form.chunks, dtype.itemsize, PIECE_BYTES)
        ]

    def take(batch: list[WantedPiece], one: list[Array], other: list[Array]) -> None:
        for each, mine, theirs in zip(batch, one, other, strict=True):
            running[each.leaf].add(mine, theirs)

    for batch in batched(wanted):
        others = [replace(each, leaf=numbers[each.leaf].numbers[1]) for each in batch]
        with _naming_checkpoint(before):
            one = await first.read(batch)
        with _naming_checkpoint(after):
            other = await second.read(others)
        await run_in_thread(take, batch, one, other)
    return [running[number].result() for number in numbers]


@contextlib.contextmanager
def _naming_checkpoint(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the damaged one of both checkpoints in errors."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{checkpoint.location}: {error.message}",
            step=error.step,
            item=error.item,
            leaf=error.leaf,
        ) from error
