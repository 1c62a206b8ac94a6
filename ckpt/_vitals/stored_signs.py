"""Vital signs in manifests: merged, checked, compared, and what they say. Pure.

They are the columns of the extension `vital_signs`, which nothing else reads. This module is a
`StoredExtension`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from ckpt._format.leaf_table import Integers, LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import leaf_of_item
from ckpt._vitals.signs import UNKNOWN, Array, LeafSigns, are_known, join_signs, no_signs, signs_of
from ckpt.errors import CorruptCheckpointError
from ckpt.keep._questions import SIGNS_NOTE, LeafNotes

if TYPE_CHECKING:
    from ckpt._plan.item_reports import MergedNotes

logger = logging.getLogger("ckpt")

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Number = Annotated[int, Meta(ge=0, le=1 << 31)]
Count = Annotated[int, Meta(ge=1, le=1 << 62)]

# Name of the extension in manifests and reports.
NAME = SIGNS_NOTE
_MOST_FLOAT = float(np.finfo(np.float64).max)
_MARGIN = 1 + 1e-4
# Most leaves that a warning names.
_NAMED = 5


class _SignColumns(Struct, frozen=True, omit_defaults=True):
    """The columns as they are in the file; docs/reference/format.md describes them."""

    fingerprints: bytes = b""
    norms: bytes = b""
    absmax: bytes = b""
    nonfinite: list[tuple[Number, Count]] = []
    unequal: list[tuple[Number, Annotated[list[Number], Meta(min_length=1)]]] = []


class StoredSigns(Struct, frozen=True, eq=False):
    """The vital signs of the leaves of an item.

    Attributes:
        records: The record of every leaf.
        unequal: Leaves whose replicas were not equal, each with the processes whose devices held
            other values than most.
    """

    records: Array
    unequal: Mapping[int, tuple[int, ...]] = {}

    def of(self, number: int) -> LeafSigns | None:
        """Return the vital signs of a leaf; None if they are unknown."""
        return signs_of(self.records[number])

    def nonfinite(self) -> list[int]:
        """Return the numbers of the leaves that are known to have NaN or infinite values."""
        found: list[int] = np.flatnonzero(self.records["nonfinite"]).tolist()
        return found

    def on(self, table: LeafTable) -> LeafTable:
        """Return the leaves with these vital signs; without columns if nothing is known."""
        records = self.records
        if not (records["norm"] != UNKNOWN).any():
            records = records[:0]
        numbers = np.flatnonzero(records["nonfinite"])
        columns = _SignColumns(
            records["fingerprint"].tobytes(),
            records["norm"].tobytes(),
            records["absmax"].tobytes(),
            list(zip(numbers.tolist(), records["nonfinite"][numbers].tolist(), strict=True)),
            [(number, list(each)) for number, each in sorted(self.unequal.items())],
        )
        found = {name: each for name, each in table.extensions.items() if name != NAME}
        if columns != _SignColumns():
            found[NAME] = Raw(msgspec.json.encode(columns))
        return table.replaced(extensions=found)


def signs_in(table: LeafTable) -> StoredSigns:
    """Return the vital signs of leaves; unknown ones if nothing is stored of them.

    Raises:
        CorruptCheckpointError: The columns do not fit each other, or the leaves.
    """
    stored = table.extensions.get(NAME)
    if stored is None:
        return StoredSigns(no_signs(len(table)))
    try:
        return _read(msgspec.json.decode(stored, type=_SignColumns), len(table))
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptCheckpointError(f"its vital signs cannot be read: {error!s:.300}") from error


def _read(columns: _SignColumns, count: int) -> StoredSigns:
    nonfinite, unequal = dict(columns.nonfinite), dict(columns.unequal)
    is_twice = (len(nonfinite), len(unequal)) != (len(columns.nonfinite), len(columns.unequal))
    if is_twice or any(number >= count for number in (*nonfinite, *unequal)):
        raise ValueError("a leaf is listed twice, or does not exist")
    given = columns.fingerprints, columns.norms, columns.absmax
    found = no_signs(count)
    if any(given) or nonfinite:
        if {*map(len, given)} != {8 * count}:
            raise ValueError("the columns do not fit each other")
        found["fingerprint"] = np.frombuffer(columns.fingerprints, "<u4").reshape(-1, 2)
        found["norm"] = np.frombuffer(columns.norms, "<f8")
        found["absmax"] = np.frombuffer(columns.absmax, "<f8")
        found["nonfinite"][list(nonfinite)] = list(nonfinite.values())
    return StoredSigns(found, {number: tuple(each) for number, each in unequal.items()})


def with_notes(table: LeafTable, merged: MergedNotes) -> LeafTable:
    """Return a table with the vital signs of its leaves, and those whose replicas differ."""
    signs = no_signs(len(table))
    if len(merged.notes.records):
        signs = join_signs(merged.notes.records, merged.leaves, len(table))
        # For a leaf that is partly on the disks of other processes these are but a part.
        signs[~merged.are_whole] = no_signs(1)
        # Values are also stored as arrays, but only for other readers.
        signs[list(table.values)] = no_signs(1)
        signs[list(table.same_as)] = signs[list(table.same_as.values())]
    unequal = differing_replicas(merged.notes.others)
    for number, source in table.same_as.items():
        if source in unequal:
            unequal[number] = unequal[source]
    return StoredSigns(signs, unequal).on(table)


def differing_replicas(copies: Array) -> dict[int, tuple[int, ...]]:
    """Return the leaves whose replicas differ, by number, each with processes that have others.

    These are the processes with another fingerprint than most; if no fingerprint has the most
    holders, all of them.
    """
    keys = copies["leaf"].astype(np.uint64) << np.uint64(32) | copies["number"]
    words, processes = copies["fingerprint"].astype(np.uint64), copies["process"]
    prints = words[:, 1] << np.uint64(32) | words[:, 0]
    order = np.lexsort((prints, keys))
    keys, prints, processes = keys[order], prints[order], processes[order]
    # Chunks with several fingerprints: two neighbours of one chunk that differ.
    differ = (keys[1:] == keys[:-1]) & (prints[1:] != prints[:-1])
    found: dict[int, set[int]] = {}
    for key in np.unique(keys[1:][differ]).tolist():
        start, stop = np.searchsorted(keys, (key, key + 1))
        values, counts = np.unique(prints[start:stop], return_counts=True)
        most = values[counts == counts.max()]
        is_other = prints[start:stop] != most[0] if len(most) == 1 else np.ones(stop - start, bool)
        found.setdefault(key >> 32, set()).update(processes[start:stop][is_other].tolist())
    return {leaf: tuple(sorted(each)) for leaf, each in sorted(found.items())}


def merged(items: Mapping[str, ItemEntry]) -> None:
    """Warn of leaves of which processes should hold the same values, and do not."""
    unequal = [
        f"{entry.leaves.names[leaf]!r} of {name!r} (process {', '.join(map(str, processes))})"
        for name, entry in items.items()
        for leaf, processes in signs_in(entry.leaves).unequal.items()
    ]
    if unequal:
        logger.warning(
            "processes that should hold the same values do not, so what is saved may be wrong: "
            "%s. A device may be faulty, or the program lets its replicas drift apart",
            first_names(unequal),
        )


def first_names(names: Sequence[str]) -> str:
    """Return the first names for a warning, and how many more there are."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def check(table: LeafTable) -> None:
    """Check that the vital signs of all leaves can be true.

    Raises:
        CorruptCheckpointError: Those of a leaf cannot.
    """
    records = signs_in(table).records
    norm, absmax, nonfinite = (records[name] for name in ("norm", "absmax", "nonfinite"))
    sizes = [_most_nonfinite(form) for form in table.forms] or [(0.0, 0.0)]
    elements, most = (
        np.array(column, np.float64)[table.form] for column in zip(*sizes, strict=True)
    )
    nothing = (absmax == 0) & (nonfinite == 0) & ~records["fingerprint"].any(axis=1)
    # A comparison with NaN is false.
    known = (norm >= 0) & (absmax >= 0) & (norm <= _MOST_FLOAT) & (nonfinite <= most)
    # The norm is at least that of the largest value, and at most that of an array full of it; sums
    # of squares are not exact.
    with np.errstate(over="ignore", invalid="ignore"):
        least, largest = absmax / _MARGIN, absmax * np.sqrt(np.maximum(elements, 1)) * _MARGIN
        known &= (least <= norm) & (norm <= largest)
    right = np.where(norm == UNKNOWN, nothing, known & (elements >= 0))
    same = np.arange(len(table))
    same[list(table.same_as)] = list(table.same_as.values())
    right &= records == records[same]
    if not right.all():
        number = int(np.argmin(right))
        raise CorruptCheckpointError(
            f"its vital signs cannot be true: {nonfinite[number]} values that are not finite, "
            f"norm {norm[number]}, and {absmax[number]} as the largest value",
            leaf=table.names[number],
        )


