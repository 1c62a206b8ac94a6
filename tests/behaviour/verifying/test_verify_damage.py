"""`verify` finds all damage of data files and names it by file, item and leaf path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._format.chunk_locations import parts_inside
from ckpt._format.manifest_head import digest
from tests.behaviour.verifying.verified_step import (
    ITEMS,
    STEP,
    damaged,
    files_of,
    flip,
    hit,
    manifest_of,
    places,
    refused,
)
from tests.hostile.test_hostile import changed


def become(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.rename(file.with_name(f"{file.name}.kept"))
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flip": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size * 2 // 3),
    "empty": lambda file: os.truncate(file, 0),
    "append": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zero": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "delete": lambda file: file.unlink(),
    "link": become(lambda file: file.symlink_to(f"{file.name}.kept")),
    "directory": become(lambda file: file.mkdir()),
    "pipe": become(lambda file: os.mkfifo(file)),
}
# What can be seen without reading.
OUTSIDE = set(DAMAGES) - {"flip", "zero"}


def changes(damage: str, file: Path) -> bool:
    """Tell whether a damage changes a file at all."""
    size = file.stat().st_size
    return size > 0 or damage not in {"flip", "cut", "empty", "zero"}


# --- Damage ---------------------------------------------------------------------------------------


def in_file(step: Path, path: str) -> set[tuple[str | None, str]]:
    """All leaves that have a chunk in a data file."""
    name, _, own = path.partition("/")
    item = manifest_of(step).items[name]
    number = item.data_files.index(own)
    return {
        (name, leaf.name.removesuffix(".value"))
        for leaf in item.leaves
        if leaf.offsets and number in (leaf.files or [0])
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_of_every_file_is_found_and_named(root: Path, damage: str) -> None:
    step = root / str(STEP)
    items = manifest_of(step).items
    data_files = {f"{name}/{path}" for name in items for path in items[name].data_files}
    assert len(data_files) > 6
    everything_lost = damage in {"empty", "delete", "link", "directory", "pipe"}
    aside = root.parent / "aside"
    for path in files_of(step):
        file = step / path
        if not changes(damage, file):
            continue
        shutil.copy(file, aside)
        DAMAGES[damage](file)
        report = ckpt.sync.verify(step)
        assert damaged(report) == {path}, report
        item = path.split("/")[0]
        assert {each.item for each in report.problems} == {item if item in ITEMS else None}
        # Exactly the arrays that a restore refuses; and if there is none, it says so.
        expected = set()
        if path in data_files:
            expected = in_file(step, path) if everything_lost else refused(root)
        assert hit(report) == expected
        assert len(report.problems) == max(len(expected), 1)
        told = set(str(report).splitlines())
        assert {f"  {problem}" for problem in report.problems} < told

        shallow = ckpt.sync.verify(step, deep=False)
        assert damaged(shallow) == ({path} if damage in OUTSIDE else set())
        assert hit(shallow) <= expected
        if everything_lost:
            assert hit(shallow) == expected
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.kept").unlink(missing_ok=True)
        shutil.move(aside, file)
    assert ckpt.sync.verify(step).ok


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("large", {"large"}),
        ("padded", {"padded"}),
        ("squeezed", {"squeezed"}),
        ("tied.0", {"tied.0", "tied.1.again"}),
        ("small.3", {"small.3"}),
        ("cell.value", {"cell"}),
        ("key", {"key"}),
    ],
)
def test_a_flipped_bit_is_named_by_leaf_and_chunk(step: Path, stored: str, named: set[str]) -> None:
    chunks = list(places(step, stored))
    number = len(chunks) - 1
    file, offset = chunks[number]
    flip(file, offset + 5)
    report = ckpt.sync.verify(step)
    assert [(each.item, each.leaf) for each in report.problems] == [
        ("model", name) for name in sorted(named)
    ]
    metadata = ckpt.sync.metadata(step)
    for problem in report.problems:
        assert f"chunk {number} of {len(chunks)} " in problem.message
        assert problem.leaf in metadata.leaves["model"]
        assert problem.file == file.relative_to(step).as_posix()


def test_damage_between_chunks_says_that_every_array_still_reads_right(step: Path) -> None:
    # The last columns of the last chunk lie beyond the array.
    file, offset = list(places(step, "padded"))[-1]
    item = manifest_of(step).items["model"]
    [entry] = [entry for entry in item.leaves if entry.name == "padded"]
    inside = entry.shape[1] % entry.chunks[1]
    assert inside
    flip(file, offset + 4 * inside)
    report = ckpt.sync.verify(step)
    [problem] = report.problems
    assert (problem.item, problem.leaf) == ("model", None)
    assert "every array still reads right" in problem.message
    assert refused(step.parent) == set()
    # The last element inside is seen.
    flip(file, offset + 4 * inside - 4)
    assert hit(ckpt.sync.verify(step)) == {("model", "padded")}


def test_several_damages_are_all_reported(step: Path) -> None:
    large, padded = (list(places(step, name)) for name in ("large", "padded"))
    flip(large[0][0], large[0][1])
    flip(large[-1][0], large[-1][1] + 1)
    padded[2][0].unlink()
    flip(step / "averages" / "_METADATA")
    (step / "config" / "metadata").write_bytes(b"")
    (step / "notes" / "text.txt").unlink()
    (step / "loader" / "parts" / "one.bin").write_bytes(b"other")
    (step / "commit_success.txt").unlink()
    report = ckpt.sync.verify(step)
    assert damaged(report) >= {
        *(file.relative_to(step).as_posix() for file, _ in (large[0], large[-1], padded[2])),
        "averages/_METADATA",
        "config/metadata",
        "notes/text.txt",
        "loader/parts/one.bin",
        "commit_success.txt",
    }
    assert len(damaged(report)) == len({large[0][0], large[-1][0], padded[2][0]}) + 5
    assert hit(report) == refused(step.parent)
    lines = str(report).splitlines()
    assert len(lines) == len(report.problems) + 1
    assert f"{len(report.problems)} problems in {len(damaged(report))} files" in lines[0]


def test_chunks_that_were_damaged_before_they_were_written_are_found(step: Path) -> None:
    """The file is as the manifest says, and its arrays are not."""
    found = set()

    def record(document: dict[str, Any], name: str, new: str) -> None:
        document["files"][name].update(digest=new)

    for leaf in ("large", "padded", "small.1"):
        file, offset = next(places(step, leaf))
        flip(file, offset)
        name = file.relative_to(step).as_posix()
        new = digest(file.read_bytes())
        changed(step, partial(record, name=name, new=new))
        found.add(("model", leaf))
        report = ckpt.sync.verify(step)
        assert hit(report) == found == refused(step.parent)
        assert len(report.problems) == len(found)


def test_a_file_of_another_step_in_its_place_is_found(whole: Path, step: Path) -> None:
    first, second = (f"model/{path}" for path in manifest_of(step).items["model"].data_files[:2])
    shutil.copy(whole / str(STEP) / second, step / first)
    report = ckpt.sync.verify(step)
    assert damaged(report) == {first}
    assert hit(report) == refused(step.parent)


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=0, max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(8, 100),
)
def test_a_chunk_is_digested_in_parts_that_make_up_what_is_inside(
    lengths: list[tuple[int, int]], itemsize: int, limit: int
) -> None:
    shape = tuple(max(pair) for pair in lengths)
    inside = tuple(min(pair) for pair in lengths)
    chunk = np.arange(np.prod(shape, dtype=int)).astype(f"u{itemsize}").reshape(shape)
    data, found = chunk.tobytes(), b""
    for part in parts_inside(shape, inside, itemsize, limit):
        length = int(np.prod(part.shape, dtype=int)) * itemsize
        assert length <= limit
        piece = data[part.offset : part.offset + length]
        whole = np.frombuffer(piece, chunk.dtype).reshape(part.shape)
        found += whole[tuple(slice(n) for n in part.inside)].tobytes()
    assert found == chunk[tuple(slice(n) for n in inside)].tobytes()


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"delete"}))
def test_a_damaged_manifest_is_one_problem(root: Path, damage: str) -> None:
    DAMAGES[damage](root / str(STEP) / "ckpt.json")
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        reports = [mgr.verify(STEP), ckpt.sync.verify(root / str(STEP), deep=False)]
    for report in reports:
        [problem] = report.problems
        assert (problem.file, problem.item, problem.leaf) == ("ckpt.json", None, None)
        assert not report
