"""Leaves whose values are in the file of msgpack, as entries of a manifest."""

from __future__ import annotations

from typing import Any

from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.flax.packed_tree import PackedArray
from ckpt._interop.flax.packed_values import check_packed, is_number, value_entry
from ckpt._interop.orbax.arrays import ArrayStore
from ckpt._interop.orbax.layout import PACKED_FILE
from ckpt._interop.orbax.ocdbt_nodes import ValuePlace
from ckpt._interop.runs_of_bytes import leaf_of_run


async def packed_entry(store: ArrayStore, name: str, leaf: Any) -> LeafEntry:
    """Return the leaf that stands for a value of the file of msgpack.

    Args:
        store: The arrays of the item.
        name: Name of the leaf here.
        leaf: Its value, or where it is.

    Raises:
        CorruptCheckpointError: It contradicts itself, or is no value of a leaf.
        UnsupportedFormatError: It has a dtype that is not read.
    """
    if not isinstance(leaf, PackedArray):
        return value_entry(name, leaf)
    check_packed(leaf, "Orbax")
    if len(leaf.pieces) == 1:
        file, offset, _ = store.place(ValuePlace(PACKED_FILE, "", *leaf.pieces[0]))
    else:
        # In pieces of a gigabyte, which is no grid of chunks.
        whole = bytearray()
        for start, length in leaf.pieces:
            whole += await store.read(PACKED_FILE, start, length)
        file, offset, _ = store.place(bytes(whole))
    kind = "jax" if leaf.kind == "jax.Array" else "numpy_scalar" if is_number(leaf) else "numpy"
    return leaf_of_run(name, kind, leaf.dtype, leaf.shape, file, offset)
