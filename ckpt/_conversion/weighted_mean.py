"""The weighted mean of checkpoints, region by region, as one that can be read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from ckpt._conversion.stored_items import StoredItem
from ckpt._format.dtypes import parse_dtype
from ckpt._format.regions import Region
from ckpt._tree.flatten import unboxed_names
from ckpt._tree.leaf_specs import LeafSpec, StoredLeaf
from ckpt.errors import TargetMismatchError

logger = logging.getLogger("ckpt")

Array = np.ndarray[Any, Any]

_SHOWN = 20
# Weights that are meant to add up to one may miss it by rounding.
_TOLERANCE = 1e-6


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
    total = sum(weights)
    if abs(total - 1) > _TOLERANCE:
        logger.warning(
            "the weights of the merge add up to %.6g, and not to 1; they are taken as they are",
            total,
        )
    places = list(checkpoints)
    best = max(range(len(weights)), key=lambda number: weights[number])
    main = checkpoints[places[best]]
    _check_alike(checkpoints, places[best])
    found: dict[str, StoredItem] = {}
    kept: list[str] = []
    for name, item in main.items():
        if item.tree is None:
            kept.append(name)
            found[name] = item
            continue
        trees = [checkpoints[place][name].tree for place in places]
        leaves: list[Any] = []
        # One array in two places of the tree stays one.
        known: dict[tuple[int, ...], StoredLeaf] = {}
        for number, leaf in enumerate(item.tree.leaves):
            if _is_averaged(leaf):
                parts = [tree.leaves[number] for tree in trees if tree is not None]
                leaves.append(known.setdefault(tuple(map(id, parts)), _merged(parts, weights)))
            else:
                leaves.append(leaf)
                kept.append(f"{name}: {item.tree.names[number]}")
        found[name] = replace(item, tree=replace(item.tree, leaves=tuple(leaves)))
    if kept:
        logger.info(
            "%d leaves and items that are no real numbers (%s, ...) are those of %s, which has the "
            "largest weight",
            len(kept),
            kept[0],
            places[best],
        )
    return found


def _is_averaged(leaf: Any) -> bool:
    return (
        isinstance(leaf, StoredLeaf)
        and leaf.spec.dtype is not None
        and leaf.spec.kind != "key"
        and bool(jnp.issubdtype(parse_dtype(leaf.spec.dtype), jnp.inexact))
    )


def _merged(parts: Sequence[StoredLeaf], weights: Sequence[float]) -> StoredLeaf:
    spec = parts[0].spec
    dtype = parse_dtype(spec.dtype)
    # The sum, and what is added to it.
    copies = 2 * -(-_accumulator(dtype).itemsize // dtype.itemsize)
    return StoredLeaf(replace(spec, copies=copies), partial(_mean, parts, weights, spec))


def _mean(
    parts: Sequence[StoredLeaf], weights: Sequence[float], spec: LeafSpec, region: Region
) -> Array:
    dtype = parse_dtype(spec.dtype)
    wide = _accumulator(dtype)
    total: Array | None = None
    for part, weight in zip(parts, weights, strict=True):
        # A small array is kept, and read again.
        value = part.read(region)
        value = value.astype(wide, copy=value.dtype != wide or not value.flags.owndata)
        np.multiply(value, wide.type(weight), out=value)
        if total is None:
            total = value
        else:
            total += value
    assert total is not None
    return total.astype(dtype, copy=False)


def _accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are added up."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128 if dtype.itemsize > 8 else np.complex64)
    return np.dtype(np.float64 if dtype.itemsize > 4 else np.float32)


def _check_alike(checkpoints: Mapping[str, Mapping[str, StoredItem]], main: str) -> None:
    """Raise if the checkpoints have different leaves."""
    problems: list[str] = []
    first = _described(checkpoints[main])
    for place, items in checkpoints.items():
        other = _described(items)
        for path in [*first, *(path for path in other if path not in first)]:
            here, there = first.get(path), other.get(path)
            if here != there:
                problems.append(
                    f"{path}: {here or 'nothing'} in {main}, {there or 'nothing'} in {place}"
                )
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TargetMismatchError(
            f"these checkpoints cannot be merged: {len(problems)} leaves differ\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
        )


def _described(items: Mapping[str, StoredItem]) -> dict[str, str]:
    """Return what every leaf is, by item and leaf path."""
    found: dict[str, str] = {}
    for name, item in items.items():
        if item.tree is None:
            found[name] = item.entry.handler
            continue
        for path, leaf in zip(
            unboxed_names(item.tree.nodes, item.tree.names), item.tree.leaves, strict=True
        ):
            what = type(leaf).__name__
            if isinstance(leaf, StoredLeaf):
                what = leaf.spec.kind
                if leaf.spec.dtype is not None:
                    what = f"{leaf.spec.dtype}{list(leaf.spec.shape)}"
            found[f"{name}.{path}"] = what
    return found
