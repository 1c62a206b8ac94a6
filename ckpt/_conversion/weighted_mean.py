"""The weighted mean of checkpoints, region by region, as one that can be read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from ckpt._conversion.stored_items import StoredItem
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry
from ckpt._format.regions import Region
from ckpt._plan.weighted_means import accumulator, check_alike, heaviest, is_averaged
from ckpt._redaction import redact
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_specs import LeafSpec, StoredLeaf

logger = logging.getLogger("ckpt")

Array = np.ndarray[Any, Any]

# Elements that are added at once; they stay in the cache of a core.
_SLICE = 1 << 18


def merged(
    checkpoints: Mapping[str, Mapping[str, StoredItem]], weights: Sequence[float]
) -> dict[str, StoredItem]:
    """Return the items that are the weighted mean of those of several checkpoints.

    Arrays of real and complex numbers are added up in float32, or in their own precision if that is
    higher. Everything else (counters, keys, texts, files) is that of the checkpoint with the
    largest weight.

    Args:
        checkpoints: Their items, by where they are.
        weights: The weight of each.

    Raises:
        TargetMismatchError: They do not have the same leaves; lists all.
    """
    places = list(checkpoints)
    best = heaviest(places, weights)
    check_alike({place: _entries(items) for place, items in checkpoints.items()}, best)
    main = checkpoints[best]
    found: dict[str, StoredItem] = {}
    kept: list[str] = []
    for name, item in main.items():
        if item.tree is None:
            kept.append(name)
            found[name] = item
            continue
        # By name: another library may have them in another order.
        every = [_leaves(checkpoints[place][name]) for place in places]
        leaves: list[Any] = []
        # One array in two places of the tree stays one.
        known: dict[tuple[int, ...], StoredLeaf] = {}
        for path, leaf in _leaves(item).items():
            if isinstance(leaf, StoredLeaf) and is_averaged(leaf.spec.kind, leaf.spec.dtype):
                parts = [each[path] for each in every]
                leaves.append(known.setdefault(tuple(map(id, parts)), _merged(parts, weights)))
            else:
                leaves.append(leaf)
                kept.append(f"{name}: {path}")
        found[name] = replace(item, tree=replace(item.tree, leaves=tuple(leaves)))
    if kept:
        logger.info(
            "%d leaves and items that are no real numbers (%s, ...) are those of %s, which has the "
            "largest weight",
            len(kept),
            kept[0],
            redact(best),
        )
    return found


def _entries(items: Mapping[str, StoredItem]) -> dict[str, ItemEntry]:
    return {name: item.entry for name, item in items.items()}


def _leaves(item: StoredItem) -> dict[str, Any]:
    """Return the leaves of an item by leaf path, in their order."""
    assert item.tree is not None
    names = unboxed_names(item.tree.nodes, item.tree.names)
    return dict(zip(names, item.tree.leaves, strict=True))


def _merged(parts: Sequence[StoredLeaf], weights: Sequence[float]) -> StoredLeaf:
    spec = parts[0].spec
    dtype = parse_dtype(spec.dtype)
    # The sum, and what is added to it as it was read.
    copies = accumulator(dtype).itemsize // dtype.itemsize + 1
    return StoredLeaf(replace(spec, copies=copies), partial(_mean, parts, weights, spec))


def _mean(
    parts: Sequence[StoredLeaf], weights: Sequence[float], spec: LeafSpec, region: Region
) -> Array:
    dtype = parse_dtype(spec.dtype)
    wide = accumulator(dtype)
    total: Array = np.empty(region.shape, wide)
    sums = total.reshape(-1)
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        values, factor = part.read(region).reshape(-1), wide.type(weight)
        # A little at a time, so that there is no second copy in the wider dtype.
        for start in range(0, len(values), _SLICE):
            piece = values[start : start + _SLICE].astype(wide, copy=False)
            piece_sum = sums[start : start + _SLICE]
            if number:
                piece_sum += piece * factor
            else:
                np.multiply(piece, factor, out=piece_sum)
    return total.astype(dtype, copy=False)
