"""A comparison of two steps, from their manifests alone; whole columns at a time. Pure.

The digests of chunks are compared if both arrays have the same chunks, otherwise fingerprints that
an extension has noted. No object is made for a leaf, so that 50,000 leaves take some milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import DIGEST_BYTES, Integers, LeafForm, LeafTable
from ckpt._format.manifest import Manifest
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Verdict(IntEnum):
    """The result of comparing a leaf that both items have."""

    SAME = 0
    # Digests do not decide. A different fingerprint proves a change; an equal one makes a change
    # improbable.
    SAME_BY_FINGERPRINT = 1
    CHANGED = 2
    UNKNOWN = 3
    OTHER_VALUE = 4
    OTHER_TYPE = 5


_UNLIKE = {
    Verdict.CHANGED: "has other values",
    Verdict.UNKNOWN: "is stored in other pieces, and has no fingerprints, which would tell",
    Verdict.OTHER_VALUE: "has another value",
    Verdict.OTHER_TYPE: "has another type or shape",
}


class ComparedLeaves(Struct, frozen=True, eq=False):
    """The leaves of two items, by their numbers in the items.

    Attributes:
        removed: Leaves that only the first has.
        added: Leaves that only the second has.
        pairs: Leaves that both have, in the order of the first; `[leaves, 2]`.
        verdicts: A `Verdict` for each pair.
        chunks_changed: For each pair the number of chunks with different digests; -1 if digests do
            not decide.
    """

    removed: Sequence[int]
    added: Sequence[int]
    pairs: Integers
    verdicts: Integers
    chunks_changed: Integers

    @property
    def same(self) -> int:
        """Number of leaves that are the same, by digests or fingerprints."""
        return int((self.verdicts <= Verdict.SAME_BY_FINGERPRINT).sum())

    @property
    def is_same(self) -> bool | None:
        """True if all leaves are the same; None if none differs and some are unknown."""
        if self.removed or self.added or (self.verdicts >= Verdict.OTHER_VALUE).any():
            return False
        if (self.verdicts == Verdict.CHANGED).any():
            return False
        return None if (self.verdicts == Verdict.UNKNOWN).any() else True


def compare_leaves(
    before: LeafTable, paths: Sequence[str], after: LeafTable, others: Sequence[str]
) -> ComparedLeaves:
    """Return the comparison of the leaves of two items.

    Args:
        before: The leaves of the first.
        paths: The path of each, without boxes.
        after: The leaves of the second.
        others: The paths of the second.
    """
    tables = before, after
    removed, added, pairs = _pair_leaves(paths, others)
    first, second = pairs[:, 0], pairs[:, 1]
    verdicts = np.full(len(pairs), Verdict.UNKNOWN, np.int64)
    changed = np.full(len(pairs), -1, np.int64)
    # Pairs of forms are compared instead of leaves, since thousands of leaves have one form.
    width = max(len(tables[1].forms), 1)
    codes = tables[0].form[first] * width + tables[1].form[second]
    kinds, kind = np.unique(codes, return_inverse=True)
    forms = [(tables[0].forms[at // width], tables[1].forms[at % width]) for at in kinds.tolist()]
    verdicts[_flags(forms, _are_unlike)[kind]] = Verdict.OTHER_TYPE
    verdicts[_flags(forms, _are_empty)[kind]] = Verdict.SAME
    values = np.flatnonzero(_flags(forms, _are_values)[kind])
    verdicts[values] = Verdict.SAME
    unlike = _with_other_values(tables[0].values, tables[1].values, pairs, values)
    verdicts[unlike] = Verdict.OTHER_VALUE
    cut = np.flatnonzero((verdicts == Verdict.UNKNOWN) & _flags(forms, _are_cut_alike)[kind])
    changed[cut] = _chunks_changed(tables, first[cut], second[cut])
    known = changed >= 0
    verdicts[known] = np.where(changed[known] > 0, Verdict.CHANGED, Verdict.SAME)
    open_still = np.flatnonzero(verdicts == Verdict.UNKNOWN)
    verdicts[open_still] = _by_fingerprint(tables, first[open_still], second[open_still])
    return ComparedLeaves(removed, added, pairs, verdicts, changed)


def how_items_differ(first: Manifest, second: Manifest) -> str:
    """Return a difference between the items of two steps, for people; empty if there is none.

    Metrics and metadata are not compared. Leaves that cannot be compared count as different.

    Raises:
        CorruptCheckpointError: A manifest contradicts itself.
    """
    for name in dict.fromkeys((*first.items, *second.items)):
        of = "" if first.unnamed and second.unnamed else f" of item {name!r}"
        if not (name in first.items and name in second.items):
            return f"only one of them has the item {name!r}"
        one, other = first.items[name], second.items[name]
        if one.handler != other.handler:
            return f"item {name!r} is of another kind ({one.handler}, {other.handler})"
        if len(one.leaves) or len(other.leaves) or one.nodes or other.nodes:
            paths = [unboxed_names(each.nodes, each.leaves.names) for each in (one, other)]
            found = compare_leaves(one.leaves, paths[0], other.leaves, paths[1])
            alone = [*(paths[0][at] for at in found.removed), *(paths[1][at] for at in found.added)]
            if alone:
                return f"only one of them has the leaf {alone[0]!r}{of}"
            unlike = np.flatnonzero(found.verdicts > Verdict.SAME_BY_FINGERPRINT)
            if len(unlike):
                leaf = paths[0][int(found.pairs[unlike[0], 0])]
                return f"the leaf {leaf!r}{of} {_UNLIKE[Verdict(int(found.verdicts[unlike[0]]))]}"
            if one.nodes != other.nodes:
                return f"the tree{of} has other containers"
        elif contents_of(first, name) != contents_of(second, name):
            return f"item {name!r} holds something else"
    return ""


def contents_of(manifest: Manifest, name: str) -> tuple[Any, dict[str, str]]:
    """Return the content of an item without leaves: its data, and the digests of its files."""
    start = f"{name}/"
    files = {
        path.removeprefix(start): each.digest
        for path, each in manifest.files.items()
        if path.startswith(start)
    }
    return manifest.items[name].data, files


def _pair_leaves(
    first: Sequence[str], second: Sequence[str]
) -> tuple[list[int], list[int], Integers]:
    """Return the leaves that only the first has, those that only the second has, and the pairs."""
    if first == second:
        numbers = np.arange(len(first))
        return [], [], np.stack([numbers, numbers], axis=1)
    places = {path: number for number, path in enumerate(second)}
    found = np.array([places.pop(path, -1) for path in first], np.int64)
    both = np.flatnonzero(found >= 0)
    removed: list[int] = np.flatnonzero(found < 0).tolist()
    return removed, list(places.values()), np.stack([both, found[both]], axis=1)


_Forms = tuple[LeafForm, LeafForm]


def _flags(forms: Sequence[_Forms], test: Any) -> Flags:
    return np.fromiter((test(*each) for each in forms), np.bool_, len(forms))


def _are_unlike(one: LeafForm, other: LeafForm) -> bool:
    return (one.kind, one.impl) != (other.kind, other.impl) or (
        one.kind in ARRAY_KINDS
        and (one.dtype, tuple(one.shape)) != (other.dtype, tuple(other.shape))
    )


def _are_values(one: LeafForm, other: LeafForm) -> bool:
    return not _are_unlike(one, other) and one.kind not in ARRAY_KINDS


def _are_empty(one: LeafForm, other: LeafForm) -> bool:
    return not _are_unlike(one, other) and one.kind in ARRAY_KINDS and not _nbytes(one)


def _are_cut_alike(one: LeafForm, other: LeafForm) -> bool:
    return tuple(one.chunks) == tuple(other.chunks) and one.count == other.count > 0


def _nbytes(form: LeafForm) -> int:
    dtype = DTYPES.get(form.dtype or "")
    return math.prod(form.shape) * (1 if dtype is None else int(dtype.itemsize))


def _with_other_values(
    before: Mapping[int, Any], after: Mapping[int, Any], pairs: Integers, among: Integers
) -> list[int]:
    if not before and not after:
        return []
    return [
        place
        for place, (one, other) in zip(among.tolist(), pairs[among].tolist(), strict=True)
        if before.get(one) != after.get(other)
    ]


def _chunks_changed(
    tables: tuple[LeafTable, LeafTable], first: Integers, second: Integers
) -> Integers:
    """Return the number of chunks with different digests per array pair; -1 if unknown."""
    if not len(first):
        return first
    starts = [
        table.firsts[_sources(table, numbers)]
        for table, numbers in zip(tables, (first, second), strict=True)
    ]
    counts = np.array([form.count for form in tables[0].forms], np.int64)[tables[0].form[first]]
    ends = np.cumsum(counts)
    # The place of every chunk among the chunks of its array.
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    halves, known = [], np.ones(len(within), np.bool_)
    for table, start in zip(tables, starts, strict=True):
        chunks = np.repeat(start, counts) + within
        found = np.frombuffer(table.digests, f"({DIGEST_BYTES // 8},)u8")[chunks]
        # Zeros stand for an unknown digest; a negative offset for a chunk that is not on this disk.
        known &= found.any(axis=1) & (table.offsets[chunks] >= 0)
        halves.append(found)
    unlike = (halves[0] != halves[1]).any(axis=1)
    firsts = ends - counts
    changed = np.add.reduceat(unlike.astype(np.int64), firsts)
    return np.where(np.logical_and.reduceat(known, firsts), changed, -1)


def _sources(table: LeafTable, numbers: Integers) -> Integers:
    """Return the numbers of the leaves that store the chunks of the given leaves."""
    if not table.same_as:
        return numbers
    sources = np.arange(len(table))
    sources[list(table.same_as)] = list(table.same_as.values())
    return sources[numbers]


def _by_fingerprint(
    tables: tuple[LeafTable, LeafTable], first: Integers, second: Integers
) -> Integers:
    found = np.full(len(first), Verdict.UNKNOWN, np.int64)
    noted = tables[0].extensions.keys() & tables[1].extensions.keys()
    if noted:
        from ckpt.extensions._readers import readers

        for each in readers(noted).values():
            known, same = each.compare(tables, first, second)
            told = np.where(same, Verdict.SAME_BY_FINGERPRINT, Verdict.CHANGED)
            found = np.where(known & (found == Verdict.UNKNOWN), told, found)
    return found
