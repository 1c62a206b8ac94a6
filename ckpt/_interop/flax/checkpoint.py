"""A file of msgpack that Flax wrote, opened: as a manifest over the file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from msgspec import Struct

from ckpt._format.digests import digest
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._interop.flax.packed_tree import PackedArray, parse_msgpack
from ckpt._interop.flax.packed_values import check_packed, is_number, value_entry
from ckpt._interop.foreign import (
    ITEM,
    Fill,
    ForeignCheckpoint,
    ForeignFiles,
    is_file,
    manifest_of,
    structure_of,
)
from ckpt._interop.runs_of_bytes import kind_of, leaf_of_run
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError, located
from ckpt.storage._base import Storage

# What a manifest is of that describes a file of Flax.
FORMAT = "flax"
SUFFIX = ".msgpack"
# As `flax.training.checkpoints` calls files.
_STEP_FILE = re.compile(r"^checkpoint_\d+\Z")
# What stands there for an array that is in another file, with parts from each process.
_ELSEWHERE = "//GDAPlaceholder:"


def is_named_like_flax(name: str) -> bool:
    """Tell whether a file of this name may be one of Flax."""
    return name.endswith(SUFFIX) or _STEP_FILE.match(name) is not None


async def open_flax(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint that a file of Flax is; None if there is no such file.

    The file is read once as a whole, to find where its arrays are; they are read from it later.

    Args:
        storage: The directory, or the place in a store.
        name: The file in it.

    Raises:
        CorruptCheckpointError: It is damaged, or larger than the memory of this machine.
        UnsupportedFormatError: It has a value that is not read; names the leaf.
        StorageError: The store refused.
    """
    if not await is_file(storage, name):
        return None
    data = await storage.read("", name, host_memory_bytes())
    if data is None:
        return None
    where = f"{storage.location}/{name}"
    tree = await run_in_thread(parse_msgpack, data, where)
    # It may be as large as the arrays that are read next.
    del data
    read = partial(storage.read_block, "", name)
    try:
        manifest, made = await run_in_thread(_manifest, tree, name, where, read)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if error.message.startswith(where):
            raise
        raise type(error)(f"{where}: {error.message}", leaf=error.leaf) from error
    return ForeignCheckpoint(manifest, ForeignFiles(storage, "", {ITEM: ""}, made=made))


def _manifest(tree: Any, file: str, where: str, read: Fill) -> tuple[Manifest, dict[str, Fill]]:
    """Return the manifest of a tree, and the files that are made when they are read."""
    structure = structure_of(tree, where)
    files = [file]
    made: dict[str, Fill] = {}
    entries: list[LeafEntry] = []
    nbytes = 0
    for name, leaf in zip(structure.names, structure.leaves, strict=True):
        with located(leaf=name):
            if not isinstance(leaf, PackedArray):
                _refuse_elsewhere(leaf)
                entries.append(value_entry(name, leaf))
                continue
            nbytes += check_packed(leaf, "Flax")
        number, offset = 0, leaf.pieces[0][0]
        if len(leaf.pieces) > 1:
            # As it is a path in a file, no other file has it.
            number, offset = len(files), 0
            files.append(f"{file}/{number}")
            made[f"{ITEM}/{files[-1]}"] = JoinedPieces(read, leaf.pieces).fill
        kind = "numpy_scalar" if is_number(leaf) else kind_of(leaf.dtype)
        entries.append(leaf_of_run(name, kind, leaf.dtype, leaf.shape, number, offset))
    table = LeafTable.of(entries)
    item = ItemEntry("pytree", list(structure.nodes), table, [], files, nbytes)
    return manifest_of(FORMAT, item, digest(repr(entries).encode())), made


def _refuse_elsewhere(leaf: Any) -> None:
    if isinstance(leaf, str) and leaf.startswith(_ELSEWHERE):
        raise UnsupportedFormatError(
            "its array is in a directory beside the file, with parts from several processes, which "
            "is not read here: load it with flax.training.checkpoints"
        )


class JoinedPieces(Struct, frozen=True):
    """An array in several pieces of a file, as if it were a file of its own.

    Attributes:
        read: Reads bytes of the file.
        pieces: Offset and length of each.
    """

    read: Fill
    pieces: Sequence[tuple[int, int]]

    async def fill(self, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of the array from `offset` on."""
        lengths = [length for _, length in self.pieces]
        for (place, length), end in zip(self.pieces, accumulate(lengths), strict=True):
            start = end - length
            first, last = max(offset, start), min(offset + len(target), end)
            if first < last:
                part = target[first - offset : last - offset]
                await self.read(place + first - start, part)
