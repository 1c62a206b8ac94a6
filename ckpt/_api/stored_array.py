"""`open_array`: one array of a checkpoint, of which only the parts are read that are asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct

from ckpt._api.faces.coroutines import UnawaitedCall, awaited
from ckpt._api.faces.plain_docs import plain_docs
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, whole
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.multihost.per_process import pick
from ckpt._plan.slices.array_index import region_of_index
from ckpt._plan.slices.array_slices import ArraySlice
from ckpt._plan.targets import ArrayRead, ArrayTarget
from ckpt._runtime.loop import call_once, run_once
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.opened import OpenedStep
from ckpt._steps.restores.requests import context_of
from ckpt._steps.wrong_paths import opened_checkpoint
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import escape_slashes
from ckpt._tree.suggestions import suggestion
from ckpt.errors import InvalidArgumentError, located
from ckpt.storage._base import Storage
from ckpt.storage._manifests import while_read
from ckpt.storage._resolve import PathLike, open_step_dir

Array = np.ndarray[Any, Any]


class FoundArray(Struct, frozen=True):
    """An array in a checkpoint.

    Attributes:
        storage: Where the checkpoint is.
        opened: The checkpoint.
        item: The item that the array is in.
        number: Number of its leaf.
        entry: Its manifest entry.
        where: Checkpoint and leaf path, for messages.
    """

    storage: Storage
    opened: OpenedStep
    item: str
    number: int
    entry: LeafEntry
    where: str

    async def read(self, region: Region) -> Array:
        """Return a region of the array; the chunks that it touches are read and checked."""
        manifest = self.opened.manifest
        context = context_of(self.opened, self.storage, make_engine(Staging(), (), ()), 0, 1)
        part = pick(manifest, self.item, 0, 1)
        reader = EngineItemReader(context, self.item, part)
        dtype = self.entry.dtype or ""
        target = ArrayTarget("numpy", parse_dtype(dtype))
        piece = ArraySlice(self.number, region, whole(region.shape))
        read = ArrayRead(target, region.shape, dtype, None, self.entry.name, (piece,))
        async with while_read(self.storage, self.opened.step_dir, manifest):
            with located(step=manifest.step, item=self.item):
                [found] = await reader.read(part.entry, [read])
        array: Array = found
        return array


async def find_array(path: PathLike, leaf: str, item: str | None) -> FoundArray:
    """Return an array of a checkpoint.

    Raises:
        InvalidArgumentError: There is no such item or leaf, or the leaf is no array.
        NotACheckpointError: There is no checkpoint at `path`.
    """
    storage, step_dir = open_step_dir(path, follow=True)
    opened = await opened_checkpoint(path, storage, step_dir)
    where, manifest = opened.location, opened.manifest
    if item is None and len(manifest.items) == 1:
        [item] = manifest.items
    if item is None or item not in manifest.items:
        listed = ", ".join(map(repr, manifest.items))
        what = f"it has several items ({listed}): say with item= in which the array is"
        if item is not None:
            what = f"there is no item {item!r:.80}, only {listed}"
        raise InvalidArgumentError(f"{where}: {what}")
    entry = manifest.items[item]
    check_leaves(entry)
    names = list(unboxed_names(entry.nodes, entry.leaves.names))
    name = escape_slashes(str(leaf))
    if name not in names:
        below = [each for each in names if each.startswith(f"{name}.")]
        hint = suggestion(name, names)
        if below:
            hint = f"; it is a branch with {len(below)} of them, such as {below[0]!r:.200}"
        raise InvalidArgumentError(f"{where}: there is no leaf {leaf!r:.200}{hint}", item=item)
    number = names.index(name)
    found = entry.leaves[number]
    if found.kind not in ARRAY_KINDS or found.kind == "key":
        what = "PRNG key" if found.kind == "key" else found.kind
        raise InvalidArgumentError(
            f"{where}: the leaf {leaf!r:.200} is no array ({what}): read it with "
            f"ckpt.load(path, at={leaf!r:.200})",
            item=item,
        )
    return FoundArray(opened.storage, opened, item, number, found, f"{where}: {leaf}")


class _ArrayBase:
    """What both faces of a stored array share: what is known without reading it."""

    def __init__(self, found: FoundArray) -> None:
        self._found = found

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._found.entry.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return parse_dtype(self._found.entry.dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The shape of the chunks in which it is stored: the least that is read of it."""
        return tuple(self._found.entry.chunks)

    @property
    def nbytes(self) -> int:
        """The bytes of all its elements."""
        return whole(self.shape).size * self.dtype.itemsize

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self.dtype.name}{list(self.shape)}, {self._found.where}>"

    def _call(self, index: Any) -> Callable[[], Awaitable[Array]]:
        """Return the call that reads what an index takes."""
        region, within = region_of_index(index, self.shape)

        async def call() -> Array:
            if not region.size:
                return np.empty(region.shape, self.dtype)[within]
            return (await self._found.read(region))[within]

        return call


class StoredArray(_ArrayBase):
    """An array of a checkpoint, of which only the parts are read that are asked for.

    `await array[10:20]` reads the chunks that hold these rows, checks their digests, and returns a
    numpy array. An index has integers, slices and `...`; a slice with a step reads what is between,
    too. Nothing is kept, so reading the same part again reads it from the storage.

    Example:
        ```python
        kernel = await ckpt.open_array("runs/a/100", "params.w")
        print(kernel.shape, kernel.dtype)
        rows = await kernel[:2]
        ```
    """

    def __getitem__(self, index: Any) -> Awaitable[Array]:
        return UnawaitedCall(run_once(self._call(index)), "array[...]", "ckpt.sync.open_array")


@plain_docs(StoredArray)
class SyncStoredArray(_ArrayBase):
    """An array of a checkpoint, of which only the parts are read that are asked for.

    `array[10:20]` reads the chunks that hold these rows, checks their digests, and returns a numpy
    array; `numpy.asarray(array)` reads all of it. An index has integers, slices and `...`; a slice
    with a step reads what is between, too. Nothing is kept, so reading the same part again reads it
    from the storage.

    Example:
        ```python
        kernel = ckpt.sync.open_array("runs/a/100", "params.w")
        print(kernel.shape, kernel.dtype)
        rows = kernel[:2]
        ```
    """

    def __getitem__(self, index: Any) -> Array:
        return call_once(self._call(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            # As numpy wants it to be said.
            raise ValueError("a stored array is read from its files, which makes a copy of it")
        found = self[...]
        return found if dtype is None else found.astype(dtype)

    def __iter__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a stored array is not iterated over, since each element would be a read of its own: "
            "read a part of it, such as array[:100], and go through that"
        )


@awaited("ckpt.open_array", "ckpt.sync.open_array")
async def open_array(path: PathLike, leaf: str, *, item: str | None = None) -> StoredArray:
    """Open one array of a checkpoint, to read parts of it.

    The manifest is read, and no array bytes. It works on what `ckpt.load` reads: checkpoints of
    this library and of Orbax, safetensors, and files of numpy and Flax, on disks and in stores.

    Args:
        path: The directory, URL or store of the checkpoint.
        leaf: Leaf path of the array, as `ckpt.metadata(path)` shows it.
        item: The item that it is in, where there are several.

    Raises:
        InvalidArgumentError: There is no such item or leaf, or the leaf is no array.
        NotACheckpointError: There is no committed checkpoint at `path`.

    Example:
        ```python
        kernel = await ckpt.open_array("runs/a/100", "params.w")
        first = await kernel[0]
        ```
    """
    return StoredArray(await run_once(partial(find_array, path, leaf, item)))
