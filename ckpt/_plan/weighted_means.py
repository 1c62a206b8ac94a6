"""Weighted means of checkpoints: the leaves to average, the precision, and checks. Pure."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from ckpt._arguments import invalid, shown
from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ItemEntry
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.errors import InvalidArgumentError, TargetMismatchError

logger = logging.getLogger("ckpt")

_SHOWN = 20
# Weights that are meant to add up to one may miss it by rounding.
_TOLERANCE = 1e-6


def check_weights(name: str, given: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the weights of checkpoints; warn if their sum is not one.

    Raises:
        InvalidArgumentError: There is no weight, or a weight is not a finite number.
    """
    if not given:
        raise invalid(name, given, "a checkpoint or more, each with its weight")
    for path, weight in given.items():
        is_number = isinstance(weight, int | float | np.floating) and not isinstance(weight, bool)
        if not (is_number and abs(weight) <= sys.float_info.max):
            raise InvalidArgumentError(
                f"{name}: the weight of {shown(path)} is {shown(weight)}; expected a number"
            )
    total = math.fsum(map(float, given.values()))
    if abs(total - 1) > _TOLERANCE:
        logger.warning(
            "the weights of the merge add up to %.6g, and not to 1; they are taken as they are",
            total,
        )
    return {path: float(weight) for path, weight in given.items()}


def is_averaged(kind: str, dtype: str | None) -> bool:
    """Return True if a leaf has real or complex numbers; others cannot have a mean."""
    if dtype is None or kind == "key" or kind not in ARRAY_KINDS:
        return False
    return bool(jnp.issubdtype(parse_dtype(dtype), jnp.inexact))


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are added up: single precision, or their own if higher."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128 if dtype.itemsize > 8 else np.complex64)
    return np.dtype(np.float64 if dtype.itemsize > 4 else np.float32)


def check_alike(checkpoints: Mapping[str, Mapping[str, ItemEntry]], main: str) -> None:
    """Raise an error if checkpoints have different leaves.

    Args:
        checkpoints: Items of each checkpoint, by its path or URL.
        main: The checkpoint that the others are compared with.

    Raises:
        TargetMismatchError: Leaves differ; lists them all.
    """
    first = _described(checkpoints[main])
    problems: list[str] = []
    for place, items in checkpoints.items():
        other = _described(items)
        for path in [*first, *(path for path in other if path not in first)]:
            here, there = first.get(path, "nothing"), other.get(path, "nothing")
            if here != there:
                problems.append(f"{path}: {here} in {main}, {there} in {place}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TargetMismatchError(
            f"these checkpoints cannot be merged: {len(problems)} leaves differ\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
        )


def _described(items: Mapping[str, ItemEntry]) -> dict[str, str]:
    """Return a description of every leaf, by item and leaf path."""
    found: dict[str, str] = {}
    for name, item in items.items():
        if not item.nodes and not len(item.leaves):
            found[name] = item.handler
            continue
        names = unboxed_names(item.nodes, item.leaves.names)
        for path, leaf in zip(names, item.leaves, strict=True):
            is_array = leaf.kind in ARRAY_KINDS
            found[f"{name}.{path}"] = (
                f"{leaf.dtype}{list(leaf.shape)}" if is_array else f"a Python {leaf.kind}"
            )
    return found


def numbers_in(other: ItemEntry, main: ItemEntry) -> Sequence[int]:
    """Return the number in another item of every leaf of the main item: leaves match by name."""
    names, others = (unboxed_names(each.nodes, each.leaves.names) for each in (main, other))
    numbers = {name: number for number, name in enumerate(others)}
    return [numbers[name] for name in names]


def with_common_arrays(main: ItemEntry, others: Sequence[ItemEntry]) -> ItemEntry:
    """Return the main item, in which leaves are one array only if they have one mean.

    Leaves that are one array in the main checkpoint may be several in another.
    """
    if not main.leaves.same_as:
        return main
    every = [(other.leaves.same_as, numbers_in(other, main)) for other in others]
    firsts: dict[tuple[int, ...], int] = {}
    leaves = []
    for number, leaf in enumerate(main.leaves):
        array = [number if leaf.same_as is None else leaf.same_as]
        if is_averaged(leaf.kind, leaf.dtype):
            array += [same_as.get(numbers[number], numbers[number]) for same_as, numbers in every]
        first = firsts.setdefault(tuple(array), number)
        leaves.append(replace(leaf, same_as=None if first == number else first))
    return replace(main, leaves=LeafTable.of(leaves))


def heaviest(places: Sequence[str], weights: Sequence[float]) -> str:
    """Return the checkpoint with the largest weight; the first if there are several."""
    return max(zip(weights, places, strict=True), key=lambda pair: pair[0])[1]
