"""Weighted means of checkpoints: what is averaged, how precisely, and what is alike. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ckpt._arguments import invalid, shown
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.errors import InvalidArgumentError, TargetMismatchError

logger = logging.getLogger("ckpt")

_SHOWN = 20
# Weights that are meant to add up to one may miss it by rounding.
_TOLERANCE = 1e-6


def check_weights(name: str, given: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the weights of checkpoints; a sum other than one is said in a warning.

    Raises:
        InvalidArgumentError: There is none, or one is not a finite number.
    """
    if not given:
        raise invalid(name, given, "a checkpoint or more, each with its weight")
    for path, weight in given.items():
        if not _is_number(weight):
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


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_averaged(kind: str, dtype: str | None) -> bool:
    """Tell whether a leaf has real or complex numbers; others cannot have a mean."""
    return (
        kind in ARRAY_KINDS
        and kind != "key"
        and dtype is not None
        and bool(jnp.issubdtype(parse_dtype(dtype), jnp.inexact))
    )


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values are added up: single precision, or their own if higher."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128 if dtype.itemsize > 8 else np.complex64)
    return np.dtype(np.float64 if dtype.itemsize > 4 else np.float32)


def check_alike(checkpoints: Mapping[str, Mapping[str, ItemEntry]], main: str) -> None:
    """Raise if checkpoints have different leaves.

    Args:
        checkpoints: Their items, by where they are.
        main: The one that the others are compared with.

    Raises:
        TargetMismatchError: They have; lists every leaf.
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
    """Return what every leaf is, by item and leaf path."""
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


def heaviest(places: Sequence[str], weights: Sequence[float]) -> str:
    """Return the checkpoint with the largest weight, the first of several."""
    return max(zip(weights, places, strict=True), key=lambda pair: pair[0])[1]
