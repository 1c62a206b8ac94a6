"""The parts of a job, joined: the same step as if its processes had saved to one place."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt._conversion.assembled_step import (
    AssembledStep,
    AssemblyTarget,
    assemble_step,
    planned_tree,
)
from ckpt._engine.plan_cache import ItemPlan
from ckpt._engine.save.merged_items import WrittenTree, entry_of
from ckpt._format.manifest import ItemEntry, Manifest, Node, decode, encode
from ckpt._format.manifest_head import OWN_DISKS, DroppedItem, FileEntry, digest
from ckpt._format.per_process import apart, combine
from ckpt._interop.orbax.sidecars import OrbaxSidecars, database_keys
from ckpt._job.process_reports import ProcessReport, SaveReport, encode_report, value_fingerprint
from ckpt._job.publication import merge_processes
from ckpt._plan.item_reports import ChunkNotes, ChunkTable, ItemReport, PlannedTree
from ckpt._vitals.signs import COPY, SIGNS, Array, no_signs
from ckpt._vitals.stored_signs import signs_in
from ckpt.errors import CheckpointError, CoordinationError, CorruptCheckpointError
from tests.unit.plan.simulated_jobs import Job, jobs
from tests.unit.plan.test_process_reports import Written, typical

CREATED, COMMITTED = 7, 11
PLACE = AssemblyTarget("100", "a" * 32)
JSON = ItemEntry(handler="json", nbytes=2, data={"a": 1})


class Parts:
    """What the processes of a job have on disks of their own: one tree, and other items."""

    def __init__(self, job: Job, seed: int = 0) -> None:
        self.written = Written(dataclasses.replace(job, mode="local"), seed)
        plan = self.written.plans[0]
        names = [leaf.name for leaf in plan.leaves]
        nodes = [Node(kind="dict", keys=list(names), children=list(range(len(names))))]
        self.tree = PlannedTree(nodes, plan.leaves, self.written.values)
        rng = np.random.default_rng(seed)
        held = [_with_signs(n, report, rng) for n, report in enumerate(self.written.reports)]
        owned = [
            replace(report, written=report.written.without_chunks(plan.copies))
            for report, plan in zip(held, self.written.plans, strict=True)
        ]
        own = [ItemEntry(handler="own", nbytes=n, data={"number": n}) for n in range(job.count)]
        self.reports = [
            SaveReport(
                {
                    "state": ItemEntry(handler="pytree"),
                    "notes": ItemEntry(handler="json"),
                    "reader": own[process],
                },
                {"state": tree},
                self._files(tree) | {_own_file(process, job.count): _file(b"%d" % process)},
            )
            for process, tree in enumerate(owned)
        ]
        self.reports[0].files["notes/metadata"] = _file(b"{}")
        self.own = own
        self.items = {
            "state": entry_of(
                ItemEntry(handler="pytree", nbytes=3),
                self.tree,
                [held[0].written],
                own_disks=True,
            ),
            "notes": JSON,
            "reader": apart(own[0], 0, job.count),
        }

    def _files(self, tree: ProcessReport) -> dict[str, FileEntry]:
        return {f"state/{name}": _file(self.written.files[name]) for name in tree.written.files}

    def first(self, **changes: Any) -> Manifest:
        """Return the manifest of process 0, as it is read."""
        manifest = Manifest(
            format="ckpt",
            version=1,
            step=100,
            attempt="b" * 32,
            unnamed=False,
            items=self.items,
            created_ns=CREATED,
            committed_ns=COMMITTED,
            writer={"ckpt": "1"},
            process_count=self.written.job.count,
            files=self.reports[0].files,
            requires=[OWN_DISKS],
            metrics={"loss": 0.5},
            metadata={"run": "one"},
            save="c" * 32,
        )
        return decode(encode(replace(manifest, **changes)), where="part 0")

    def joined(self, place: AssemblyTarget = PLACE, **changes: Any) -> AssembledStep:
        return assemble_step(
            self.first(**changes), [encode_report(each) for each in self.reports], place
        )

    def shared(self) -> tuple[dict[str, ItemEntry], dict[str, FileEntry]]:
        """Return the entries and files that a save to one place would have."""
        entries = {
            "state": ItemEntry(handler="pytree", nbytes=3),
            "notes": JSON,
            "reader": combine(self.own),
        }
        whole = WrittenTree(self.tree, ItemPlan(self.written.plans[0]))
        found, _ = merge_processes(entries, {"state": whole}, self.reports, CREATED)
        return found, {path: e for report in self.reports for path, e in report.files.items()}


def _file(data: bytes) -> FileEntry:
    return FileEntry(size=len(data), digest=digest(data))


def _own_file(process: int, count: int) -> str:
    return f"reader/process_{process}-of-{count}/state.json"


def _with_signs(process: int, report: ProcessReport, rng: np.random.Generator) -> ProcessReport:
    """Add made-up vital signs of all chunks, and a replica of some, which may differ."""
    rows = report.written.rows
    signs = np.zeros(len(rows), SIGNS)
    signs["fingerprint"] = rng.integers(0, 1 << 32, (len(rows), 2))
    signs["norm"] = signs["absmax"] = rng.random(len(rows))
    copies = np.zeros(1, COPY)
    copies["process"], copies["fingerprint"] = process, rng.integers(0, 2)
    return replace(report, written=noted(report.written, signs, copies))


def noted(written: ItemReport, signs: Array, copies: Array) -> ItemReport:
    notes = ChunkNotes(signs, no_signs(1)[0], copies)
    return replace(written, notes={"vital_signs": notes})


def views(tree: PlannedTree, manifest: Manifest) -> dict[str, bytes]:
    sidecars = OrbaxSidecars()
    made = sidecars.of_tree("state", tree).of_structure()
    step = sidecars.of_step("100", manifest)
    return step | {path: data for path, (data, _) in made.items()}


@given(jobs().filter(lambda job: job.count > 1), st.integers(0, 5))
def test_it_is_what_a_save_to_one_place_would_be(job: Job, seed: int) -> None:
    parts = Parts(job, seed)
    joined, (items, files) = parts.joined(), parts.shared()
    manifest = joined.manifest
    # Byte for byte, with all columns of its leaves.
    assert joined.encoded == encode(replace(manifest, items=items))
    assert encode(decode(joined.encoded, where="joined")) == joined.encoded
    view = views(parts.tree, replace(manifest, items=items, files=files))
    assert {path: joined.files[path] for path in view} == view
    database = set(joined.files) - set(view)
    stores_arrays = any(leaf.metadata for leaf in parts.tree.leaves)
    assert len(database) == 2 * stores_arrays
    assert manifest.files == files | {path: _file(data) for path, data in joined.files.items()}


@given(jobs().filter(lambda job: job.count > 1))
def test_its_database_has_the_keys_of_one_place(job: Job) -> None:
    parts = Parts(job)
    written = [report.trees["state"].written for report in parts.reports]
    expected, found = (
        list(database_keys(tree.leaves, ChunkTable.merged(tree.leaves, written)))
        for tree in (parts.tree, planned_tree(parts.first().items["state"]))
    )
    assert found == expected


def test_what_it_keeps_of_the_part_of_process_0() -> None:
    parts = Parts(typical())
    first, manifest = parts.first(), parts.joined().manifest
    same = ("step", "unnamed", "metrics", "metadata", "parent", "created_ns", "committed_ns")
    for name in (*same, "writer", "process_count", "save", "statistics", "dropped"):
        assert getattr(manifest, name) == getattr(first, name)
    assert (manifest.attempt, manifest.folder, manifest.requires) == ("a" * 32, "", [])


def test_in_a_store_it_has_a_folder_and_marks() -> None:
    joined = Parts(typical()).joined(AssemblyTarget("100", "a" * 32, "a" * 32))
    assert (joined.manifest.folder, joined.manifest.requires) == ("a" * 32, ["folder"])
    marks = {path for path in joined.files if path.endswith("commit_success.txt")}
    names = ("state/", "notes/", "reader/", "metrics/", "")
    assert marks == {f"{name}commit_success.txt" for name in names}


def test_items_that_the_step_has_lost_are_left_out() -> None:
    parts = Parts(typical())
    lost = [DroppedItem("state", 12), DroppedItem("reader", 12)]
    joined = parts.joined(items={"notes": JSON}, dropped=lost)
    assert list(joined.manifest.items) == ["notes"]
    assert {path.partition("/")[0] for path in joined.manifest.files if "/" in path} == {
        "notes",
        "metrics",
    }
    assert joined.manifest.dropped == lost


def test_unequal_replicas_of_several_processes_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = Parts(typical())
    for process, report in enumerate(parts.reports):
        tree = report.trees["state"]
        copies = np.zeros(1, COPY)
        copies["process"], copies["leaf"], copies["fingerprint"] = process, 1, process == 2
        signs = tree.written.notes["vital_signs"].records
        report.trees["state"] = replace(tree, written=noted(tree.written, signs, copies))
    with caplog.at_level(logging.WARNING, "ckpt"):
        manifest = parts.joined().manifest
    assert signs_in(manifest.items["state"].leaves).unequal == {1: (2,)}
    assert "'leaf1' of 'state' (process 2)" in caplog.text


# -- mistakes -------------------------------------------------------------------------------------


def without_row(report: SaveReport, row: int) -> None:
    tree = report.trees["state"]
    written = tree.written
    notes = written.notes["vital_signs"]
    rows, digests, signs = (
        np.delete(each, row, 0) for each in (written.rows, written.digests, notes.records)
    )
    changed = noted(replace(written, rows=rows, digests=digests), signs, notes.others)
    report.trees["state"] = replace(tree, written=changed)


@given(jobs().filter(lambda job: job.count > 1), st.data())
def test_a_chunk_that_no_part_has_is_named(job: Job, data: st.DataObject) -> None:
    parts = Parts(job)
    counts = [len(report.trees["state"].written.rows) for report in parts.reports]
    if not any(counts):
        return
    process = data.draw(st.sampled_from([n for n, count in enumerate(counts) if count]))
    row = data.draw(st.integers(0, counts[process] - 1))
    lost = parts.reports[process].trees["state"].written.rows[row]
    without_row(parts.reports[process], row)
    with pytest.raises(CheckpointError, match="was written by no process") as caught:
        parts.joined()
    error = caught.value
    leaf = parts.tree.leaves[int(lost["leaf"])]
    # Who holds a part of a sharded array is not known any more.
    assert ("is held by" in str(error)) == (leaf.spec.sharding is None)
    assert (error.step, error.item) == (100, "state")
    assert error.leaf == leaf.name
    assert f"chunk {lost['number']} of" in str(error)


def test_a_chunk_that_two_parts_have_is_named() -> None:
    parts = Parts(typical())
    tree, other = (parts.reports[n].trees["state"].written for n in (0, 1))
    notes = other.notes["vital_signs"]
    changed = replace(
        other,
        rows=np.concatenate([other.rows, other.rows[:1]]),
        digests=np.concatenate([other.digests, other.digests[:1]]),
    )
    signs = np.concatenate([notes.records, notes.records[:1]])
    changed = noted(changed, signs, notes.others)
    changed.rows[-1]["leaf"], changed.rows[-1]["number"] = (
        tree.rows[0]["leaf"],
        (tree.rows[0]["number"]),
    )
    report = parts.reports[1]
    report.trees["state"] = replace(report.trees["state"], written=changed)
    with pytest.raises(CheckpointError, match="was written by the processes 0, 1") as caught:
        parts.joined()
    assert caught.value.leaf == parts.tree.leaves[int(tree.rows[0]["leaf"])].name


def test_a_process_with_another_tree_is_named() -> None:
    parts = Parts(typical())
    other = Written(replace_last(typical(), "uint16")).reports[2]
    report = parts.reports[2]
    report.trees["state"] = replace(report.trees["state"], tree=other.tree)
    with pytest.raises(CoordinationError, match="on process 2"):
        parts.joined()


def test_a_process_with_a_value_of_its_own_is_named() -> None:
    """Of a value that all should have alike, only that of process 0 would be left."""
    parts = Parts(typical())
    plan = typical().plan(0)
    for process, report in enumerate(parts.reports):
        values = [None, None, 8 if process == 2 else 7, None]
        found = value_fingerprint(plan, values, {3: "0" * 32})
        report.trees["state"] = replace(report.trees["state"], values=found)
    with pytest.raises(CoordinationError, match="7 on process 0, and int 8 on process 2") as caught:
        parts.joined()
    assert "leaf 'leaf2'" in str(caught.value)


def replace_last(job: Job, dtype: str) -> Job:
    trees = [(*tree[:-1], replace(tree[-1], dtype=dtype)) for tree in job.trees]
    return Job(tuple(trees), job.budget)


def test_a_process_with_other_items_is_named() -> None:
    parts = Parts(typical())
    del parts.reports[3].entries["notes"]
    with pytest.raises(CoordinationError, match="process 3 'state'"):
        parts.joined()


def test_a_manifest_of_another_save_is_refused() -> None:
    parts = Parts(typical())
    with pytest.raises(CheckpointError, match="they are not of one save"):
        parts.joined(items={"notes": JSON, "state": parts.items["state"]})
    with pytest.raises(CheckpointError, match="they are not of one save") as caught:
        parts.joined(items=parts.items | {"state": ItemEntry(handler="pytree")})
    assert caught.value.item == "state"


@pytest.mark.parametrize("count", [1, 3])
def test_a_report_of_every_process_is_needed(count: int) -> None:
    parts = Parts(typical())
    del parts.reports[count:]
    with pytest.raises(CheckpointError, match=f"4 processes, and {count} have reported"):
        parts.joined()


@pytest.mark.parametrize("junk", [b"", b"junk", bytes(8) + b"{}"])
def test_a_report_that_cannot_be_read_is_named(junk: bytes) -> None:
    parts = Parts(typical())
    reports = [encode_report(each) for each in parts.reports]
    for bad in (junk, reports[2][:-1]):
        changed = [*reports[:2], bad, reports[3]]
        with pytest.raises(CorruptCheckpointError, match="process 2: ") as caught:
            assemble_step(parts.first(), changed, PLACE)
        assert caught.value.step == 100


def test_a_file_that_a_part_does_not_list_is_named() -> None:
    parts = Parts(typical())
    path = next(path for path in parts.reports[1].files if "/d/" in path)
    del parts.reports[1].files[path]
    with pytest.raises(CheckpointError, match="process 1 says that it has chunks in 'd/"):
        parts.joined()


def test_a_file_that_two_parts_have_is_named() -> None:
    parts = Parts(typical())
    parts.reports[3].files["notes/metadata"] = _file(b"[]")
    with pytest.raises(CheckpointError, match=r"processes 0 and 3 both have.*'notes/metadata'"):
        parts.joined()
