"""What each process of a job with disks of its own says of its part of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt._format.manifest import Manifest, decode
from ckpt._format.manifest_head import PART_FILE
from ckpt._format.step_files import StepPart, decode_part
from ckpt._job.process_reports import decode_report
from ckpt.errors import InvalidArgumentError
from tests.support.simulated_job import FAR, closed, managers, saved, steps, together

STATE: dict[str, Any] = {
    "w": np.arange(200_000, dtype=np.float32),
    "b": np.ones(3, np.int8),
    "lr": 0.5,
    "none": None,
}


def parts_of(root: Path, count: int, step: int) -> list[tuple[Manifest, StepPart]]:
    found = []
    for index in range(count):
        path = root / str(index) / str(step)
        manifest = decode((path / "ckpt.json").read_bytes(), where=str(path))
        part = decode_part((path / PART_FILE).read_bytes(), str(path))
        found.append((manifest, part))
    return found


def test_the_parts_of_a_step_have_each_chunk_once(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, 3, own_disks=True, seconds=FAR)
    assert steps(saved(mgrs, 1, STATE)) == [1] * 3
    chunks: list[tuple[int, int]] = []
    for index, (manifest, part) in enumerate(parts_of(tmp_path, 3, 1)):
        assert (part.process, part.count) == (index, 3)
        assert PART_FILE in manifest.files
        # Sizes and digests of its files are those of the manifest.
        report = decode_report(part.report)
        assert report.files == {path: manifest.files[path] for path in part.files}
        rows = report.trees["default"].written.rows
        chunks += zip(rows["leaf"].tolist(), rows["number"].tolist(), strict=True)
        # Arrays of numpy, which all processes have alike, are taken from the first.
        assert bool(part.files) == (index == 0)
    # Three arrays: the number is one for other readers.
    assert sorted(chunks) == [(0, 0), (1, 0), (2, 0)]
    closed(mgrs)


def test_files_of_handlers_are_those_of_the_first_process(tmp_path: Path) -> None:
    handlers = {"config": ckpt.handlers.JsonHandler()}
    mgrs = managers(tmp_path, 2, own_disks=True, seconds=FAR, handlers=handlers)
    items = {"model": STATE, "config": {"a": 1}}
    commits = together(*(lambda m=m: m.save(1, items=items) for m in mgrs))
    for commit in commits:
        commit.result(FAR)
    (one, first), (_, second) = parts_of(tmp_path, 2, 1)
    assert second.files == ()
    assert set(first.files) == {path for path in one.files if path != PART_FILE}
    closed(mgrs)


def test_what_was_taken_over_from_the_step_before_is_in_its_part(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, 2, own_disks=True, seconds=FAR)
    state = {"same": np.zeros(2 << 20, np.uint8), "other": np.zeros(2 << 20, np.uint8)}
    assert steps(saved(mgrs, 1, state)) == [1] * 2
    state["other"] = state["other"] + 1
    assert steps(saved(mgrs, 2, state)) == [2] * 2
    state["other"] = state["other"] + 1
    assert steps(saved(mgrs, 3, state)) == [3] * 2
    for step in (2, 3):
        (manifest, part), _ = parts_of(tmp_path, 2, step)
        data = {path for path in manifest.files if "/d/" in path}
        assert data <= set(part.files)
        assert any(manifest.files[path].shared for path in data)
    closed(mgrs)


def test_an_item_may_not_have_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=PART_FILE):
        ckpt.sync.save(tmp_path / "a", items={PART_FILE: {"a": 1}})
