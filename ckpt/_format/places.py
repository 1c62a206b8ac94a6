"""Places of arrays: shardings as manifest entries, and the places that a restore chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from msgspec import Struct

from ckpt._format.manifest import ShardingEntry

Shape = tuple[int, ...]


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


class Place(Struct, frozen=True):
    """The place to which an array is restored.

    Attributes:
        sharding: Sharding of the array; None for jax's default place, from which jax may move it.
        lost: Differences from the place that it should have, as text; empty without any.
    """

    sharding: Sharding | None = None
    lost: str = ""


class StoredPlace(Struct, frozen=True):
    """The place of an array when it was saved.

    Attributes:
        entry: The stored sharding.
        sharding: The same on the devices of this job; None if not all of them are here.
        is_free: True if jax was free to move the array.
    """

    entry: ShardingEntry
    sharding: Sharding | None
    is_free: bool = False

    @staticmethod
    def of(entry: ShardingEntry, *, is_free: bool = False) -> StoredPlace:
        """Return the place of a stored sharding, rebuilt on the devices that are here."""
        return StoredPlace(entry, rebuild_sharding(entry), is_free)


def place_of(
    shape: Shape,
    stored: StoredPlace | None,
    wanted: Sharding | None,
    mesh: Mesh | AbstractMesh | None,
    *,
    is_free: bool = False,
) -> Place:
    """Return the place to which an array is restored.

    Args:
        shape: Shape of the array; for a PRNG key, of its data.
        stored: Place of the array when it was saved; None if it was on no devices.
        wanted: Sharding of its target; None if the target names no place.
        mesh: The mesh that the caller has set, or None.
        is_free: True if its target is an array that jax is free to move.
    """
    if wanted is not None and not is_abstract(wanted):
        return Place(wanted)
    # A sharding without axes names no place, either.
    wanted = None if wanted is None or wanted.mesh.empty else wanted  # type: ignore[attr-defined]
    own: Any = getattr(wanted, "mesh", None)
    is_one = is_free and stored is not None and len(stored.entry.device_ids) == 1
    if own is None and stored is not None and (stored.is_free or is_one):
        return Place()
    base, lost = _mesh_of(stored, own, mesh)
    if base is None:
        found = None if stored is None or own is not None else stored.sharding
        return Place(found, "" if found is not None else lost)
    sizes, spec, kind = _spec_of(stored, wanted)
    kept, cut = _fit_spec(spec, shape, base, sizes)
    local = base.local_devices
    if kind and local and kind not in {each.kind for each in local[0].addressable_memories()}:
        cut, kind = [*cut, kind], None
    if cut:
        lost = f"{lost}{', and ' if lost else ''}it has no {', '.join(map(repr, cut))} there"
    return Place(NamedSharding(base, kept, memory_kind=kind), lost)


def is_abstract(sharding: Sharding | None) -> bool:
    """Return True if a sharding is over a mesh without devices."""
    return isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _mesh_of(
    stored: StoredPlace | None, own: AbstractMesh | None, mesh: Mesh | AbstractMesh | None
) -> tuple[Mesh | None, str]:
    """Return the mesh for an array, and what the array loses there; None for its stored place."""
    if isinstance(mesh, Mesh):
        return mesh, ""
    # The abstract mesh that is set, or else that of the target.
    own = own if mesh is None else mesh
    known = None if stored is None else stored.sharding
    old = known.mesh if isinstance(known, NamedSharding) else None
    if own is not None:
        if isinstance(old, Mesh) and old.shape_tuple == own.shape_tuple:
            return Mesh(old.devices, old.axis_names, axis_types=own.axis_types), ""
        return _fitted(own.axis_names, own.axis_sizes, own.axis_types)
    if known is not None or stored is None:
        return (old, "") if isinstance(old, Mesh) else (None, "")
    entry = stored.entry
    if entry.kind == "named":
        kinds = [getattr(AxisType, name, None) for name in entry.axis_types]
        return _fitted(entry.axis_names, entry.axis_sizes, kinds, entry.platform)
    if entry.kind == "single" or len(entry.device_ids) < 2:
        return None, "its device is not here, and it goes to the default one"
    made, lost = _fitted(["devices"], [len(entry.device_ids)], [AxisType.Auto], entry.platform)
    return made, lost or "its sharding cannot be made again, and it is on every device"


def _fitted(
    names: Sequence[Any], sizes: Sequence[int], types: Sequence[Any], platform: str | None = None
) -> tuple[Mesh | None, str]:
    """Return a mesh of these axes over all devices, and what an array loses there.

    The inner axes keep their sizes as far as these divide the number of devices; the first one
    takes the rest.
    """
    try:
        try:
            devices = jax.devices(platform)
        except RuntimeError:
            devices = jax.devices()
        left, fitted = len(devices), list(sizes)
        for axis in range(len(fitted) - 1, 0, -1):
            fitted[axis] = math.gcd(fitted[axis], left)
            left //= fitted[axis]
        fitted[0] = left
        mesh = jax.make_mesh(fitted, names, axis_types=tuple(types), devices=devices)
    except Exception:
        # A stored mesh may be anything, and jax may raise any error then.
        return None, "its mesh cannot be made here, and it goes to the default device"
    was, now = (
        ", ".join(f"{name}={n}" for name, n in zip(names, each, strict=False))
        for each in (sizes, fitted)
    )
    return mesh, "" if was == now else f"its mesh {was:.100} is {now:.100} on the devices here"


def _spec_of(
    stored: StoredPlace | None, wanted: Any
) -> tuple[Mapping[str, int], Sequence[Any], str | None]:
    """Return the axes, the spec over them and the memory kind that an array is to have."""
    if wanted is not None:
        # A traced array has a memory kind only if the program asked for one.
        kind = wanted.memory_kind or (stored.entry.memory_kind if stored is not None else None)
        return wanted.mesh.shape, wanted.spec, kind
    if stored is None:
        return {}, (), None
    entry = stored.entry
    return (
        dict(zip(entry.axis_names, entry.axis_sizes, strict=False)),
        entry.spec if entry.kind == "named" else (),
        entry.memory_kind,
    )


def _fit_spec(
    spec: Sequence[Any], shape: Shape, mesh: Mesh, sizes: Mapping[str, int]
) -> tuple[PartitionSpec, list[str]]:
    """Return the axes of a spec that a mesh has and that divide a shape, and the lost axes."""
    parts: list[Any] = []
    lost: list[str] = []
    used: set[str] = set()
    for length, part in zip(shape, spec, strict=False):
        names = [part] if isinstance(part, str) else part if isinstance(part, list | tuple) else []
        kept: list[str] = []
        for name in names:
            size = mesh.shape.get(name)
            if size and name not in used and length % (size * _size(kept, mesh)) == 0:
                used.add(name)
                kept.append(name)
            elif sizes.get(name) != 1:
                lost.append(name)
        parts.append(kept[0] if kept and isinstance(part, str) else tuple(kept) or None)
    return PartitionSpec(*parts), lost  # type: ignore[no-untyped-call]


def _size(names: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in names)
