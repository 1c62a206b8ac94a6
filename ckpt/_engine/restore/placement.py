"""Placement: host buffers become what the target asks for, jax arrays on their devices or numpy.

An array over several processes is made of the parts on this process's own devices: no program runs,
nothing is compared with the other processes, and none of them is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ckpt._engine.memory.casts import cast
from ckpt._engine.restore.blank_arrays import memory_of
from ckpt._engine.restore.destinations import Destination
from ckpt._engine.restore.device_arrays import Shards, make_arrays
from ckpt._format.regions import Region, addressable_regions
from ckpt._plan.targets import PYTHON_TYPES, ArrayRead, ArrayTarget, default_device
from ckpt.errors import TargetMismatchError

Array = np.ndarray[Any, Any]

_ZEROS = {"i": 0, "f": 0.0, "c": 0j}
# Pages that an array of its own may keep alive beyond its end.
_SLACK = 4096


def place(complete: Sequence[Destination]) -> list[Any]:
    """Return arrays as they are wanted, from the memory that they were read into.

    Host buffers that are not lent belong to their array from now on.

    Raises:
        TargetMismatchError: A value does not fit the integer dtype wanted; names the leaf.
    """
    placed: list[Any] = [None] * len(complete)
    free = default_device()
    # Those that are made in the same way are made in one call.
    going: dict[tuple[bool, bool], tuple[list[int], list[Shards]]] = {}
    for number, each in enumerate(complete):
        read, found, target, is_lent = each.read, each.regions, each.read.target, each.is_lent
        if each.blanks:
            placed[number] = _joined(read, each.blanks)
            continue
        hosts = [_cast(buffer, read) for _, buffer in found]
        if target.kind in ("jax", "key"):
            way = (target.sharding is not None, is_lent)
            numbers, arrays = going.setdefault(way, ([], []))
            numbers.append(number)
            if target.sharding is None:
                (host,) = hosts
                arrays.append((read.shape, target.dtype, _at_device(free), [(free, host)]))
            else:
                buffers = dict(zip((region for region, _ in found), hosts, strict=True))
                shards = _shards(target.sharding, read.shape, buffers)
                arrays.append((read.shape, target.dtype, target.sharding, shards))
            continue
        (host,) = hosts
        if target.kind == "numpy":
            # Memory of its own: a part of a larger buffer would keep all of that alive.
            is_own = _owns(host) and host.flags.writeable and not is_lent
            placed[number] = host if is_own else host.copy()
        elif target.kind == "numpy_scalar":
            placed[number] = host[()]
        else:
            placed[number] = PYTHON_TYPES[target.kind](host[()])
    for (committed, copies), (numbers, arrays) in going.items():
        made = make_arrays(arrays, committed=committed, copies=copies)
        for number, array in zip(numbers, made, strict=True):
            placed[number] = _finished(array, complete[number].read.target)
    return placed


def _joined(read: ArrayRead, parts: Sequence[jax.Array]) -> jax.Array:
    """Return the array of what each device was given, once the replicas have it too."""
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


def _shards(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], buffers: Mapping[Region, Array]
) -> list[tuple[jax.Device, Array]]:
    """Return what each device of this process is given of an array."""
    whole = next((buffer for region, buffer in buffers.items() if region.shape == shape), None)
    if whole is not None and isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return [(device, whole)]
    devices = list(sharding.addressable_devices_indices_map(shape))
    shards: list[Any] = [None] * len(devices)
    for region, positions in addressable_regions(sharding, shape):
        # The dots: without axes, indexing would give a value instead of a view.
        index: tuple[Any, ...] = (*region.slices, ...)
        part = buffers[region] if whole is None else whole[index]
        for position in positions:
            shards[position] = (devices[position], part)
    return shards


@functools.lru_cache(maxsize=64)
def _at_device(device: jax.Device) -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(device)


def _cast(host: Array, read: ArrayRead) -> Array:
    """Return a buffer in the dtype that is wanted; integers never wrap around.

    Raises:
        TargetMismatchError: A value does not fit; names the leaf.
    """
    dtype = read.target.dtype
    if host.dtype == dtype:
        return host
    if jnp.issubdtype(dtype, jnp.integer) and host.size and not _holds_all(host.dtype, dtype):
        # As a dtype that can be compared; what narrower ones hold, it does.
        wider = np.int16 if jnp.issubdtype(host.dtype, jnp.integer) else np.float32
        wide = host if host.dtype.itemsize > 1 else host.astype(wider)
        least, most = wide.min(), wide.max()
        low, high = _bounds(dtype)
        # A NaN is not between them either.
        if not (low <= least and most <= high):
            raise TargetMismatchError(
                f"stored {host.dtype} values from {least} to {most}, which {dtype} does not hold "
                f"({low} to {high}); ask for a wider dtype, or a numpy array",
                leaf=read.path,
            )
    return cast(host, dtype.name)


def _finished(array: jax.Array, target: ArrayTarget) -> jax.Array:
    """Return a placed array as a PRNG key, or weakly typed, where it was one."""
    if target.kind == "key":
        keys: jax.Array = jax.random.wrap_key_data(array, impl=target.impl)
        return keys
    return _weakly_typed(array) if target.weak_type and array.is_fully_addressable else array


def cannot_be_weak(target: ArrayTarget) -> bool:
    """Tell whether an array was weakly typed and cannot come back so.

    jax has no call that sets the type of an array. Computing one that has it is a program, which
    all processes with a part of the array would have to run at the same point of their own.
    """
    sharding = target.sharding
    return target.weak_type and sharding is not None and not sharding.is_fully_addressable


def _weakly_typed(array: jax.Array) -> jax.Array:
    zero = _ZEROS.get(array.dtype.kind)
    weak = None if zero is None else jnp.full(array.shape, zero)
    if weak is None or weak.dtype != array.dtype:
        # jax has no weak type of such values.
        return array
    # An update keeps the type of what is updated: jax has no public call that sets it.
    weak = weak.at[...].set(array)
    return weak if weak.sharding == array.sharding else jax.device_put(weak, array.sharding)


def _owns(array: Array) -> bool:
    """Tell whether the memory that an array keeps alive is about as large as itself."""
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
