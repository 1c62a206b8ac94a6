"""Device arrays from host memory: many in little time, and on CPU devices with memory of their own.

`jax.device_put` has two costs that a restore feels. It takes about 35 us of Python for each array,
and on CPU devices an array that it makes of aligned numpy memory is that memory, which jax cannot
donate: the first step after a restore would allocate the whole state again. The function of the
runtime that it ends in takes 6 us, and can be told to copy during the call. It is not public, so
this is the only file that knows it, and where it is missing or refuses, `jax.device_put` is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

logger = logging.getLogger("ckpt")

Array = np.ndarray[Any, Any]
# Of one array: its shape, dtype, sharding, and the host memory of each of this process's devices.
Shards = tuple[tuple[int, ...], np.dtype[Any], jax.sharding.Sharding, Sequence[tuple[Any, Array]]]


def make_arrays(arrays: Sequence[Shards], *, committed: bool, copies: bool) -> list[jax.Array]:
    """Return arrays of the shards that this process holds.

    Args:
        arrays: The arrays. Shards are in the order of the sharding's addressable devices.
        committed: Whether jax must leave them where they are put.
        copies: Whether the host memory is used again after the call. On CPU devices the arrays then
            have memory of their own, which jax can donate; otherwise they may be the host memory.
    """
    put = _runtime_put()
    if put is not None:
        try:
            return [put(array, committed, copies) for array in arrays]
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            _say_once(f"{error!s:.200}")
    return [_public_put(array, committed, copies) for array in arrays]


def _public_put(array: Shards, committed: bool, copies: bool) -> jax.Array:
    shape, dtype, sharding, shards = array
    hosts = [host.copy() if copies else host for _, host in shards]
    if not committed:
        free: jax.Array = jax.device_put(hosts[0])
        return free
    places = [
        jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        for device, _ in shards
    ]
    parts = jax.device_put(hosts, places)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


@functools.cache
def _runtime_put() -> Callable[..., jax.Array] | None:
    """Return a function with the arguments of `_public_put`, or None where jax does not have it."""
    try:
        from jax._src import core
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        raw = xla_client.batched_device_put
        semantics = xla_client.HostBufferSemantics
        kept, during = semantics.ZERO_COPY, semantics.IMMUTABLE_ONLY_DURING_CALL
    except (ImportError, AttributeError) as error:
        _say_once(f"{error!s:.200}")
        return None

    @functools.lru_cache(maxsize=4096)
    def at_device(device: jax.Device, kind: str | None) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

    @functools.lru_cache(maxsize=4096)
    def abstract(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return core.ShapedArray(shape, dtype)

    def put(array: Shards, committed: bool, copies: bool) -> jax.Array:
        shape, dtype, sharding, shards = array
        if copies and len(shards) > 1:
            # With other shards than one, the runtime (jaxlib 0.10 to 0.12) copies nothing, and
            # raises `bad_function_call`.
            kind = sharding.memory_kind
            parts = [
                put((host.shape, dtype, at_device(device, kind), [(device, host)]), True, True)
                for device, host in shards
            ]
            return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
        made: jax.Array = raw(
            abstract(shape, dtype),
            sharding,
            [host for _, host in shards],
            [device for device, _ in shards],
            committed,
            False,
            during if copies else kept,
        )
        return made

    return put


@functools.cache
def _say_once(reason: str) -> None:
    logger.debug("jax has no quick way to make arrays here (%s); device_put is used", reason)
