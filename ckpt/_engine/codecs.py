"""The zarr codecs: chunks are encoded and decoded in memory, by TensorStore.

TensorStore has no function that encodes bytes. An array of one chunk over a key-value store in
memory does the same: what is written to the array is encoded in the store, and what is put into the
store is decoded by a read of the array. To a codec a chunk is bytes, so the array has the dtype
uint8, whatever the leaf's dtype is.

Everything here runs in worker threads and holds a chunk three times meanwhile.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt._engine.tensorstore import new_context, translated
from ckpt._format.array_format import Blosc, Compression, Zstd
from ckpt._format.leaf_table import LeafEntry
from ckpt._plan.write_batches import encoded_bound
from ckpt.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    import tensorstore as ts

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_KEY = "c/0"
# Encoded bytes carry their parameters; only the kind of codec has to be known.
_DECODERS: dict[str, Compression] = {"zstd": Zstd(), "blosc": Blosc()}
# The decoded and the encoded size, in the header of 16 bytes of a blosc buffer.
_BLOSC_SIZES = struct.Struct("<4xI4xI")


def encode_chunk(chunk: Bytes, compression: Compression, itemsize: int) -> bytes:
    """Return `chunk` encoded; its elements have `itemsize` bytes."""
    store, array = _one_chunk(chunk.nbytes, compression, itemsize)
    # Without a copy: the write has ended before the caller goes on.
    array.write(chunk, can_reference_source_data_indefinitely=True).result()
    encoded: bytes = store.read(_KEY).result().value
    if len(encoded) > encoded_bound(chunk.nbytes):
        raise CheckpointError(f"{compression} made {len(encoded)} bytes of {chunk.nbytes}")
    return encoded


def decode_chunk(leaf: LeafEntry, encoded: bytes, target: Bytes) -> None:
    """Fill `target` with the bytes of a chunk of `leaf`; never decodes more than that.

    Raises:
        CorruptCheckpointError: The encoded bytes are damaged, or decode to another size.
    """
    if leaf.codec == "blosc":
        # The decoder allocates as much memory as the header says.
        sizes = _BLOSC_SIZES.unpack_from(encoded) if len(encoded) >= _BLOSC_SIZES.size else None
        if sizes != (target.nbytes, len(encoded)):
            raise CorruptCheckpointError(
                f"a chunk of {target.nbytes} bytes was encoded in {len(encoded)}; its header says "
                f"{sizes}. The data was damaged; restore another step",
                leaf=leaf.name,
            )
    import tensorstore as ts

    with translated("decode an array", leaf=leaf.name):
        store, array = _one_chunk(target.nbytes, _DECODERS[leaf.codec or ""], 1)
        store.write(_KEY, encoded).result()
        ts.array(target).write(array).result()


def _one_chunk(
    nbytes: int, compression: Compression, itemsize: int
) -> tuple[ts.KvStore, ts.TensorStore]:
    """Return a store in memory for one chunk, and the array over it."""
    # Few steps are compressed, and its import takes as long as that of half of this library.
    import tensorstore as ts

    context = new_context()
    store = ts.KvStore.open({"driver": "memory"}, context=context).result()
    spec = {
        "driver": "zarr3",
        "metadata": {
            "shape": [nbytes],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [nbytes]}},
            "chunk_key_encoding": {"name": "default"},
            "data_type": "uint8",
            "codecs": [{"name": "bytes"}, compression.codec(itemsize)],
            "fill_value": 0,
        },
        "store_data_equal_to_fill_value": True,
    }
    opened = ts.open(spec, kvstore=store, context=context, open=True, assume_metadata=True)
    return store, opened.result()
