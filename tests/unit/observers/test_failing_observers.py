"""An observer that raises is logged once, and counted after that."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt.sync


class Failing:
    def __init__(self, most: int = 10**9) -> None:
        self.calls = 0
        self.most = most

    def __call__(self, event: ckpt.types.Event) -> None:
        self.calls += 1
        if self.calls <= self.most:
            raise RuntimeError("mine")

    def __repr__(self) -> str:
        return "Failing()"


def test_one_traceback_and_then_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, healthy = Failing(), Failing(1), Failing(0)
    with ckpt.sync.CheckpointManager(tmp_path, observers=[first, second, healthy]) as mgr:
        mgr.save(1, {"w": jnp.ones(100_000)}, durable=True)
        mgr.wait_until_finished()
        mgr.restore(1)
    logged = [each for each in caplog.records if each.exc_info]
    assert len(logged) == 2, "one traceback for each observer that fails"
    assert all("the observer Failing() failed on" in each.getMessage() for each in logged)
    # One number for the save, one for the restore; together with the first they are all.
    numbers = [
        int(re.findall(r"the observer Failing\(\) failed on (\d+) more events", text)[0])
        for each in caplog.records
        if each not in logged and (text := each.getMessage())
    ]
    assert len(numbers) == 2
    assert 1 + sum(numbers) == first.calls
    assert healthy.calls == first.calls == second.calls
