"""Item copies: a handler that saves an item of another checkpoint as it is stored there."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt._plan.orbax_view import ABOUT_FILE, about_item
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter


class ItemCopy:
    """Saves a `CheckpointItem` under the name of the handler that wrote it; needs no class of it.

    Attributes:
        name: Name of that handler.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def accepts(self, item: Any) -> bool:
        """Return True for an item of a checkpoint."""
        return isinstance(item, CheckpointItem)

    async def stage(self, item: CheckpointItem, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Read and stage the arrays; files follow in the commit."""
        if item.tree is not None:
            await writer.stage(item.tree)

        async def commit() -> ItemEntry:
            for path in item.files:
                data = await item.read_file(path)
                # The save writes the library's own file for Orbax again.
                if path != ABOUT_FILE or data != about_item(item.entry):
                    await writer.write_file(path, data)
            # The engine counts the bytes of a tree.
            nbytes = 0 if item.tree is not None else item.entry.nbytes
            return ItemEntry(handler=self.name, nbytes=nbytes, data=item.entry.data)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Not called: the handler of its name loads a saved item."""
        raise AssertionError("an ItemCopy saves items; the handler that wrote them loads them")
