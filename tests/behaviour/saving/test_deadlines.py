"""A save that is not durable at its deadline is given up, says where it was, and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.behaviour.saving.odd_managers import (
    LARGE,
    SMALL,
    manager,
    names,
    plain_manager,
    reached,
    run,
)
from tests.support.conditions import until
from tests.support.odd_items import Odd, OddHandler
from tests.support.simulated_job import FAR, closed, managers, together
from tests.support.trees import assert_same

# Saves that are held would never end, so any deadline is met.
SOON = 0.2
# What is to be met while files are written has to leave a busy machine time to stage them.
LATER = 2.0
MIB = ckpt.Staging(budget_bytes=1 << 20)


def test_a_commit_that_is_late_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path, staging=MIB) as mgr:
            held = Odd(LARGE, hold="commit")
            commit = await mgr.save(7, held, timeout=LATER)
            with pytest.raises(
                errors.DeadlineExceededError,
                match=r"^step 7: the save was given up 2(\.0)? s after its.*while it was writing",
            ) as caught:
                await commit
            assert isinstance(caught.value, TimeoutError)
            assert caught.value.step == 7
            assert commit.stage == "failed"
            assert names(tmp_path) == set()
            # With a megabyte of staging memory, none of which may have been lost.
            await mgr.save(8, LARGE, durable=True)
            assert_same(await mgr.restore(8), LARGE)
        # It was fetched, so the manager does not raise it again.
        assert names(tmp_path) == {"8"}

    run(main)


def test_a_commit_that_is_late_and_not_awaited_is_raised_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(errors.DeadlineExceededError, match="step 7"), plain_manager(tmp_path) as m:
        m.save(7, Odd(SMALL, hold="commit"), timeout=SOON)


def test_the_state_is_let_go(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        array = jnp.ones((256, 256))
        alive = weakref.ref(array)
        commit = mgr.save(7, Odd({"w": array}, hold="commit"), timeout=LATER)
        del array
        with pytest.raises(errors.DeadlineExceededError):
            commit.result()
        mgr.wait_until_finished()
        # The engine's thread may still be about to forget it.
        until(lambda: gc.collect() >= 0 and alive() is None)


def test_a_snapshot_that_is_late_is_the_error_of_the_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with manager(tmp_path) as mgr:
            with pytest.raises(errors.DeadlineExceededError, match="while it was staging"):
                await mgr.save(7, Odd(SMALL, hold="stage"), timeout=SOON)
            await mgr.save(7, SMALL, durable=True)
            assert_same(await mgr.restore(7), SMALL)

    run(main)


def test_waiting_for_another_save_counts(tmp_path: Path) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with manager(tmp_path, staging=ckpt.Staging(backlog="wait")) as mgr:
            first = Odd(SMALL, gate=gate)
            commit = await mgr.save(1, first)
            await reached(first)
            second = Odd(SMALL, hold="stage")
            with pytest.raises(errors.DeadlineExceededError) as caught:
                await mgr.save(2, second, timeout=SOON, durable=True)
            assert caught.value.step == 2
            assert not commit.done()
            gate.set()
            await commit
            assert await mgr.all_steps() == [1]

    run(main)


def test_a_save_in_time_is_saved(tmp_path: Path) -> None:
    with plain_manager(tmp_path) as mgr:
        assert mgr.save(1, LARGE, timeout=3600, durable=True)
        mgr.save(2, SMALL, timeout=3600).result()
        assert mgr.all_steps() == [1, 2]
        assert_same(mgr.restore(1), LARGE)


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf"), "60", True])
def test_what_is_no_deadline(tmp_path: Path, deadline: Any) -> None:
    with plain_manager(tmp_path) as mgr:
        for call in (
            lambda: mgr.save(1, SMALL, timeout=deadline),
            lambda: ckpt.sync.save(tmp_path / "x", SMALL, timeout=deadline),
            lambda: ckpt.sync.save(tmp_path / "x", SMALL, timeout=deadline, durable=False),
        ):
            with pytest.raises(errors.InvalidArgumentError, match="timeout"):
                call()
        assert mgr.all_steps() == []


# --- Checkpoints by themselves --------------------------------------------------------------------


ONE_SHOT: dict[str, Callable[[Path], object]] = {
    "sync": lambda path: ckpt.sync.save(
        path, Odd(SMALL, hold="commit"), handlers=[OddHandler()], timeout=LATER
    ),
    "sync-background": lambda path: ckpt.sync.save(
        path, Odd(SMALL, hold="commit"), handlers=[OddHandler()], timeout=LATER, durable=False
    ).result(),
    "async": lambda path: asyncio.run(
        ckpt.save(path, Odd(SMALL, hold="commit"), handlers=[OddHandler()], timeout=LATER)
    ),
}


@pytest.mark.parametrize("way", ONE_SHOT)
def test_a_checkpoint_by_itself(tmp_path: Path, way: str) -> None:
    with pytest.raises(errors.DeadlineExceededError, match="while it was writing"):
        ONE_SHOT[way](tmp_path / "x")
    assert names(tmp_path) == set()
    ckpt.sync.save(tmp_path / "x", SMALL)
    assert_same(ckpt.sync.load(tmp_path / "x"), SMALL)


# --- Several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_gives_up_ends_the_save_of_all(tmp_path: Path, late: int) -> None:
    """Also if it alone has a deadline: the others hear of it, and wait no longer."""
    job = managers(tmp_path, 2, seconds=FAR, handlers=[OddHandler()])
    tree = {"a": np.arange(10)}

    def save(index: int) -> object:
        options: dict[str, Any] = {"timeout": LATER} if index == late else {}
        item = Odd(tree, hold="commit") if index == late else Odd(tree)
        return job[index].save(5, item, **options).result(FAR)

    found = together(lambda: save(0), lambda: save(1))
    assert all(isinstance(each, errors.DeadlineExceededError) for each in found), found
    assert "while it was writing" in str(found[late])
    assert f"process {late}" in str(found[1 - late])
    again = together(*(lambda each=each: each.save(5, tree).result(FAR) for each in job))
    assert [each.step for each in again] == [5, 5]
    closed(job)
    assert names(tmp_path) == {"5"}
