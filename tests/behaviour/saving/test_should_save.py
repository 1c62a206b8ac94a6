"""`should_save` says what `save` would do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

import pytest

import ckpt
import ckpt.sync
from tests.behaviour.saving.odd_managers import PATIENCE_S, SMALL, plain_manager
from tests.support.odd_items import Odd


@pytest.mark.parametrize("backlog", ["wait", "skip", "supersede"])
def test_should_save_and_save_agree_beside_a_save_under_way(
    tmp_path: Path, backlog: Literal["wait", "skip", "supersede"]
) -> None:
    gate = threading.Event()
    with plain_manager(tmp_path, staging=ckpt.Staging(backlog=backlog)) as mgr:
        mgr.save(0, Odd(SMALL, gate=gate))
        assert mgr.should_save(1) == (backlog != "skip")
        assert bool(mgr.save(1, SMALL)) == (backlog != "skip")
        # That one is being saved.
        assert not mgr.should_save(0)
        if backlog == "skip":
            assert not mgr.save(0, SMALL)
        else:
            with pytest.raises(ckpt.errors.StepExistsError):
                mgr.save(0, SMALL, if_exists="error")
        gate.set()


def test_should_save_and_save_agree_about_a_step_that_is_there(tmp_path: Path) -> None:
    options: dict[str, Any] = {"step_names": ckpt.step_names.Standard("step", 4)}
    for root, more in ((tmp_path / "a", {}), (tmp_path / "b", options)):
        with ckpt.sync.CheckpointManager(root, **more) as mgr:
            assert mgr.should_save(3)
            mgr.save(3, SMALL, durable=True)
            assert not mgr.should_save(3)
            assert not mgr.save(3, SMALL)
        with ckpt.sync.CheckpointManager(root, **more) as mgr:
            assert not mgr.should_save(3)
            assert mgr.should_save(4)


def test_should_save_and_save_agree_about_a_damaged_step(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in (1, 2):
            mgr.save(step, SMALL, durable=True)
    (tmp_path / "2" / "ckpt.json").write_text("torn")
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.resume(SMALL)[0] == 2
        # A save replaces it.
        assert mgr.should_save(2)
        assert mgr.save(2, SMALL).result(PATIENCE_S).step == 2
        assert not mgr.should_save(2)
