"""Vital signs in manifests: whether they can be true, what they say, and how they compare. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ckpt._format.leaf_table import LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import leaf_of_item
from ckpt._vitals.signs import UNKNOWN, Array, are_known
from ckpt.errors import CorruptCheckpointError

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Integers = np.ndarray[Any, np.dtype[np.int64]]

_MOST_FLOAT = float(np.finfo(np.float64).max)
_MARGIN = 1 + 1e-4


def check_signs(table: LeafTable) -> None:
    """Check that the vital signs of all leaves can be true.

    Raises:
        CorruptCheckpointError: Those of a leaf cannot.
    """
    norm, absmax, nonfinite = (table.signs[name] for name in ("norm", "absmax", "nonfinite"))
    sizes = [_most_nonfinite(form) for form in table.forms] or [(0.0, 0.0)]
    elements, most = (
        np.array(column, np.float64)[table.form] for column in zip(*sizes, strict=True)
    )
    nothing = (absmax == 0) & (nonfinite == 0) & ~table.signs["fingerprint"].any(axis=1)
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
    right &= table.signs == table.signs[same]
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


def are_alike(one: Array, other: Array) -> tuple[Flags, Flags]:
    """Return for each pair of records whether both are known, and whether the values are equal."""
    same = (one["fingerprint"] == other["fingerprint"]).all(axis=1)
    same &= one["nonfinite"] == other["nonfinite"]
    return are_known(one) & are_known(other), same


def nonfinite_leaves(manifest: Manifest) -> dict[str, int]:
    """Return the number of NaN and infinite values by leaf path, for leaves that have some.

    In a step of several items, the name of the item comes before the path: `model:params.w`.
    """
    found: dict[str, int] = {}
    for name, item in manifest.items.items():
        numbers = item.leaves.nonfinite()
        counts = item.leaves.signs["nonfinite"][numbers].tolist()
        found |= zip(_paths(manifest, name, item, numbers), counts, strict=True)
    return found


def unequal_leaves(manifest: Manifest) -> list[str]:
    """Return the leaves whose replicas were not equal, as in `nonfinite_leaves`."""
    return [
        path
        for name, item in manifest.items.items()
        for path in _paths(manifest, name, item, sorted(item.leaves.unequal))
    ]


def _paths(manifest: Manifest, name: str, item: ItemEntry, numbers: Iterable[int]) -> list[str]:
    paths = unboxed_names(item.nodes, item.leaves.names)
    return [leaf_of_item("" if manifest.unnamed else name, paths[number]) for number in numbers]


def notable_arrays(table: LeafTable, arrays: Flags) -> Integers:
    """Return the numbers of the arrays that are not known to be finite and equal.

    `arrays` is `[leaves] bool`, True for arrays.
    """
    are_notable = (table.signs["norm"] == UNKNOWN) | (table.signs["nonfinite"] > 0)
    are_notable[list(table.unequal)] = True
    return np.flatnonzero(arrays & are_notable)
