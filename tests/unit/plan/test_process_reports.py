"""Reports of several processes: merged they are what one process would have reported.

What a report says is checked against the bytes that it is about, put together from made-up files.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

from ckpt._format.chunk_locations import region_of
from ckpt._format.manifest import ItemEntry, Node
from ckpt._format.manifest_head import digest
from ckpt._interop.orbax.database_index import DatabaseIndex, KeyValue
from ckpt._interop.orbax.sidecars import database_keys
from ckpt._job.process_reports import (
    ProcessReport,
    disagreement,
    line_fingerprint,
    tree_fingerprint,
    value_fingerprint,
)
from ckpt._plan.chunking import METADATA_KEY
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.write_batches import FileSpan
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import CheckpointError, CorruptCheckpointError
from docs.explanation.scaling.fake_devices import devices_of
from tests.unit.plan.simulated_jobs import MIB, Job, chunks_in, jobs, values_of

NODES = [Node(kind="dict", keys=["a"], children=[0])]


def bytes_of(array: Any, index: tuple[slice, ...] = ()) -> bytes:
    return np.ascontiguousarray(np.asarray(array)[index]).tobytes()


class Written:
    """What the processes of a job write of a tree, in memory instead of in files."""

    def __init__(self, job: Job, seed: int = 0) -> None:
        self.job = job
        self.plans = job.plans()
        self.values = values_of(job.trees[0], seed)
        self.files: dict[str, bytes] = {}
        self.digests: list[list[list[str]]] = []
        self.places: list[dict[int, list[FileSpan]]] = []
        self.names: list[list[str]] = []
        for process, plan in enumerate(self.plans):
            self.digests.append([])
            self.places.append({})
            self.names.append([])
            for number, batch in enumerate(plan.batches):
                self._write(process, number, batch)
        self.reports = [self.report(process) for process in range(job.count)]

    def _write(self, process: int, number: int, batch: Any) -> None:
        name = f"d/{process:016x}{number:016x}"
        data = bytearray(2 * batch.nbytes + 4096)
        found, places, end = [], [], 0
        for chunk in batch.chunks:
            raw = self.bytes_of_chunk(chunk)
            found.append(digest(raw))
            start = end if batch.encoded else chunk.offset
            # As if it could be compressed to its bytes and one more.
            raw = raw + b"!" if batch.encoded else raw
            data[start : start + len(raw)] = raw
            end = start + len(raw)
            places.append(FileSpan(start, len(raw)))
        self.files[name] = bytes(data)
        self.names[process].append(name)
        self.digests[process].append(found)
        if batch.encoded:
            self.places[process][number] = places

    def bytes_of_chunk(self, chunk: Any) -> bytes:
        spec, value = self.job.trees[0][chunk.leaf], self.values[chunk.leaf]
        if spec.kind not in ARRAY_KINDS:
            return np.asarray(value).tobytes()
        return bytes_of(value, chunk.region.slices)

    def own(self, plan: SavePlan) -> dict[int, str]:
        arrays = [n for n in plan.own if plan.leaves[n].spec.kind in ARRAY_KINDS]
        return {number: digest(bytes_of(self.values[number])) for number in arrays}

    def report(self, process: int) -> ProcessReport:
        plan = self.plans[process]
        written = ItemReport.of(
            plan.batches, self.names[process], self.digests[process], self.places[process]
        )
        values = value_fingerprint(plan, self.values, self.own(plan))
        return ProcessReport(written, tree_fingerprint(plan, NODES), values)

    def merge(self, reports: Sequence[ProcessReport]) -> tuple[ItemEntry, list[KeyValue]]:
        return self.merge_written([report.written for report in reports])

    def merge_written(self, reports: Sequence[ItemReport]) -> tuple[ItemEntry, list[KeyValue]]:
        leaves = self.plans[0].leaves
        stored = ChunkTable.merged(leaves, reports)
        entry = PlannedTree([], leaves, self.values).filled(ItemEntry(handler=""), stored)
        return entry, list(database_keys(leaves, stored))


def as_text(report: ProcessReport) -> tuple[Any, ...]:
    rows, found = report.written.rows.tolist(), report.written.digests.tolist()
    return report.written.files, rows, found, report.tree, report.values


# -- merging --------------------------------------------------------------------------------------


@given(jobs().filter(lambda job: job.count > 1))
def test_merged_reports_are_that_of_a_process_that_wrote_everything(job: Job) -> None:
    written = Written(job)
    entry, keys = written.merge(written.reports)
    batches: list[Any] = []
    places: dict[Any, Any] = {}
    digests: list[Any] = []
    files: list[Any] = []
    for process, plan in enumerate(written.plans):
        for number, found in written.places[process].items():
            places[len(batches) + number] = found
        batches += plan.batches
        digests += written.digests[process]
        files += written.names[process]
    alone = ItemReport.of(batches, files, digests, places)
    assert (entry, keys) == written.merge_written([alone])
    if keys:
        DatabaseIndex(keys)


@given(jobs().filter(lambda job: job.count > 1), st.integers(0, 5))
def test_the_arrays_are_where_the_merged_reports_say(job: Job, seed: int) -> None:
    written = Written(job, seed)
    item, keys = written.merge(written.reports)
    check_leaves(item)
    entries = {entry.key.decode(): entry for entry in keys}
    for leaf, value in zip(item.leaves, written.values, strict=True):
        if leaf.kind not in ARRAY_KINDS:
            continue
        found = np.zeros_like(value)
        itemsize = value.dtype.itemsize
        grid = [-(-n // c) for n, c in zip(leaf.shape, leaf.chunks, strict=True)]
        for number, stored in enumerate(leaf.digests):
            region = region_of(leaf, number)
            file = item.data_files[leaf.files[number] if leaf.files else 0]
            start, nbytes = leaf.offsets[number], region.size * itemsize
            raw = written.files[file][start : start + nbytes]
            assert digest(raw) == stored
            found[region.slices] = np.frombuffer(raw, value.dtype).reshape(region.shape)
            place = "/".join(map(str, np.unravel_index(number, grid)))
            entry = entries[f"{leaf.name}/c/{place}" if place else f"{leaf.name}/c"]
            assert (item.data_files[entry.file], entry.offset) == (file, start)
            whole = math.prod(leaf.chunks) * itemsize
            assert entry.length == (leaf.lengths[number] if leaf.lengths else whole)
        assert found.tobytes() == value.tobytes()
        assert entries[f"{leaf.name}/{METADATA_KEY}"].inline is not None


# -- on the way -----------------------------------------------------------------------------------


@given(jobs().filter(lambda job: job.count > 1))
def test_reports_come_back_as_they_went(job: Job) -> None:
    for report in Written(job).reports:
        assert as_text(ProcessReport.unpack(report.pack())) == as_text(report)


def typical() -> Job:
    mesh = Mesh(devices_of(4, 2).reshape(4, 2), ("data", "model"))
    cut = NamedSharding(mesh, PartitionSpec(None, "model"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    tree = (
        LeafSpec("jax", "float32", (1000, 1024), cut),
        LeafSpec("jax", "float32", (1000,), everywhere),
        LeafSpec("int", "int64"),
        LeafSpec("numpy", "uint8", (10,)),
    )
    return Job((tree,) * 4, 4 * MIB)


@given(st.data())
def test_a_changed_record_is_refused(data: st.DataObject) -> None:
    packed = bytearray(Written(typical()).reports[1].pack())
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptCheckpointError, match="changed on its way"):
        ProcessReport.unpack(bytes(packed))


@given(st.binary(max_size=300), st.booleans(), st.data())
def test_what_is_no_record_is_refused(junk: bytes, begins_well: bool, data: st.DataObject) -> None:
    packed = Written(typical()).reports[1].pack()
    if begins_well:
        start = data.draw(st.integers(0, len(packed) - 17))
        junk = packed[:start] + junk
    # Whoever sends junk may also send the right checksum of it.
    signed = junk + bytes.fromhex(digest(junk))
    for each in (junk, signed):
        if each == packed:
            continue
        with pytest.raises(CorruptCheckpointError):
            ProcessReport.unpack(each)


@pytest.mark.parametrize("more", [-1, 1])
def test_rows_are_as_many_as_the_record_says(more: int) -> None:
    report = Written(typical()).reports[1]
    body, chunks = report.pack()[:-16], report.written.rows
    columns = b"".join(chunks[name].tobytes() for name in chunks.dtype.names or ())
    rows, other = (
        zlib.compress(each, 1) for each in (columns, (columns + b"!")[: len(columns) + more])
    )
    head = bytearray(body[: body.index(rows)])
    head[20:28] = len(other).to_bytes(8, "little")
    wrong = bytes(head) + other + body[body.index(rows) + len(rows) :]
    with pytest.raises(CorruptCheckpointError, match="its rows are not those of"):
        ProcessReport.unpack(wrong + bytes.fromhex(digest(wrong)))


def test_a_record_of_another_version_is_refused() -> None:
    wrong = b"ckr9" + Written(typical()).reports[1].pack()[4:-16]
    with pytest.raises(CorruptCheckpointError, match="cannot be used"):
        ProcessReport.unpack(wrong + bytes.fromhex(digest(wrong)))


@given(st.data())
def test_numbers_in_a_record_may_be_anything(data: st.DataObject) -> None:
    written = Written(typical())
    reports = [ProcessReport.unpack(report.pack()).written for report in written.reports]
    process = data.draw(st.sampled_from([p for p, r in enumerate(reports) if len(r.rows)]))
    rows = reports[process].rows.copy()
    name = data.draw(st.sampled_from(rows.dtype.names))
    row = data.draw(st.integers(0, len(rows) - 1))
    bits = 8 * rows.dtype[name].itemsize
    value = data.draw(st.integers(0, 2**bits - 1))
    if rows[name][row] == value or name == "offset":
        return
    rows[name][row] = value
    changed = replace(written.reports[process], written=replace(reports[process], rows=rows))
    reports[process] = ProcessReport.unpack(changed.pack()).written
    if name == "file" and value < len(reports[process].files):
        return
    with pytest.raises(CheckpointError):
        written.merge_written(reports)


# -- mistakes -------------------------------------------------------------------------------------


def test_a_chunk_that_nobody_wrote_is_named() -> None:
    written = Written(typical())
    reports = [report.written for report in written.reports]
    process = next(p for p, r in enumerate(reports) if (r.rows["leaf"] == 0).any())
    lost = reports[process]
    row = int(np.argmax(lost.rows["leaf"] == 0))
    reports[process] = replace(
        lost, rows=np.delete(lost.rows, row), digests=np.delete(lost.digests, row, 0)
    )
    number = lost.rows["number"][row]
    with pytest.raises(CheckpointError) as caught:
        written.merge_written(reports)
    assert caught.value.leaf == "leaf0"
    assert f"chunk {number} of 4 was written by no process, and is held by 0, 1, 2, 3" in str(
        caught.value
    )


def test_a_chunk_that_two_wrote_is_named() -> None:
    written = Written(typical())
    with pytest.raises(CheckpointError) as caught:
        written.merge([*written.reports, written.reports[0]])
    assert "was written by the processes 0, 4: expected exactly one" in str(caught.value)
    assert caught.value.leaf is not None


def test_processes_with_the_same_tree_agree() -> None:
    assert disagreement(Written(typical()).reports) is None


@given(jobs())
def test_no_difference_is_seen_where_there_is_none(job: Job) -> None:
    if job.count > 1:
        assert disagreement(Written(job).reports) is None
        plans = dataclasses.replace(job, mode="local").plans()
        assert len({tree_fingerprint(plan, NODES).signature for plan in plans}) == 1


def changed(job: Job, process: int, number: int, **changes: Any) -> Job:
    trees = [list(tree) for tree in job.trees]
    trees[process][number] = replace(trees[process][number], **changes)
    return dataclasses.replace(job, trees=tuple(map(tuple, trees)))


@pytest.mark.parametrize(
    ("number", "changes", "here", "there"),
    [
        (0, {"shape": (1000, 1026)}, "float32[1000, 1024]", "float32[1000, 1026]"),
        (0, {"dtype": "int32"}, "float32[1000, 1024]", "int32[1000, 1024]"),
        (1, {"weak_type": True}, "P() over data=4", "weakly typed"),
        (1, {"committed": False}, "P() over data=4", "uncommitted"),
        (2, {"kind": "float", "dtype": "float64"}, "int", "float"),
        (3, {"shape": (11,)}, "numpy, uint8[10]", "numpy, uint8[11]"),
    ],
)
def test_a_leaf_that_differs_is_named(
    number: int, changes: dict[str, Any], here: str, there: str
) -> None:
    job = changed(typical(), 3, number, **changes)
    plans = job.plans()
    found = [tree_fingerprint(plan, NODES) for plan in plans]
    message = disagreement([report_of(each) for each in found])
    assert message is not None
    assert f"different trees: leaf 'leaf{number}' is " in message
    mine, _, other = message.partition(" on process 0, and ")
    assert here in mine
    assert there in other.partition(" on process 3")[0]
    assert " on process 3. All processes" in message


def report_of(tree: Any, values: Any = None) -> ProcessReport:
    nothing = ItemReport.of([], [])
    return ProcessReport(nothing, tree, values or line_fingerprint([], 4))


def test_a_sharding_that_differs_is_found() -> None:
    job = typical()
    devices = devices_of(4, 2)[::-1].reshape(4, 2)
    other = NamedSharding(Mesh(devices, ("data", "model")), PartitionSpec(None, "model"))
    plans = changed(job, 1, 0, sharding=other).plans()
    message = disagreement([report_of(tree_fingerprint(plan, NODES)) for plan in plans])
    assert message is not None
    assert "'leaf0'" in message
    assert "process 1" in message


def test_devices_of_its_own_make_no_difference() -> None:
    devices = devices_of(2, 2)
    own = [NamedSharding(Mesh(devices[2 * n : 2 * n + 2], ("d",)), PartitionSpec()) for n in (0, 1)]
    job = Job(tuple((LeafSpec("jax", "float32", (3,), each),) for each in own), MIB)
    assert disagreement(Written(job).reports) is None


def test_other_nodes_and_other_names_are_found() -> None:
    plan = typical().plan(0)
    trees = [
        tree_fingerprint(plan, NODES),
        tree_fingerprint(plan, [Node(kind="list", children=[0])]),
    ]
    message = disagreement([report_of(tree) for tree in trees])
    assert message is not None
    assert "its structure is 1 inner nodes" in message
    leaves = (replace(plan.leaves[0], name="other"), *plan.leaves[1:])
    trees[1] = tree_fingerprint(replace(plan, leaves=leaves), NODES)
    message = disagreement([report_of(tree) for tree in trees])
    assert message is not None
    assert "leaf 'leaf0' is jax, float32[1000, 1024]" in message
    assert "on process 0, and missing on process 1" in message
    leaves = plan.leaves[1::-1] + plan.leaves[2:]
    trees[1] = tree_fingerprint(replace(plan, leaves=leaves), NODES)
    message = disagreement([report_of(tree) for tree in trees])
    assert message is not None
    assert "leaf number 0 is 'leaf0' on process 0, and 'leaf1' on process 1" in message


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_leaf_that_only_one_has_is_named(lost: int) -> None:
    plan = typical().plan(0)
    leaves = tuple(leaf for number, leaf in enumerate(plan.leaves) if number != lost)
    fewer = tree_fingerprint(replace(plan, leaves=leaves), [Node(kind="dict", keys=["b"])])
    reports = [report_of(each) for each in (tree_fingerprint(plan, NODES), fewer)]
    message = disagreement(reports)
    assert message is not None
    assert f"different trees: leaf 'leaf{lost}' is " in message
    assert "on process 0, and missing on process 1. All" in message
    message = disagreement(reports[::-1])
    assert message is not None
    assert f"leaf 'leaf{lost}' is missing on process 0, and " in message


@pytest.mark.parametrize(("number", "value"), [(2, 8), (3, np.zeros(10, "V1"))])
def test_a_value_that_differs_is_named(number: int, value: Any) -> None:
    written = Written(typical())
    written.values[number] = value
    message = disagreement([*written.reports[:3], written.report(3)])
    assert message is not None
    assert message.startswith(f"leaf 'leaf{number}' has one value for all processes, but it is ")
    assert "on process 3" in message
    if number == 2:
        assert "int 7 on process 0, and int 8 on process 3" in message


def test_long_values_are_told_apart_by_what_is_cut_off() -> None:
    job = Job(((LeafSpec("str"),),) * 2, MIB)
    written = Written(job)
    reports = []
    for process in range(2):
        written.values[0] = "x" * 1000 + str(process)
        reports.append(written.report(process))
    message = disagreement(reports)
    assert message is not None
    assert len(message) < 600


@given(
    st.lists(st.tuples(st.text(max_size=5), st.text(max_size=30)), min_size=1, max_size=300),
    st.data(),
)
def test_a_difference_is_found_however_little_is_told(
    lines: list[tuple[str, str]], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(lines) - 1))
    other = list(lines)
    other[place] = (lines[place][0], lines[place][1] + "!")
    processes = data.draw(st.sampled_from([2, 100_000, 1 << 25]))
    mine, same, theirs = (line_fingerprint(each, processes) for each in (lines, list(lines), other))
    assert mine == same
    assert len(mine.packed) <= 2 * (64 << 20) // processes + 200
    assert disagreement([report_of(mine), report_of(same)]) is None
    message = disagreement([report_of(mine), report_of(theirs)])
    assert message is not None
    if processes == 2:
        assert f"{lines[place][1]}!" in message


@given(st.binary(max_size=100))
def test_a_malformed_fingerprint_is_an_error(junk: bytes) -> None:
    mine = line_fingerprint([("a", "b")], 2)
    theirs = replace(mine, signature=bytes(16), packed=junk)
    with pytest.raises(CheckpointError, match="fingerprint of a tree"):
        disagreement([report_of(mine), report_of(theirs)])


def test_the_report_of_a_process_is_small() -> None:
    written = Written(typical())
    for report, plan in zip(written.reports, written.plans, strict=True):
        assert len(report.pack()) < 700 + 40 * len(chunks_in(plan))
