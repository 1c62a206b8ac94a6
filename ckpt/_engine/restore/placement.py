"""Placement: host buffers become the arrays that the target asks for, of jax or of numpy.

An array over several processes is made of the parts on this process's own devices: no program runs,
nothing is compared with the other processes, and this process waits for none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from msgspec import Struct, field

from ckpt._engine.memory.casts import cast
from ckpt._engine.restore.destinations import Destination
from ckpt._engine.restore.device_arrays import ArrayKind, Hosts, make_arrays, weakly_typed
from ckpt._engine.restore.uninitialized_arrays import memory_of
from ckpt._format.dtypes import parse_dtype
from ckpt._format.regions import Region, addressable_regions
from ckpt._plan.targets import PYTHON_TYPES, ArrayRead, ArrayTarget, default_device
from ckpt.errors import TargetMismatchError

Array = np.ndarray[Any, Any]

# Most bytes beyond its own that the memory of a numpy array may keep alive.
_SLACK = 4096
# Values of a cast that are checked together.
_PIECE = 1 << 20
# Arrays made in one call. Lists of thousands at once would set off the garbage collector.
_AT_ONCE = 256


class _Alike(Struct):
    """Arrays that are made in one call.

    Attributes:
        kind: Properties of the arrays.
        devices: The devices of this process that hold them.
        regions: The regions that these devices hold, each with the positions of its devices.
        copies: True if the memory that they were read into is lent.
        is_cast: True if they are stored in another dtype.
        numbers: Numbers of the arrays.
    """

    kind: ArrayKind
    devices: Sequence[jax.Device]
    regions: Sequence[tuple[Region, Sequence[int]]]
    copies: bool
    is_cast: bool
    numbers: list[int] = field(default_factory=list)

    def hosts(self, complete: Destination) -> Hosts:
        """Return the host memory of each device's part of an array."""
        regions = complete.filled
        if self.is_cast:
            regions = [(region, _cast(buffer, complete)) for region, buffer in regions]
        is_one = len(self.devices) == 1 and regions[0][0] == self.regions[0][0]
        return [regions[0][1]] if is_one else self._shards(regions)

    def _shards(self, found: Sequence[tuple[Region, Array]]) -> Hosts:
        """Return the part of each device: a region that was read, or a slice of the whole array."""
        buffers, shape = dict(found), self.kind.shape
        whole = next((buffer for region, buffer in found if region.shape == shape), None)
        shards: list[Any] = [None] * len(self.devices)
        for region, positions in self.regions:
            # With the ellipsis, indexing an array without axes gives a view, not a value.
            index: tuple[Any, ...] = (*region.slices, ...)
            part = buffers[region] if whole is None else whole[index]
            for position in positions:
                shards[position] = part
        return shards


def place(complete: Sequence[Destination]) -> list[Any]:
    """Return the wanted arrays, made from the memory that they were read into.

    Host buffers that are not lent belong to their array from now on.

    Raises:
        TargetMismatchError: A value does not fit the wanted integer dtype; names the leaf.
    """
    placed: list[Any] = [None] * len(complete)
    # Grouped: thousands of arrays have a few targets, which are the same objects.
    groups: dict[tuple[object, ...], _Alike] = {}
    for number, each in enumerate(complete):
        read = each.read
        if each.blanks:
            placed[number] = _filled_array(read, each.blanks)
        elif read.target.kind in ("jax", "key"):
            likeness = (id(read.target), read.shape, read.stored, each.packed)
            alike = groups.get(likeness)
            if alike is None:
                alike = groups[likeness] = _alike(each)
            alike.numbers.append(number)
        else:
            placed[number] = _on_host(each)
    for alike in groups.values():
        target = complete[alike.numbers[0]].read.target
        for first in range(0, len(alike.numbers), _AT_ONCE):
            numbers = alike.numbers[first : first + _AT_ONCE]
            hosts = [alike.hosts(complete[number]) for number in numbers]
            arrays = make_arrays(alike.kind, alike.devices, hosts, copies=alike.copies)
            for number, array in zip(numbers, arrays, strict=True):
                placed[number] = _finished(array, target)
    return placed


def _alike(each: Destination) -> _Alike:
    """Return an empty group for arrays that are like `each`."""
    read, target = each.read, each.read.target
    sharding, devices = target.sharding, [default_device()]
    is_committed = sharding is not None
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(devices[0])
    else:
        devices = list(sharding.addressable_devices_indices_map(read.shape))
    kind = ArrayKind(read.shape, target.dtype, sharding, is_committed)
    regions = addressable_regions(sharding, read.shape)
    is_cast = parse_dtype(read.stored) != target.dtype
    return _Alike(kind, devices, regions, each.is_lent, is_cast)


