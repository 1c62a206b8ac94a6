"""`verify` with `sample=` and `timeout=`: a part of a step, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt import errors
from ckpt._engine.verify.report import FileSelection, ReadLimits
from tests.behaviour.verifying.verified_step import STEP, flip, manifest_of, places


def total_of(step: Path) -> tuple[int, int]:
    files = manifest_of(step).files.values()
    return len(files), sum(file.size for file in files)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5])
def test_a_sample_reads_that_share_of_the_files_and_of_the_bytes(whole: Path, share: float) -> None:
    count, nbytes = total_of(whole / str(STEP))
    reports = [ckpt.sync.verify(whole / str(STEP), sample=share, seed=seed) for seed in range(6)]
    # The largest file may be needed, and be the last.
    assert any(report.is_partial for report in reports)
    for report in reports:
        read = count - report.unread_files
        assert report.ok
        assert report.files == count + 1
        assert read >= max(1, share * count)
        assert report.nbytes >= share * nbytes
        assert report.nbytes + report.unread_nbytes == nbytes
        assert report.is_partial is (read < count)
        if report.is_partial:
            assert "nothing is wrong in the part that was read" in str(report)
            assert f"{read + 1} of {count + 1} files" in str(report)


def test_a_sample_of_everything_is_everything(whole: Path) -> None:
    report = ckpt.sync.verify(whole / str(STEP), sample=1)
    assert not report.is_partial
    assert report.nbytes == total_of(whole / str(STEP))[1]
    assert "is whole" in str(report)


def test_the_seed_makes_the_choice() -> None:
    sizes = {f"d/{number}": 100 for number in range(200)}

    def chosen(seed: int | None, step: str = "a") -> set[str]:
        return set(FileSelection(sizes, ReadLimits(0.1, seed), step).order)

    assert chosen(1) == chosen(1)
    assert len(chosen(1)) == 20
    assert len({frozenset(each) for each in (chosen(1), chosen(2), chosen(1, "b"))}) == 3
    assert chosen(None) != chosen(None)


def test_every_file_is_found_damaged_by_some_seed(root: Path) -> None:
    step = root / str(STEP)
    flip(*next(places(step, "large")))
    found = [ckpt.sync.verify(step, sample=0.3, seed=seed) for seed in range(20)]
    assert {report.ok for report in found} == {True, False}
    for report in found:
        assert {problem.leaf for problem in report.problems} <= {"large"}


def test_names_and_sizes_of_the_rest_are_compared(root: Path) -> None:
    step = root / str(STEP)
    for path in manifest_of(step).files:
        if path.startswith("loader/"):
            (step / path).unlink()
    report = ckpt.sync.verify(step, sample=0.01, seed=3)
    assert {problem.item for problem in report.problems} == {"loader"}


def test_after_the_deadline_nothing_is_begun(root: Path) -> None:
    step = root / str(STEP)
    count, nbytes = total_of(step)
    report = ckpt.sync.verify(step, timeout=0)
    assert (report.nbytes, report.unread_files, report.unread_nbytes) == (0, count, nbytes)
    assert report.ok
    assert not ckpt.sync.verify(step, timeout=3600).is_partial
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.verify(STEP, timeout=0).unread_files == count
        assert mgr.verify(sample=0.5, seed=0).is_partial


def test_a_part_of_a_virtual_step_gives_it_no_digests(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for number in range(4):
        save_file({f"w{number}": np.ones(1000)}, tmp_path / "models" / f"{number}.safetensors")
    places = {f"w{number}": f"{number}.safetensors" for number in range(4)}
    index = tmp_path / "models" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    ckpt.sync.adopt(tmp_path / "models", tmp_path / "base")
    for part in (
        ckpt.sync.verify(tmp_path / "base", sample=0.2, seed=0),
        ckpt.sync.verify(tmp_path / "base", timeout=0),
    ):
        assert part.is_partial
        assert (part.first_digests, part.without_digests) == (0, 4)
    report = ckpt.sync.verify(tmp_path / "base", sample=1.0)
    assert (report.first_digests, report.without_digests) == (4, 0)
    assert ckpt.sync.verify(tmp_path / "base", sample=0.2, seed=0).nbytes >= 8000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample": 0}, "above 0 and up to 1"),
        ({"sample": 1.5}, "above 0 and up to 1"),
        ({"sample": float("nan")}, "above 0 and up to 1"),
        ({"sample": True}, "above 0 and up to 1"),
        ({"sample": 0.1, "seed": "x"}, "a whole number"),
        ({"timeout": -1}, "a finite number of seconds"),
        ({"deep": False, "sample": 0.1}, "with deep=False nothing is"),
        ({"deep": False, "timeout": 1}, "with deep=False nothing is"),
    ],
)
def test_wrong_parts_are_refused(whole: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ckpt.sync.verify(whole / str(STEP), **options)
    with (
        ckpt.sync.CheckpointManager(whole, mode="r") as mgr,
        pytest.raises(errors.InvalidArgumentError, match=words),
    ):
        mgr.verify(STEP, **options)
