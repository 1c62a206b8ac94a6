"""Merged items: the reports of all writers of an item become one manifest entry and one database.

The writers are the processes of a job, or the calls of a save in parts. A process that saves an
item alone is its only writer.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._engine.memory.staging import host_bytes
from ckpt._engine.plan_cache import ItemPlan, new_data_file
from ckpt._engine.save.multihost.save_report import SaveReport
from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry
from ckpt._format.ocdbt import DatabaseIndex
from ckpt._plan.item_reports import (
    ChunkTable,
    ItemReport,
    PlannedTree,
    fill_entry,
    key_values,
    merge_reports,
)
from ckpt._plan.merged_parts import TreeParts, merge_parts
from ckpt._plan.multihost.process_reports import ProcessReport, disagreement
from ckpt._plan.multihost.tree_fingerprint import TreeFingerprint, line_fingerprint
from ckpt._plan.orbax_view import item_view
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.errors import CoordinationError, InvalidArgumentError, located

# Largest array that is compared if every process has it for itself: on accelerators, larger arrays
# would have to be copied to the hosts of all processes, though only the primary's are stored.
_COMPARED_BYTES = 1 << 20
# The only handler whose entries hold just the tree; entries of others cannot be merged.
_TREES = "pytree"


class WrittenTree(Struct):
    """The tree of an item, as this process writes it.

    Attributes:
        tree: The tree with the plan of its leaves.
        plan: The plan of this process.
        own: Digests of the arrays that every process has for itself, by number of the leaf.
        report: Chunks that this process has written, once they are known.
        values: Fingerprint of the values that every process has for itself and that must be the
            same on all; None with private disks.
    """

    tree: PlannedTree
    plan: ItemPlan
    own: Mapping[int, str]
    report: ItemReport | None = None
    values: TreeFingerprint | None = None

    def for_primary(self) -> ProcessReport:
        """Return the report for the primary; the tree must have been written."""
        assert self.report is not None
        assert self.plan.fingerprint is not None
        values = self.values or line_fingerprint([], 1)
        return ProcessReport(self.report, self.plan.fingerprint, values)


class ItemParts(Struct):
    """One item that may arrive in several parts.

    Attributes:
        handler: Name of the handler that saves the item.
        structure: The structure so far; empty for an item that is not a tree.
        written: The tree of each part, by its number; the reports are complete when all is durable.
        entry: The entry that the handler made of the last part.
    """

    handler: str
    structure: TreeParts = field(default_factory=TreeParts)
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


def own_digests(plan: ItemPlan, leaves: Sequence[Any]) -> dict[int, str]:
    """Return the digests of the small arrays that every process has for itself, by leaf."""
    found = {}
    for number in plan.save.own:
        spec = plan.save.leaves[number].spec
        if spec.kind in ARRAY_KINDS:
            compared = spec.nbytes <= _COMPARED_BYTES
            found[number] = digest(host_bytes(leaves[number]).data) if compared else ""
    return found


def check_alike(names: Collection[str], reports: Sequence[SaveReport]) -> None:
    """Raise an error unless the processes have saved the same trees.

    Raises:
        CoordinationError: The trees differ; names the first leaf.
    """
    for name in names:
        with located(item=name):
            difference = disagreement([report.trees[name] for report in reports])
            if difference is not None:
                raise CoordinationError(difference)


def merge_processes(
    entries: Mapping[str, ItemEntry],
    trees: Mapping[str, WrittenTree],
    reports: Sequence[SaveReport],
    created_ns: int,
) -> tuple[dict[str, ItemEntry], dict[str, bytes]]:
    """Return the entries of items over the chunks of all processes, and the files of these entries.

    Args:
        entries: The entries that the primary's handlers made.
        trees: The primary's trees of the items that are divided among the processes.
        reports: The report of every process, by its number.
        created_ns: Unix time in nanoseconds.

    Raises:
        CoordinationError: The processes saved different trees; names the first leaf.
    """
    check_alike(trees, reports)
    found = dict(entries)
    files: dict[str, bytes] = {}
    for name, written in trees.items():
        with located(item=name):
            own = [report.trees[name].written for report in reports]
            found[name], made = merge_item(entries[name], written.tree, own, created_ns)
            files |= {f"{name}/{path}": data for path, data in made.items()}
    return found, files


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
    stored = merge_reports(tree.leaves, reports)
    keys = list(key_values(tree.leaves, stored))
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
    found = fill_entry(entry, tree, stored)
    if stored.notes:
        # Whoever notes nothing does not import this.
        from ckpt.extensions import merge_notes

        for name, notes in stored.notes.items():
            found = replace(found, leaves=merge_notes(name, found.leaves, notes))
    return found


def database_files(
    index: DatabaseIndex, data_files: Sequence[str], created_ns: int
) -> dict[str, bytes]:
    """Return the files that make data files a database, by path relative to the item."""
    tree_file = new_data_file()
    made = index.encode(data_files, tree_file, uuid.uuid4().bytes, created_ns)
    return {tree_file: made.tree, "manifest.ocdbt": made.manifest}
