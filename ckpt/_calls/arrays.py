"""One array of a checkpoint, read in parts on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct

from ckpt._engine.restore.item_reader import RegionReader
from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, whole
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.slices.array_index import region_of_index
from ckpt._runtime.loop import call_once
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.opened import OpenedStep
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.restores.restore_arguments import context_of
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.item_leaves import branch_of
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.suggestions import suggestion
from ckpt.errors import InvalidArgumentError
from ckpt.storage._resolve import PathLike, open_step_dir

Array = np.ndarray[Any, Any]


class FoundArray(Struct, frozen=True):
    """An array in a checkpoint.

    Attributes:
        opened: The checkpoint.
        item: The item of the array.
        number: Number of its leaf.
        entry: Its manifest entry.
        where: Checkpoint and leaf path, for messages.
    """

    opened: OpenedStep
    item: str
    number: int
    entry: LeafEntry
    where: str

    async def read(self, region: Region) -> Array:
        """Return a region of the array; reads and checks the chunks that the region touches."""
        context = context_of(self.opened, make_engine(Staging(), ()))
        [found] = await RegionReader(context, self.item, None).read([(self.number, region)])
        return found


async def find_array(path: PathLike, leaf: str) -> FoundArray:
    """Return an array of a checkpoint.

    Raises:
        InvalidArgumentError: There is no such item or leaf, or the leaf is no array.
        NotACheckpointError: There is no checkpoint at `path`.
    """
    storage, step_dir = open_step_dir(path, follow=True)
    opened = await opened_checkpoint(path, storage, step_dir)
    where, manifest = opened.location, opened.manifest
    try:
        item, name = branch_of(str(leaf), list(manifest.items), unnamed=manifest.unnamed)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error.message}") from None
    entry = manifest.items[item]
    check_leaves(entry)
    names = list(unboxed_names(entry.nodes, entry.leaves.names))
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
    return FoundArray(opened, item, number, found, f"{where}: {leaf}")


class ArrayBase:
    """A stored array without its reads, which differ between the two faces."""

    def __init__(self, found: FoundArray) -> None:
        self._found = found

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self._found.entry.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return parse_dtype(self._found.entry.dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of its stored chunks: the smallest parts that are read."""
        return tuple(self._found.entry.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return whole(self.shape).size * self.dtype.itemsize

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self.dtype.name}{list(self.shape)}, {self._found.where}>"

    def _call(self, index: Any) -> Callable[[], Awaitable[Array]]:
        """Return the call that reads the elements of an index."""
        region, within = region_of_index(index, self.shape)

        async def call() -> Array:
            if not region.size:
                return np.empty(region.shape, self.dtype)[within]
            return (await self._found.read(region))[within]

        return call


class PlainArrayBase(ArrayBase):
    """A stored array of the plain face, which numpy can read as a whole."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            # numpy requires a ValueError if a copy cannot be avoided.
            raise ValueError("a stored array is read from its files, which makes a copy of it")
        found = call_once(self._call(...))
        return found if dtype is None else found.astype(dtype)

    def __iter__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a stored array is not iterated over, since each element would be a read of its own: "
            "read a part of it, such as array[:100], and go through that"
        )
