"""The last step of a root that this program knows: which files have the bytes of which arrays.

It is the one that it has saved last; before its first save, the one that it has restored.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct, field

from ckpt._format.leaf_table import LeafForm
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import OWN_FORMAT, VIRTUAL, FileEntry
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import DIGEST_BYTES, ROW, ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.unchanged.kept_chunks import SMALL_BYTES, EarlierChunks, files_apart
from ckpt._plan.write_batches import WriteBatch
from ckpt.storage._base import Storage, can_share
from ckpt.storage._manifests import lies_in

_NONE = np.zeros(0, np.int64)


class SavedItem(Struct, frozen=True, eq=False):
    """One item, as this process has written it.

    Attributes:
        plan: The plan of all its chunks.
        chunks: Where they are.
        arrays: By number of the leaf a weak reference to its array, so that the memory of it is the
            caller's to free; None for anything but arrays of jax, which can change in place.
        files: Its data files, by path relative to the item.
        compared: Numbers of the leaves whose replicas were compared, by this save or by one before
            it that had the same arrays.
        is_first: Whether no step before it was known, so that any of its arrays may stay the same.
    """

    plan: SavePlan
    chunks: EarlierChunks
    arrays: Sequence[weakref.ref[Any] | None]
    files: Mapping[str, FileEntry]
    compared: frozenset[int] = frozenset()
    is_first: bool = False

    def of_leaves(self, same: Sequence[int]) -> ItemReport | None:
        """Return which chunks a save can take over, by files; None if there are none.

        Args:
            same: Numbers of the leaves that are what they were.
        """
        if not same:
            return None
        unchanged = np.zeros(len(self.arrays), np.bool_)
        unchanged[same] = True
        found = self.chunks.of_leaves(unchanged)
        return found if found.files else None

    def same(self, leaves: Sequence[Any]) -> list[int]:
        """Return the numbers of the leaves that are the same arrays as they were."""
        pairs = zip(self.arrays, leaves, strict=True)
        return [n for n, (known, leaf) in enumerate(pairs) if known and known() is leaf]

    def apart(self, kept: ItemReport | None) -> list[set[tuple[int, int]]]:
        """Return the chunks of each large file that was shared before and is not `kept` already.

        They may be the same once more. So they stay together, and all others come together.
        """
        taken = set() if kept is None else set(kept.files)
        shared = {
            path for path, entry in self.files.items() if entry.shared and entry.size >= SMALL_BYTES
        }
        return files_apart(self.chunks.report, shared - taken)

    def expected(self, batches: Sequence[WriteBatch]) -> set[int]:
        """Return the numbers of the batches that are likely the same as they were."""
        chunks = self.chunks
        return {number for number, batch in enumerate(batches) if chunks.is_expected(batch)}

    def small_files(self, report: ItemReport) -> int:
        """Return how many files of a report are small."""
        return sum(self.files[path].size < SMALL_BYTES for path in report.files)


class RestoredItem(Struct, frozen=True, eq=False):
    """One item of a step that was restored.

    Attributes:
        entry: What the manifest says of it.
        files: Its data files, by path relative to the item.
    """

    entry: ItemEntry
    files: Mapping[str, FileEntry]

    def as_saved(self, plan: SavePlan) -> SavedItem:
        """Return what of it a save with this plan would write in the same chunks."""
        table = self.entry.leaves
        numbers = {name: number for number, name in enumerate(table.names)}
        found, leaves = [_NONE], [_NONE]
        chunks = [_NONE]
        for number, leaf in enumerate(plan.leaves):
            at = numbers.get(leaf.name)
            if at is None or leaf.spec.dtype is None:
                continue
            first, end = int(table.firsts[at]), int(table.firsts[at + 1])
            if end - first == math.prod(leaf.grid) and _is_alike(leaf, table.forms[table.form[at]]):
                found.append(np.arange(first, end))
                leaves.append(np.full(end - first, number))
                chunks.append(np.arange(end - first))
        places = np.concatenate(found)
        here = table.offsets[places] >= 0
        places = places[here]
        rows = np.zeros(len(places), ROW)
        rows["leaf"], rows["number"] = np.concatenate(leaves)[here], np.concatenate(chunks)[here]
        rows["offset"] = table.offsets[places]
        for name, column in (("file", table.files), ("length", table.lengths)):
            if len(column):
                rows[name] = column[places]
        digests = np.frombuffer(table.digests, np.uint8).reshape(-1, DIGEST_BYTES)[places]
        report = ItemReport(tuple(self.entry.data_files), rows, digests)
        return saved_item(plan, report, [None] * len(plan.leaves), self.files, None)


def _is_alike(leaf: LeafPlan, form: LeafForm) -> bool:
    """Tell whether the chunks of a stored leaf are those of a plan."""
    codec = None if leaf.compression is None else leaf.compression.name
    stored = (form.dtype, tuple(form.shape), tuple(form.chunks), form.packed, form.codec)
    return stored == (leaf.spec.dtype, leaf.spec.shape, leaf.chunk, leaf.packed, codec)


class LastSave(Struct):
    """A committed step whose files the next one may share.

    Attributes:
        storage: The root.
        step_dir: The step directory, with the folder that its manifest names.
        items: What is known of its items.
        was_restored: Whether it was restored, and not saved by this program.
    """

    storage: Storage
    step_dir: str
    items: Mapping[str, SavedItem | RestoredItem] = field(default_factory=dict)
    was_restored: bool = False


def restored(storage: Storage, step_dir: str, manifest: Manifest) -> LastSave | None:
    """Return what a save may share with a step that was restored; None if it can share nothing.

    Args:
        storage: The root.
        step_dir: Name of its directory.
        manifest: Its manifest.
    """
    is_here = manifest.format == OWN_FORMAT and VIRTUAL not in manifest.requires
    if not is_here or not can_share(storage):
        return None
    items = {}
    for name, entry in manifest.items.items():
        files = {path: manifest.files.get(f"{name}/{path}") for path in entry.data_files}
        known = {path: file for path, file in files.items() if file is not None}
        if len(known) == len(files):
            items[name] = RestoredItem(entry, known)
    return LastSave(storage, lies_in(step_dir, manifest), items, was_restored=True)


def saved_item(
    plan: SavePlan,
    report: ItemReport,
    arrays: Sequence[weakref.ref[Any] | None],
    files: Mapping[str, FileEntry],
    before: SavedItem | None,
    compared: frozenset[int] = frozenset(),
) -> SavedItem:
    """Return an item as it was written.

    Args:
        plan: The plan of all its chunks.
        report: Where they are.
        arrays: See `SavedItem`.
        files: See `SavedItem`.
        before: The same item, as the step before has it; None if that is not known.
        compared: See `SavedItem`.
    """
    # What was the same once is expected to be so again; without a step before, all may be.
    same = np.ones(len(report.rows), np.bool_)
    if before is not None:
        same = before.chunks.same_again(report)
    sizes = [files[path].size for path in report.files]
    chunks = EarlierChunks(plan.leaves, report, sizes, same)
    return SavedItem(plan, chunks, arrays, files, compared, before is None)


def references(leaves: Sequence[Any]) -> list[weakref.ref[Any] | None]:
    """Return what tells later whether a leaf is the same array; see `SavedItem.arrays`."""
    return [weakref.ref(leaf) if isinstance(leaf, jax.Array) else None for leaf in leaves]