def _on_host(each: Destination) -> Any:
    """Return a numpy array, or a scalar."""
    kind = each.read.target.kind
    ((_, buffer),) = each.filled
    host = _cast(buffer, each)
    if kind == "numpy":
        # The array gets memory of its own: a view would keep all of a larger buffer alive.
        is_own = _owns(host) and host.flags.writeable and not each.is_lent
        return host if is_own else host.copy()
    return host[()] if kind == "numpy_scalar" else PYTHON_TYPES[kind](host[()])


def _filled_array(read: ArrayRead, parts: Sequence[jax.Array]) -> jax.Array:
    """Return the array of the parts of the devices, after filling the replicas."""
    sharding = read.target.sharding
    if sharding is None:
        (array,) = parts
        return array
    for _, (first, *others) in addressable_regions(sharding, read.shape):
        for other in others:
            memory_of(parts[other])[...] = memory_of(parts[first])
    return jax.make_array_from_single_device_arrays(
        read.shape, sharding, list(parts), dtype=read.target.dtype
    )


@functools.lru_cache(maxsize=64)
def _cast(host: Array, each: Destination) -> Array:
    """Return a buffer in the wanted dtype; integers never wrap around.

    Raises:
        TargetMismatchError: A value does not fit; names the leaf.
    """
    read = each.read
    dtype = read.target.dtype
    if host.dtype == dtype:
        return host
    if jnp.issubdtype(dtype, jnp.integer) and host.size and not _holds_all(host.dtype, dtype):
        # Narrow dtypes are compared as a wider one, which holds all of their values.
        wider = np.int16 if jnp.issubdtype(host.dtype, jnp.integer) else np.float32
        wide = host if host.dtype.itemsize > 1 else host.astype(wider)
        least, most = wide.min(), wide.max()
        low, high = _bounds(dtype)
        # NaN fails this comparison, too.
        if not (low <= least and most <= high):
            raise TargetMismatchError(
                f"stored {host.dtype} values from {least} to {most}, which {dtype} does not hold "
                f"({low} to {high}); ask for a wider dtype, or a numpy array",
                leaf=read.path,
            )
    made = cast(host, dtype.name)
    if loses_precision(read):
        each.vanished += _vanished(host, made, read)
    return made


def loses_precision(read: ArrayRead) -> bool:
    """Return True if values are rounded only because the target has another dtype."""
    stored, target = parse_dtype(read.stored), read.target
    is_narrower = stored != target.dtype and target.dtype.itemsize <= stored.itemsize
    return is_narrower and not target.is_cast and bool(jnp.issubdtype(target.dtype, jnp.inexact))


def _vanished(host: Array, made: Array, read: ArrayRead) -> int:
    """Return the number of values that a cast has made 0.

    Raises:
        TargetMismatchError: The cast has made a value infinite, or NaN; names the leaf.
    """
    count, before, after = 0, host.reshape(-1), made.reshape(-1)
    for start in range(0, host.size, _PIECE):
        old, new = before[start : start + _PIECE], after[start : start + _PIECE]
        lost = ~np.isfinite(new)
        if lost.any() and (lost := lost & np.isfinite(old)).any():
            raise TargetMismatchError(
                f"stored {old.dtype} value {old[lost][0]!s}, which is {new[lost][0]!s} as "
                f"{new.dtype}; ask for a dtype that holds it, or allow it with "
                f"adapt=ckpt.Adapt(cast={{{read.path!r}: {new.dtype.name!r}}})",
                leaf=read.path,
            )
        count += int(np.count_nonzero(old)) - int(np.count_nonzero(new))
    return count


def _finished(array: jax.Array, target: ArrayTarget) -> jax.Array:
    """Return a placed array as a PRNG key or weakly typed, as the target asks."""
    if target.kind == "key":
        keys: jax.Array = jax.random.wrap_key_data(array, impl=target.impl)
        return keys
    return weakly_typed(array) if target.weak_type else array


def _owns(array: Array) -> bool:
    """Return True if the memory that an array keeps alive is about as large as itself."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory.nbytes <= array.nbytes + _SLACK


def _holds_all(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    if source == np.bool_:
        return True
    if not jnp.issubdtype(source, jnp.integer):
        return False
    here, there = _bounds(source), _bounds(target)
    return there[0] <= here[0] and here[1] <= there[1]


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    info: Any = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)
