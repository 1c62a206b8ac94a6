"""Encoding: compresses the chunks of a staged batch into the bytes of its file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._engine.chunk_extensions import NotesOfItem
from ckpt._engine.codecs import encode_chunk
from ckpt._engine.memory.staging import BatchContents, batch_contents
from ckpt._format.array_format import DTYPES
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.write_batches import FileSpan, WriteBatch, aligned, alignment_of, file_size
from ckpt.errors import located

# A batch may take seconds. Its parts are reported one by one, so that people see progress.
_PART_NS = 100_000_000

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Encoded(Struct, frozen=True):
    """An encoded batch.

    Attributes:
        contents: Digests of the logical bytes of every chunk, and the records of extensions.
        spans: Place of every chunk in the file.
        nbytes: Size of the file.
    """

    contents: BatchContents
    spans: list[FileSpan]
    nbytes: int


def encode_batch(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    memory: Bytes,
    extensions: Mapping[str, NotesOfItem],
    *,
    told: Callable[[int, int, int], object] | None = None,
) -> Encoded:
    """Encode the chunks of a batch in its block; the file is then at the beginning of the block.

    Args:
        batch: The batch, staged from its `staged_at` on.
        plans: The plans of all leaves of the item.
        memory: The block. Chunk after chunk moves to the front, where there is always room for it:
            the gap before the staged chunks is as long as all of them can grow.
        extensions: Extensions that note records, by name.
        told: Called with the start time, the end time and the staged bytes of every part of the
            work, in order; all parts together are the batch.
    """
    began, begun_at = time.perf_counter_ns(), 0
    staged = memory[batch.staged_at : batch.staged_at + batch.nbytes]
    contents = batch_contents(batch, plans, staged, extensions)
    spans = []
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
        spans.append(FileSpan(offset, len(encoded)))
        now, done = time.perf_counter_ns(), chunk.offset + chunk.stored_nbytes
        if told is not None and now - began >= _PART_NS and chunk is not batch.chunks[-1]:
            told(began, now, done - begun_at)
            began, begun_at = now, done
    size = file_size(end)
    memory[end:size] = 0
    if told is not None:
        told(began, time.perf_counter_ns(), batch.nbytes - begun_at)
    return Encoded(contents, spans, size)
