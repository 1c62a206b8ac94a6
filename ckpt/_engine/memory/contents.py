"""Contents of a staged batch: the digests of its chunks, and the records of extensions.

The functions run in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from ckpt._format.digests import digest, new_digest
from ckpt._format.dtypes import DTYPES
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.write_batches import Chunk, WriteBatch

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import NotesOfItem

Array = np.ndarray[Any, Any]


class BatchContents(Struct, frozen=True, eq=False):
    """The contents of a batch.

    Attributes:
        digests: Digest of the logical bytes of every chunk.
        records: `[chunks]`, the record of each chunk, by name of the extension.
    """

    digests: list[str]
    records: Mapping[str, Array] = {}

    def of_chunks(self, chosen: Sequence[int]) -> BatchContents:
        """Return the contents of some chunks, by their numbers in the batch."""
        records = {name: each[list(chosen)] for name, each in self.records.items()}
        return BatchContents([self.digests[at] for at in chosen], records)


NO_CONTENTS = BatchContents([])


def batch_contents(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    memory: Array,
    extensions: Mapping[str, NotesOfItem],
) -> BatchContents:
    """Return the contents of a batch in `memory`, which is `[batch.nbytes] uint8`.

    `plans` are those of all leaves of the item; `extensions` note records, by name.
    """

    def bytes_of(chunk: Chunk) -> Array:
        return _logical(chunk, plans, memory)

    if not extensions:
        return BatchContents([digest(bytes_of(chunk).data) for chunk in batch.chunks])
    digesters = [new_digest() for _ in batch.chunks]
    # The first extension hands the bytes on while they are in the processor's cache.
    takes: Sequence[Callable[[memoryview], object]] = [each.update for each in digesters]
    records = {}
    for name, each in extensions.items():
        records[name] = each.records(batch, bytes_of, takes)
        takes = [len] * len(batch.chunks)
    return BatchContents([each.hexdigest() for each in digesters], records)


def _logical(chunk: Chunk, plans: Sequence[LeafPlan], memory: Array) -> Array:
    """Return the bytes of a chunk without its padding; `[n] uint8`."""
    stored = memory[chunk.offset : chunk.offset + chunk.stored_nbytes]
    if chunk.nbytes == chunk.stored_nbytes:
        return stored
    plan = plans[chunk.leaf]
    whole = stored.view(DTYPES[plan.spec.dtype or ""]).reshape(plan.chunk)
    inside = whole[tuple(slice(n) for n in chunk.region.shape)]
    return np.ascontiguousarray(inside).reshape(-1).view(np.uint8)
