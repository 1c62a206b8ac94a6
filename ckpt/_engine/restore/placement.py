"""Placement: host buffers become the arrays that the target asks for, of jax or of numpy.

An array over several processes is made of the parts on this process's own devices: no program runs,
nothing is compared with the other processes, and this process waits for none of them.

Device arrays from host memory: many in little time, and on CPU devices with memory of their own.
`jax.device_put` has two costs that a restore feels. It takes about 35 us of Python for each array.
On CPU devices it turns aligned numpy memory into the array itself, and jax cannot donate such
memory: the first step after a restore would allocate the whole state again. The runtime function
that it ends in takes 6 us, and can copy during the call. That function is not public; if it is
missing or refuses, `jax.device_put` is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from msgspec import Struct, field

from ckpt._engine.memory.staging import cast
from ckpt._engine.restore.destinations import Destination, memory_of
from ckpt._format.array_format import parse_dtype
from ckpt._format.regions import Region, addressable_regions
from ckpt._plan.targets import PYTHON_TYPES, ArrayRead, ArrayTarget, default_device
from ckpt._runtime.jax_internals import array_runtime
from ckpt.errors import TargetMismatchError

logger = logging.getLogger("ckpt")

Array = np.ndarray[Any, Any]
Devices = Sequence[jax.Device]
# Host memory of the shards of one array, one entry per device.
Hosts = list[Array]
_Put = Callable[["ArrayKind", Devices, Sequence[Hosts], bool], list[jax.Array]]


class ArrayKind(Struct, frozen=True):
    """The properties that arrays made in one call share.

    Attributes:
        shape: Shape of each array.
        dtype: Dtype of each array.
        sharding: Sharding of each array.
        committed: True if jax must leave the arrays where they are put.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    committed: bool


def make_arrays(
    kind: ArrayKind, devices: Devices, arrays: Sequence[Hosts], *, copies: bool
) -> list[jax.Array]:
    """Return arrays of the shards that this process holds.

    Args:
        kind: Properties of the arrays.
        devices: The sharding's devices of this process.
        arrays: The host memory of each array's shards, in the order of the devices.
        copies: True if the host memory is reused after the call. On CPU devices the arrays then
            have memory of their own, which jax can donate; otherwise they may be the host memory.
    """
    put = _runtime_put()
    if put is not None:
        try:
            return put(kind, devices, arrays, copies)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            _say_once(f"{error!s:.200}")
    return [_public_put(kind, devices, hosts, copies) for hosts in arrays]


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return a weakly typed array over the same memory; no program runs, on no process.

    jax has no call for that, but an array can be constructed from an abstract value and its parts.
    """
    make: Any = type(array)
    parts = [shard.data for shard in array.addressable_shards]
    try:
        weak: Any = array.aval
        weak = make(weak.update(weak_type=True), array.sharding, parts, committed=array.committed)
    except (TypeError, AttributeError) as error:
        _say_not_weak(f"{error!s:.200}")
        return array
    return weak  # type: ignore[no-any-return]


@functools.cache
def _say_not_weak(reason: str) -> None:
    logger.warning(
        "weakly typed arrays come back with their dtype, and not weakly: this jax does not make "
        "such arrays (%s)",
        reason,
    )


def _public_put(kind: ArrayKind, devices: Devices, hosts: Hosts, copies: bool) -> jax.Array:
    hosts = [host.copy() if copies else host for host in hosts]
    if not kind.committed:
        free: jax.Array = jax.device_put(hosts[0])
        return free
    parts = jax.device_put(hosts, [_at_device(device, kind) for device in devices])
    return _join_parts(kind, parts)


def _join_parts(kind: ArrayKind, parts: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(
        kind.shape, kind.sharding, parts, dtype=kind.dtype
    )


def _at_device(device: jax.Device, kind: ArrayKind) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind.sharding.memory_kind)


@functools.cache
def _runtime_put() -> _Put | None:
    """Return a function that makes arrays; None if jax does not have it."""
    try:
        runtime = array_runtime()
    except (ImportError, AttributeError) as error:
        _say_once(f"{error!s:.200}")
        return None

    def put(
        kind: ArrayKind, devices: Devices, arrays: Sequence[Hosts], copies: bool
    ) -> list[jax.Array]:
        if copies and len(devices) > 1:
            return in_parts(kind, devices, arrays)
        abstract, given = runtime.abstract(kind.shape, kind.dtype), list(devices)
        how, raw = runtime.copied if copies else runtime.kept, runtime.put
        sharding, committed = kind.sharding, kind.committed
        return [raw(abstract, sharding, hosts, given, committed, False, how) for hosts in arrays]

    def in_parts(kind: ArrayKind, devices: Devices, arrays: Sequence[Hosts]) -> list[jax.Array]:
        """Make arrays from parts: the runtime refuses to copy several shards in one call.

        jaxlib 0.10 to 0.12 raises `bad_function_call`.
        """
        shape = kind.sharding.shard_shape(kind.shape)
        parts = [
            put(
                ArrayKind(shape, kind.dtype, _at_device(device, kind), True),
                [device],
                [[hosts[position]] for hosts in arrays],
                True,
            )
            for position, device in enumerate(devices)
        ]
        return [_join_parts(kind, each) for each in zip(*parts, strict=True)]

    return put


@functools.cache
def _say_once(reason: str) -> None:
    logger.debug("jax has no quick way to make arrays here (%s); device_put is used", reason)


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
        sharding = _alone_at(devices[0])
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
def _alone_at(device: jax.Device) -> jax.sharding.SingleDeviceSharding:
    return jax.sharding.SingleDeviceSharding(device)


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
