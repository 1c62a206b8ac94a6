"""Placements: the part of every array that each process of a job would hold after a restore.

Arrays are placed either as they were saved, or on a mesh that the caller describes. What each
device holds is asked of jax, whose shardings take devices that need not exist. A partition spec
that jax refuses is a problem of the array.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import Manifest, ShardingEntry
from ckpt._format.regions import Region, whole
from ckpt._plan.chunk_reads import ReadRequest, plan_chunk_reads, plan_requests
from ckpt._plan.slices import ArraySlice
from ckpt._tree.leaf_names import compile_pattern, suggestion
from ckpt.errors import InvalidArgumentError, TargetMismatchError

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, NamedSharding

Shape = tuple[int, ...]
# For every dimension, the axes of the mesh over which it is cut, the slowest first; dimensions at
# the end may be left out.
Spec = tuple[tuple[str, ...], ...]

# A plan for more devices takes minutes.
MOST_DEVICES = 1 << 16


class HeldPart(Struct, frozen=True):
    """The part of an array on the devices of one process.

    Attributes:
        regions: The distinct regions.
        elements: Number of elements on all of its devices, including replicas.
    """

    regions: tuple[Region, ...]
    elements: int


def everything(shape: Shape) -> HeldPart:
    """Return the part of a process that has the whole array once."""
    return HeldPart((whole(shape),), math.prod(shape))


class PlannedDevice:
    """A device that need not exist: jax makes meshes and shardings of it, but no arrays."""

    def __init__(self, number: int, process: int) -> None:
        self.id = number
        self.process_index = process


class DeviceGrid(Struct, frozen=True):
    """A mesh of planned devices, each of which belongs to a process.

    Attributes:
        mesh: The mesh.
    """

    mesh: Mesh
    _known: dict[tuple[Shape, Spec], dict[int, HeldPart]] = field(default_factory=dict)

    def held(self, shape: Shape, spec: Spec) -> dict[int, HeldPart]:
        """Return the part of every process; `spec_problem` must have found nothing."""
        if (shape, spec) not in self._known:
            mine: dict[int, list[Region]] = {}
            indices: Any = _sharding_on(self.mesh, spec).devices_indices_map(shape)
            for device, index in indices.items():
                bounds = [part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True)]
                region = Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))
                mine.setdefault(device.process_index, []).append(region)
            self._known[shape, spec] = {
                owner: HeldPart(tuple(dict.fromkeys(each)), sum(region.size for region in each))
                for owner, each in mine.items()
            }
        return self._known[shape, spec]


def grid_of(axes: Mapping[str, int], processes: int) -> DeviceGrid:
    """Return a mesh whose devices are divided among processes in their order.

    Raises:
        InvalidArgumentError: The devices cannot be divided, or there are too many.
    """
    count = math.prod(axes.values())
    if count > MOST_DEVICES:
        raise InvalidArgumentError(
            f"a mesh of {count:,} devices; at most {MOST_DEVICES:,} are planned for"
        )
    if count % processes:
        raise InvalidArgumentError(
            f"{count} devices cannot be divided among {processes} processes. Give a number of "
            f"processes that divides {count}"
        )
    each = count // processes
    devices = [PlannedDevice(number, number // each) for number in range(count)]
    return DeviceGrid(_mesh_of(devices, list(axes), list(axes.values())))


def _mesh_of(
    devices: Sequence[PlannedDevice],
    names: Sequence[str],
    sizes: Sequence[int],
    types: Sequence[str] = (),
) -> Mesh:
    # Imported only here: explanations are the only tools for manifests that need jax.
    import numpy as np
    from jax.sharding import AxisType, Mesh

    grid = np.empty(len(devices), object)
    grid[:] = devices
    kinds = tuple(AxisType[name] for name in types) if types else None
    return Mesh(grid.reshape(sizes), tuple(names), axis_types=kinds)


def _sharding_on(mesh: Mesh | AbstractMesh, spec: Spec) -> NamedSharding:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]


def spec_problem(shape: Shape, spec: Spec, mesh: Mesh) -> str | None:
    """Return the reason why jax cannot cut an array by a spec, or None."""
    try:
        sharding = _sharding_on(mesh, spec)
        sharding.check_compatible_aval(shape)
        sharding.shard_shape(shape)
    except Exception as error:
        # jax raises various errors here. The whole mesh is in their texts.
        text = str(error)
        return text.partition(" implies that ")[2].partition(" (full shape")[0] or text
    return None


_SHOWN = 8
# Kinds of jax arrays.
_ON_DEVICES = frozenset({"jax", "key"})


class HeldParts(Struct, frozen=True, eq=False):
    """The parts of an array that the processes of a job hold.

    Attributes:
        parts: The parts, by number of the process.
        on_devices: True for a jax array; other arrays are in host memory.
    """

    parts: Sequence[HeldPart]
    on_devices: bool


class TargetMesh(Struct, frozen=True):
    """A mesh to restore onto.

    Attributes:
        axes: Sizes of its axes, by name.
        specs: Specs of leaves by pattern; the first pattern that covers a leaf counts.
    """

    axes: Mapping[str, int]
    specs: Sequence[tuple[str, Spec]] = ()


class Placements(Protocol):
    """Determines the parts of arrays that each process would hold."""

    @property
    def keeps_identity(self) -> bool:
        """True if one array at several places is restored as one array.

        A restore as saved does so. A target has a separate array at each place.
        """

    @property
    def devices(self) -> Sequence[int]:
        """Number of devices of each process."""

    def of(self, item: str, path: str, leaf: LeafEntry) -> HeldParts:
        """Return the part of an array that each process would hold."""

    @property
    def problems(self) -> Sequence[str]:
        """The arrays so far that cannot be placed, with reasons."""

    def notes(self) -> list[str]:
        """Return the assumptions about the arrays so far, as sentences."""


class AsSaved:
    """Places arrays as they were saved, in a job like the one that saved them; a `Placements`."""

    keeps_identity = True

    def __init__(self, manifest: Manifest, processes: int) -> None:
        """Divide the devices that the manifest names among the processes, by their ids."""
        entries = {
            (name, number): entry
            for name, item in manifest.items.items()
            for number, entry in enumerate(item.shardings)
        }
        ids = sorted({each for entry in entries.values() for each in entry.device_ids})
        self._processes = processes
        self._is_divided = processes > 1 and bool(ids) and len(ids) % processes == 0
        each = len(ids) // processes if self._is_divided else max(len(ids), 1)
        self._devices = {
            device: PlannedDevice(device, number // each) for number, device in enumerate(ids)
        }
        self._entries = entries
        self._grids = {key: self._grid(entry) for key, entry in entries.items()}
        self._lost: list[str] = []
        self.problems: list[str] = []
        self._known: dict[tuple[str, int, Shape], HeldParts] = {}
        self._wholes: dict[tuple[Shape, bool], HeldParts] = {}

    @property
    def devices(self) -> Sequence[int]:
        """Number of devices of each process."""
        counts = Counter(each.process_index for each in self._devices.values())
        if not self._is_divided:
            return [max(counts[0], 1)] * self._processes
        return [counts[number] for number in range(self._processes)]

    def of(self, item: str, path: str, leaf: LeafEntry) -> HeldParts:
        """Return the part of an array that each process would hold."""
        shape = tuple(leaf.shape)
        on_devices = leaf.kind in _ON_DEVICES
        if leaf.sharding is None or not leaf.committed or not on_devices:
            return self._whole(shape, on_devices)
        grid = self._grids[item, leaf.sharding]
        if grid is None:
            self._lost.append(path)
            return self._whole(shape, True)
        spec = _stored_spec(self._entries[item, leaf.sharding])
        key = item, leaf.sharding, shape
        if key in self._known:
            return self._known[key]
        reason = spec_problem(shape, spec, grid.mesh)
        if reason is not None:
            self.problems.append(f"{path}: {reason}")
            return self._whole(shape, True)
        held = grid.held(shape, spec)
        # An array saved by one process is restored on every process's local devices.
        is_own = len(held) == 1
        parts = [held[min(held) if is_own else number] for number in range(self._processes)]
        self._known[key] = HeldParts(parts, True)
        return self._known[key]

    def _whole(self, shape: Shape, on_devices: bool) -> HeldParts:
        key = shape, on_devices
        if key not in self._wholes:
            self._wholes[key] = HeldParts([everything(shape)] * self._processes, on_devices)
        return self._wholes[key]

    def notes(self) -> list[str]:
        """Return the assumptions about the arrays so far, as sentences."""
        found = []
        if self._processes > 1 and self._devices:
            found.append(
                "devices are divided among the processes in the order of their ids"
                if self._is_divided
                else f"the {len(self._devices)} devices that the manifest names cannot be divided "
                f"among {self._processes} processes; each process is taken to have such devices"
            )
        if self._lost:
            found.append(
                f"the shardings of {_few(self._lost)} cannot be made again; a restore puts these "
                "arrays on a mesh of the devices that it has, and here they are taken to be whole "
                "in each process"
            )
        return found

    def _grid(self, entry: ShardingEntry) -> DeviceGrid | None:
        """Return the devices of a stored sharding; None if a restore could not make it again."""
        if entry.kind not in ("named", "single") or not entry.device_ids:
            return None
        devices = [self._devices[each] for each in entry.device_ids]
        # A process without devices in the sharding would have no part of the array.
        if len({each.process_index for each in devices}) not in (1, self._processes):
            return None
        try:
            if entry.kind == "single":
                return DeviceGrid(_mesh_of(devices[:1], (), ()))
            mesh = _mesh_of(devices, entry.axis_names, entry.axis_sizes, entry.axis_types)
            _sharding_on(mesh, _stored_spec(entry))
        except Exception:
            # As in a restore, whatever jax does not understand is placed otherwise.
            return None
        return DeviceGrid(mesh)


class OnMesh:
    """Places arrays on one mesh: by the given specs, else by the stored ones, else on every device.

    A numpy array without a given spec is in the memory of every process.
    """

    keeps_identity = False

    def __init__(
        self, manifest: Manifest, mesh: TargetMesh, processes: int, paths: Iterable[str]
    ) -> None:
        """Divide the devices of the mesh among the processes, in their order.

        Args:
            manifest: Manifest of the checkpoint.
            mesh: The mesh.
            processes: Number of processes.
            paths: The leaf paths of all arrays.

        Raises:
            InvalidArgumentError: The mesh cannot be divided, or a spec covers no array.
        """
        self._axes = mesh.axes
        self._grid = grid_of(mesh.axes, processes)
        self._processes = processes
        self._shardings = {name: item.shardings for name, item in manifest.items.items()}
        self._chosen = _chosen(mesh, list(paths))
        self._unknown_axes: Counter[str] = Counter()
        self._other: list[str] = []
        self.problems: list[str] = []
        self._known: dict[tuple[Shape, Spec | None], HeldParts] = {}

    @property
    def devices(self) -> Sequence[int]:
        """Number of devices of each process."""
        return [self._grid.mesh.size // self._processes] * self._processes

    def of(self, item: str, path: str, leaf: LeafEntry) -> HeldParts:
        """Return the part of an array that each process would hold."""
        shape, spec = tuple(leaf.shape), self._chosen.get(path)
        if spec is None and leaf.kind in _ON_DEVICES:
            stored = None if leaf.sharding is None else self._shardings[item][leaf.sharding]
            spec = self._kept(path, stored)
        reason = None if spec is None else spec_problem(shape, spec, self._grid.mesh)
        if reason is not None:
            self.problems.append(f"{path}: {reason}")
            spec = None
        if (shape, spec) not in self._known:
            self._known[shape, spec] = self._held(shape, spec)
        return self._known[shape, spec]

    def _held(self, shape: Shape, spec: Spec | None) -> HeldParts:
        if spec is None:
            return HeldParts([everything(shape)] * self._processes, False)
        held = self._grid.held(shape, spec)
        parts = [held[number] for number in range(self._processes)]
        return HeldParts(parts, True)

    def notes(self) -> list[str]:
        """Return the assumptions about the arrays so far, as sentences."""
        found = [
            f"the mesh has no axis {name!r:.60}, over which {count:,} "
            f"{'array was' if count == 1 else 'arrays were'} cut; it is left out of their specs"
            for name, count in self._unknown_axes.items()
        ]
        if self._other:
            found.append(
                f"the shardings of {_few(self._other)} have no partition spec; these arrays are "
                "on every device"
            )
        return found

    def _kept(self, path: str, stored: ShardingEntry | None) -> Spec:
        """Return a stored spec without the axes that this mesh does not have."""
        if stored is None or stored.kind == "single":
            return ()
        if stored.kind != "named":
            self._other.append(path)
            return ()
        spec = _stored_spec(stored)
        self._unknown_axes.update(
            {name for over in spec for name in over if name not in self._axes}
        )
        return tuple(tuple(name for name in over if name in self._axes) for over in spec)


def stored_shard(entry: ShardingEntry | None, shape: Shape) -> Shape:
    """Return the shape of the shards in which an array was saved; its whole shape if unknown.

    The shape serves for advice only.
    """
    if entry is None or entry.kind != "named":
        return shape
    from jax.sharding import AbstractMesh

    try:
        mesh = AbstractMesh(tuple(entry.axis_sizes), tuple(entry.axis_names))
        return _sharding_on(mesh, _stored_spec(entry)).shard_shape(shape)
    except Exception:
        return shape


def refuse(problems: Sequence[str]) -> None:
    """Raise if arrays cannot be placed.

    Raises:
        TargetMismatchError: There are problems; lists them.
    """
    if not problems:
        return
    count = len(problems)
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
    raise TargetMismatchError(
        f"{count} {'array does' if count == 1 else 'arrays do'} not fit the devices, and jax "
        f"refuses them, too: {shown}{more}. Give another mesh, or other specs with --shard",
        problems=tuple(problems),
    )


def _stored_spec(entry: ShardingEntry) -> Spec:
    if entry.kind != "named":
        return ()
    return tuple(
        () if part is None else (part,) if isinstance(part, str) else tuple(part)
        for part in entry.spec
    )


def _chosen(mesh: TargetMesh, paths: Sequence[str]) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for text, spec in mesh.specs:
        for name in {name for over in spec for name in over}:
            if name not in mesh.axes:
                raise InvalidArgumentError(
                    f"--shard {text}: the mesh has no axis {name!r:.60}, only "
                    f"{', '.join(mesh.axes)}"
                )
        pattern = compile_pattern(text)
        covered = [path for path in paths if pattern.covers(path)]
        if not covered:
            raise InvalidArgumentError(
                f"--shard: {text!r:.80} covers none of the {len(paths)} arrays"
                f"{suggestion(text, paths)}"
            )
        if all(path in found for path in covered):
            raise InvalidArgumentError(
                f"--shard: {text!r:.80} has no effect, since patterns before it cover the same "
                "arrays. Put it first"
            )
        for path in covered:
            found.setdefault(path, spec)
    return found


def _few(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths):,} arrays ({paths[0]}, ...)"


class WantedArray(Struct, frozen=True):
    """An array to restore.

    Attributes:
        path: Its leaf path.
        number: Number of the stored leaf; for one array at several places, of the first.
        leaf: The leaf.
        held: The part of each process.
    """

    path: str
    number: int
    leaf: LeafEntry
    held: HeldParts


class WantedItem(Struct, frozen=True):
    """An item to restore.

    Attributes:
        name: Its name.
        leaves: All of its stored leaves.
        arrays: The arrays to restore.
        data_files: Its data files, relative to the step.
    """

    name: str
    leaves: Sequence[LeafEntry]
    arrays: Sequence[WantedArray]
    data_files: Sequence[str]


class NeededRegions(Struct, frozen=True, gc=False):
    """The regions of a stored leaf that a process needs, in the form that the planner expects."""

    shape: Shape
    leaf: int | None
    regions: tuple[Region, ...]
    pieces: tuple[ArraySlice, ...] = ()


def requests_of(item: WantedItem, process: int, limit: int) -> list[ReadRequest]:
    """Return the requests of a process for an item, in the order of a restore.

    Args:
        item: The item.
        process: Number of the process.
        limit: Most bytes of a coalesced request.

    Raises:
        TargetMismatchError: A chunk is on the disk of another process.
    """
    needed = [
        NeededRegions(tuple(each.leaf.shape), each.number, each.held.parts[process].regions)
        for each in item.arrays
    ]
    return plan_requests(plan_chunk_reads(item.leaves, needed), item.data_files, limit)


def alike(items: Sequence[WantedItem], processes: int) -> list[list[int]]:
    """Return the processes in groups that need the same parts of all arrays."""
    groups: dict[tuple[int, ...], list[int]] = {}
    # Equal parts get one number each, so that keys of many processes and arrays compare fast.
    numbers: dict[HeldPart, int] = {}
    known: dict[int, int] = {}
    placements = {id(array.held): array.held for item in items for array in item.arrays}
    for process in range(processes):
        key = []
        for held in placements.values():
            part = held.parts[process]
            if id(part) not in known:
                known[id(part)] = numbers.setdefault(part, len(numbers))
            key.append(known[id(part)])
        groups.setdefault(tuple(key), []).append(process)
    return list(groups.values())
