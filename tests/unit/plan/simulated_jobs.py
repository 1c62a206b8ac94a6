"""Jobs of several processes on made-up devices: random meshes, random trees, all their plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

from ckpt._format.array_format import ArrayFormat
from ckpt._job.division import Division, ProcessGroup
from ckpt._plan.save_plan import SavePlan, plan_save
from ckpt._plan.write_batches import Chunk
from ckpt._tree.leaf_specs import LeafSpec
from docs.explanation.scaling.fake_devices import devices_of

KIB, MIB = 1 << 10, 1 << 20
MOST_ELEMENTS = 20_000
LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 13, 64, 101])
DTYPES = st.sampled_from(["uint8", "bfloat16", "float32", "complex128"])
# Small budgets make many chunks and batches of small arrays.
BUDGETS = st.sampled_from([4096, 5003, 40_000, MIB, 1 << 30])
FORMATS = st.sampled_from(
    [
        None,
        None,
        ArrayFormat(compression="zstd"),
        ArrayFormat(chunk_bytes=4096),
        ArrayFormat(chunk_bytes=5000, split_axes=(-1,)),
    ]
)
SCALARS = [LeafSpec("int", "int64"), LeafSpec("float", "float64"), LeafSpec("str")]


@dataclass(frozen=True)
class Job:
    """A tree as each process of a job describes it.

    `trees[process]` are the specs of its leaves; those of arrays that every process has of its own
    name its own devices.
    """

    trees: tuple[tuple[LeafSpec, ...], ...]
    budget: int
    mode: str = "shared"

    @property
    def count(self) -> int:
        return len(self.trees)

    @property
    def names(self) -> list[str]:
        return [f"leaf{number}" for number in range(len(self.trees[0]))]

    def plan(self, process: int, largest: int | None = None) -> SavePlan:
        group = ProcessGroup(process, self.count, self.mode)  # type: ignore[arg-type]
        return plan_save(self.names, self.trees[process], self.budget, Division(group), largest)

    def plans(self, largest: int | None = None) -> list[SavePlan]:
        return [self.plan(process, largest) for process in range(self.count)]


def chunks_in(plan: SavePlan) -> list[Chunk]:
    return [chunk for batch in plan.batches for chunk in batch.chunks]


@st.composite
def meshes(draw: st.DrawFn, devices: Any) -> Mesh:
    """A mesh over all devices, or over those of some processes, in some order."""
    left = len(devices)
    sizes = []
    for _ in range(draw(st.integers(0, 2))):
        size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes.append(left)
    if draw(st.integers(0, 3)) == 0:
        devices = devices[list(draw(st.permutations(range(len(devices)))))]
    return Mesh(devices.reshape(sizes), tuple("xyz"[: len(sizes)]))


@st.composite
def shardings(draw: st.DrawFn, mesh: Mesh, rank: int) -> tuple[NamedSharding, list[int]]:
    """A sharding for arrays of a rank, and into how many parts it cuts every axis."""
    axes = list(draw(st.permutations(mesh.axis_names)))
    spec, parts = [], []
    for _ in range(rank):
        taken = draw(st.integers(0, len(axes)))
        used, axes = axes[:taken], axes[taken:]
        spec.append(tuple(used) or None)
        parts.append(math.prod(mesh.shape[axis] for axis in used))
    return NamedSharding(mesh, PartitionSpec(*spec)), parts


@st.composite
def jobs(draw: st.DrawFn, most_leaves: int = 5) -> Job:
    """1 to 8 processes of 1 to 4 devices each, and a tree over them."""
    count, each = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    devices = devices_of(count, each)
    if draw(st.booleans()):
        # Some processes have more devices than others.
        rest = draw(st.lists(st.integers(0, count - 1), min_size=len(devices) - count))
        for device, process in zip(devices, [*range(count), *rest], strict=False):
            device.process_index = process
    # Of a mesh of one process's devices nobody else could tell that it is not his own.
    last = count - draw(st.integers(0, 1)) * (count > 2)
    mesh = draw(meshes(devices[[device.process_index < last for device in devices]]))
    trees: list[list[LeafSpec]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(1, most_leaves))):
        kind = draw(st.sampled_from(["jax", "jax", "jax", "key", "numpy", "own", "scalar", "same"]))
        rank = draw(st.integers(0, 3))
        dtype = draw(DTYPES)
        sharding, parts = draw(shardings(mesh, rank))
        lengths = draw(st.lists(LENGTHS, min_size=rank, max_size=rank))
        if math.prod(lengths) * math.prod(parts) > MOST_ELEMENTS:
            lengths = [min(length, 5) for length in lengths]
        shape = tuple(length * part for length, part in zip(lengths, parts, strict=True))
        if draw(st.integers(0, 9)) == 0:
            shape = (*shape[:-1], 0)[:rank]
        if kind == "jax":
            spec = LeafSpec("jax", dtype, shape, sharding, format=draw(FORMATS))
        elif kind == "key":
            keys, _ = draw(shardings(mesh, 0))
            spec = LeafSpec("key", "uint32", (2,), keys, impl="threefry2x32")
        elif kind == "numpy":
            spec = LeafSpec("numpy", dtype, shape)
        elif kind == "scalar":
            spec = draw(st.sampled_from(SCALARS))
        elif kind == "same":
            first = draw(st.integers(0, max(number - 1, 0)))
            shareable = trees[0] and trees[0][first].kind in ("jax", "numpy")
            if not shareable or trees[0][first].same_as is not None:
                first = number
            for tree in trees:
                found = LeafSpec("numpy", dtype, shape) if first == number else tree[first]
                tree.append(found if first == number else replace(found, same_as=first))
            continue
        for process, tree in enumerate(trees):
            if kind == "own":
                own = Mesh(devices[[d.process_index == process for d in devices]], ("d",))
                spec = LeafSpec("jax", dtype, shape, NamedSharding(own, PartitionSpec()))
            tree.append(spec)
    return Job(tuple(map(tuple, trees)), draw(BUDGETS))


def values_of(specs: Any, seed: int) -> list[Any]:
    """Random arrays, and Python scalars in their places."""
    rng = np.random.default_rng(seed)
    made: list[Any] = []
    for spec in specs:
        if spec.same_as is not None:
            made.append(made[spec.same_as])
        elif spec.kind in ("int", "float", "str"):
            made.append({"int": 7, "float": 0.5, "str": "text"}[spec.kind])
        else:
            raw = rng.integers(0, 256, max(spec.nbytes, 1), np.uint8)[: spec.nbytes]
            itemsize = spec.nbytes // max(math.prod(spec.shape), 1) or 1
            made.append(raw.view(f"V{itemsize}").reshape(spec.shape))
    return made
