"""Host buffers to what the target asks for: jax arrays on their devices, or numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ckpt.layout.match import ArrayTarget
from ckpt.layout.shards import Region, addressable_regions, whole

__all__ = ["place_regions", "place_whole"]

Array = np.ndarray[Any, Any]

# Pages that an array of its own may keep alive beyond its end.
_SLACK = 4096


def place_whole(hosts: Sequence[Array], targets: Sequence[ArrayTarget]) -> list[Any]:
    """Return whole arrays as their targets want them, jax arrays in as few calls as can be."""
    placed: list[Any] = [None] * len(hosts)
    # Those that go to one place are put there in one call.
    going: dict[int, tuple[jax.sharding.Sharding | None, list[int]]] = {}
    cast = [
        host if host.dtype == target.dtype else host.astype(target.dtype)
        for host, target in zip(hosts, targets, strict=True)
    ]
    for number, (host, target) in enumerate(zip(cast, targets, strict=True)):
        if target.kind == "numpy":
            # Memory of its own: a part of a larger buffer would keep all of that alive.
            placed[number] = host if _owns(host) and host.flags.writeable else host.copy()
        elif target.kind == "numpy_scalar":
            placed[number] = host[()]
        else:
            going.setdefault(id(target.sharding), (target.sharding, []))[1].append(number)
    for sharding, numbers in going.values():
        arrays = jax.device_put([cast[number] for number in numbers], sharding)
        for number, array in zip(numbers, arrays, strict=True):
            placed[number] = array
    return placed


def _owns(array: Array) -> bool:
    """Tell whether what an array keeps alive is about as large as itself."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory.nbytes <= array.nbytes + _SLACK


def place_regions(
    shape: tuple[int, ...], target: ArrayTarget, regions: Sequence[tuple[Region, Array]]
) -> Any:
    """Return one array from the buffers of the distinct regions that this process needs."""
    buffers = {
        region: buffer if buffer.dtype == target.dtype else buffer.astype(target.dtype)
        for region, buffer in regions
    }
    if target.kind != "jax" or target.sharding is None:
        return place_whole([buffers[whole(shape)]], [target])[0]
    devices = list(target.sharding.addressable_devices_indices_map(shape))
    memory_kind = target.sharding.memory_kind
    hosts: list[Array] = []
    places = []
    for region, positions in addressable_regions(target.sharding, shape):
        for position in positions:
            hosts.append(buffers[region])
            places.append(
                jax.sharding.SingleDeviceSharding(devices[position], memory_kind=memory_kind)
            )
    arrays = jax.device_put(hosts, places)
    return jax.make_array_from_single_device_arrays(
        shape, target.sharding, arrays, dtype=target.dtype
    )
