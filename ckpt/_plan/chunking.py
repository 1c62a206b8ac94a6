"""How one leaf is cut into chunks, and what its `zarr.json` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt._format.array_format import ArrayFormat, Compression
from ckpt._format.dtypes import DTYPES
from ckpt._format.ocdbt import MAX_KEY_BYTES
from ckpt._format.regions import chunk_grid
from ckpt._format.zarr import choose_chunk, chunk_key, zarr_metadata_bytes
from ckpt._plan.data_files import CHUNK_ALIGNMENT, SECTOR
from ckpt._plan.ownership import ArrayPlacement
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import UnsupportedLeafError

__all__ = [
    "BATCH_BYTES",
    "METADATA_KEY",
    "PACKED_BYTES",
    "LeafPlan",
    "Limits",
    "limits_of",
    "plan_leaf",
]

# A leaf up to this size is packed. Gathering whole leaves costs a few microseconds each; what is
# larger is worth a chunk for every shard, so that each owner writes its own.
PACKED_BYTES = 256 << 10
# A batch must be large against the few milliseconds a file of its own costs, and small enough
# that several fit the budget and every lane has some; a chunk must be small enough for resharded
# reads. A large item has larger batches, so that it has not more than about so many files.
BATCH_BYTES = 48 << 20
CHUNK_BYTES = 32 << 20
# Chunks to be compressed are smaller: a chunk keeps one thread busy, and is held three times
# meanwhile.
COMPRESSED_CHUNK_BYTES = 8 << 20
_MOST_FILES = 256
METADATA_KEY = "zarr.json"
_NO_FORMAT = ArrayFormat()


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """Where one leaf goes.

    Attributes:
        name: Its stored name.
        spec: What it is.
        chunk: Chunk shape of its array.
        grid: Number of chunks along every axis.
        packed: Whether it is a packed leaf.
        metadata: Its `zarr.json`, or None where nothing of it is in the database.
        compression: How its chunks are encoded, or None.
    """

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    packed: bool
    metadata: bytes | None
    compression: Compression | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Most bytes of a batch; of one to be encoded; of a chunk that cannot be smaller."""

    batch: int
    encoded: int
    chunk: int


def limits_of(
    nbytes: int,
    budget_bytes: int,
    processes: int,
    largest: int | None,
    usual: int | None = None,
) -> Limits:
    """Return the limits of a tree of `nbytes`, written by so many processes.

    Args:
        nbytes: Bytes of all its arrays.
        budget_bytes: The staging budget of every process.
        processes: How many there are.
        largest: Most bytes of a file, or None.
        usual: About how large a file is best, or None for what is best on a disk.
    """
    share = nbytes // processes
    batch = min(max(usual or BATCH_BYTES, share // _MOST_FILES), budget_bytes // 4)
    if largest is None:
        return Limits(batch, batch, budget_bytes // 2)
    largest = largest // SECTOR * SECTOR
    batch = min(batch, largest)
    # Small chunks can get three times as long, with what aligns them.
    return Limits(batch, min(batch, largest // 4), min(budget_bytes // 2, largest))


def plan_leaf(
    name: str,
    spec: LeafSpec,
    limits: Limits,
    documents: dict[tuple[object, ...], bytes],
    spread: ArrayPlacement | None,
) -> LeafPlan:
    """Return where one leaf goes.

    Args:
        name: Its stored name.
        spec: What it is.
        limits: How large chunks and batches may be.
        documents: The `zarr.json` of all kinds of arrays so far; thousands of leaves share a few.
        spread: How it lies on several processes, or None where it does not.

    Raises:
        UnsupportedLeafError: Its name is too long to be a key of a database.
    """
    if spec.dtype is None:
        return LeafPlan(name, spec, (), (), packed=False, metadata=None)
    itemsize = DTYPES[spec.dtype].itemsize
    chosen = spec.format or _NO_FORMAT
    batch_bytes = limits.batch
    most_bytes = None if spread is None else limits.chunk
    largest = min(CHUNK_BYTES, batch_bytes) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    most = batch_bytes if chosen.chunk_bytes is None else chosen.chunk_bytes
    packed = spec.nbytes <= min(PACKED_BYTES, largest // 2, most)
    packed = packed and (spread is None or spread.is_whole)
    compression = None if packed else chosen.codec
    if compression is not None:
        largest, batch_bytes = COMPRESSED_CHUNK_BYTES, limits.encoded // 2
        most_bytes = None if spread is None else limits.chunk // 4
    chunk_bytes = min(chosen.chunk_bytes or largest, batch_bytes)
    shard = spec.shape
    if not packed and spec.sharding is not None:
        shard = spec.sharding.shard_shape(spec.shape)
    axes = () if packed else _axes_first(spec, chosen, shard)
    chunk = choose_chunk(spec.shape, shard, itemsize, max(chunk_bytes, itemsize), axes, most_bytes)
    key = (spec.shape, chunk, spec.dtype, compression)
    if key not in documents:
        documents[key] = zarr_metadata_bytes(spec.shape, chunk, spec.dtype, compression)
    grid = chunk_grid(spec.shape, chunk)
    _check_name(name, grid)
    return LeafPlan(name, spec, chunk, grid, packed, documents[key], compression)


def _axes_first(spec: LeafSpec, chosen: ArrayFormat, shard: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are cut before the leading ones."""
    if chosen.split_axes is not None:
        return tuple(dict.fromkeys(axis % len(spec.shape) for axis in chosen.split_axes))
    if chosen.chunk_bytes is None:
        return ()
    lengths = zip(shard, spec.shape, strict=True)
    return tuple(axis for axis, (part, length) in enumerate(lengths) if part < length)


def _check_name(name: str, grid: tuple[int, ...]) -> None:
    last = chunk_key([max(n - 1, 0) for n in grid])
    longest = MAX_KEY_BYTES - 1 - max(len(last), len(METADATA_KEY))
    nbytes = len(name.encode())
    if nbytes > longest:
        raise UnsupportedLeafError(
            f"the leaf's name has {nbytes} bytes, of which at most {longest} can be stored; use "
            "shorter keys",
            leaf=name,
        )
