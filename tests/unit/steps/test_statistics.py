"""Where the time of a save went: told by the commit, and by the step later."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._statistics import (
    SaveStatistics,
    decode_late,
    encode_late,
    of_manifest,
)

FIELDS = set(SaveStatistics.__dataclass_fields__)
LATE = {"merged", "published", "deleted"}


def of(info: ckpt.StepInfo | None) -> SaveStatistics:
    assert info is not None
    assert info.statistics is not None
    return info.statistics


def test_a_step_tells_where_the_time_of_its_save_went(tmp_path: Path) -> None:
    state = {"w": np.ones((2048, 2048)), "b": np.ones(7)}
    with ckpt.sync.CheckpointManager(tmp_path, preservation=ckpt.policies.LatestN(1)) as mgr:
        for step in range(3):
            told = of(mgr.save(step, state).result())
        mgr.wait_until_finished()
        later = of(mgr.metadata(2).info)
    known = asdict(told)
    assert known.pop("deleted") is None
    assert all(isinstance(value, float) and value >= 0 for value in known.values()), known
    assert asdict(later).items() >= known.items()
    assert later.deleted is not None
    assert later.deleted > 0
    # As they are defined.
    assert told.blocked is not None
    assert told.written is not None
    assert told.staged is not None
    assert told.blocked <= told.written
    assert told.staged <= told.written
    # Another process is told the same, and one that knows nothing of the root.
    assert of(ckpt.sync.metadata(tmp_path / "2").info) == later


def test_a_one_shot_save_tells_as_much(tmp_path: Path) -> None:
    told = asdict(of(ckpt.sync.save(tmp_path / "one", {"n": 1})))
    assert told.pop("deleted") is None
    assert all(isinstance(value, float) for name, value in told.items() if name != "waited"), told


def test_a_copy_of_a_step_tells_what_was_known_when_it_was_written(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        told = of(mgr.save(1, {"n": 1}).result())
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "1").rename(tmp_path / "b" / "1")
    found = of(ckpt.sync.metadata(tmp_path / "b" / "1").info)
    assert found.blocked == told.blocked
    assert found.published is None


def test_a_save_that_waited_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            commits = [await mgr.save(step, {"w": np.ones((1024, 1024))}) for step in range(4)]
            waits = [of(await commit).waited for commit in commits]
            assert waits[0] is not None
            assert max(each or 0.0 for each in waits[1:]) > 0

    asyncio.run(main())


def test_what_was_kept_of_a_step_that_was_replaced_is_not_told_of_the_new_one(
    tmp_path: Path,
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"n": 1}).result()
        mgr.wait_until_finished()
        (note,) = (tmp_path / "metadata").glob("1.*")
        kept = note.read_bytes()
        told = of(mgr.save(1, {"n": 2}, overwrite=True).result())
        mgr.wait_until_finished()
        assert of(mgr.metadata(1).info).published == told.published
        note.write_bytes(kept)
        assert of(mgr.metadata(1).info).published is None


def test_what_was_kept_goes_with_its_step(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, preservation=ckpt.policies.LatestN(1)) as mgr:
        for step in range(3):
            mgr.save(step, {"n": step}).result()
        mgr.wait_until_finished()
        assert {path.name for path in (tmp_path / "metadata").iterdir()} == {
            "_ROOT_METADATA",
            "2.statistics.json",
        }
        mgr.delete(2)
    # Of steps that somebody removed.
    for step, taken in enumerate([SaveStatistics(), SaveStatistics(1.0, *[2.0] * 6)]):
        note = tmp_path / "metadata" / f"{step}.statistics.json"
        note.write_bytes(encode_late("a", taken))
    with ckpt.sync.CheckpointManager(tmp_path):
        pass
    assert [path.name for path in (tmp_path / "metadata").iterdir()] == ["_ROOT_METADATA"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null",
        b"mine",
        b'["attempt"]',
        b'{"published": 1.0}',
        b'{"attempt": "a", "published": 1.0, "loss": 0.5}',
        b"[" * 3000,
        b'{"attempt": "' + b"a" * 5000 + b'"}',
    ],
)
def test_what_others_put_beside_them_stays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metadata").mkdir()
    kept = tmp_path / "metadata" / "eval.statistics.json"
    kept.write_bytes(content)
    (tmp_path / "metadata" / "a.statistics.json").symlink_to(kept)
    ours = tmp_path / "metadata" / "z.statistics.json"
    ours.write_bytes(encode_late("a", SaveStatistics()))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"n": 1}).result()
    with ckpt.sync.CheckpointManager(tmp_path):
        pass
    assert kept.read_bytes() == content
    assert (tmp_path / "metadata" / "a.statistics.json").is_symlink()
    # One that is in the way is no reason to leave the others.
    assert not ours.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"[" * 100_000,
        json.dumps({"attempt": "other", "published": 1.0}).encode(),
        json.dumps({"attempt": "a", "published": "soon", "deleted": [1]}).encode(),
        b'{"attempt": "a", "published": NaN, "merged": Infinity, "deleted": -1}',
    ],
)
def test_what_makes_no_sense_is_left_out(data: bytes) -> None:
    early = SaveStatistics(blocked=0.5)
    assert decode_late(data, "a", early) == early


def test_a_step_is_fine_with_rubbish_in_the_place_of_its_statistics(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"n": 1}).result()
        mgr.wait_until_finished()
        note = tmp_path / "metadata" / "1.statistics.json"
        for spoil in (
            lambda: note.write_bytes(b"x" * 100_000),
            lambda: (note.unlink(), note.mkdir()),
            lambda: (note.rmdir(), note.symlink_to("/etc/passwd")),
        ):
            spoil()
            assert of(mgr.metadata(1).info).published is None
            assert mgr.restore(1) == {"n": 1}
            assert mgr.verify(1)


times = st.none() | st.floats(0, 1e9)


@given(st.fixed_dictionaries(dict.fromkeys(sorted(FIELDS), times)))
def test_statistics_come_back_as_they_were(values: dict[str, Any]) -> None:
    taken = SaveStatistics(**values)
    early = {
        name: value for name, value in values.items() if name not in LATE and value is not None
    }
    found = of_manifest(early)
    if found is not None:
        assert decode_late(encode_late("a", taken), "a", found) == taken
