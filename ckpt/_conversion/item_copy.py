"""Item copies: the handler that saves an item of another checkpoint as it is stored there."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ckpt._conversion.stored_items import StoredItem
from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt._plan.orbax_view import ABOUT_FILE, about_item
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter


class ItemCopy:
    """Saves a `StoredItem` under the name of the handler that wrote it; no class of it is needed.

    Attributes:
        name: The name of that handler.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def accepts(self, item: Any) -> bool:
        """Tell whether it is an item of a checkpoint."""
        return isinstance(item, StoredItem)

    async def stage(self, item: StoredItem, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Read and stage the arrays; files follow in the commit."""
        if item.tree is not None:
            await writer.stage(item.tree)

        async def commit() -> ItemEntry:
            for path in item.files:
                data = await item.read_file(path)
                # What the library itself has written there for Orbax is written again by the save.
                if path != ABOUT_FILE or data != about_item(item.entry):
                    await writer.write_file(path, data)
            # Those of a tree are counted by the engine.
            nbytes = 0 if item.tree is not None else item.entry.nbytes
            return ItemEntry(handler=self.name, nbytes=nbytes, data=item.entry.data)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Not called: what it has saved is loaded by the handler of its name."""
        raise AssertionError("an ItemCopy saves items; the handler that wrote them loads them")
