"""The switch interval is short while bytes move, and afterwards what it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt._runtime.threads import short_switch_interval
from ckpt.errors import CheckpointError
from ckpt.types import Event

SHORT = 1e-3


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    """The interval before the test, which is set back after it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def test_bodies_may_overlap(usual: float) -> None:
    first, second = short_switch_interval(), short_switch_interval()
    first.__enter__()
    second.__enter__()
    assert sys.getswitchinterval() < SHORT
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < SHORT
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


def test_many_threads_leave_it_as_it_was(usual: float) -> None:
    def work() -> None:
        for _ in range(200):
            with short_switch_interval():
                assert sys.getswitchinterval() < SHORT

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == usual


def test_an_error_sets_it_back(usual: float) -> None:
    with pytest.raises(ValueError, match="stop"), short_switch_interval():
        raise ValueError("stop")
    assert sys.getswitchinterval() == usual


def test_a_shorter_one_is_left_alone() -> None:
    sys.setswitchinterval(5e-5)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(5e-5)
    assert sys.getswitchinterval() == pytest.approx(5e-5)


def test_one_that_the_program_sets_meanwhile_stays() -> None:
    with short_switch_interval():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)


def test_saves_and_restores(tmp_path: Path, usual: float) -> None:
    seen: dict[str, float] = {}

    def observe(event: Event) -> None:
        if event.phase in ("read", "write"):
            seen[event.operation] = sys.getswitchinterval()

    with ckpt.sync.CheckpointManager(tmp_path, observers=[observe]) as mgr:
        mgr.save(1, {"w": jnp.arange(8.0)}).result()
        assert sys.getswitchinterval() == usual
        mgr.restore(1)
        assert sys.getswitchinterval() == usual
        with pytest.raises(CheckpointError):
            mgr.restore(1, like={"v": jnp.zeros(3)})
        assert sys.getswitchinterval() == usual
    assert seen.keys() == {"save", "restore"}
    assert max(seen.values()) < SHORT


def test_saves_that_fail(tmp_path: Path, usual: float) -> None:
    class Strange:
        pass

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        leaf: Any = Strange()
        with pytest.raises(CheckpointError):
            mgr.save(1, {"w": leaf}).result()
        assert sys.getswitchinterval() == usual