def _most_nonfinite(form: LeafForm) -> tuple[float, float]:
    """Return how many elements a leaf has, -1 if it is no array, and how many may be not finite."""
    if form.kind not in ARRAY_KINDS:
        return -1.0, 0.0
    elements = float(math.prod(form.shape))
    name = form.dtype or ""
    return elements, elements if "float" in name or "complex" in name else 0.0


def compare(
    tables: tuple[LeafTable, LeafTable], first: Integers, second: Integers
) -> tuple[Flags, Flags]:
    """Return for each pair of leaves whether both are known, and whether the values are equal."""
    one, other = signs_in(tables[0]).records[first], signs_in(tables[1]).records[second]
    same = (one["fingerprint"] == other["fingerprint"]).all(axis=1)
    same &= one["nonfinite"] == other["nonfinite"]
    return are_known(one) & are_known(other), same


class NotedSigns(Struct, frozen=True, gc=False):
    """What is noted of one leaf: its vital signs, and the processes with other values than most."""

    signs: LeafSigns | None
    unequal_on: tuple[int, ...]

    @property
    def remark(self) -> str:
        """What people should know of the leaf; empty if there is nothing."""
        found = []
        if self.signs is not None and (count := self.signs.nonfinite):
            found.append(f"{count} {'value is' if count == 1 else 'values are'} not finite")
        if self.unequal_on:
            found.append(f"replicas differ on process {', '.join(map(str, self.unequal_on))}")
        return "  ".join(found)


