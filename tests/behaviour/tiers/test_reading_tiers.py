"""What is read from a root and from memory where the two differ."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt._tiers.agent.flush import flush
from ckpt.errors import StepNotFoundError
from ckpt.storage._local.storage import LocalStorage
from ckpt.tiers import SharedMemory
from tests.support.numbered_states import state_of
from tests.support.snapshots import shared_memory, steps_of


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(root: Path, memory: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    tier = SharedMemory(directory=str(memory), flush=options.pop("flush", False))
    return ckpt.sync.CheckpointManager(root, tiers=[tier], **options)


def test_what_was_saved_last_counts(tmp_path: Path, memory: Path) -> None:
    """A run that went back may save other values under the number of a snapshot."""
    with manager(tmp_path / "run", memory) as mgr:
        mgr.snapshot(1, {"number": 1}).result()
        mgr.save(1, {"number": 2}).result()
        assert mgr.restore(1) == mgr.restore() == {"number": 2}
        assert mgr.resume({"number": 0}) == (2, {"number": 2})
        assert [each.startswith(str(memory)) for each in mgr.metadata(1).info.tiers] == [
            False,
            True,
        ]
        mgr.snapshot(1, {"number": 3}).result()
        assert mgr.restore(1) == mgr.restore() == {"number": 3}


def test_of_two_that_are_equal_the_nearest_is_read(tmp_path: Path, memory: Path) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        mgr.save(1, state_of(1)).result()
        assert mgr.metadata(1).info.tiers[0].startswith(str(memory))
        shutil.rmtree(tmp_path / "run/1/default")
        assert mgr.restore(1)["number"] == mgr.restore()["number"] == 1


def test_an_unhealthy_snapshot_makes_way_also_in_the_root(tmp_path: Path, memory: Path) -> None:
    """An agent that survived may write it there after the run has gone back."""
    root = tmp_path / "run"
    good, bad = {"w": np.ones(2)}, {"w": np.array([1, np.nan])}
    with manager(root, memory, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(10, good).result()
        mgr.snapshot(20, bad).result()
        assert mgr.resume({"w": np.zeros(2)}, healthy=True)[0] == 11
        [folder] = memory.glob("*/*")
        done = anyio.run(flush, folder, LocalStorage(root, Timeouts()), 10)
        assert done is not None
        assert done.problem == ""
        assert mgr.save(20, good).result().step == 20


def test_a_run_that_goes_back_by_a_deletion_is_flushed(tmp_path: Path, memory: Path) -> None:
    mgr = manager(tmp_path / "run", memory, flush=True)
    with mgr:
        for step in (50, 100):
            mgr.save(step, state_of(step)).result()
        mgr.delete(100)
        mgr.snapshot(60, state_of(60)).result()
        mgr.__exit__(ValueError, ValueError(), None)
    assert steps_of(tmp_path / "run") == [50, 60]


def test_damage_is_reported_as_without_tiers(tmp_path: Path, memory: Path) -> None:
    root = tmp_path / "run"
    with manager(root, memory) as mgr:
        mgr.save(1, state_of(1)).result()
        mgr.snapshot(2, state_of(2)).result()
        (root / "1/ckpt.json").write_bytes(b"{")
        assert not mgr.verify(1).ok
        assert mgr.verify(2).ok
        with pytest.raises(StepNotFoundError):
            mgr.verify(3)


@pytest.mark.parametrize("method", ["metadata", "verify"])
def test_a_snapshot_that_is_replaced_while_it_is_looked_at(
    method: str, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path / "run", memory) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        reader = mgr._service.memory.service.reader  # type: ignore[attr-defined]
        look, looks = getattr(reader, method), []

        async def replaced(step: int, *args: Any) -> Any:
            looks.append(step)
            if len(looks) == 1:
                raise StepNotFoundError("gone", step=step)
            return await look(step, *args)

        monkeypatch.setattr(reader, method, replaced)
        assert getattr(mgr, method)()
        assert len(looks) == 2
