"""Kernels of vital signs: one pass over the shards of an array, each on its own device.

A kernel computes the same signs as `ckpt._vitals` on the host, with numbers of 32 bits only. All
sums over a value are one reduction with several results, so memory is read once. No device waits
for another: the host adds up the sums of the shards.

The pass over arrays on their devices: begun before the caller goes on, and read afterwards. The
kernels are in the queues of the devices when `begin_pass` returns, so from then on the caller may
donate its arrays. The results are a few bytes for each chunk, fetched on demand.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from msgspec import Struct, field

from ckpt._engine.memory.staging import shards_of
from ckpt._format.regions import Region, Shape, addressable_regions, chunk_grid, position_in_grid
from ckpt._plan.chunking import LeafPlan, holders_of
from ckpt._runtime.threads import run_in_thread
from ckpt._vitals.fingerprint import CHANNELS, COLUMN_BITS, COLUMNS, odd
from ckpt._vitals.signs import COPY, SIGNS, Array, no_copies
from ckpt._vitals.stored_signs import first_names

logger = logging.getLogger("ckpt")

# Where vital signs are taken; see `ckpt.extensions.VitalSigns`.
SignsPlace = Literal["auto", "host", "device"]

# Most memory that a kernel may need for itself: this part of a shard's memory, and a little.
_SCRATCH_SHARE, _SCRATCH_BYTES = 8, 4 << 20
_AXIS = "shards"

# Squares of 32-bit floats overflow or vanish. So values are summed up in three ranges, of which the
# outer two are scaled: J. L. Blue, "A portable Fortran program to find the Euclidean norm of a
# vector", ACM Transactions on Mathematical Software 4 (1978).
_SMALL, _LARGE = 2.0**-60, 2.0**50
SMALL_SCALE, LARGE_SCALE = 2.0**100, 2.0**-80
# Bit pattern of the least 32-bit float, without its sign, that is not finite.
_NOT_FINITE = 0x7F800000
# Values that are added up before their sum is added to others. Equal values lose the most
# precision: the norm of four million is off by 2e-5 with runs of 4096, and by 5e-6 with these,
# whose sums take 5 % of the memory of the narrowest floats.
_RUN = 512
# Weight of each part of a word in the folded word, by its place.
_PARTS = (1, 1 << 8, (1 << 16) + 1, (1 << 24) + (1 << 8))

# Dtypes that the kernel takes, with the integers of their width.
KERNEL_DTYPES: dict[str, Any] = {
    "float32": jnp.uint32,
    "bfloat16": jnp.uint16,
    "float16": jnp.uint16,
    "float8_e4m3fn": jnp.uint8,
    "float8_e5m2": jnp.uint8,
}


class KernelKey(Struct, frozen=True):
    """The properties that a kernel is compiled for.

    Attributes:
        devices: The devices of the shards, in the order of the shards.
        shard: Shape of a shard.
        dtype: Name of the dtype.
        chunk: Shape of a chunk, which must be consecutive memory of a shard; see `is_run`.
        offsets: The first corner of each shard in its array.
    """

    devices: tuple[Any, ...]
    shard: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    def sharding(self) -> jax.sharding.NamedSharding:
        """Return the sharding of the shards as one array: side by side along its first axis."""
        return _side_by_side(self.devices)

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the shards as one array."""
        first, *others = self.shard
        return (first * len(self.devices), *others)


class Kernels(Struct):
    """The compiled kernels of a manager. Used by one save at a time.

    A kernel is a function of an array whose first axis is divided over devices, so that each has
    its shard. It returns the results of `chunk_sums` for all devices: `[devices, chunks, n]`.

    Attributes:
        wanted: Kernels that a save could have used, and that are to be compiled after it.
    """

    _known: dict[KernelKey, Any] = field(default_factory=dict)
    wanted: dict[KernelKey, None] = field(default_factory=dict)
    _compiling: bool = False

    def find(self, key: KernelKey) -> Any | None:
        """Return a kernel; None if it is not compiled."""
        return self._known.get(key)

    def give_up(self, key: KernelKey) -> None:
        """Never use a kernel again, since it cannot run on the arrays that it was made for."""
        self._known[key] = None

    def want(self, keys: Iterable[KernelKey]) -> None:
        """Let kernels that were never compiled be compiled after the save."""
        self.wanted.update((key, None) for key in keys if key not in self._known)

    async def compile_wanted(self, goes_on: Callable[[], bool]) -> None:
        """Compile kernels that saves wanted, while `goes_on` returns True; on the engine's loop.

        Returns at once if another call is doing this already.
        """
        if self._compiling:
            return
        self._compiling = True
        try:
            while self.wanted and goes_on():
                # Removed only when compiled, so that a save meanwhile does not want it again.
                key = next(iter(self.wanted))
                await run_in_thread(self.compile, key)
                del self.wanted[key]
        finally:
            self._compiling = False

    def compile(self, key: KernelKey) -> None:
        """Compile a kernel, which takes some tenths of a second. If that fails, there is none."""
        if key in self._known:
            return
        kernel = None
        try:
            kernel = _compiled(key)
        except Exception as error:
            logger.warning(
                "no kernel of vital signs for %s%s on %s: they are taken on the host (%s)",
                key.dtype,
                list(key.shard),
                key.devices[0],
                error,
            )
        self._known[key] = kernel


@functools.lru_cache(maxsize=64)
def _side_by_side(devices: tuple[Any, ...]) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    spec = jax.sharding.PartitionSpec(_AXIS)  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(mesh, spec)


