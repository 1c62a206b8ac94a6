"""Contents: what a staged batch holds, as digests and vital signs of its chunks.

Runs in worker threads. Every byte is looked at once, in pieces that stay in a processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from ckpt._format.digests import digest, new_digest
from ckpt._format.dtypes import DTYPES
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.write_batches import Chunk, WriteBatch
from ckpt._vitals.signs import SIGNS, Array, box_signs, no_signs, whole_signs

# Small arrays whose signs are taken together: as many as have so many bytes.
_TOGETHER_BYTES = 1 << 19


class BatchContents(Struct, frozen=True, eq=False):
    """What a batch holds.

    Attributes:
        digests: Digest of the logical bytes of every chunk.
        signs: `[chunks]`, the record of the vital signs of each; empty if they were not taken.
    """

    digests: list[str]
    signs: Array


NO_CONTENTS = BatchContents([], no_signs(0))


class KnownSigns(Protocol):
    """Vital signs that were taken elsewhere."""

    def record(self, leaf: int, chunk: int, /) -> Array | None:
        """Return the record of a chunk; None if it is to be taken on the host."""


def batch_contents(
    batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array, signs: KnownSigns | None
) -> BatchContents:
    """Return what a batch in `memory` holds.

    Args:
        batch: The batch.
        plans: The plans of all leaves of the item.
        memory: `[batch.nbytes] uint8`.
        signs: The vital signs that are known; None if none are to be taken.
    """
    if batch.packed and signs is not None:
        return BatchContents(
            [digest(_logical(chunk, plans, memory).data) for chunk in batch.chunks],
            _packed_signs(batch, plans, memory),
        )
    if signs is None:
        digests = [digest(_logical(chunk, plans, memory).data) for chunk in batch.chunks]
        return BatchContents(digests, no_signs(0))
    digests, records = [], np.empty(len(batch.chunks), SIGNS)
    for number, chunk in enumerate(batch.chunks):
        digester, region = new_digest(), chunk.region
        dtype = DTYPES[plans[chunk.leaf].spec.dtype or ""]
        data, known = _logical(chunk, plans, memory), signs.record(chunk.leaf, chunk.number)
        if known is None:
            known = box_signs(data, region.offset, region.shape, dtype, digester.update)
        else:
            digester.update(data.data)
        records[number] = known
        digests.append(digester.hexdigest())
    return BatchContents(digests, records)


def _logical(chunk: Chunk, plans: Sequence[LeafPlan], memory: Array) -> Array:
    """Return the bytes of a chunk without what is padding; `[n] uint8`."""
    stored = memory[chunk.offset : chunk.offset + chunk.stored_nbytes]
    if chunk.nbytes == chunk.stored_nbytes:
        return stored
    plan = plans[chunk.leaf]
    whole = stored.view(DTYPES[plan.spec.dtype or ""]).reshape(plan.chunk)
    inside = whole[tuple(slice(n) for n in chunk.region.shape)]
    return np.ascontiguousarray(inside).reshape(-1).view(np.uint8)


def _packed_signs(batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array) -> Array:
    """Return the records of small leaves; those that are alike are taken together."""
    signs = np.zeros(len(batch.chunks), SIGNS)
    # By shape and dtype: thousands of leaves have a few.
    alike: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for number, chunk in enumerate(batch.chunks):
        spec = plans[chunk.leaf].spec
        if chunk.nbytes:
            alike.setdefault((spec.shape, spec.dtype or ""), []).append(number)
    for (shape, dtype), numbers in alike.items():
        nbytes = batch.chunks[numbers[0]].nbytes
        step = max(_TOGETHER_BYTES // nbytes, 1)
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            arrays = np.empty((len(some), nbytes), np.uint8)
            for row, number in enumerate(some):
                offset = batch.chunks[number].offset
                arrays[row] = memory[offset : offset + nbytes]
            signs[some] = whole_signs(arrays, shape, DTYPES[dtype])
    return signs
