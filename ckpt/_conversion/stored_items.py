"""Stored items: a checkpoint as trees whose arrays are read when somebody asks for a part of them.

Arrays of up to a MiB are read at once, in few requests; they are most of the leaves of many trees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import jax
import numpy as np
from msgspec import Struct

from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.item_files import read_item_file
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._engine.verify.file_roles import role_of
from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import OWN_DISKS
from ckpt._format.regions import Region, whole
from ckpt._format.shardings import describe_sharding
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.multihost.per_process import ProcessPart
from ckpt._plan.orbax_view import ABOUT_FILE
from ckpt._plan.slices.array_slices import ArraySlice
from ckpt._plan.targets import ArrayRead, ArrayTarget, default_device
from ckpt._settings import MIN_BUDGET_BYTES, Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.opened import OpenedStep
from ckpt._steps.restores.requests import context_of
from ckpt._tree.flatten import Structure
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, decode_scalar
from ckpt._tree.leaf_specs import LeafSpec, StoredLeaf
from ckpt.errors import UnsupportedFormatError, located
from ckpt.storage._base import Storage

Array = np.ndarray[Any, Any]

_SMALL_BYTES = 1 << 20


class StoredItem(Struct, frozen=True, eq=False):
    """One item of a checkpoint.

    Attributes:
        name: Its name.
        entry: Its entry in the manifest.
        tree: Its tree, whose arrays are `StoredLeaf`; None if it has none.
        files: The files that its handler keeps, relative to it.
        read_file: Returns one of them.
    """

    name: str
    entry: ItemEntry
    tree: Structure | None
    files: tuple[str, ...]
    read_file: Callable[[str], Any]


async def items_of(opened: OpenedStep, storage: Storage, budget: int) -> dict[str, StoredItem]:
    """Return the items of a checkpoint, which are read within a budget of memory.

    Args:
        opened: The checkpoint.
        storage: Where it is.
        budget: Bytes of memory; half of them for arrays that are read at once.

    Raises:
        CheckpointError: As by `stored_items`.
    """
    engine = make_engine(Staging(max(budget // 2, MIN_BUDGET_BYTES)), ())
    context = context_of(opened, storage, engine, 0, 1)
    return await stored_items(context, budget // 2)


async def stored_items(context: RestoreContext, small_bytes: int) -> dict[str, StoredItem]:
    """Return the items of a checkpoint.

    Args:
        context: What a restore of it needs. The engine's loop must be the one that calls this.
        small_bytes: Most bytes of all arrays that are read at once.

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
            reader = _ArrayReader(context, name, entry)
            share = small_bytes // len(manifest.items)
            tree = await reader.tree(share) if entry.nodes or len(entry.leaves) else None
        files = tuple(
            path.removeprefix(f"{name}/")
            for path in manifest.files
            if path.startswith(f"{name}/")
            and _is_of_handler(entry, path.removeprefix(f"{name}/"), tree is None)
        )
        read_file = partial(read_item_file, context, name)
        found[name] = StoredItem(name, entry, tree, files, read_file)
    return found


def _is_of_handler(entry: ItemEntry, path: str, is_plain: bool) -> bool:
    """Tell whether a file of an item is its handler's, or may be."""
    return role_of(entry, path) == "handler" or (is_plain and path == ABOUT_FILE)


class _ArrayReader:
    """Reads regions of the arrays of one item."""

    def __init__(self, context: RestoreContext, item: str, entry: ItemEntry) -> None:
        self._step = context.manifest.step
        self._item = item
        self._entry = entry
        self._reader = EngineItemReader(context, item, ProcessPart(entry))

    async def tree(self, small_bytes: int) -> Structure:
        """Return the tree of the item."""
        entry = self._entry
        check_leaves(entry)
        leaves: list[Any] = []
        small = await self._small(small_bytes)
        for number, leaf in enumerate(entry.leaves):
            if leaf.same_as is not None:
                # The same object, as in the tree that was saved.
                leaves.append(leaves[leaf.same_as])
            elif leaf.kind == CALLABLE:
                leaves.append(StoredLeaf(LeafSpec(CALLABLE), _nothing, str(leaf.value)))
            elif leaf.kind in ARRAY_KINDS:
                known = small.get(number)
                read = partial(self._read_now, number) if known is None else partial(_part, known)
                leaves.append(StoredLeaf(_spec_of(entry, leaf), read))
            else:
                leaves.append(decode_scalar(leaf))
        return Structure(tuple(entry.nodes), tuple(entry.leaves.names), tuple(leaves))

    async def _small(self, most: int) -> Mapping[int, Array]:
        numbers = []
        left = most
        for number, leaf in enumerate(self._entry.leaves):
            if leaf.kind in ARRAY_KINDS and leaf.same_as is None:
                nbytes = _spec_of(self._entry, leaf).nbytes
                if nbytes <= min(left, _SMALL_BYTES):
                    numbers.append(number)
                    left -= nbytes
        reads = [self._request(number, None) for number in numbers]
        return dict(zip(numbers, await self._reader.read(self._entry, reads), strict=True))

    def _request(self, number: int, region: Region | None) -> ArrayRead:
        leaf = self._entry.leaves[number]
        dtype = leaf.dtype or ""
        target = ArrayTarget("numpy", parse_dtype(dtype))
        if region is None or region.shape == tuple(leaf.shape):
            return ArrayRead(target, tuple(leaf.shape), dtype, number, leaf.name)
        piece = ArraySlice(number, region, whole(region.shape))
        return ArrayRead(target, region.shape, dtype, None, leaf.name, (piece,))

    async def _read(self, number: int, region: Region) -> Array:
        # The thread that waits for it is waited for in turn, also if its caller is cancelled:
        # anyio would never let a cancelled read end.
        with anyio.CancelScope(shield=True), located(step=self._step, item=self._item):
            [found] = await self._reader.read(self._entry, [self._request(number, region)])
        array: Array = found
        return array

    def _read_now(self, number: int, region: Region) -> Array:
        """Return a region; called in worker threads of the loop."""
        return anyio.from_thread.run(self._read, number, region)


def _part(array: Array, region: Region) -> Array:
    # The dots: without axes, indexing would give a value instead of a view.
    index: tuple[Any, ...] = (*region.slices, ...)
    found: Array = array[index]
    return found


def _nothing(region: Region) -> Array:
    raise AssertionError("a function has no array")


def _spec_of(item: ItemEntry, leaf: LeafEntry) -> LeafSpec:
    placed = None if leaf.sharding is None else item.shardings[leaf.sharding]
    if placed is None and leaf.kind in ("jax", "key"):
        # Where jax puts new arrays; Orbax wants to know of every array where it was.
        placed = describe_sharding(jax.sharding.SingleDeviceSharding(default_device()))
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
        copies=1,
    )


def _is_read_whole(leaf: LeafEntry) -> bool:
    """Tell whether a chunk is read as a whole, to be decoded or compared with its digest."""
    return leaf.codec is not None or any(each != UNCHECKED for each in leaf.digests[:1])
