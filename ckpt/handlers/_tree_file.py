"""Tree files: a tree of arrays as one file, for state that each process of a job has alone.

The file holds the length of the header (8 bytes, little endian), the header (an `ItemEntry` as
JSON: nodes, leaves and shardings), and the bytes of every distinct array, in the order of the
leaves, C order, little endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from msgspec.structs import replace

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, decode_item, encode_item
from ckpt._format.places import describe_sharding
from ckpt._plan.adapt import Adapt
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.slices import copy_strided
from ckpt._plan.targets import ArrayRead
from ckpt._tree.leaf_kinds import ARRAY_KINDS, SCALAR_KINDS, encode_scalar
from ckpt._tree.leaf_specs import LeafSpec, classify
from ckpt._tree.structure import describe
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedLeafError
from ckpt.handlers._base import ItemReader
from ckpt.handlers._pytree import PyTreeHandler

T = TypeVar("T")
Array = np.ndarray[Any, Any]

_LENGTH_BYTES = 8


def encode_tree(tree: Any) -> bytes:
    """Return a tree as the bytes of a file, which share no memory with it.

    Raises:
        UnsupportedLeafError: A leaf cannot be stored, or is on devices of other processes.
        InvalidArgumentError: A leaf is a function.
    """
    structure = describe(tree, saved=True)
    leaves: list[LeafEntry] = []
    blocks: list[bytes] = []
    shardings: dict[jax.sharding.Sharding, int] = {}
    first: dict[int, int] = {}
    for name, leaf in zip(structure.names, structure.leaves, strict=True):
        _refuse_remote(leaf, name)
        spec = classify(leaf, name)
        if spec.kind in SCALAR_KINDS:
            value = encode_scalar(spec.kind, leaf)
            leaves.append(LeafEntry(name=name, kind=spec.kind, value=value))
            continue
        if spec.kind not in ARRAY_KINDS:
            raise InvalidArgumentError("a state has no place for functions", leaf=name)
        same_as = first.setdefault(id(leaf), len(leaves))
        if same_as != len(leaves):
            leaves.append(replace(leaves[same_as], name=name, same_as=same_as))
            continue
        sharding = None
        if spec.sharding is not None:
            sharding = shardings.setdefault(spec.sharding, len(shardings))
        leaves.append(_array_entry(name, spec, sharding))
        blocks.append(np.asarray(jax.random.key_data(leaf) if spec.impl else leaf).tobytes())
    entry = ItemEntry(
        handler=PyTreeHandler.name,
        nodes=list(structure.nodes),
        leaves=LeafTable.of(leaves),
        shardings=[describe_sharding(each) for each in shardings],
    )
    header = encode_item(entry)
    return b"".join((len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blocks))


def _refuse_remote(leaf: Any, name: str) -> None:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if is_array and not leaf.is_fully_addressable:
        raise UnsupportedLeafError(
            "the array is on devices of several processes, but the state of an object is saved by "
            "each process for itself: save the array in a tree, as an item of its own",
            leaf=name,
        )


def _array_entry(name: str, spec: LeafSpec, sharding: int | None) -> LeafEntry:
    return LeafEntry(
        name=name,
        kind=spec.kind,
        dtype=spec.dtype,
        shape=list(spec.shape),
        # One chunk, which the digest of the file covers; no chunk if the array has no elements.
        chunks=[max(length, 1) for length in spec.shape],
        digests=[""] * all(spec.shape),
        packed=True,
        sharding=sharding,
        committed=spec.committed,
        weak_type=spec.weak_type,
        impl=spec.impl,
    )


async def load_tree(data: bytes, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
    """Return the tree in a file, in the form of the target `like` if there is one.

    Raises:
        TargetMismatchError: The target does not fit; the message lists every leaf.
        CorruptCheckpointError: The bytes are not such a file.
    """
    entry, arrays = await reader.in_thread(_decoded, data)
    return await PyTreeHandler().load(entry, like, adapt, _MemoryReader(reader, arrays))


def _decoded(data: bytes) -> tuple[ItemEntry, list[Array | None]]:
    """Return the header, and the array of every leaf, or None."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        entry = decode_item(data[_LENGTH_BYTES:end])
    except ValueError:
        raise CorruptCheckpointError("the file of a state has no readable header") from None
    check_leaves(entry)
    arrays: list[Array | None] = []
    for leaf in entry.leaves:
        if leaf.kind not in ARRAY_KINDS or leaf.same_as is not None:
            arrays.append(None if leaf.same_as is None else arrays[leaf.same_as])
            continue
        dtype = parse_dtype(leaf.dtype)
        start, end = end, end + math.prod(leaf.shape) * dtype.itemsize
        if end > len(data):
            raise CorruptCheckpointError("the file of a state ends too early", leaf=leaf.name)
        found: Array = np.ndarray(tuple(leaf.shape), dtype, data, start)
        # Copied into memory of its own, which is aligned.
        arrays.append(found.copy())
    return entry, arrays


class _MemoryReader:
    """An `ItemReader` for arrays that are already in memory."""

    def __init__(self, reader: ItemReader, arrays: Sequence[Array | None]) -> None:
        self._reader = reader
        self._arrays = arrays
        self.item = reader.item
        self.process = reader.process
        self.processes = reader.processes

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        known = [
            replace(read, leaf=None, pieces=(), value=_value_of(read, self._arrays))
            for read in reads
        ]
        return await self._reader.read(ItemEntry(handler=entry.handler), known)

    async def read_file(self, path: str) -> bytes:
        return await self._reader.read_file(path)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await self._reader.in_thread(function, *args)


def _value_of(read: ArrayRead, arrays: Sequence[Array | None]) -> Array | None:
    """Return the array of a read, assembled if it is made of parts."""
    if read.leaf is not None:
        return arrays[read.leaf]
    if read.value is not None:
        return read.value
    whole: Array = np.zeros(read.shape, parse_dtype(read.stored))
    for piece in read.pieces:
        source = arrays[piece.leaf]
        assert source is not None
        at, place = piece.source.offset, piece.target.offset
        copy_strided(source, at, whole, place, piece.directions)
    return whole
