"""Readers of what extensions have stored in manifests, by the name of the extension.

A manifest may have columns of an extension that is unknown here. They are carried wherever their
leaves stay as they are, and are never read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckpt._proof.run_notes import notes_on_run
from ckpt.keep._questions import SIGNS_NOTE

if TYPE_CHECKING:
    from ckpt._format.leaf_table import Integers, LeafTable
    from ckpt._format.manifest import ItemEntry
    from ckpt._plan.item_reports import MergedNotes


# How a step came about, of which extensions say something.
Made = Literal["new", "joint", "part"]


class StoredExtension(Protocol):
    """Reads the columns of one extension."""

    def with_notes(self, table: LeafTable, notes: MergedNotes) -> LeafTable:
        """Return the leaves with the columns that the notes on the chunks of all writers make."""

    def check(self, table: LeafTable) -> None:
        """Raise a `CorruptCheckpointError` if the columns cannot be true."""

    def compare(
        self, tables: tuple[LeafTable, LeafTable], first: Integers, second: Integers
    ) -> tuple[Any, Any]:
        """Return for pairs of leaves whether the columns tell, and whether both are the same."""

    def of_leaves(self, table: LeafTable) -> Sequence[Any]:
        """Return what is noted of each leaf, with a text for people as its `remark`."""

    def of_step(self, items: Mapping[str, ItemEntry]) -> dict[str, Any]:
        """Return what the head of a manifest with these items says of the step."""

    def merged(self, items: Mapping[str, ItemEntry]) -> None:
        """Look at the items of a step, merged over all processes of a job."""


def readers(names: Collection[str]) -> dict[str, StoredExtension]:
    """Return the readers of the extensions that are known here."""
    found: dict[str, StoredExtension] = {}
    if SIGNS_NOTE in names:
        from ckpt._vitals import stored_signs

        found[SIGNS_NOTE] = stored_signs
    return found


def notes_on_step(
    items: Mapping[str, ItemEntry], noted: Mapping[str, Any], made: Made = "new"
) -> dict[str, Any]:
    """Return what extensions say of a step whose items are new, or others than before.

    Args:
        items: The items.
        noted: What extensions have said of the step, or None for those that take part. What is not
            known here is dropped, as it may not be true any more.
        made: `joint` if several processes have saved the items, which are new; `part` if they are
            a part of a step that is read, of which nothing is lost.
    """
    known = readers({*noted, *(name for it in items.values() for name in it.leaves.extensions)})
    of_run = notes_on_run(noted, noted if made == "part" else known)
    for each in known.values() if made == "joint" else ():
        each.merged(items)
    return of_run | {name: each.of_step(items) for name, each in known.items()}