def _compiled(key: KernelKey) -> Any | None:
    """Return a compiled kernel; None if it would use much memory of its own."""
    sharding = key.sharding()

    def sums(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        offset = jnp.array(key.offsets, jnp.uint32)[lax.axis_index(_AXIS)]
        return chunk_sums(shard, offset, key.chunk)

    mapped = jax.shard_map(
        sums,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=(sharding.spec, sharding.spec),
    )
    shards = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        key.shape(), jnp.dtype(key.dtype), sharding=sharding
    )
    kernel = jax.jit(mapped).lower(shards).compile()
    memory = kernel.memory_analysis()
    nbytes = shards.dtype.itemsize * math.prod(key.shard)
    # Not all backends report their memory.
    scratch = 0 if memory is None else memory.temp_size_in_bytes
    return kernel if scratch <= nbytes // _SCRATCH_SHARE + _SCRATCH_BYTES else None


def is_run(chunk: Sequence[int], shard: Sequence[int]) -> bool:
    """Return True if a chunk is consecutive memory of a shard: cut along its first axes only."""
    cut = next((axis for axis, n in enumerate(chunk) if n > 1), len(chunk))
    return tuple(chunk[cut + 1 :]) == tuple(shard[cut + 1 :])


def chunk_sums(
    shard: jax.Array, offset: jax.Array, chunk: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the sums over each chunk of a shard, in C order.

    Args:
        shard: The shard.
        offset: `[rank] uint32`, its first corner in its array.
        chunk: Shape of a chunk, which must be consecutive memory of a shard; see `is_run`.

    Returns:
        `[1, chunks, 3] uint32`, the two channels of the fingerprint and the number of values that
        are not finite; and `[1, chunks, 4] float32`, the sums of the squares of small, middle and
        large values, and the largest value.
    """
    values = jnp.abs(shard.astype(jnp.float32))
    # Compared as integers, since a comparison of floats may take small ones for 0.
    is_finite = lax.bitcast_convert_type(values, jnp.uint32) < jnp.uint32(_NOT_FINITE)
    values = jnp.where(is_finite, values, 0)
    is_small, is_large = values < _SMALL, values > _LARGE
    words = _folded(shard) * row_factors(offset, shard.shape[:-1])
    columns = column_factors(offset[-1], shard.shape, shard.dtype.itemsize)
    found = reduced(
        (
            *(words * columns[channel] for channel in range(CHANNELS)),
            (~is_finite).astype(jnp.uint32),
            jnp.square(jnp.where(is_small, values * SMALL_SCALE, 0)),
            jnp.square(jnp.where(is_small | is_large, 0, values)),
            jnp.square(jnp.where(is_large, values * LARGE_SCALE, 0)),
            values,
        ),
        chunk,
    )
    counts, squares = found[: CHANNELS + 1], found[CHANNELS + 1 :]
    return jnp.stack(counts, axis=-1)[None], jnp.stack(squares, axis=-1)[None]


def reduced(operands: Sequence[jax.Array], chunk: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Add up arrays chunk by chunk, but take the maximum of the last one; `[chunks]` each.

    Values are added up in runs, then the sums of the runs, and so on: a long sum of floats would
    lose its last terms.
    """

    def join(one: Sequence[jax.Array], two: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        *added, largest = zip(one, two, strict=True)
        return (*(a + b for a, b in added), jnp.maximum(*largest))

    zeros = tuple(np.zeros((), each.dtype) for each in operands)
    # The last chunk along an axis may be shorter.
    past = [(0, -length % n) for length, n in zip(operands[0].shape, chunk, strict=True)]
    found = tuple(jnp.pad(each, past).reshape(-1, math.prod(chunk)) for each in operands)
    while True:
        chunks, length = found[0].shape
        run = min(length, _RUN)
        padded = (jnp.pad(each, ((0, 0), (0, -length % run))) for each in found)
        runs = tuple(each.reshape(chunks, -1, run) for each in padded)
        # One reduction, so that nothing is computed twice.
        found = tuple(lax.reduce(runs, zeros, join, (2,)))
        if found[0].shape[1] == 1:
            return tuple(each[:, 0] for each in found)


def _folded(shard: jax.Array) -> jax.Array:
    """Return each element's contribution to its folded word, except for its place in the word."""
    integers = lax.bitcast_convert_type(shard, KERNEL_DTYPES[shard.dtype.name])
    words: jax.Array = integers.astype(jnp.uint32)
    if shard.dtype.itemsize == 4:
        words += words >> 16
    return words


def column_factors(first: jax.Array, shape: Sequence[int], itemsize: int) -> jax.Array:
    """Return the weights of elements along the last dimension; `[2, elements]`."""
    dimension = len(shape) - 1
    elements = first + lax.iota(jnp.uint32, shape[-1])
    words, part = elements // (4 // itemsize), elements % (4 // itemsize)
    shared = jnp.array(_PARTS[::itemsize], jnp.uint32)[part]
    shared *= _high_factors(words >> COLUMN_BITS, dimension)
    lower = words & (COLUMNS - 1)
    return jnp.stack([odd(lower, dimension, channel) * shared for channel in range(CHANNELS)])


def row_factors(offset: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return the factors of rows, in the shape of the outer dimensions and a last one of 1."""
    along = jnp.ones((*shape, 1), jnp.uint32)
    for dimension, length in enumerate(shape):
        indexes = offset[dimension] + lax.iota(jnp.uint32, length)
        factors = odd(indexes & (COLUMNS - 1), dimension, 2)
        factors *= _high_factors(indexes >> COLUMN_BITS, dimension)
        along *= factors.reshape(length, *[1] * (len(shape) - dimension))
    return along


def _high_factors(high: jax.Array, dimension: int) -> jax.Array:
    return jnp.where(high > 0, odd(high, dimension, 3), 1)


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
    if place == "device":
        for key in keys.values():
            kernels.compile(key)
    else:
        kernels.want(keys.values())
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
