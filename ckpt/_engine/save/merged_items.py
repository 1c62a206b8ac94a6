"""Merged items: the reports of all writers of an item become one manifest entry.

The writers are the processes of a job, or the calls of a save in parts. A process that saves an
item alone is its only writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._engine.plan_cache import ItemPlan, Sidecars
from ckpt._format.manifest import ItemEntry
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
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

    def whole(
        self, item: str, sidecars: Sidecars, created_ns: int
    ) -> tuple[ItemEntry, dict[str, bytes]]:
        """Return the entry of the whole item, and the files for other readers, by path.

        Args:
            item: Name of the item.
            sidecars: The files for other readers.
            created_ns: Start of the save, in Unix nanoseconds.
        """
        assert self.entry is not None
        if not self.structure.count:
            return self.entry, {}
        parts = [self.written[number] for number in range(self.structure.count)]
        tree, reports = self.structure.merged().planned(
            [part.tree for part in parts],
            [part.report for part in parts if part.report is not None],
        )
        entry = entry_of(self.entry, tree, reports)
        beside = sidecars.of_tree(item, tree)
        early = {path: data for path, (data, _) in beside.of_structure().items()}
        return entry, early | beside.of_places(reports, created_ns)


def entry_of(
    entry: ItemEntry, tree: PlannedTree, reports: Sequence[ItemReport], *, own_disks: bool = False
) -> ItemEntry:
    """Return the entry of an item with its tree, and with the columns of extensions.

    Args:
        entry: The entry that the handler made.
        tree: The tree.
        reports: The report of each writer.
        own_disks: True if chunks may be missing because other processes keep them.
    """
    stored = ChunkTable.merged(tree.leaves, reports, own_disks=own_disks)
    found = tree.filled(entry, stored)
    if stored.notes:
        # Imported only where an extension has noted something.
        from ckpt.extensions._readers import readers

        for name, each in readers(stored.notes).items():
            found = replace(found, leaves=each.with_notes(found.leaves, stored.notes[name]))
    return found
