"""The write of one item while it is under way, and the steps of it that run in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from ckpt._engine.memory.arena import Block
from ckpt._engine.memory.staging import (
    Source,
    batch_digests,
    copy_batch,
    wait_until_computed,
)
from ckpt._engine.plan_cache import ItemPlan
from ckpt._engine.save.encoding import Encoded
from ckpt._format.digests import digest
from ckpt._format.manifest import FileEntry
from ckpt._plan.save_plan import FileSpan, LeafPlan, WriteBatch

__all__ = ["ItemWrite", "Staged", "file_digests", "first_of", "stage_batch"]

Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class Staged:
    """A batch that waits for a lane, and the block that it lies in."""

    number: int
    block: Block


@dataclass(slots=True)
class ItemWrite:
    """The write of one item, while it is under way.

    Attributes:
        plan: The plan.
        files: Path of every batch's data file, relative to the item.
        digests: Digest of every chunk, by batch; complete when `hashed` is set.
        left: Batches whose digests are still to come.
        unplaced: Batches that are still to be encoded; `placed` is set when there are none.
        places: Where the chunks of the others lie, by batch.
        staged: Batches that wait for a lane, as many as `ready` counts.
        turns: Handed out to lanes, one for every batch.
        running: Tasks that still write; `durable` is set when there are none.
    """

    plan: ItemPlan
    files: list[str]
    digests: list[list[str]]
    left: int
    unplaced: int
    turns: Iterator[int]
    places: dict[int, list[FileSpan]] = field(default_factory=dict)
    staged: deque[Staged] = field(default_factory=deque)
    ready: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(0))
    running: int = 0
    hashed: anyio.Event = field(default_factory=anyio.Event)
    placed: anyio.Event = field(default_factory=anyio.Event)
    durable: anyio.Event = field(default_factory=anyio.Event)

    async def settled(self) -> None:
        """Wait until everything that this process writes of the item is durable."""
        if self.running:
            await self.durable.wait()

    def note_digests(self, number: int, digests: list[str]) -> None:
        """Take the digests of a batch."""
        self.digests[number] = digests
        self.left -= 1
        if not self.left:
            self.hashed.set()

    def note_encoded(self, number: int, encoded: Encoded) -> None:
        """Take the places and digests of an encoded batch."""
        self.places[number] = encoded.places
        self.digests[number] = encoded.digests
        self.unplaced -= 1
        if not self.unplaced:
            self.placed.set()


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of `events` is set."""
    if any(event.is_set() for event in events):
        return

    async def wait(event: anyio.Event) -> None:
        await event.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for event in events:
            tasks.start_soon(wait, event)


def stage_batch(
    batch: WriteBatch, plans: Sequence[LeafPlan], sources: Sequence[Source], block: Block
) -> None:
    """Copy a batch into its block, once its arrays have been computed."""
    wait_until_computed(sources)
    memory = block.memory[batch.lead : batch.lead + batch.nbytes]
    copy_batch(batch, plans, sources, memory)


def file_digests(
    batch: WriteBatch, plans: Sequence[LeafPlan], memory: Array
) -> tuple[list[str], FileEntry]:
    """Return the digests of the chunks of a batch, none of encoded ones, and its file's entry."""
    if batch.encoded:
        return [], FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = batch_digests(batch, plans, memory)
    first = batch.chunks[0]
    is_whole = first.nbytes == batch.nbytes
    return found, FileEntry(size=batch.nbytes, digest=found[0] if is_whole else digest(memory.data))