def of_leaves(table: LeafTable) -> Sequence[NotedSigns]:
    """Return what is noted of each leaf."""
    signs = signs_in(table)
    return [
        NotedSigns(signs.of(number), signs.unequal.get(number, ())) for number in range(len(table))
    ]


def of_step(items: Mapping[str, ItemEntry]) -> dict[str, Any]:
    """Return what the head of a manifest says of these items."""
    nonfinite, unequal, _ = _counts(items)
    return {"nonfinite_leaves": nonfinite, "unequal_leaves": unequal}


def notes_of_step(manifest: Manifest) -> LeafNotes:
    """Return what is known of the leaves of a step, with their names."""
    nonfinite, unequal, unknown = _counts(manifest.items)
    names = tuple(nonfinite_leaves(manifest)), tuple(unequal_leaves(manifest))
    return LeafNotes(nonfinite, unequal, *names, unknown)


def _counts(items: Mapping[str, ItemEntry]) -> tuple[int | None, int, int]:
    """Return the numbers of leaves with values that are not finite, of unequal and unknown ones.

    The first is None if there are none, and the vital signs of some array are unknown.
    """
    nonfinite = unequal = unknown = 0
    for item in items.values():
        table, signs = item.leaves, signs_in(item.leaves)
        are_arrays = np.array([form.dtype is not None for form in table.forms] or [False])
        unknown += int((are_arrays[table.form] & (signs.records["norm"] == UNKNOWN)).sum())
        nonfinite += len(signs.nonfinite())
        unequal += len(signs.unequal)
    return nonfinite or (None if unknown else 0), unequal, unknown


def nonfinite_leaves(manifest: Manifest) -> dict[str, int]:
    """Return the number of NaN and infinite values by leaf path, for leaves that have some.

    In a step of several items, the name of the item comes before the path: `model:params.w`.
    """
    found: dict[str, int] = {}
    for name, item in manifest.items.items():
        signs = signs_in(item.leaves)
        numbers = signs.nonfinite()
        counts = signs.records["nonfinite"][numbers].tolist()
        found |= zip(_paths(manifest, name, item, numbers), counts, strict=True)
    return found


def unequal_leaves(manifest: Manifest) -> list[str]:
    """Return the leaves whose replicas were not equal, as in `nonfinite_leaves`."""
    return [
        path
        for name, item in manifest.items.items()
        for path in _paths(manifest, name, item, sorted(signs_in(item.leaves).unequal))
    ]


def _paths(manifest: Manifest, name: str, item: ItemEntry, numbers: Iterable[int]) -> list[str]:
    paths = unboxed_names(item.nodes, item.leaves.names)
    return [leaf_of_item("" if manifest.unnamed else name, paths[number]) for number in numbers]
