"""Placement: host buffers become what the target asks for, jax arrays on their devices or numpy.

An array over several processes is made of the parts on this process's own devices: no program runs,
nothing is compared with the other processes, and none of them is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ckpt._engine.memory.casts import cast
from ckpt._format.regions import Region, addressable_regions
from ckpt._plan.targets import PYTHON_TYPES, ArrayRead, ArrayTarget
from ckpt.errors import TargetMismatchError

Array = np.ndarray[Any, Any]

_ZEROS = {"i": 0, "f": 0.0, "c": 0j}
# Pages that an array of its own may keep alive beyond its end.
_SLACK = 4096


def place(
    reads: Sequence[ArrayRead], regions: Sequence[Sequence[tuple[Region, Array]]]
) -> list[Any]:
    """Return arrays as they are wanted, from host buffers.

    Args:
        reads: What is wanted.
        regions: For each array the distinct regions of it that this process needs, with their
            buffers. These belong to the arrays from now on, or are not used any more.

    Raises:
        TargetMismatchError: A value does not fit the integer dtype wanted; names the leaf.
    """
    placed: list[Any] = [None] * len(reads)
    whole: list[int] = []
    cut: list[int] = []
    for number, (read, found) in enumerate(zip(reads, regions, strict=True)):
        is_whole = len(found) == 1 and found[0][0].shape == read.shape
        (whole if is_whole else cut).append(number)
    hosts = [_cast(regions[number][0][1], reads[number]) for number in whole]
    for number, value in zip(whole, _whole(hosts, [reads[n] for n in whole]), strict=True):
        placed[number] = value
    if cut:
        parts = [
            {region: _cast(buffer, reads[number]) for region, buffer in regions[number]}
            for number in cut
        ]
        for number, array in zip(cut, _made([reads[n] for n in cut], parts), strict=True):
            placed[number] = _finished(array, reads[number].target)
    return placed


def _whole(hosts: Sequence[Array], reads: Sequence[ArrayRead]) -> list[Any]:
    """Return arrays of which a buffer holds all, jax arrays in as few calls as possible."""
    placed: list[Any] = [None] * len(hosts)
    # Those that go to one place are put there in one call.
    going: dict[int, tuple[jax.sharding.Sharding | None, list[int]]] = {}
    for number, (host, read) in enumerate(zip(hosts, reads, strict=True)):
        target = read.target
        if target.kind == "numpy":
            # Memory of its own: a part of a larger buffer would keep all of that alive.
            placed[number] = host if _owns(host) and host.flags.writeable else host.copy()
        elif target.kind == "numpy_scalar":
            placed[number] = host[()]
        elif target.kind in PYTHON_TYPES:
            placed[number] = PYTHON_TYPES[target.kind](host[()])
        else:
            going.setdefault(id(target.sharding), (target.sharding, []))[1].append(number)
    for sharding, numbers in going.values():
        if sharding is None or sharding.is_fully_addressable:
            arrays = jax.device_put([hosts[number] for number in numbers], sharding)
        else:
            # device_put would compare the values of all processes, in a program that all must run.
            parts = [_cut(hosts[number], sharding) for number in numbers]
            arrays = _made([reads[number] for number in numbers], parts)
        for number, array in zip(numbers, arrays, strict=True):
            placed[number] = _finished(array, reads[number].target)
    return placed


def _cut(host: Array, sharding: jax.sharding.Sharding) -> dict[Region, Array]:
    """Return the regions of a whole array that this process needs."""
    parts: dict[Region, Array] = {}
    for region, _ in addressable_regions(sharding, host.shape):
        # The dots: without axes, indexing would give a value instead of a view.
        index: tuple[Any, ...] = (*region.slices, ...)
        parts[region] = host[index]
    return parts


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


def _made(reads: Sequence[ArrayRead], parts: Sequence[Mapping[Region, Array]]) -> list[jax.Array]:
    """Return arrays, each device of this process given the region that it holds.

    Args:
        reads: The arrays; each has a sharding, of which no device need be this process's.
        parts: For each array the buffers of the distinct regions that this process needs.
    """
    hosts: list[Array] = []
    places: list[jax.sharding.Sharding] = []
    ends: list[int] = []
    for read, buffers in zip(reads, parts, strict=True):
        sharding = _sharding_of(read)
        devices = list(sharding.addressable_devices_indices_map(read.shape))
        for region, positions in addressable_regions(sharding, read.shape):
            for position in positions:
                hosts.append(buffers[region])
                places.append(
                    jax.sharding.SingleDeviceSharding(
                        devices[position], memory_kind=sharding.memory_kind
                    )
                )
        ends.append(len(hosts))
    arrays = jax.device_put(hosts, places)
    return [
        jax.make_array_from_single_device_arrays(
            read.shape, _sharding_of(read), arrays[start:end], dtype=read.target.dtype
        )
        for read, start, end in zip(reads, [0, *ends], ends, strict=False)
    ]


def _sharding_of(read: ArrayRead) -> jax.sharding.Sharding:
    assert read.target.sharding is not None
    return read.target.sharding
