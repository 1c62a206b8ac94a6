"""Manifest entries of leaves: made from a plan after a save, checked before a restore."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt.errors import CorruptCheckpointError
from ckpt.layout.leaves import (
    ARRAY_KINDS,
    SCALAR_KINDS,
    decode_scalar,
    encode_scalar,
    parse_dtype,
)
from ckpt.layout.plan import SavePlan
from ckpt.layout.shardings import describe_sharding
from ckpt.layout.shards import chunk_grid
from ckpt.manifest import ItemEntry, LeafEntry, ShardingEntry

__all__ = ["LeafRecords", "check_leaves", "record_leaves"]

# numpy's own limit of dimensions; zarr and jax have none lower.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 48


@dataclass(frozen=True, slots=True)
class LeafRecords:
    """The manifest entries of an item's leaves and of the shardings they refer to."""

    leaves: list[LeafEntry]
    shardings: list[ShardingEntry]
    nbytes: int


def record_leaves(
    plan: SavePlan, leaves: Sequence[Any], digests: Mapping[tuple[int, tuple[int, ...]], str]
) -> LeafRecords:
    """Return the entries of leaves that were written by `plan`.

    Args:
        plan: The plan.
        leaves: Python scalars at their places; arrays are not looked at.
        digests: Digest of every chunk by leaf number and place.
    """
    numbers: dict[jax.sharding.Sharding, int] = {}
    entries = []
    for number, leaf in enumerate(plan.leaves):
        spec = leaf.spec
        if spec.kind in SCALAR_KINDS:
            value = encode_scalar(spec.kind, leaves[number])
            entries.append(LeafEntry(name=leaf.name, kind=spec.kind, value=value))
            continue
        sharding = None
        if spec.sharding is not None:
            sharding = numbers.setdefault(spec.sharding, len(numbers))
        entries.append(
            LeafEntry(
                name=leaf.name,
                kind=spec.kind,
                dtype=spec.dtype,
                shape=list(spec.shape),
                chunks=list(leaf.chunk),
                digests=[digests[number, place] for place in np.ndindex(*leaf.grid)],
                packed=leaf.packed,
                sharding=sharding,
                committed=spec.committed,
                weak_type=spec.weak_type,
            )
        )
    return LeafRecords(entries, [describe_sharding(s) for s in numbers], plan.nbytes)


def check_leaves(item: ItemEntry) -> None:
    """Check that the leaf entries of an item can be true, before anything is made of them.

    Raises:
        CorruptCheckpointError: An entry contradicts itself.
    """
    seen: set[str] = set()
    for entry in item.leaves:
        if entry.name in seen:
            raise CorruptCheckpointError("two leaves are stored under one name", leaf=entry.name)
        seen.add(entry.name)
        if entry.kind in SCALAR_KINDS:
            decode_scalar(entry)
        elif entry.kind in ARRAY_KINDS:
            _check_array(entry, len(item.shardings))
        else:
            raise CorruptCheckpointError(
                f"a leaf of the unknown kind {entry.kind!r:.60}", leaf=entry.name
            )


def _check_array(entry: LeafEntry, sharding_count: int) -> None:
    parse_dtype(entry.dtype)
    shape, chunk = entry.shape, entry.chunks
    possible = (
        len(shape) == len(chunk) <= _MAX_RANK
        and all(0 <= n <= _MAX_LENGTH for n in shape)
        and all(1 <= n <= _MAX_LENGTH for n in chunk)
        and math.prod(chunk_grid(shape, chunk)) == len(entry.digests)
        and (not entry.packed or len(entry.digests) <= 1)
        and (entry.sharding is None or 0 <= entry.sharding < sharding_count)
    )
    if not possible:
        raise CorruptCheckpointError(
            f"shape {shape[:8]}, chunks {chunk[:8]}, {len(entry.digests)} digests and sharding "
            f"{entry.sharding} do not fit each other",
            leaf=entry.name,
        )
