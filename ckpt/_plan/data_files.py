"""Batches: chunks that are staged together, and written as they lie there as one data file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt._format.regions import Region

__all__ = [
    "CHUNK_ALIGNMENT",
    "SECTOR",
    "Chunk",
    "ChunkPart",
    "FileSpan",
    "Places",
    "WriteBatch",
    "aligned",
    "alignment_of",
    "encoded_bound",
    "file_size",
    "pack_chunks",
    "to_encode",
]

# Chunks start on cache lines, so that copies and hashes run at full speed and jax can take over the
# memory they are read into; larger ones on the sectors of disks, so that they can be read past the
# page cache.
CHUNK_ALIGNMENT = 64
SECTOR = 4096
DIRECT_BYTES = 1 << 20
# Chunks to be compressed are held three times meanwhile.
_ENCODING_COPIES = 3


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What one shard holds of a chunk.

    Attributes:
        shard: Position of the shard in `addressable_shards`.
        source: The part relative to the shard.
        target: The same relative to the chunk.
    """

    shard: int
    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored chunk and where its bytes come from.

    Attributes:
        leaf: Number of the leaf.
        number: Number of the chunk within the leaf, in C order of the chunk grid.
        parts: The shards it is copied from, almost always one; none where the chunk is the whole
            array of a packed leaf.
        place: Place in the chunk grid.
        region: Part of the global array it covers.
        offset: First byte within the batch's block.
        nbytes: Its bytes.
        stored_nbytes: Bytes of a whole chunk: zarr wants padding beyond the edge of an array.
    """

    leaf: int
    number: int
    parts: tuple[ChunkPart, ...]
    place: tuple[int, ...]
    region: Region
    offset: int
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Chunks that are staged and written together, as one file.

    The chunks of a batch that is to be encoded lie at the end of a larger block, whose beginning
    takes the encoded ones: none gets in the way of one that is still to be encoded.

    Attributes:
        packed: Whether its chunks are whole packed leaves.
        chunks: The chunks, in the order in which they lie.
        nbytes: Bytes of the chunks as they are staged, alignment included; the size of the file
            where they are not encoded.
        encoded: Whether the chunks are encoded before they are written.
        lead: Where the staged chunks begin in the block.
        block_bytes: Staging memory that it takes, all copies included that encoding makes.
    """

    packed: bool
    chunks: tuple[Chunk, ...]
    nbytes: int
    encoded: bool = False
    lead: int = 0
    block_bytes: int = 0

    def __post_init__(self) -> None:
        """Take as much memory as is staged, if nothing else is said."""
        object.__setattr__(self, "block_bytes", max(self.block_bytes, self.nbytes))


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Where an encoded chunk lies in its file."""

    offset: int
    length: int


# By the number of the batch the places of its chunks; only of those that were encoded.
Places = Mapping[int, Sequence[FileSpan]]


def pack_chunks(
    chunks: Iterable[Chunk], batch_bytes: int, *, packed: bool = False
) -> Iterable[WriteBatch]:
    """Put chunks together until the next one would make the block larger than `batch_bytes`."""
    batch: list[Chunk] = []
    end = 0
    for chunk in chunks:
        length = chunk.stored_nbytes
        start = aligned(end, alignment_of(length))
        if batch and start + length > batch_bytes:
            yield WriteBatch(packed, tuple(batch), file_size(end))
            batch, start = [], 0
        batch.append(replace(chunk, offset=start))
        end = start + length
    if batch:
        yield WriteBatch(packed, tuple(batch), file_size(end))


def to_encode(batch: WriteBatch) -> WriteBatch:
    """Return a batch whose chunks are encoded before they are written."""
    sizes = [chunk.stored_nbytes for chunk in batch.chunks]
    # So much longer than staged the chunks can become, one after the other.
    growth = sum(encoded_bound(size) + alignment_of(encoded_bound(size)) - size for size in sizes)
    lead = aligned(growth, SECTOR)
    more = _ENCODING_COPIES * encoded_bound(max(sizes))
    block_bytes = aligned(lead + batch.nbytes, SECTOR) + more
    return replace(batch, encoded=True, lead=lead, block_bytes=block_bytes)


def encoded_bound(nbytes: int) -> int:
    """Return how long a chunk of `nbytes` can get when it is encoded, whatever it holds."""
    # zstd adds 1/256 and up to 64 bytes, blosc 16 bytes.
    return nbytes + nbytes // 128 + 128


def alignment_of(length: int) -> int:
    """Return what the place of a chunk of `length` bytes is a multiple of."""
    return SECTOR if length > SECTOR else CHUNK_ALIGNMENT


def file_size(end: int) -> int:
    """Return the size of a data file whose last chunk ends at `end`."""
    # Only whole sectors can be written past the page cache; a small file is not worth it.
    return aligned(end, SECTOR if end >= DIRECT_BYTES else CHUNK_ALIGNMENT)


def aligned(nbytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment
