"""Shardings as manifest entries, and rebuilt on today's devices if possible."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._format.manifest import ShardingEntry


def describe_sharding(sharding: jax.sharding.Sharding) -> ShardingEntry:
    memory_kind = sharding.memory_kind
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        devices = list(mesh.devices.flat)
        spec = [list(part) if isinstance(part, tuple) else part for part in sharding.spec]
        if all(part is None or isinstance(part, str | list) for part in spec):
            return ShardingEntry(
                kind="named",
                platform=devices[0].platform,
                device_ids=[device.id for device in devices],
                memory_kind=_unless_default(memory_kind, devices[0]),
                axis_names=[str(name) for name in mesh.axis_names],
                axis_sizes=list(mesh.devices.shape),
                axis_types=[kind.name for kind in mesh.axis_types],
                spec=spec,
            )
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    common = {
        "platform": devices[0].platform,
        "device_ids": [device.id for device in devices],
        "memory_kind": _unless_default(memory_kind, devices[0]),
    }
    if isinstance(sharding, SingleDeviceSharding):
        return ShardingEntry(kind="single", text=str(devices[0]), **common)
    return ShardingEntry(kind="other", text=repr(sharding), **common)


def _unless_default(kind: str | None, device: jax.Device) -> str | None:
    return None if kind is None or kind == device.default_memory().kind else kind


def rebuild_sharding(entry: ShardingEntry) -> jax.sharding.Sharding | None:
    """Return the sharding of `entry` on the same devices of this job, or None if impossible.

    Devices are the same if platform and id agree. This process always has a part of the sharding;
    for a job of several processes see `_within_reach`.
    """
    try:
        present = {device.id: device for device in jax.devices(entry.platform)}
        local = jax.local_devices(backend=entry.platform)
    except RuntimeError:
        return None
    if not entry.device_ids or not set(entry.device_ids) <= set(present):
        return None
    devices = _within_reach([present[number] for number in entry.device_ids], local)
    if devices is None:
        return None
    kinds = {memory.kind for memory in local[0].addressable_memories()}
    if entry.memory_kind is not None and entry.memory_kind not in kinds:
        return None
    if entry.kind == "single":
        return SingleDeviceSharding(devices[0], memory_kind=entry.memory_kind)
    if entry.kind != "named":
        return None
    try:
        grid = np.array(devices, dtype=object).reshape(entry.axis_sizes)
        types = tuple(AxisType[name] for name in entry.axis_types)
        mesh = Mesh(grid, tuple(entry.axis_names), axis_types=types)
        spec = PartitionSpec(  # type: ignore[no-untyped-call]
            *(tuple(p) if isinstance(p, list) else p for p in entry.spec)
        )
        return NamedSharding(mesh, spec, memory_kind=entry.memory_kind)
    except Exception:
        # Data must not be lost because this version of jax does not understand a sharding, and jax
        # may raise any error then.
        return None


def _within_reach(
    devices: list[jax.Device], local: Sequence[jax.Device]
) -> list[jax.Device] | None:
    """Return the devices for a sharding of which every process of the job has a part, or None.

    - Devices of all processes are taken as they are.
    - Devices of one process held an array that each process has for itself: every process takes
      its own devices at the same positions.
    - Devices of some processes are refused: the others could not use the arrays.

    Args:
        devices: The devices of the sharding, all of one platform.
        local: The devices of this process.
    """
    owners = {device.process_index for device in devices}
    platform = devices[0].platform
    if owners == {device.process_index for device in jax.devices(platform)}:
        return devices
    if len(owners) > 1:
        return None
    theirs = jax.local_devices(process_index=owners.pop(), backend=platform)
    places = [theirs.index(device) for device in devices]
    return None if max(places) >= len(local) else [local[place] for place in places]
