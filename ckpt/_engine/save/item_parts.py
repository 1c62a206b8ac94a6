"""Items of a save that may arrive in several parts: what is kept of each, and put together."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt._engine.plan_cache import new_data_file
from ckpt._format.manifest import ItemEntry, Node
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.merged_parts import (
    Merged,
    PartPlan,
    TreeParts,
    merge_database,
    merge_entries,
)
from ckpt._plan.orbax_view import item_view
from ckpt.errors import InvalidArgumentError

__all__ = ["ItemParts"]

# Of all handlers only this one keeps nothing but the tree, so its entries can be merged.
_TREES = "pytree"


@dataclass(slots=True)
class ItemParts:
    """One item that may arrive in several parts.

    Attributes:
        handler: Name of the handler that saves it.
        tree: The structure so far; empty of items that are no trees.
        plans: Where the arrays went, by number of the part; complete when all is durable.
        entries: What the handler made of each part; complete when all is durable.
    """

    handler: str
    tree: TreeParts = field(default_factory=TreeParts)
    plans: dict[int, PartPlan] = field(default_factory=dict)
    entries: dict[int, ItemEntry] = field(default_factory=dict)

    def check_next(self, item: str, handler: str) -> None:
        """Raise unless one more part may come, of this handler."""
        if not self.handler == handler == _TREES:
            raise InvalidArgumentError(
                f"it was saved already, by the handler {self.handler!r:.80}; only trees of dicts "
                f"can be saved in several parts, and this part would be saved by {handler!r:.80}",
                item=item,
            )

    def add(self, nodes: Sequence[Node]) -> int:
        """Take the structure of a part; see `TreeParts.add`."""
        return self.tree.add(nodes)

    def whole(self, created_ns: int) -> tuple[ItemEntry, dict[str, bytes]]:
        """Return the entry of the whole item, and the files over all its parts by path."""
        if not self.tree.count:
            return self.entries[0], {}
        merged = self.tree.merged()
        order = range(self.tree.count)
        entry = merge_entries([self.entries[number] for number in order], merged)
        return entry, item_view(entry) | self._database(merged, created_ns)

    def _database(self, merged: Merged, created_ns: int) -> dict[str, bytes]:
        plans = [self.plans[number] for number in range(self.tree.count)]
        entries = merge_database(plans, merged)
        if not entries:
            return {}
        files = [path for plan in plans for path in plan.files]
        tree_file = new_data_file()
        made = DatabaseIndex(entries).encode(files, tree_file, uuid.uuid4().bytes, created_ns)
        return {tree_file: made.tree, "manifest.ocdbt": made.manifest}
