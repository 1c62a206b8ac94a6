"""Weighted reads: arrays that are the weighted mean of those of several checkpoints.

They are added up on the devices that they are for, a group of arrays at a time, so that besides the
result there is never more than a group of each checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry
from ckpt._plan.targets import ArrayRead
from ckpt._plan.weighted_means import accumulator, is_averaged
from ckpt._tree.boxes import unboxed_names

T = TypeVar("T")

_GROUP_BYTES = 256 << 20


class WeightedItem(Struct, frozen=True, eq=False):
    """One item of one of the checkpoints.

    Attributes:
        weight: Its weight.
        entry: The entry of the item.
        reader: Reads it.
    """

    weight: float
    entry: ItemEntry
    reader: EngineItemReader


class WeightedReader:
    """An `ItemReader` for the weighted mean of items; everything but arrays is that of one."""

    def __init__(self, main: WeightedItem, every: Sequence[WeightedItem]) -> None:
        """Read `every` item; `main` is the one among them with the largest weight.

        They have the same leaves; see `check_alike`.
        """
        self._main = main
        self._every = every
        self.item = main.reader.item
        self.process = main.reader.process
        self.processes = main.reader.processes
        self._numbers = [_numbers_in(each.entry, main.entry) for each in every]

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await self._main.reader.in_thread(function, *args)

    async def read_file(self, path: str) -> bytes:
        """Read a file of the main item."""
        return await self._main.reader.read_file(path)

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        """Read arrays; see `ItemReader.read`."""
        found: list[Any] = [None] * len(reads)
        summed = [n for n, read in enumerate(reads) if _is_summed(read)]
        others = sorted(set(range(len(reads))) - set(summed))
        single = await self._main.reader.read(entry, [reads[n] for n in others])
        for number, value in zip(others, single, strict=True):
            found[number] = value
        for group in _groups(summed, reads):
            total: list[Any] | None = None
            for each, numbers in zip(self._every, self._numbers, strict=True):
                wanted = [_wide(_renumbered(reads[n], numbers)) for n in group]
                values = await each.reader.read(each.entry, wanted)
                total = await self.in_thread(_added, total, values, each.weight)
            assert total is not None
            made = await self.in_thread(_narrowed, total, [reads[n] for n in group])
            for number, value in zip(group, made, strict=True):
                found[number] = value
        return found


def _numbers_in(other: ItemEntry, main: ItemEntry) -> Mapping[int, int] | None:
    """Return the numbers of the main item's leaves in another; None if they are the same."""
    names, others = (unboxed_names(each.nodes, each.leaves.names) for each in (main, other))
    if list(names) == list(others):
        return None
    places = {name: number for number, name in enumerate(others)}
    return {number: places[name] for number, name in enumerate(names)}


def _is_summed(read: ArrayRead) -> bool:
    target = read.target
    return (
        read.value is None
        and target.kind != "key"
        and is_averaged("numpy", read.stored)
        and is_averaged("numpy", target.dtype.name)
    )


def _wide(read: ArrayRead) -> ArrayRead:
    """Return the same read, in the dtype in which values are added up."""
    dtype, target = accumulator(parse_dtype(read.stored)), read.target
    # A number is made at the end.
    kind = target.kind if target.kind in ("jax", "numpy") else "numpy"
    if kind == "jax":
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return replace(read, target=replace(target, kind=kind, dtype=dtype, weak_type=False))


def _renumbered(read: ArrayRead, numbers: Mapping[int, int] | None) -> ArrayRead:
    if numbers is None:
        return read
    return replace(
        read,
        leaf=None if read.leaf is None else numbers[read.leaf],
        pieces=tuple(replace(piece, leaf=numbers[piece.leaf]) for piece in read.pieces),
    )


def _groups(numbers: Sequence[int], reads: Sequence[ArrayRead]) -> list[list[int]]:
    groups: list[list[int]] = []
    left = 0
    for number in numbers:
        nbytes = 4 * int(np.prod(reads[number].shape, dtype=np.int64))
        if not groups or nbytes > left:
            groups.append([])
            left = _GROUP_BYTES
        groups[-1].append(number)
        left -= nbytes
    return groups


def _added(total: list[Any] | None, values: list[Any], weight: float) -> list[Any]:
    found = []
    for number, value in enumerate(values):
        before = None if total is None else total[number]
        if not isinstance(value, jax.Array):
            np.multiply(value, value.dtype.type(weight), out=value)
            found.append(value if before is None else np.add(before, value, out=before))
        elif before is None:
            found.append(_on_shards(lambda part: _scaled(part, weight), value))
        else:
            found.append(_on_shards(lambda part, sum: _plus(part, sum, weight), value, before))
    return found


@jax.jit
def _scaled(value: Any, weight: Any) -> Any:
    return value * jnp.asarray(weight, value.dtype)


@functools.partial(jax.jit, donate_argnums=1)
def _plus(value: Any, before: Any, weight: Any) -> Any:
    return before + value * jnp.asarray(weight, value.dtype)


def _on_shards(function: Callable[..., Any], first: jax.Array, *more: jax.Array) -> jax.Array:
    """Call a function with the arrays of each device: no process waits for another."""
    parts = zip(*(each.addressable_shards for each in (first, *more)), strict=True)
    made: list[jax.Array] = [function(*(shard.data for shard in part)) for part in parts]
    if not first.committed:
        (array,) = made
        return array
    return jax.make_array_from_single_device_arrays(first.shape, first.sharding, made)


def _narrowed(total: list[Any], reads: Sequence[ArrayRead]) -> list[Any]:
    """Return sums as they are wanted."""
    return [_as_wanted(value, read) for value, read in zip(total, reads, strict=True)]


def _as_wanted(value: Any, read: ArrayRead) -> Any:
    target = read.target
    if target.kind == "jax":
        return _on_shards(lambda part: part.astype(target.dtype), value)
    made = np.asarray(value).astype(target.dtype)
    return made if target.kind == "numpy" else made[()]
