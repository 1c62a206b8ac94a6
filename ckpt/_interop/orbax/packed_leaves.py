"""Leaves whose values are in the msgpack file, as entries of a manifest."""

from __future__ import annotations

from typing import Any

from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.flax.packed_tree import PackedArray
from ckpt._interop.flax.packed_values import check_packed, is_number, value_entry
from ckpt._interop.orbax.arrays import ArrayStore
from ckpt._interop.orbax.layout import PACKED_FILE
from ckpt._interop.orbax.ocdbt_nodes import ValueLocation
from ckpt._interop.runs_of_bytes import StoredRun, leaf_of_run


async def packed_entry(store: ArrayStore, name: str, leaf: Any) -> LeafEntry:
    """Return the leaf for a value in the msgpack file.

    Args:
        store: The arrays of the item.
        name: Name of the leaf in this library.
        leaf: Its value, or its place.

    Raises:
        CorruptCheckpointError: The leaf contradicts itself, or is not the value of a leaf.
        UnsupportedFormatError: The leaf has an unsupported dtype.
    """
    if not isinstance(leaf, PackedArray):
        return value_entry(name, leaf)
    check_packed(leaf, "Orbax")
    if len(leaf.pieces) == 1:
        file, offset, _ = store.place(ValueLocation(PACKED_FILE, "", *leaf.pieces[0]))
    else:
        # Pieces of a gigabyte do not form a grid of chunks, so they are joined in memory.
        whole = bytearray()
        for start, length in leaf.pieces:
            whole += await store.read(PACKED_FILE, start, length)
        file, offset, _ = store.place(bytes(whole))
    kind = "jax" if leaf.kind == "jax.Array" else "numpy_scalar" if is_number(leaf) else "numpy"
    return leaf_of_run(name, StoredRun(leaf.dtype, leaf.shape, offset, file, kind=kind))
