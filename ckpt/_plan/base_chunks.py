"""Base chunks: the chunks of the step before that a save reuses, file by file. Pure.

A file is reused whole, so its unneeded chunks take space as long as any step has the file. So a
file is kept only if at least half of it is still needed; needed chunks of other files are written
anew. That separates data that changes from data that does not, without a hint from the user: after
the first save that shares, each file holds arrays that change together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import DIGEST_BYTES, LeafForm
from ckpt._format.manifest import ItemEntry
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ROW, ItemReport
from ckpt._plan.write_batches import WriteBatch

Array = np.ndarray[Any, Any]

# Few files smaller than this are kept: a list of many small files would grow from save to save, and
# writing them costs as little as linking them.
SMALL_BYTES = 1 << 20
MOST_SMALL = 16
_NONE = np.zeros(0, np.int64)


class BaseChunks:
    """The chunks that an earlier save of the same tree has written, and their places."""

    def __init__(
        self, leaves: Sequence[LeafPlan], report: ItemReport, sizes: Sequence[int], same: Array
    ) -> None:
        """Index the chunks of an earlier save.

        Args:
            leaves: The plans of the leaves, the same for both saves.
            report: The report of the earlier save.
            sizes: Size of each of its files.
            same: `[rows of the report] bool`, True for chunks that are expected to be the same
                again.
        """
        self.report: ItemReport = report
        self._sizes = np.array(sizes, np.int64)
        pairs = zip(report.files, sizes, strict=True)
        self._small = {path for path, size in pairs if size < SMALL_BYTES}
        self._nbytes = _stored_bytes(leaves, report.rows)
        self._same = same
        keys = _keys(report.rows["leaf"], report.rows["number"])
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def of_leaves(self, unchanged: Array) -> ItemReport:
        """Return the part of the report that a save reuses if some leaves did not change.

        `unchanged` is `[leaves] bool`, True for these leaves.
        """
        return self._kept(unchanged[self.report.rows["leaf"]], MOST_SMALL)

    def is_expected(self, batch: WriteBatch) -> bool:
        """Return True if at least half of a batch is expected to be the same again."""
        if not self._same.any():
            return False
        rows = self._rows_of(batch)
        nbytes = np.array([chunk.stored_nbytes for chunk in batch.chunks], np.int64)
        known = rows >= 0
        expected = nbytes[known][self._same[rows[known]]].sum()
        return bool(2 * expected >= nbytes.sum())

    def of_digests(
        self, batch: WriteBatch, digests: Sequence[str], kept: Sequence[ItemReport] = ()
    ) -> ItemReport:
        """Return the part of the report that a save reuses for a batch.

        Args:
            batch: The batch.
            digests: The digests of its chunks.
            kept: What the save has kept already; small files count.
        """
        rows = self._rows_of(batch)
        own = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, DIGEST_BYTES)
        wanted = np.zeros(len(self.report.rows), np.bool_)
        wanted[rows[self._are_equal(rows, own)]] = True
        small = sum(path in self._small for report in kept for path in report.files)
        return self._kept(wanted, MOST_SMALL - small)

    def in_large_files(self, files: Set[str]) -> list[set[tuple[int, int]]]:
        """Return the chunks in each of some files, but for the small ones."""
        return self.report.chunks_by_file(files - self._small)

    def same_again(self, report: ItemReport) -> Array:
        """Return the chunks of a later report that are the same; `[rows of that report] bool`."""
        rows = self._rows(_keys(report.rows["leaf"], report.rows["number"]))
        return self._are_equal(rows, report.digests)

    def _are_equal(self, rows: Array, digests: Array) -> Array:
        """Return True for each row that exists and has the given digest."""
        equal: Array = rows >= 0
        equal[equal] = (self.report.digests[rows[equal]] == digests[equal]).all(axis=1)
        return equal

    def _kept(self, wanted: Array, most_small: int) -> ItemReport:
        """Return the wanted rows in the files that are worth keeping for them."""
        count = len(self._sizes)
        needed = np.bincount(
            self.report.rows["file"], weights=wanted * self._nbytes, minlength=count
        )
        is_kept = (needed > 0) & (2 * needed >= self._sizes)
        small = np.flatnonzero(is_kept & (self._sizes < SMALL_BYTES))
        largest_first = small[np.argsort(-needed[small], kind="stable")]
        is_kept[largest_first[max(most_small, 0) :]] = False
        return self.report.part(is_kept, wanted)

    def _rows_of(self, batch: WriteBatch) -> Array:
        leaf = np.array([chunk.leaf for chunk in batch.chunks], np.int64)
        number = np.array([chunk.number for chunk in batch.chunks], np.int64)
        return self._rows(_keys(leaf, number))

    def _rows(self, keys: Array) -> Array:
        """Return the row of each chunk; -1 if there is none."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[places] == keys, self._order[places], -1)


def _keys(leaf: Array, number: Array) -> Array:
    return leaf.astype(np.int64) << 32 | number.astype(np.int64)


def _stored_bytes(leaves: Sequence[LeafPlan], rows: Array) -> Array:
    """Return the bytes that each chunk takes in its file."""
    plain = np.zeros(len(leaves), np.int64)
    for number in np.unique(rows["leaf"]).tolist():
        leaf = leaves[number]
        plain[number] = np.prod(leaf.chunk, dtype=np.int64) * DTYPES[leaf.spec.dtype or ""].itemsize
    return np.where(rows["length"] > 0, rows["length"].astype(np.int64), plain[rows["leaf"]])


def stored_report(entry: ItemEntry, leaves: Sequence[LeafPlan]) -> ItemReport:
    """Return the chunks of a stored item that a save with these plans would write alike."""
    table = entry.leaves
    numbers = {name: number for number, name in enumerate(table.names)}
    found, owners = [_NONE], [_NONE]
    chunks = [_NONE]
    for number, leaf in enumerate(leaves):
        at = numbers.get(leaf.name)
        if at is None or leaf.spec.dtype is None:
            continue
        first, end = int(table.firsts[at]), int(table.firsts[at + 1])
        if end - first == math.prod(leaf.grid) and _is_alike(leaf, table.forms[table.form[at]]):
            found.append(np.arange(first, end))
            owners.append(np.full(end - first, number))
            chunks.append(np.arange(end - first))
    places = np.concatenate(found)
    here = table.offsets[places] >= 0
    places = places[here]
    rows = np.zeros(len(places), ROW)
    rows["leaf"], rows["number"] = np.concatenate(owners)[here], np.concatenate(chunks)[here]
    rows["offset"] = table.offsets[places]
    for name, column in (("file", table.files), ("length", table.lengths)):
        if len(column):
            rows[name] = column[places]
    digests = np.frombuffer(table.digests, np.uint8).reshape(-1, DIGEST_BYTES)[places]
    return ItemReport(tuple(entry.data_files), rows, digests)


def _is_alike(leaf: LeafPlan, form: LeafForm) -> bool:
    """Return True if a stored leaf has the chunks that the plan gives it."""
    codec = None if leaf.compression is None else leaf.compression.name
    stored = (form.dtype, tuple(form.shape), tuple(form.chunks), form.packed, form.codec)
    return stored == (leaf.spec.dtype, leaf.spec.shape, leaf.chunk, leaf.packed, codec)
