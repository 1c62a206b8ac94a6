"""What is written where: leaves to chunks, chunks to batches.

A plan depends on the specs of the leaves alone, so one plan serves every save of a tree of the same
structure. A write batch is the unit of work of the engine: chunks that are staged together
into one block of the arena, and written as they lie there as one data file. Leaves of a few
kilobytes are packed: the whole array is one chunk, gathered from its shards. Where several
processes save, each has a plan of its own: its share of the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt._format.ocdbt import KeyValue
from ckpt._format.zarr import chunk_key
from ckpt._plan.chunking import (
    BATCH_BYTES,
    METADATA_KEY,
    PACKED_BYTES,
    LeafPlan,
    limits_of,
    plan_leaf,
)
from ckpt._plan.data_files import (
    CHUNK_ALIGNMENT,
    SECTOR,
    Chunk,
    ChunkPart,
    FileSpan,
    Places,
    WriteBatch,
    aligned,
    alignment_of,
    encoded_bound,
    file_size,
    pack_chunks,
    to_encode,
)
from ckpt._plan.local_chunks import (
    add_jobs,
    has_chunks,
    own_chunks,
    shared_chunks,
)
from ckpt._plan.ownership import (
    ArrayPlacement,
    Ownership,
    Partitioner,
    ProcessGroup,
)
from ckpt._tree.leaf_specs import ARRAY_KINDS, LeafSpec
from ckpt.errors import InvalidArgumentError

__all__ = [
    "BATCH_BYTES",
    "CHUNK_ALIGNMENT",
    "MOST_CHUNKS",
    "PACKED_BYTES",
    "SECTOR",
    "Chunk",
    "ChunkPart",
    "FileSpan",
    "LeafPlan",
    "Places",
    "SavePlan",
    "WriteBatch",
    "aligned",
    "alignment_of",
    "database_entries",
    "encoded_bound",
    "file_size",
    "plan_save",
]

# A chunk takes about 55 bytes of the manifest, a file 130; it may have 256 MiB in all.
MOST_CHUNKS = 3_000_000


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of one item, as one process sees it.

    Attributes:
        leaves: A plan for every leaf, in tree order; the same on all processes.
        batches: The batches that this process writes, biggest first.
        nbytes: Logical bytes of all arrays, shared ones once; Python scalars do not count.
        team: The processes that save, or None for one alone.
        own: Numbers of the leaves of which every process has its own. They are stored once, so they
            must be equal on all processes.
    """

    leaves: tuple[LeafPlan, ...]
    batches: tuple[WriteBatch, ...]
    nbytes: int
    team: ProcessGroup | None = None
    own: tuple[int, ...] = ()

    @property
    def is_encoded(self) -> bool:
        """Whether the places of some chunks are only known once they are encoded."""
        return any(batch.encoded for batch in self.batches)


def plan_save(
    names: Sequence[str],
    specs: Sequence[LeafSpec],
    budget_bytes: int,
    team: ProcessGroup | None = None,
    largest_file_bytes: int | None = None,
    usual_file_bytes: int | None = None,
) -> SavePlan:
    """Plan the save of leaves `specs` stored under `names`.

    Args:
        names: Stored name of every leaf.
        specs: What every leaf is.
        budget_bytes: The staging budget, the same on all processes; batches are kept to a quarter
            of it, so that staging and writing can overlap within it. (A single chunk that cannot be
            smaller may be larger.)
        team: The processes that save together; None for one alone.
        largest_file_bytes: No data file is larger.
        usual_file_bytes: About how large data files are best; None for what is best on a disk.

    Raises:
        UnsupportedLeafError: The name of a leaf is too long to be a key of a database, or the leaf
            lies on devices of one other process only.
        InvalidArgumentError: The tree has more chunks than a manifest can hold, or an array lies
            on processes that do not save.
    """
    if largest_file_bytes is not None and largest_file_bytes < SECTOR:
        raise InvalidArgumentError(
            f"largest_file_bytes={largest_file_bytes}: expected {SECTOR} or more"
        )
    if team is not None and team.count == 1:
        team = None
    owners = None if team is None else Ownership(team)
    owned = [spec for spec in specs if spec.kind in ARRAY_KINDS and spec.same_as is None]
    nbytes = sum(spec.nbytes for spec in owned)
    processes = 1 if team is None else team.count
    limits = limits_of(nbytes, budget_bytes, processes, largest_file_bytes, usual_file_bytes)
    documents: dict[tuple[object, ...], bytes] = {}
    leaves = []
    own = []
    spreads: dict[int, ArrayPlacement] = {}
    deal = Partitioner()
    chunks = 0
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        spread = None if owners is None else owners.spread(spec.sharding, spec.shape, name)
        leaf = plan_leaf(name, spec, limits, documents, spread)
        leaves.append(leaf)
        if spread is not None:
            spreads[number] = spread
            if has_chunks(leaf):
                add_jobs(deal, number, leaf, spread)
        elif owners is not None and spec.same_as is None:
            own.append(number)
        chunks += math.prod(leaf.grid)
    if chunks > MOST_CHUNKS:
        raise _too_many(chunks, leaves)
    shares = deal.own()
    packed: list[Chunk] = []
    large: list[Chunk] = []
    encoded: list[Chunk] = []
    for number, leaf in enumerate(leaves):
        if not has_chunks(leaf):
            continue
        found = packed if leaf.packed else large if leaf.compression is None else encoded
        if number in spreads:
            found.extend(shared_chunks(number, leaf, spreads[number], shares))
        elif team is None or team.index == 0 or team.mode == "local":
            found.extend(own_chunks(number, leaf, team))
    batches = [
        *pack_chunks(packed, limits.batch, packed=True),
        *pack_chunks(large, limits.batch),
        *map(to_encode, pack_chunks(encoded, limits.encoded)),
    ]
    batches.sort(key=lambda batch: batch.nbytes, reverse=True)
    alike = () if team is None or team.mode == "local" else tuple(own)
    return SavePlan(tuple(leaves), tuple(batches), nbytes, team, alike)


def database_entries(plan: SavePlan, places: Places | None = None) -> Iterable[KeyValue]:
    """Yield the keys of the item's database; batch `n` is its data file `n`."""
    placed = places or {}
    sharers: dict[int, list[LeafPlan]] = {}
    for leaf in plan.leaves:
        if leaf.metadata is not None:
            yield KeyValue(f"{leaf.name}/{METADATA_KEY}".encode(), leaf.metadata)
        if leaf.spec.same_as is not None:
            sharers.setdefault(leaf.spec.same_as, []).append(leaf)
    for file, batch in enumerate(plan.batches):
        found = placed.get(file) or [
            FileSpan(chunk.offset, chunk.stored_nbytes) for chunk in batch.chunks
        ]
        for chunk, place in zip(batch.chunks, found, strict=True):
            for leaf in (plan.leaves[chunk.leaf], *sharers.get(chunk.leaf, ())):
                key = f"{leaf.name}/{chunk_key(chunk.place)}"
                yield KeyValue(key.encode(), None, file, place.offset, place.length)


def _too_many(chunks: int, leaves: Sequence[LeafPlan]) -> InvalidArgumentError:
    most = max(leaves, key=lambda leaf: math.prod(leaf.grid))
    return InvalidArgumentError(
        f"the tree has {chunks} chunks, of which {math.prod(most.grid)} are of this leaf; the "
        f"manifest of a step can hold {MOST_CHUNKS}. Every shard is a chunk of its own: spread the "
        "arrays over fewer devices and replicate them over the others, or stack small arrays",
        leaf=most.name,
    )
