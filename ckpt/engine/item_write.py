"""The write of one item while it is under way, and the steps of it that run in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from ckpt.digests import digest
from ckpt.engine.arena import Block
from ckpt.engine.encoding import Encoded
from ckpt.engine.plans import ItemPlan
from ckpt.engine.staging import Source, copy_granule, granule_digests, wait_until_computed
from ckpt.layout.plan import Granule, LeafPlan, Place
from ckpt.manifest import FileEntry

__all__ = ["ItemWrite", "Staged", "file_digests", "first_of", "stage_granule"]

Array = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True, eq=False)
class Staged:
    """A granule that waits for a lane, and the block that it lies in."""

    number: int
    block: Block


@dataclass(slots=True)
class ItemWrite:
    """The write of one item, while it is under way.

    Attributes:
        plan: The plan.
        files: Path of every granule's data file, relative to the item.
        digests: Digest of every chunk, by granule; complete when `hashed` is set.
        left: Granules whose digests are still to come.
        unplaced: Granules that are still to be encoded; `placed` is set when there are none.
        places: Where the chunks of the others lie, by granule.
        staged: Granules that wait for a lane, as many as `ready` counts.
        turns: Handed out to lanes, one for every granule.
        running: Tasks that still write; `durable` is set when there are none.
    """

    plan: ItemPlan
    files: list[str]
    digests: list[list[str]]
    left: int
    unplaced: int
    turns: Iterator[int]
    places: dict[int, list[Place]] = field(default_factory=dict)
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
        """Take the digests of a granule."""
        self.digests[number] = digests
        self.left -= 1
        if not self.left:
            self.hashed.set()

    def note_encoded(self, number: int, encoded: Encoded) -> None:
        """Take the places and digests of an encoded granule."""
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


def stage_granule(
    granule: Granule, plans: Sequence[LeafPlan], sources: Sequence[Source], block: Block
) -> None:
    """Copy a granule into its block, once its arrays have been computed."""
    wait_until_computed(sources)
    memory = block.memory[granule.lead : granule.lead + granule.nbytes]
    copy_granule(granule, plans, sources, memory)


def file_digests(
    granule: Granule, plans: Sequence[LeafPlan], memory: Array
) -> tuple[list[str], FileEntry]:
    """Return the digests of the chunks of a granule, none of encoded ones, and its file's entry."""
    if granule.encoded:
        return [], FileEntry(size=memory.nbytes, digest=digest(memory.data))
    found = granule_digests(granule, plans, memory)
    first = granule.chunks[0]
    is_whole = first.nbytes == granule.nbytes
    return found, FileEntry(
        size=granule.nbytes, digest=found[0] if is_whole else digest(memory.data)
    )
