"""The pass over arrays on their devices: begun before the caller goes on, and read afterwards.

The kernels are in the queues of the devices when `begin_pass` returns, so from then on the caller
may donate its arrays. The results are a few bytes for each chunk, fetched on demand.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct

from ckpt._engine.memory.staging import shards_of
from ckpt._format.regions import Region, Shape, addressable_regions, chunk_grid, position_in_grid
from ckpt._plan.chunking import LeafPlan, holders_of
from ckpt._settings import SignsPlace
from ckpt._vitals.extension.kernels import (
    KERNEL_DTYPES,
    LARGE_SCALE,
    SMALL_SCALE,
    KernelKey,
    Kernels,
    is_run,
)
from ckpt._vitals.extension.merged_signs import first_names
from ckpt._vitals.records import COPY, SIGNS, Array, no_copies

logger = logging.getLogger("ckpt")

# Smallest shard for a kernel: small shards are many, and the host takes small arrays together.
_LEAST_BYTES = 1 << 20
# Most elements of a shard: indexes and counts have 32 bits.
_MOST_ELEMENTS = 1 << 31


class _LeafPass(Struct, frozen=True, eq=False):
    """The kernels over one leaf.

    Attributes:
        plan: Plan of the leaf.
        regions: The regions of the leaf on devices of this process, and their positions in the
            results.
        elsewhere: Regions that other processes hold, too.
        devices: The devices, in the order of the results.
        results: Pending results; see `Kernels`.
    """

    plan: LeafPlan
    regions: Sequence[tuple[Region, Sequence[int]]]
    elsewhere: frozenset[Region]
    devices: Sequence[jax.Device]
    results: tuple[jax.Array, jax.Array]


class _Found(Struct, frozen=True, eq=False):
    """The results of the kernels over one leaf.

    Attributes:
        records: Records of the vital signs, by number of the chunk.
        copies: Chunks of this process that others hold, too; see `COPY`.
        unequal: Devices whose values differ from those of most devices with the same region.
    """

    records: Mapping[int, Array]
    copies: Array
    unequal: Sequence[jax.Device]


class DevicePass:
    """The pass over the leaves of an item. Its methods run in worker threads.

    Attributes:
        looked_at: Numbers of the leaves that the pass covers.
    """

    def __init__(self, pending: Mapping[int, _LeafPass]) -> None:
        """Wait for the kernels over leaves, by their numbers."""
        self.looked_at = frozenset(pending)
        self._pending = pending
        # None for a leaf whose computation failed.
        self._found: dict[int, _Found | None] = {}
        self._reading = threading.Lock()

    def record(self, leaf: int, chunk: int) -> Array | None:
        """Return the record of a chunk; None if the host is to take it."""
        found = self._read(leaf)
        return None if found is None else found.records[chunk]

    def copies(self, process: int) -> Array:
        """Return this process's copies of chunks that should be equal on several devices.

        `process` is its number.
        """
        found = filter(None, map(self._read, self._pending))
        copies = np.concatenate([no_copies(), *(each.copies for each in found)])
        copies["process"] = process
        return copies

    def warn_of_unequal(self, item: str) -> None:
        """Warn of leaves of `item` that differ on devices of this process and should be equal."""
        found = {each.plan.name: self._read(leaf) for leaf, each in self._pending.items()}
        unequal = {name: each.unequal for name, each in found.items() if each and each.unequal}
        if not unequal:
            return
        names = [f"{name!r} ({', '.join(map(str, each))})" for name, each in unequal.items()]
        logger.warning(
            "item %r: devices that should hold the same values do not, so what is saved may be "
            "wrong: %s. A device may be faulty, or the program lets its replicas drift apart",
            item,
            first_names(names),
        )

    def _read(self, leaf: int) -> _Found | None:
        if leaf not in self._pending:
            return None
        with self._reading:
            if leaf not in self._found:
                pending = self._pending[leaf]
                try:
                    self._found[leaf] = _read(leaf, pending)
                except Exception as error:
                    self._found[leaf] = None
                    _say_failed(pending.plan, error)
            return self._found[leaf]


def begin_pass(
    place: SignsPlace,
    plans: Sequence[LeafPlan],
    leaves: Sequence[Any],
    known: Iterable[int],
    kernels: Kernels,
) -> DevicePass:
    """Begin to take the vital signs of arrays on their devices, where that is possible.

    Args:
        place: Place where the signs are taken. Only "device" waits for kernels to be compiled: a
            save should not take longer the first time.
        plans: The plans of all leaves of the item.
        leaves: The leaves.
        known: Numbers of leaves that are left out.
        kernels: The kernels compiled so far.
    """
    if place == "host":
        return DevicePass({})
    left_out = set(known)
    keys = {
        number: key_of(leaf.sharding, leaf.shape, leaf.dtype.name, tuple(plan.chunk))
        for number, (plan, leaf) in enumerate(zip(plans, leaves, strict=True))
        if number not in left_out and _is_suitable(plan, leaf, on_cpus=place == "device")
    }
    missing = kernels.missing(keys.values())
    if place == "device":
        for key in missing:
            kernels.compile(key)
    else:
        kernels.wanted.update(dict.fromkeys(missing))
    pending: dict[int, _LeafPass] = {}
    for number, key in keys.items():
        kernel = kernels.find(key)
        if kernel is not None:
            try:
                pending[number] = _begin(plans[number], leaves[number], key, kernel)
            except Exception as error:
                # For example an array in another layout, or a device whose memory is full.
                kernels.give_up(key)
                _say_failed(plans[number], error)
    return DevicePass(pending)


def _say_failed(plan: LeafPlan, error: Exception) -> None:
    logger.warning(
        "the vital signs of %r, and of arrays like it, are taken on the host, since its devices "
        "could not: %s",
        plan.name,
        error,
    )


def _is_suitable(plan: LeafPlan, leaf: Any, *, on_cpus: bool) -> bool:
    if not isinstance(leaf, jax.Array) or plan.packed or not plan.has_chunks:
        return False
    # The stored dtype must be the dtype on the device.
    return leaf.dtype.name == plan.spec.dtype and can_be_passed(leaf, plan.chunk, on_cpus=on_cpus)


def can_be_passed(leaf: jax.Array, chunk: Shape, *, on_cpus: bool) -> bool:
    """Return True if a kernel can cover an array chunk by chunk, and if that is worth it."""
    if leaf.dtype.name not in KERNEL_DTYPES or leaf.is_deleted():
        return False
    if not _is_in_device_memory(leaf, on_cpus=on_cpus):
        return False
    shard = leaf.sharding.shard_shape(leaf.shape)
    divides = all(
        part % n == 0 or part == length
        for part, n, length in zip(shard, chunk, leaf.shape, strict=True)
    )
    elements = math.prod(shard)
    return (
        divides
        and is_run(chunk, shard)
        and elements * leaf.dtype.itemsize >= _LEAST_BYTES
        and max(*leaf.shape, elements) <= _MOST_ELEMENTS
    )


def _is_in_device_memory(leaf: jax.Array, *, on_cpus: bool) -> bool:
    # Some processes of a job may have no part of an array.
    device: Any = next(iter(leaf.sharding.addressable_devices), None)
    if device is None or (device.platform == "cpu" and not on_cpus):
        return False
    return leaf.sharding.memory_kind in (None, _memory_of(device))


@functools.lru_cache(maxsize=64)
def _memory_of(device: Any) -> str:
    return str(device.default_memory().kind)


@functools.lru_cache(maxsize=4096)
def key_of(sharding: jax.sharding.Sharding, shape: Shape, dtype: str, chunk: Shape) -> KernelKey:
    """Return the key of the kernel over the chunks of an array."""
    devices = tuple(sharding.addressable_devices_indices_map(shape))
    offsets = [(0,) * len(shape)] * len(devices)
    for region, positions in addressable_regions(sharding, shape):
        for position in positions:
            offsets[position] = tuple(region.offset)
    return KernelKey(devices, sharding.shard_shape(shape), dtype, chunk, tuple(offsets))


def _begin(plan: LeafPlan, leaf: jax.Array, key: KernelKey, kernel: Any) -> _LeafPass:
    regions = addressable_regions(leaf.sharding, leaf.shape)
    elsewhere = _held_elsewhere(leaf, regions)
    return _LeafPass(plan, regions, elsewhere, key.devices, kernel(joined(leaf, key)))


def joined(leaf: jax.Array, key: KernelKey) -> jax.Array:
    """Return the memory of the shards of this process as one array; nothing is copied."""
    return jax.make_array_from_single_device_arrays(
        key.shape(), key.sharding(), [shard.data for shard in shards_of(leaf)]
    )


def _held_elsewhere(
    leaf: jax.Array, regions: Sequence[tuple[Region, Sequence[int]]]
) -> frozenset[Region]:
    if leaf.is_fully_addressable:
        return frozenset()
    return frozenset(
        region
        for region, _ in regions
        if len(holders_of(leaf.sharding, leaf.shape, region.offset)) > 1
    )


def _read(leaf: int, pending: _LeafPass) -> _Found:
    """Wait for the kernels over a leaf; their errors are raised."""
    every = signs_records(*(np.asarray(each) for each in pending.results))
    found: dict[int, Array] = {}
    copies: list[tuple[Any, ...]] = []
    unequal: dict[jax.Device, None] = {}
    for region, positions in pending.regions:
        for at, number in enumerate(_chunks_of(pending.plan, region)):
            records = every[list(positions), at]
            found[number] = records[0]
            prints, which, counts = np.unique(
                records["fingerprint"], axis=0, return_inverse=True, return_counts=True
            )
            if len(prints) > 1 or region in pending.elsewhere:
                copies += [(0, leaf, number, tuple(each)) for each in prints.tolist()]
            if len(prints) > 1:
                is_most = counts == counts.max()
                # If no value has the most holders alone, all may be wrong.
                is_other = ~is_most[which.reshape(-1)] | (is_most.sum() > 1)
                others = [positions[each] for each in np.flatnonzero(is_other).tolist()]
                unequal.update(dict.fromkeys(pending.devices[each] for each in others))
    return _Found(found, np.array(copies, COPY), list(unequal))


def signs_records(counts: Array, squares: Array) -> Array:
    """Return the records of vital signs from the sums of the kernels."""
    records = np.zeros(counts.shape[:2], SIGNS)
    records["fingerprint"] = counts[..., :2]
    records["nonfinite"] = counts[..., 2]
    small, middle, large = np.moveaxis(squares[..., :3].astype(np.float64), -1, 0)
    records["norm"] = np.sqrt(small / SMALL_SCALE**2 + middle + large / LARGE_SCALE**2)
    records["absmax"] = squares[..., 3]
    return records


def _chunks_of(plan: LeafPlan, region: Region) -> list[int]:
    """Return the numbers of the chunks of a region, in C order."""
    first = [at // n for at, n in zip(region.offset, plan.chunk, strict=True)]
    grid = chunk_grid(region.shape, plan.chunk)
    return [
        position_in_grid([a + b for a, b in zip(first, place, strict=True)], plan.grid)
        for place in np.ndindex(*grid)
    ]
