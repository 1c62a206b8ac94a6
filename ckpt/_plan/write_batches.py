"""Write batches: chunks that are staged into one block and written as one data file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ckpt._format.regions import Region

# Chunks start on cache lines, so that copies and hashes run at full speed and jax can take over the
# memory they are read into; larger ones start on sectors, so that they can be read past the page
# cache.
CHUNK_ALIGNMENT = 64
SECTOR = 4096
DIRECT_BYTES = 1 << 20
# A batch must be large against the few milliseconds that a file costs, and small enough that
# several fit the budget and every lane has some.
BATCH_BYTES = 48 << 20
# Beside a chunk in its block: the memory that it is encoded into, and the bytes cut from that.
_ENCODING_COPIES = 2


class ChunkPart(Struct, frozen=True):
    """What one shard holds of a chunk.

    Attributes:
        shard: Position of the shard in `addressable_shards`.
        source: The part relative to the shard.
        target: The same relative to the chunk.
    """

    shard: int
    source: Region
    target: Region


class Chunk(Struct, frozen=True, gc=False):
    """One stored chunk and where its bytes come from.

    Attributes:
        leaf: Number of the leaf.
        number: Number of the chunk within the leaf, in C order of the chunk grid.
        parts: The shards it is copied from, almost always one; none for a packed leaf, whose whole
            array is the chunk.
        place: Its place in the chunk grid.
        region: The part of the global array that it covers.
        offset: First byte within the batch's staged bytes.
        nbytes: Its bytes.
        stored_nbytes: Bytes of a full chunk: zarr wants padding beyond the edge of an array.
    """

    leaf: int
    number: int
    parts: tuple[ChunkPart, ...]
    place: tuple[int, ...]
    region: Region
    offset: int
    nbytes: int
    stored_nbytes: int


class WriteBatch(Struct, frozen=True):
    """Chunks that are staged and written together, as one file.

    A batch that is to be encoded is staged at the end of a larger block, whose beginning takes the
    encoded chunks: there is always room for the next one before those still to be encoded.

    Attributes:
        packed: Whether its chunks are whole packed leaves.
        chunks: The chunks, in the order of their offsets.
        nbytes: Bytes of the chunks as they are staged, alignment included; unless they are
            encoded, the size of the file.
        encoded: Whether the chunks are encoded before they are written.
        staged_at: Where the staged chunks begin in the block.
        block_bytes: Staging memory that it takes, including all copies that encoding makes.
    """

    packed: bool
    chunks: tuple[Chunk, ...]
    nbytes: int
    encoded: bool = False
    staged_at: int = 0
    block_bytes: int = 0

    def __post_init__(self) -> None:
        """Take at least as much memory as is staged."""
        force_setattr(self, "block_bytes", max(self.block_bytes, self.nbytes))


class FileSpan(Struct, frozen=True, gc=False):
    """Where an encoded chunk is in its file."""

    offset: int
    length: int


# By number of the batch where its chunks are; only of batches that were encoded.
FileSpans = Mapping[int, Sequence[FileSpan]]


def pack_chunks(
    chunks: Iterable[Chunk], batch_bytes: int, *, packed: bool = False
) -> Iterable[WriteBatch]:
    """Group chunks until the next one would make the batch larger than `batch_bytes`."""
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


def with_chunks(batch: WriteBatch, kept: Set[tuple[int, int]]) -> WriteBatch | None:
    """Return a staged batch with some of its chunks; None for none.

    They keep their order, so each can be moved to its new offset, one after the other.

    Args:
        batch: The batch.
        kept: Number of the leaf, and of the chunk in it.
    """
    left = [chunk for chunk in batch.chunks if (chunk.leaf, chunk.number) in kept]
    for packed in pack_chunks(left, batch.nbytes, packed=batch.packed):
        return replace(batch, chunks=packed.chunks, nbytes=packed.nbytes)
    return None


def to_encode(batch: WriteBatch) -> WriteBatch:
    """Return a batch whose chunks are encoded before they are written."""
    sizes = [chunk.stored_nbytes for chunk in batch.chunks]
    # By how much the chunks can grow, one after the other.
    growth = sum(encoded_bound(size) + alignment_of(encoded_bound(size)) - size for size in sizes)
    staged_at = aligned(growth, SECTOR)
    more = _ENCODING_COPIES * encoded_bound(max(sizes))
    block_bytes = aligned(staged_at + batch.nbytes, SECTOR) + more
    return replace(batch, encoded=True, staged_at=staged_at, block_bytes=block_bytes)


def encoded_bound(nbytes: int) -> int:
    """Return the most bytes that a chunk of `nbytes` can have once it is encoded."""
    # zstd adds 1/256 and up to 64 bytes, blosc 16 bytes.
    return nbytes + nbytes // 128 + 128


def alignment_of(length: int) -> int:
    """Return what the offset of a chunk of `length` bytes is a multiple of."""
    return SECTOR if length > SECTOR else CHUNK_ALIGNMENT


def file_size(end: int) -> int:
    """Return the size of a data file whose last chunk ends at `end`."""
    # Only whole sectors can be written past the page cache, which a small file is not worth.
    return aligned(end, SECTOR if end >= DIRECT_BYTES else CHUNK_ALIGNMENT)


def aligned(nbytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment
