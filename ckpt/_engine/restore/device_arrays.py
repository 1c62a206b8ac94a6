"""Device arrays from host memory: many in little time, and on CPU devices with memory of their own.

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
import numpy as np
from msgspec import Struct

from ckpt._runtime.jax_internals import array_runtime

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
