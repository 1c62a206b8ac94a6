"""Write batches: chunks that are staged into one block and written as one data file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ckpt._format.regions import Region

# Chunks start on cache lines, so that copies and hashes run at full speed and jax can take over the
# memory they are read into. Larger chunks start on sectors, so that reads can bypass the page
# cache.
CHUNK_ALIGNMENT = 64
SECTOR = 4096
DIRECT_BYTES = 1 << 20
# Size of a batch: large against the few milliseconds that a file costs, and so small that several
# fit the budget and every lane has some.
BATCH_BYTES = 48 << 20
# Copies of a chunk beside it in its block: the memory it is encoded into, and the resulting bytes.
_ENCODING_COPIES = 2


class ChunkPart(Struct, frozen=True):
    """The part of a chunk that one shard holds.

    Attributes:
        shard: Position of the shard in `addressable_shards`.
        source: The part, relative to the shard.
        target: The same part, relative to the chunk.
    """

    shard: int
    source: Region
    target: Region


class Chunk(Struct, frozen=True, gc=False):
    """One stored chunk, and the sources of its bytes.

    Attributes:
        leaf: Number of the leaf.
        number: Number of the chunk within the leaf, in C order of the chunk grid.
        parts: The parts of shards it is copied from, almost always one; none for a packed leaf,
            whose whole array is the chunk.
        place: Its place in the chunk grid.
        region: The part of the global array that it covers.
        offset: Offset of its first byte in the batch's staged bytes.
        nbytes: Bytes of the elements in the array.
        stored_nbytes: Bytes of a full chunk: zarr requires padding beyond the edge of an array.
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

    A batch to be encoded is staged at the end of a larger block. The encoded chunks go to the
    beginning of the block, where there is always room for the next one before the chunks that are
    still to be encoded.

    Attributes:
        packed: True if its chunks are whole packed leaves.
        chunks: The chunks, in the order of their offsets.
        nbytes: Bytes of the staged chunks, alignment included; also the size of the file, unless
            chunks are encoded.
        encoded: True if the chunks are encoded before they are written.
        staged_at: Offset of the staged chunks in the block.
        block_bytes: Staging memory that it takes, including all copies that encoding makes.
    """

    packed: bool
    chunks: tuple[Chunk, ...]
    nbytes: int
    encoded: bool = False
    staged_at: int = 0
    block_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise `block_bytes` to the bytes that are staged."""
        force_setattr(self, "block_bytes", max(self.block_bytes, self.nbytes))

    def with_chunks(self, kept: Set[tuple[int, int]]) -> WriteBatch | None:
        """Return the staged batch reduced to the chunks `kept`; None if none is left.

        Chunks keep their order, so each can be moved to its new offset, one after the other. `kept`
        has pairs of a leaf number and the chunk's number in the leaf.
        """
        left = [chunk for chunk in self.chunks if (chunk.leaf, chunk.number) in kept]
        for packed in pack_chunks(left, self.nbytes, packed=self.packed):
            return replace(self, chunks=packed.chunks, nbytes=packed.nbytes)
        return None


class FileSpan(Struct, frozen=True, gc=False):
    """The place of an encoded chunk in its file."""

    offset: int
    length: int


# Places of the chunks of encoded batches, by number of the batch.
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


def to_encode(batch: WriteBatch) -> WriteBatch:
    """Return a batch whose chunks are encoded before they are written."""
    sizes = [chunk.stored_nbytes for chunk in batch.chunks]
    # Bytes by which all chunks together can grow.
    growth = sum(encoded_bound(size) + alignment_of(encoded_bound(size)) - size for size in sizes)
    staged_at = aligned(growth, SECTOR)
    more = _ENCODING_COPIES * encoded_bound(max(sizes))
    block_bytes = aligned(staged_at + batch.nbytes, SECTOR) + more
    return replace(batch, encoded=True, staged_at=staged_at, block_bytes=block_bytes)


def encoded_bound(nbytes: int) -> int:
    """Return the most bytes of an encoded chunk whose plain size is `nbytes`."""
    # zstd adds 1/256 and up to 64 bytes, blosc 16 bytes.
    return nbytes + nbytes // 128 + 128


def alignment_of(length: int) -> int:
    """Return the alignment of the offset of a chunk of `length` bytes."""
    return SECTOR if length > SECTOR else CHUNK_ALIGNMENT


def file_size(end: int) -> int:
    """Return the size of a data file whose last chunk ends at `end`."""
    # Only whole sectors can bypass the page cache, which is not worth it for a small file.
    return aligned(end, SECTOR if end >= DIRECT_BYTES else CHUNK_ALIGNMENT)


def aligned(nbytes: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment
