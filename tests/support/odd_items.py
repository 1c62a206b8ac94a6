"""Items whose saving takes a turn that a test chose, through the public handler protocol."""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import anyio

from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter
from ckpt.handlers._pytree import PyTreeHandler

__all__ = ["Odd", "OddHandler"]


@dataclass(eq=False)
class Odd:
    """A tree with an odd way to be saved; restored, it is the tree.

    Attributes:
        tree: The tree.
        hold: Where to stop, for good: in `stage` (while `save()` waits) or in `commit`.
        gate: The commit goes on once this is set.
        error: Raised by the commit.
        reached: Set when the save stands where it stops.
    """

    tree: Any
    hold: str | None = None
    gate: threading.Event | None = None
    error: Exception | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class OddHandler:
    """Saves `Odd` items as the trees in them."""

    name = "odd"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Odd)

    async def stage(self, item: Odd, writer: ItemWriter) -> Awaitable[ItemEntry]:
        entry = await PyTreeHandler().stage(item.tree, writer)
        if item.hold == "stage":
            item.reached.set()
            await anyio.sleep_forever()

        async def commit() -> ItemEntry:
            item.reached.set()
            if item.hold == "commit":
                await anyio.sleep_forever()
            if item.gate is not None:
                await writer.in_thread(item.gate.wait, 60)
            if item.error is not None:
                raise item.error
            return await entry

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        return await PyTreeHandler().load(entry, like, adapt, reader)
