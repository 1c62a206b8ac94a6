"""Chunks through zarr codecs, by way of TensorStore, in memory.

TensorStore has no function that encodes bytes. An array of one chunk over a key-value store in
memory comes to the same: what is written to it lies in the store encoded, and what lies there comes
out decoded. To a codec a chunk is bytes, so the array is one of bytes, whatever the leaf's dtype.

Everything here runs in worker threads and holds a chunk three times for the moment.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import tensorstore as ts

from ckpt._engine.tensorstore import translated
from ckpt._format.array_format import Blosc, Compression, Zstd
from ckpt._format.manifest import LeafEntry
from ckpt._plan.write_batches import encoded_bound
from ckpt.errors import CheckpointError, CorruptCheckpointError

__all__ = ["decode_chunk", "encode_chunk"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_KEY = "c/0"
# What is encoded says itself how; only the kind of codec has to be known.
_DECODERS: dict[str, Compression] = {"zstd": Zstd(), "blosc": Blosc()}
# Of the 16 bytes that a blosc buffer begins with: decoded and encoded size.
_BLOSC_SIZES = struct.Struct("<4xI4xI")


def encode_chunk(chunk: Bytes, compression: Compression, itemsize: int) -> bytes:
    """Return `chunk`, whose elements have `itemsize` bytes, encoded."""
    store, array = _one_chunk(chunk.nbytes, compression, itemsize)
    # Not copied: the write has ended before the caller goes on.
    array.write(chunk, can_reference_source_data_indefinitely=True).result()
    encoded: bytes = store.read(_KEY).result().value
    if len(encoded) > encoded_bound(chunk.nbytes):
        raise CheckpointError(f"{compression} made {len(encoded)} bytes of {chunk.nbytes}")
    return encoded


def decode_chunk(leaf: LeafEntry, encoded: bytes, target: Bytes) -> None:
    """Fill `target` with the bytes of a chunk of `leaf`; never decodes more than that.

    Raises:
        CorruptCheckpointError: What is encoded is damaged, or of another size.
    """
    if leaf.codec == "blosc":
        # Its decoder takes as much memory as the header says.
        sizes = _BLOSC_SIZES.unpack_from(encoded) if len(encoded) >= _BLOSC_SIZES.size else None
        if sizes != (target.nbytes, len(encoded)):
            raise CorruptCheckpointError(
                f"a chunk of {target.nbytes} bytes was encoded in {len(encoded)}; its header says "
                f"{sizes}. The data was damaged; restore another step",
                leaf=leaf.name,
            )
    with translated("decode an array", leaf=leaf.name):
        store, array = _one_chunk(target.nbytes, _DECODERS[leaf.codec or ""], 1)
        store.write(_KEY, encoded).result()
        ts.array(target).write(array).result()


def _one_chunk(
    nbytes: int, compression: Compression, itemsize: int
) -> tuple[ts.KvStore, ts.TensorStore]:
    """Return a store of its own for one chunk, and the array that is to lie there."""
    # Stores in memory are shared within a context.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
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
