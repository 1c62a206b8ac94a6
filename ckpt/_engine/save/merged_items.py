"""Merged items: the reports of all writers of an item become one manifest entry and one database.

The writers are the processes of a job, or the calls of a save in parts. A process that saves an
item alone is its only writer.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._engine.plan_cache import ItemPlan, new_data_file
from ckpt._format.manifest import ItemEntry
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.orbax_view import item_view
from ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ckpt._job.process_reports import TreeFingerprint
    from ckpt._plan.merged_parts import TreeParts

# The only handler whose entries hold just the tree; entries of others cannot be merged.
_TREES = "pytree"


class WrittenTree(Struct):
    """The tree of an item, as this process writes it.

    Attributes:
        tree: The tree with the plan of its leaves.
        plan: The plan of this process.
        report: Chunks that this process has written, once they are known.
        own: Digests of the arrays that every process has for itself, by number of the leaf; none
            with private disks, or for a process alone.
        values: Fingerprint of the values that every process has for itself and that must be the
            same on all; None with private disks, or for a process alone.
    """

    tree: PlannedTree
    plan: ItemPlan
    report: ItemReport | None = None
    own: Mapping[int, str] = {}
    values: TreeFingerprint | None = None


def _no_parts() -> TreeParts:
    # Imported only by a save in parts.
    from ckpt._plan.merged_parts import TreeParts

    return TreeParts()


class ItemParts(Struct):
    """One item that may arrive in several parts.

    Attributes:
        handler: Name of the handler that saves the item.
        structure: The structure so far; empty for an item that is not a tree.
        written: The tree of each part, by its number; the reports are complete when all is durable.
        entry: The entry that the handler made of the last part.
    """

    handler: str
    structure: TreeParts = field(default_factory=_no_parts)
    written: dict[int, WrittenTree] = field(default_factory=dict)
    entry: ItemEntry | None = None

    def check_next(self, item: str, handler: str) -> None:
        """Raise an error unless this handler may save one more part."""
        if not self.handler == handler == _TREES:
            raise InvalidArgumentError(
                f"it was saved already, by the handler {self.handler!r:.80}; only trees of dicts "
                f"can be saved in several parts, and this part would be saved by {handler!r:.80}",
                item=item,
            )

    def whole(self, created_ns: int) -> tuple[ItemEntry, dict[str, bytes]]:
        """Return the entry of the whole item, and the files that cover all its parts, by path."""
        from ckpt._plan.merged_parts import merge_parts

        assert self.entry is not None
        if not self.structure.count:
            return self.entry, {}
        parts = [self.written[number] for number in range(self.structure.count)]
        tree, reports = merge_parts(
            self.structure.merged(),
            [part.tree for part in parts],
            [part.report for part in parts if part.report is not None],
        )
        entry, files = merge_item(self.entry, tree, reports, created_ns)
        return entry, item_view(entry) | files


def merge_item(
    entry: ItemEntry, tree: PlannedTree, reports: Sequence[ItemReport], created_ns: int
) -> tuple[ItemEntry, dict[str, bytes]]:
    """Return the entry of an item with its tree, and the files of its database by path.

    Args:
        entry: The entry that the handler made.
        tree: The tree.
        reports: The report of each writer.
        created_ns: Unix time in nanoseconds.
    """
    stored = ChunkTable.merged(tree.leaves, reports)
    keys = list(stored.keys(tree.leaves))
    files: dict[str, bytes] = {}
    if keys:
        files = database_files(DatabaseIndex(keys), stored.data_files, created_ns)
    return entry_of(entry, tree, stored), files


def entry_of(entry: ItemEntry, tree: PlannedTree, stored: ChunkTable) -> ItemEntry:
    """Return the entry of an item with its tree, and with the columns of extensions.

    Args:
        entry: The entry that the handler made.
        tree: The tree.
        stored: The chunks of all writers.
    """
    found = tree.filled(entry, stored)
    if stored.notes:
        # Imported only where an extension has noted something.
        from ckpt.extensions._readers import readers

        for name, each in readers(stored.notes).items():
            found = replace(found, leaves=each.with_notes(found.leaves, stored.notes[name]))
    return found


def database_files(
    index: DatabaseIndex, data_files: Sequence[str], created_ns: int
) -> dict[str, bytes]:
    """Return the files that make data files a database, by path relative to the item."""
    tree_file = new_data_file()
    made = index.encode(data_files, tree_file, uuid.uuid4().bytes, created_ns)
    return {tree_file: made.tree, "manifest.ocdbt": made.manifest}
