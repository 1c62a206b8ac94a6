"""Leaves whose values are in the file of msgpack, as entries of a manifest."""

from __future__ import annotations

import base64
import math
from typing import Any

from msgspec.structs import replace

from ckpt._format.dtypes import DTYPES
from ckpt._format.leaf_table import LeafEntry
from ckpt._interop.orbax.arrays import ArrayStore, Described, leaf_entry
from ckpt._interop.orbax.layout import PACKED_FILE
from ckpt._interop.orbax.msgpack_tree import PackedArray
from ckpt._interop.orbax.ocdbt_nodes import ValuePlace
from ckpt._interop.orbax.tree import UNKNOWN, Param
from ckpt._interop.orbax.zarr_arrays import ZarrArray
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

_SCALAR = "numpy_scalar"


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
    if isinstance(leaf, PackedArray):
        return await _array_entry(store, name, leaf)
    if isinstance(leaf, bool | str):
        return LeafEntry(name, type(leaf).__name__, value=leaf)
    if isinstance(leaf, int | float | complex):
        return LeafEntry(name, type(leaf).__name__, value=repr(leaf))
    if isinstance(leaf, bytes):
        return LeafEntry(name, "bytes", value=base64.b64encode(leaf).decode())
    raise CorruptCheckpointError(f"it is {leaf!r:.60}, which is no value")


async def _array_entry(store: ArrayStore, name: str, leaf: PackedArray) -> LeafEntry:
    if leaf.dtype not in DTYPES:
        raise UnsupportedFormatError(
            f"it has the dtype {leaf.dtype!r:.40}, which is not read here: load it with Orbax"
        )
    nbytes = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
    if nbytes != sum(length for _, length in leaf.pieces):
        raise CorruptCheckpointError(f"it has not the {nbytes} bytes that it should have")
    if len(leaf.pieces) == 1:
        offset, length = leaf.pieces[0]
        places = [store.place(ValuePlace(PACKED_FILE, "", offset, length))]
    else:
        # In pieces of a gigabyte, which is no grid of chunks.
        whole = bytearray()
        for offset, length in leaf.pieces:
            whole += await store.read(PACKED_FILE, offset, length)
        places = [store.place(bytes(whole))]
    chunks = tuple(max(n, 1) for n in leaf.shape)
    array = ZarrArray(leaf.shape, leaf.dtype, chunks, None, None, ("", "."), None)
    described = Described(array, places if nbytes else ())
    if leaf.kind in ("np.generic", "scalar") and not leaf.shape:
        # It has a dtype: numbers of Python are values of msgpack.
        return replace(leaf_entry(Param("", UNKNOWN), name, described, None, None), kind=_SCALAR)
    return leaf_entry(Param("", leaf.kind), name, described, None, None)
