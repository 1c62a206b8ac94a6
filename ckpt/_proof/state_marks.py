"""Marks: what is kept of a state at a step, some bytes for each leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

Array = np.ndarray[Any, Any]

# The kind of objects that know their own state begins with this.
ITERATOR = "state of"
# Parts of an array that are told apart: its shards, or groups of them.
MOST_PARTS = 8
# A leaf of a mark.
#   fingerprint  as in vital signs
#   parts        the first channel of the fingerprint of each part; 0 if there is one part
#   split        number of regions that the array is divided into over its devices; 0 on the host
#   norm         square root of the sum of the squares of the finite values
#   sketch       sum of the finite values, each times a factor of its place (mean 0, variance 1)
#   value        a number without dimensions, if it is an integer
MARK = np.dtype(
    [
        ("fingerprint", "<u4", (2,)),
        ("parts", "<u4", (MOST_PARTS,)),
        ("split", "<u4"),
        ("norm", "<f4"),
        ("sketch", "<f4"),
        ("value", "<i8"),
    ]
)


class StateLayout(Struct, frozen=True, gc=False):
    """What marks of one program have in common.

    Attributes:
        names: The leaf paths.
        kinds: Kind of each leaf: the dtype of an array with its shape, such as `float32[8,4]`;
            `key`, its implementation and its shape; or `state of` and a class.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]


class StateMark(Struct, frozen=True, eq=False):
    """A mark.

    Attributes:
        step: The step.
        layout: The names and kinds of the leaves.
        leaves: `[leaves]` of dtype `MARK`.
    """

    step: int
    layout: StateLayout
    leaves: Array


def part_of(region: int, split: int) -> int:
    """Return the part of a region, by its number among all regions of the array."""
    return region * min(split, MOST_PARTS) // split
