"""A staged batch to the bytes of its file, where its chunks are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt._engine.codecs import encode_chunk
from ckpt._engine.memory.staging import batch_digests
from ckpt._format.dtypes import DTYPES
from ckpt._plan.save_plan import (
    FileSpan,
    LeafPlan,
    WriteBatch,
    aligned,
    alignment_of,
    file_size,
)
from ckpt.errors import located

__all__ = ["Encoded", "encode_batch"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded batch.

    Attributes:
        digests: Digest of the logical bytes of every chunk.
        places: Where every chunk lies in the file.
        nbytes: Size of the file.
    """

    digests: list[str]
    places: list[FileSpan]
    nbytes: int


def encode_batch(batch: WriteBatch, plans: Sequence[LeafPlan], memory: Bytes) -> Encoded:
    """Encode the chunks of a batch in its block; the file is at the block's beginning after it.

    Args:
        batch: The batch; staged from its `lead` on.
        plans: The plans of all leaves of the item.
        memory: The block. Chunk after chunk moves to the front, where there is always room for it:
            the lead is as long as all of them can grow.
    """
    staged = memory[batch.lead : batch.lead + batch.nbytes]
    digests = batch_digests(batch, plans, staged)
    places = []
    end = 0
    for chunk in batch.chunks:
        plan = plans[chunk.leaf]
        assert plan.compression is not None
        with located(leaf=plan.name):
            source = staged[chunk.offset : chunk.offset + chunk.stored_nbytes]
            itemsize = DTYPES[plan.spec.dtype or ""].itemsize
            encoded = encode_chunk(source, plan.compression, itemsize)
        offset = aligned(end, alignment_of(len(encoded)))
        memory[end:offset] = 0
        end = offset + len(encoded)
        memory[offset:end] = np.frombuffer(encoded, np.uint8)
        places.append(FileSpan(offset, len(encoded)))
    size = file_size(end)
    memory[end:size] = 0
    return Encoded(digests, places, size)
