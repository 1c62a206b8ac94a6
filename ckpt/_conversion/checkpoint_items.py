"""Stored items: a checkpoint as trees whose arrays are read on demand, in regions.

Arrays of up to a MiB, which are most of the leaves of many trees, are read at once, in few
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.from_thread
import jax
import numpy as np
from msgspec import Struct

from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.item_files import read_item_file
from ckpt._engine.restore.item_reader import RegionReader
from ckpt._engine.verify.report import role_of
from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import OWN_DISKS
from ckpt._format.places import describe_sharding
from ckpt._format.regions import Region, whole
from ckpt._interop.orbax.sidecars import ABOUT_FILE
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.targets import default_device
from ckpt._plan.weighted_means import accumulator, is_averaged
from ckpt._settings import MIN_BUDGET_BYTES, Staging
from ckpt._steps.opened import OpenedStep
from ckpt._steps.restore_arguments import context_of
from ckpt._steps.service import make_engine
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, decode_scalar
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt._tree.structure import Structure
from ckpt.errors import UnsupportedFormatError, located
from ckpt.handlers._base import ItemReader

Array = np.ndarray[Any, Any]

_SMALL_BYTES = 1 << 20


class CheckpointItem(Struct, frozen=True, eq=False):
    """One item of a checkpoint.

    Attributes:
        name: Its name.
        entry: Its entry in the manifest.
        tree: Its tree, whose arrays are `CheckpointLeaf`; None if it has none.
        files: The files of its handler, relative to the item.
        read_file: Returns the content of one of these files.
    """

    name: str
    entry: ItemEntry
    tree: Structure | None
    files: tuple[str, ...]
    read_file: Callable[[str], Any]


async def items_of(opened: OpenedStep, budget: int) -> dict[str, CheckpointItem]:
    """Return the items of a checkpoint, to be read within a memory budget.

    Raises:
        CheckpointError: As in `checkpoint_items`.
    """
    return await checkpoint_items(reading_within(budget, opened), budget // 2)


def reading_within(budget: int, opened: OpenedStep) -> RestoreContext:
    """Return the context of reads of a checkpoint, which take half of a memory budget."""
    engine = make_engine(Staging(max(budget // 2, MIN_BUDGET_BYTES)), ())
    return context_of(opened, engine)


async def checkpoint_items(
    context: RestoreContext,
    small_bytes: int,
    mean_of: Callable[[str], ItemReader] | None = None,
) -> dict[str, CheckpointItem]:
    """Return the items of a checkpoint.

    Args:
        context: The context of a restore. The engine's loop must be the loop of this call.
        small_bytes: Limit of the bytes of all arrays that are read at once.
        mean_of: Returns a reader of the weighted mean of an item in several checkpoints, of which
            `context` is one; None reads this one alone.

    Raises:
        UnsupportedFormatError: Each process of a job has a part of the arrays on its own disk.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    manifest = context.manifest
    if OWN_DISKS in manifest.requires:
        raise UnsupportedFormatError(
            "every process has a part of this step on a disk of its own: restore it in a job of "
            "as many processes, and save it from there",
            step=manifest.step,
        )
    found = {}
    for name, entry in manifest.items.items():
        with located(step=manifest.step, item=name):
            tree = None
            if entry.nodes or len(entry.leaves):
                reader = RegionReader(context, name, None if mean_of is None else mean_of(name))
                arrays = _Arrays(entry, reader, is_mean=mean_of is not None)
                tree = await arrays.tree(small_bytes // len(manifest.items))
        files = tuple(
            path.removeprefix(f"{name}/")
            for path in manifest.files
            if path.startswith(f"{name}/")
            and _is_of_handler(entry, path.removeprefix(f"{name}/"), tree is None)
        )
        read_file = partial(read_item_file, context, name)
        found[name] = CheckpointItem(name, entry, tree, files, read_file)
    return found


def _is_of_handler(entry: ItemEntry, path: str, is_plain: bool) -> bool:
    """Return True if a file of an item belongs, or may belong, to its handler."""
    return role_of(entry, path) == "handler" or (is_plain and path == ABOUT_FILE)


class _Arrays:
    """The arrays of one item, which worker threads read."""

    def __init__(self, entry: ItemEntry, reader: RegionReader, *, is_mean: bool) -> None:
        self._entry = entry
        self._reader = reader
        self._is_mean = is_mean

    async def tree(self, small_bytes: int) -> Structure:
        entry = self._entry
        check_leaves(entry)
        leaves: list[Any] = []
        small = await self._small(small_bytes)
        for number, leaf in enumerate(entry.leaves):
            if leaf.same_as is not None:
                # The same object, as in the saved tree.
                leaves.append(leaves[leaf.same_as])
            elif leaf.kind == CALLABLE:
                leaves.append(CheckpointLeaf(LeafSpec(CALLABLE), _nothing, str(leaf.value)))
            elif leaf.kind in ARRAY_KINDS:
                known = small.get(number)
                read = partial(self._read_now, number) if known is None else partial(_part, known)
                leaves.append(CheckpointLeaf(self._spec_of(leaf), read))
            else:
                leaves.append(decode_scalar(leaf))
        return Structure(tuple(entry.nodes), tuple(entry.leaves.names), tuple(leaves))

    async def _small(self, most: int) -> Mapping[int, Array]:
        wanted = []
        left = most
        for number, leaf in enumerate(self._entry.leaves):
            if leaf.kind in ARRAY_KINDS and leaf.same_as is None:
                nbytes = self._spec_of(leaf).nbytes
                if nbytes <= min(left, _SMALL_BYTES):
                    wanted.append((number, whole(tuple(leaf.shape))))
                    left -= nbytes
        found = await self._reader.read(wanted)
        return {number: array for (number, _), array in zip(wanted, found, strict=True)}

    async def _read(self, number: int, region: Region) -> Array:
        # Shielded: a worker thread waits for this read, and its caller waits for that thread even
        # if it is cancelled. anyio would never let a cancelled read end.
        with anyio.CancelScope(shield=True):
            [found] = await self._reader.read([(number, region)])
        return found

    def _read_now(self, number: int, region: Region) -> Array:
        """Return a region; must be called in worker threads of the loop."""
        return anyio.from_thread.run(self._read, number, region)

    def _spec_of(self, leaf: LeafEntry) -> LeafSpec:
        placed = None if leaf.sharding is None else self._entry.shardings[leaf.sharding]
        if placed is None and leaf.kind in ("jax", "key"):
            # The device where jax puts new arrays: Orbax requires a placement of every array.
            placed = describe_sharding(jax.sharding.SingleDeviceSharding(default_device()))
        copies = 1
        if self._is_mean and is_averaged(leaf.kind, leaf.dtype):
            # Memory holds the sum, and the array that is added to it in its own dtype.
            dtype = parse_dtype(leaf.dtype)
            copies += accumulator(dtype).itemsize // dtype.itemsize
        return LeafSpec(
            leaf.kind,
            leaf.dtype,
            tuple(leaf.shape),
            None,
            leaf.committed,
            leaf.weak_type,
            leaf.impl,
            placed=placed,
            chunk=tuple(leaf.chunks) if _is_read_whole(leaf) else None,
            copies=copies,
        )


def _part(array: Array, region: Region) -> Array:
    # With the dots, indexing without axes gives a view instead of a value.
    index: tuple[Any, ...] = (*region.slices, ...)
    found: Array = array[index]
    return found


def _nothing(region: Region) -> Array:
    raise AssertionError("a function has no array")


def _is_read_whole(leaf: LeafEntry) -> bool:
    """Return True if a chunk is read as a whole, to be decoded or compared with its digest."""
    return leaf.codec is not None or any(each != UNCHECKED for each in leaf.digests[:1])


class Written(Struct, frozen=True):
    """The result of a conversion.

    Attributes:
        path: Path of the result.
        arrays: Number of its arrays.
        nbytes: Bytes of the arrays.
    """

    path: str
    arrays: int
    nbytes: int


class Target(Protocol):
    """A place and a format that a checkpoint is written to."""

    @property
    def format(self) -> str:
        """Name of the format."""

    async def write(
        self, items: Mapping[str, CheckpointItem], old: Manifest, budget: int
    ) -> Written:
        """Write items; durable on return.

        Args:
            items: The items by name.
            old: Manifest of their checkpoint.
            budget: Limit of the memory to use, in bytes.
        """
