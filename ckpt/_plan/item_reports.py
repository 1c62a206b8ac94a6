"""Item reports: the places of the chunks that each writer of an item has written, merged. Pure.

A writer is a process of a job, or one call of a save in parts; a process that saves alone is the
only writer. Their reports are merged: every chunk of every leaf must be there once. The manifest is
made of the result, so it is the same for any number of writers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.leaf_table import DIGEST_BYTES, LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry, Node, ShardingEntry
from ckpt._format.places import describe_sharding
from ckpt._plan.chunking import LeafPlan, holders_of
from ckpt._plan.write_batches import FileSpans, WriteBatch
from ckpt._tree.leaf_kinds import ARRAY_KINDS, SCALAR_KINDS, encode_scalar
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt.errors import CheckpointError

Array = np.ndarray[Any, Any]

ROW = np.dtype(
    [("leaf", "<u4"), ("number", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("length", "<u8")]
)


class PlannedTree(Struct, frozen=True):
    """A tree with a plan for every leaf.

    Attributes:
        nodes: Its inner nodes, root first.
        leaves: The plans of its leaves.
        values: Python scalars and functions at the places of their leaves; places of arrays are
            ignored.
    """

    nodes: Sequence[Node]
    leaves: Sequence[LeafPlan]
    values: Sequence[Any]

    def filled(self, entry: ItemEntry, stored: ChunkTable) -> ItemEntry:
        """Return the manifest entry of an item with this tree.

        Args:
            entry: The entry that the handler made; the bytes of the arrays are added to its own.
            stored: The places of its chunks.
        """
        leaves, shardings = _leaf_table(self, stored)
        arrays = [each.spec for each in self.leaves if each.spec.kind in ARRAY_KINDS]
        return replace(
            entry,
            nodes=list(self.nodes),
            leaves=leaves,
            shardings=shardings,
            data_files=stored.data_files,
            nbytes=entry.nbytes + sum(spec.nbytes for spec in arrays if spec.same_as is None),
        )


class ChunkNotes(Struct, frozen=True, eq=False):
    """The notes of one extension on the chunks of a report.

    Attributes:
        records: `[chunks]`, a record for each chunk.
        blank: The record of a chunk that nothing is known of.
        others: Records of the extension beside those; the field `leaf` has the number of a leaf.
        seen: Numbers of the leaves of which `records` and `others` say all; not sent to others.
    """

    records: Array
    blank: Array
    others: Array
    seen: frozenset[int] = frozenset()

    def of_chunks(self, chosen: Array) -> ChunkNotes:
        """Return the notes on some chunks; `chosen` is an index of arrays."""
        return ChunkNotes(self.records[chosen], self.blank, self.others[:0])


class ItemReport(Struct, frozen=True, eq=False):
    """The report of one writer on the chunks of an item.

    Attributes:
        files: Paths of its data files, relative to the item.
        rows: `[chunks]`, for each chunk the number of its `leaf`, its `number` in the leaf, the
            number of its `file`, its `offset` in the file, and its `length` if it is encoded, else
            0.
        digests: `[chunks, 16] uint8`, the digest of each chunk.
        notes: The notes of extensions on the chunks, by name of the extension.
    """

    files: tuple[str, ...]
    rows: Array
    digests: Array
    notes: Mapping[str, ChunkNotes] = {}

    def without_chunks(self, chunks: Set[tuple[int, int]]) -> ItemReport:
        """Return the report without some chunks, and without files that have no others.

        `chunks` are pairs of a leaf number and the chunk's number in the leaf.
        """
        if not chunks:
            return self
        rows = self.rows
        pairs = zip(rows["leaf"].tolist(), rows["number"].tolist(), strict=True)
        wanted = np.array([pair not in chunks for pair in pairs], np.bool_)
        is_kept = np.zeros(len(self.files), np.bool_)
        is_kept[rows["file"][wanted]] = True
        found = self.part(is_kept, wanted)
        notes = {
            name: replace(each, others=self.notes[name].others)
            for name, each in found.notes.items()
        }
        return replace(found, notes=notes)

    @staticmethod
    def of(
        batches: Sequence[WriteBatch],
        files: Sequence[str],
        digests: Sequence[Sequence[str]] | None = None,
        spans: FileSpans | None = None,
        notes: Mapping[str, ChunkNotes] | None = None,
    ) -> ItemReport:
        """Return the report of a writer.

        Args:
            batches: The batches that it has written.
            files: Path of every batch's file, relative to the item.
            digests: Digest of every chunk, by batch and in the order of its chunks; None if only
                the places matter.
            spans: The places of encoded chunks.
            notes: The notes of extensions on all chunks, in that order.
        """
        rows: list[tuple[int, int, int, int, int]] = []
        for file, batch in enumerate(batches):
            found = (spans or {}).get(file)
            if found is None:
                rows.extend((c.leaf, c.number, file, c.offset, 0) for c in batch.chunks)
            else:
                pairs = zip(batch.chunks, found, strict=True)
                rows.extend((c.leaf, c.number, file, at.offset, at.length) for c, at in pairs)
        if digests is None:
            raw = bytes(DIGEST_BYTES * len(rows))
        else:
            raw = bytes.fromhex("".join(each for batch in digests for each in batch))
        every = np.frombuffer(raw, np.uint8).reshape(len(rows), DIGEST_BYTES)
        return ItemReport(tuple(files), np.array(rows, ROW), every, notes or {})

    @staticmethod
    def joined(reports: Sequence[ItemReport]) -> ItemReport:
        """Return the report of a writer that has written the chunks of all reports.

        A file that occurs in several reports is the same one.
        """
        files: dict[str, int] = {}
        rows = []
        for report in reports:
            numbers = [files.setdefault(path, len(files)) for path in report.files]
            own = report.rows.copy()
            own["file"] = np.array(numbers, np.int64)[own["file"]]
            rows.append(own)
        digests = np.concatenate([report.digests for report in reports])
        return ItemReport(tuple(files), np.concatenate(rows), digests, join_notes(reports))

    def part(self, is_kept: Array, wanted: Array) -> ItemReport:
        """Return the part that covers some chunks in some of the files.

        Args:
            is_kept: `[files] bool`, True for the files.
            wanted: `[chunks] bool`, True for the chunks.
        """
        chosen = wanted & is_kept[self.rows["file"]]
        rows = self.rows[chosen]
        # Files are numbered anew.
        rows["file"] = (np.cumsum(is_kept) - 1)[rows["file"]]
        files = tuple(path for path, kept in zip(self.files, is_kept, strict=True) if kept)
        notes = {name: each.of_chunks(chosen) for name, each in self.notes.items()}
        return ItemReport(files, rows, self.digests[chosen], notes)

    def in_files(self, files: Set[str]) -> ItemReport:
        """Return the part that covers some of the files."""
        is_kept = np.array([path in files for path in self.files], np.bool_)
        return self.part(is_kept, np.ones(len(self.rows), np.bool_))

    def chunks_by_file(self, files: Set[str]) -> list[set[tuple[int, int]]]:
        """Return the chunks in each of some files: number of the leaf, and of the chunk in it."""
        found = {n: set[tuple[int, int]]() for n, path in enumerate(self.files) if path in files}
        if found:
            columns = (self.rows[name].tolist() for name in ("leaf", "number", "file"))
            for leaf, number, file in zip(*columns, strict=True):
                if file in found:
                    found[file].add((leaf, number))
        return list(found.values())


class MergedNotes(Struct, frozen=True, eq=False):
    """The notes of one extension on the chunks of an item, by all of its writers.

    Attributes:
        leaves: `[chunks]`, number of the leaf of each chunk.
        notes: The notes on these chunks.
        are_whole: `[leaves] bool`, True if no process has a chunk of the leaf for itself.
    """

    leaves: Array
    notes: ChunkNotes
    are_whole: Array


class ChunkTable(Struct, frozen=True):
    """The places of the chunks of all leaves, by leaf and in C order of the chunk grid.

    Attributes:
        firsts: Number of every leaf's first chunk, followed by the number of chunks.
        digests: Digest of every chunk, one after the other.
        offsets: Offset of each chunk in its data file; -1 for a chunk on the disk of another
            process.
        files: Number of the data file of each chunk.
        lengths: Bytes of each encoded chunk; 0 for a plain one.
        data_files: Paths of the data files, relative to the item.
        notes: The notes of extensions on the chunks of all writers, by name of the extension.
    """

    firsts: Array
    digests: bytes
    offsets: Array
    files: Array
    lengths: Array
    data_files: list[str]
    notes: Mapping[str, MergedNotes] = {}

    @staticmethod
    def blank(leaves: int) -> ChunkTable:
        """Return a table without chunks, for uses in which chunks do not matter."""
        none = np.zeros(0, np.int64)
        return ChunkTable(np.zeros(leaves + 1, np.int64), b"", none, none, none, [])

    @staticmethod
    def merged(
        leaves: Sequence[LeafPlan], reports: Sequence[ItemReport], *, own_disks: bool = False
    ) -> ChunkTable:
        """Return the places of all chunks of an item.

        Args:
            leaves: The plans of its leaves; with several processes those of the primary.
            reports: The reports of all writers, in their order.
            own_disks: True if chunks may be missing because other processes keep them.

        Raises:
            CheckpointError: A chunk was written by no process or by several, or does not exist;
                names the leaf, the chunk and the processes.
        """
        counts = np.array([math.prod(leaf.grid) * leaf.has_chunks for leaf in leaves], np.int64)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        rows = np.concatenate([report.rows for report in reports])
        starts = np.cumsum([0, *(len(report.rows) for report in reports)])
        first_files = np.cumsum([0, *(len(report.files) for report in reports)])
        _check_rows(leaves, counts, rows, starts, reports)
        places = firsts[rows["leaf"]] + rows["number"]
        times = np.bincount(places, minlength=firsts[-1])
        wrong = times > 1 if own_disks else times != 1
        if wrong.any():
            raise _not_once_error(leaves, firsts, int(np.argmax(wrong)), places, starts)
        writers = np.repeat(np.arange(len(reports)), np.diff(starts))
        lengths, files = np.zeros(firsts[-1], np.int64), np.zeros(firsts[-1], np.int64)
        offsets = np.full(firsts[-1], -1, np.int64)
        offsets[places] = rows["offset"]
        lengths[places] = rows["length"]
        files[places] = rows["file"] + first_files[writers]
        digests = np.zeros((firsts[-1], DIGEST_BYTES), np.uint8)
        digests[places] = np.concatenate([report.digests for report in reports])
        data_files = [path for report in reports for path in report.files]
        noted = join_notes(reports)
        notes = {}
        if noted:
            are_whole = np.ones(len(leaves), np.bool_)
            are_whole[np.repeat(np.arange(len(leaves)), np.diff(firsts))[offsets < 0]] = False
            notes = {name: MergedNotes(rows["leaf"], it, are_whole) for name, it in noted.items()}
        return ChunkTable(firsts, digests.tobytes(), offsets, files, lengths, data_files, notes)


def join_notes(reports: Sequence[ItemReport]) -> dict[str, ChunkNotes]:
    """Return the notes of each extension on the chunks of all reports, one after the other."""
    found = {}
    for name in dict.fromkeys(name for report in reports for name in report.notes):
        noted = [report.notes[name] for report in reports if name in report.notes]
        # Writers without the extension contribute blank records.
        records = [
            report.notes[name].records
            if name in report.notes
            else np.full(len(report.rows), noted[0].blank)
            for report in reports
        ]
        others = np.concatenate([each.others for each in noted])
        found[name] = ChunkNotes(np.concatenate(records), noted[0].blank, others)
    return found


def _check_rows(
    leaves: Sequence[LeafPlan],
    counts: Array,
    rows: Array,
    starts: Array,
    reports: Sequence[ItemReport],
) -> None:
    """Raise an error if a row names a chunk or a file that does not exist."""
    known = rows["leaf"] < len(counts)
    leaf = np.where(known, rows["leaf"], 0)
    encoded = np.array([leaf.compression is not None for leaf in leaves] or [False])
    most = np.repeat([len(report.files) for report in reports], np.diff(starts))
    limits = counts[leaf] if len(counts) else np.zeros(len(rows), np.int64)
    right = known & (rows["number"] < limits) & (rows["file"] < most)
    right &= (rows["offset"] < 1 << 62) & ((rows["length"] > 0) == encoded[leaf])
    right &= rows["length"] < 1 << 62
    if not right.all():
        wrong = int(np.argmin(right))
        process = int(np.searchsorted(starts, wrong, side="right")) - 1
        row = dict(zip(ROW.names or (), rows[wrong].tolist(), strict=True))
        raise CheckpointError(
            f"process {process} says that it has written a chunk that the tree does not have: {row}"
        )


def _not_once_error(
    leaves: Sequence[LeafPlan], firsts: Array, place: int, places: Array, starts: Array
) -> CheckpointError:
    number = int(np.searchsorted(firsts, place, side="right")) - 1
    leaf, chunk = leaves[number], place - int(firsts[number])
    writers = np.searchsorted(starts, np.flatnonzero(places == place), side="right") - 1
    if len(writers):
        what = f"was written by the processes {', '.join(map(str, writers.tolist()))}"
    elif leaf.spec.placed is not None:
        # Only the ids of its devices are known, not their processes.
        what = "was written by no process"
    else:
        holders: tuple[int, ...] = (0,)
        if leaf.spec.sharding is not None:
            corner = zip(np.unravel_index(chunk, leaf.grid), leaf.chunk, strict=True)
            offset = tuple(int(at) * length for at, length in corner)
            holders = holders_of(leaf.spec.sharding, leaf.spec.shape, offset)
        shown = ", ".join(map(str, holders[:20])) + ", ..." * (len(holders) > 20)
        what = f"was written by no process, and is held by {shown}"
    return CheckpointError(
        f"chunk {chunk} of {math.prod(leaf.grid)} {what}: expected exactly one. All processes must "
        "save the same tree with the same version of this library",
        leaf=leaf.name,
    )


def _leaf_table(tree: PlannedTree, stored: ChunkTable) -> tuple[LeafTable, list[ShardingEntry]]:
    # A sharding that comes from a checkpoint is keyed by its text.
    shardings: dict[jax.sharding.Sharding | str, int] = {}
    described: list[ShardingEntry] = []
    # Hashing a sharding is slow, and thousands of leaves share a few.
    known: dict[int, int] = {}
    forms: dict[LeafForm, int] = {}
    # Keyed by all that decides about a form: thousands of leaves have the same.
    alike: dict[tuple[int, tuple[int, ...], bool, int], int] = {}
    form: list[int] = []
    same_as: dict[int, int] = {}
    values: dict[int, str | bool | None] = {}
    counts = np.diff(stored.firsts).tolist()
    for number, (leaf, value) in enumerate(zip(tree.leaves, tree.values, strict=True)):
        spec = leaf.spec
        if spec.kind not in ARRAY_KINDS:
            is_scalar = spec.kind in SCALAR_KINDS
            values[number] = encode_scalar(spec.kind, value) if is_scalar else _function_name(value)
            form.append(forms.setdefault(LeafForm(spec.kind), len(forms)))
            continue
        source = number
        if spec.same_as is not None:
            source = same_as[number] = spec.same_as
        likeness = (id(spec), leaf.chunk, leaf.packed, counts[source])
        if likeness in alike:
            form.append(alike[likeness])
            continue
        sharding = known.get(id(spec.sharding))
        if sharding is None and (spec.sharding is not None or spec.placed is not None):
            key = spec.sharding or repr(spec.placed)
            sharding = shardings.setdefault(key, len(shardings))
            if sharding == len(described):
                described.append(_described(spec))
            if spec.sharding is not None:
                known[id(spec.sharding)] = sharding
        made = LeafForm(
            kind=spec.kind,
            dtype=spec.dtype,
            shape=spec.shape,
            chunks=leaf.chunk,
            count=counts[source],
            codec=None if leaf.compression is None else leaf.compression.name,
            packed=leaf.packed,
            sharding=sharding,
            committed=spec.committed,
            weak_type=spec.weak_type,
            impl=spec.impl,
        )
        form.append(alike.setdefault(likeness, forms.setdefault(made, len(forms))))
    digests = stored.digests
    offsets, files, lengths = stored.offsets, stored.files, stored.lengths
    if values and stored.firsts[-1]:
        # Scalars are also stored as arrays, but only for other readers.
        are_arrays = np.ones(len(form), np.bool_)
        are_arrays[list(values)] = False
        kept = np.repeat(are_arrays, counts)
        digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")[kept].tobytes()
        offsets, files, lengths = offsets[kept], files[kept], lengths[kept]
    columns = (digests, offsets, files, lengths, same_as, values)
    return LeafTable([leaf.name for leaf in tree.leaves], list(forms), form, *columns), described


def _described(spec: LeafSpec) -> ShardingEntry:
    if spec.placed is not None:
        return spec.placed
    assert spec.sharding is not None
    return describe_sharding(spec.sharding)


def _function_name(function: Any) -> str:
    if isinstance(function, CheckpointLeaf):
        return function.name
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or '?'}:{name}"
