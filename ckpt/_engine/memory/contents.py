"""Contents of a staged batch: digests and vital signs of its chunks.

The functions run in worker threads. Each byte is read once, in pieces that fit a processor's cache.
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

# Bytes of small arrays whose signs are taken together.
_TOGETHER_BYTES = 1 << 19


class BatchContents(Struct, frozen=True, eq=False):
    """The contents of a batch.

    Attributes:
        digests: Digest of the logical bytes of every chunk.
        signs: `[chunks]`, a record of vital signs for each chunk; empty if they were not taken.
    """

    digests: list[str]
    signs: Array


NO_CONTENTS = BatchContents([], no_signs(0))


class KnownSigns(Protocol):
    """Vital signs that were taken elsewhere."""

    def record(self, leaf: int, chunk: int, /) -> Array | None:
        """Return the record of a chunk; None if the host is to take it."""


def batch_contents(
    batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array, signs: KnownSigns | None
) -> BatchContents:
    """Return the contents of a batch in `memory`, which is `[batch.nbytes] uint8`.

    `plans` are those of all leaves of the item. `signs` are the known vital signs; None if none are
    to be taken.
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
    """Return the bytes of a chunk without its padding; `[n] uint8`."""
    stored = memory[chunk.offset : chunk.offset + chunk.stored_nbytes]
    if chunk.nbytes == chunk.stored_nbytes:
        return stored
    plan = plans[chunk.leaf]
    whole = stored.view(DTYPES[plan.spec.dtype or ""]).reshape(plan.chunk)
    inside = whole[tuple(slice(n) for n in chunk.region.shape)]
    return np.ascontiguousarray(inside).reshape(-1).view(np.uint8)


def _packed_signs(batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array) -> Array:
    """Return the records of small leaves; equal shapes and dtypes are taken together."""
    signs = np.zeros(len(batch.chunks), SIGNS)
    # Keyed by shape and dtype, of which thousands of leaves have a few.
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
