"""The last save of a root: which arrays it had, and which files have their bytes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct, field

from ckpt._format.manifest_head import FileEntry
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.unchanged.kept_chunks import EarlierChunks, files_apart
from ckpt.storage._base import Storage

Flags = np.ndarray[Any, np.dtype[np.bool_]]


class SavedItem(Struct, frozen=True, eq=False):
    """One item, as this process has written it.

    Attributes:
        plan: The plan of all its chunks.
        chunks: Where they are.
        arrays: By number of the leaf a weak reference to its array, so that the memory of it is the
            caller's to free; None for anything but arrays of jax, which can change in place.
        files: Its data files, by path relative to the item.
    """

    plan: SavePlan
    chunks: EarlierChunks
    arrays: Sequence[weakref.ref[Any] | None]
    files: Mapping[str, FileEntry]

    def of_the_same_arrays(self, leaves: Sequence[Any]) -> ItemReport | None:
        """Return which chunks a save of `leaves` can take over, by files; None if there are none.

        Args:
            leaves: The leaves of the item, in tree order; the tree is that of this save.
        """
        same = [
            known is not None and known() is leaf
            for known, leaf in zip(self.arrays, leaves, strict=True)
        ]
        if True not in same:
            return None
        found = self.chunks.of_leaves(np.array(same, np.bool_))
        return found if found.files else None

    def apart(self, kept: ItemReport | None) -> list[set[tuple[int, int]]]:
        """Return the chunks of each file that was shared before and is not `kept` already.

        They may be the same once more. So they stay together, and all others come together.
        """
        taken = set() if kept is None else set(kept.files)
        shared = {path for path, entry in self.files.items() if entry.shared}
        return files_apart(self.chunks.report, shared - taken)


class LastSave(Struct):
    """What this process wrote of the step that was committed last.

    Attributes:
        storage: The root.
        step_dir: Name of the step directory.
        items: The items that hold arrays.
    """

    storage: Storage
    step_dir: str
    items: dict[str, SavedItem] = field(default_factory=dict)


def saved_item(
    plan: SavePlan,
    report: ItemReport,
    arrays: Sequence[weakref.ref[Any] | None],
    files: Mapping[str, FileEntry],
    before: SavedItem | None,
) -> SavedItem:
    """Return an item as it was written.

    Args:
        plan: The plan of all its chunks.
        report: Where they are.
        arrays: See `SavedItem`.
        files: See `SavedItem`.
        before: The same item, as the step before has it; None if that is not known.
    """
    # What was the same once is expected to be so again; without a step before, nobody knows.
    same = np.ones(len(report.rows), np.bool_)
    if before is not None:
        same = before.chunks.same_again(report)
    sizes = [files[path].size for path in report.files]
    return SavedItem(plan, EarlierChunks(plan.leaves, report, sizes, same), arrays, files)


def references(leaves: Sequence[Any]) -> list[weakref.ref[Any] | None]:
    """Return what tells later whether a leaf is the same array; see `SavedItem.arrays`."""
    return [weakref.ref(leaf) if isinstance(leaf, jax.Array) else None for leaf in leaves]
