"""A msgpack file of Flax, opened as a manifest over the file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.flax.packed_tree import PackedArray, parse_msgpack
from ckpt._interop.flax.packed_values import check_packed, is_number, value_entry
from ckpt._interop.foreign import (
    ITEM,
    UNREAD_ERRORS,
    ForeignCheckpoint,
    ForeignFiles,
    checkpoint_of,
    naming,
    structure_of,
)
from ckpt._interop.runs_of_bytes import Fill, StoredRun
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import host_memory_bytes
from ckpt.errors import CheckpointError, UnsupportedFormatError
from ckpt.storage._base import Storage

# Format of a manifest that describes a Flax file.
FORMAT = "flax"
# Placeholder for an array that is in another file, with parts from each process.
_ELSEWHERE = "//GDAPlaceholder:"


async def open_flax(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint in a Flax file; None if the file is gone.

    The file is read once as a whole, to find the places of its arrays; they are read from it later.

    Args:
        storage: The directory, or the place in a store.
        name: Name of the file in it.

    Raises:
        CorruptCheckpointError: The file is damaged, or larger than the memory of this machine.
        UnsupportedFormatError: The file has an unsupported value; names the leaf.
        StorageError: The store refused.
    """
    data = await storage.read("", name, host_memory_bytes())
    if data is None:
        return None
    where = f"{storage.location}/{name}"
    tree = await run_in_thread(parse_msgpack, data, where)
    # Freed now: it may be as large as the arrays that are read next.
    del data
    read = partial(storage.read_block, "", name)
    with naming(where):
        structure = structure_of(tree, where)
        leaves = [
            _leaf(each, leaf, read)
            for each, leaf in zip(structure.names, structure.leaves, strict=True)
        ]
        found = ForeignFiles(storage, "", {ITEM: ""})
        return await run_in_thread(checkpoint_of, FORMAT, found, [name], structure, leaves, where)


def _leaf(name: str, leaf: Any, read: Fill) -> StoredRun | LeafEntry | CheckpointError:
    try:
        if not isinstance(leaf, PackedArray):
            if isinstance(leaf, str) and leaf.startswith(_ELSEWHERE):
                raise UnsupportedFormatError(
                    "its array is in a directory beside the file, with parts from several "
                    "processes, which is not read here: load it with flax.training.checkpoints"
                )
            return value_entry(name, leaf)
        check_packed(leaf, "Flax")
    except UNREAD_ERRORS as error:
        return error
    fill = joined(read, leaf.pieces) if len(leaf.pieces) > 1 else None
    kind = "numpy_scalar" if is_number(leaf) else None
    return StoredRun(leaf.dtype, leaf.shape, leaf.pieces[0][0], fill=fill, kind=kind)


def joined(read: Fill, pieces: Sequence[tuple[int, int]]) -> Fill:
    """Return a function that reads an array from several pieces of a file.

    Args:
        read: Reads bytes of the file.
        pieces: Offset and length of each piece.
    """

    async def fill(offset: int, target: memoryview) -> None:
        start = 0
        for place, length in pieces:
            first, last = max(offset, start), min(offset + len(target), start + length)
            if first < last:
                await read(place + first - start, target[first - offset : last - offset])
            start += length

    return fill
