"""`commit.items[name]`: a future for each item, done when the item is durable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trio

import ckpt
from ckpt import errors
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler

W = np.arange(6.0)


@contextlib.contextmanager
def closed_gate() -> Iterator[Gate]:
    """A gate that is opened at the end, however that comes."""
    gate = Gate()
    try:
        yield gate
    finally:
        gate.open()


def manager(root: Path) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[GateHandler()])


def test_an_item_is_durable_before_the_step(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr, closed_gate() as gate:
        commit = mgr.save(1, items={"model": {"w": W}, "gate": gate})
        assert list(commit.items) == ["model", "gate"]
        model = commit.items["model"]
        model.result(PATIENCE_S)
        assert model.done()
        assert model.exception() is None
        # Its bytes are in the attempt, which has no name yet.
        files = [each for each in tmp_path.glob("*/model/**/*") if each.is_file()]
        assert any(W.tobytes() in each.read_bytes() for each in files)
        assert not commit.items["gate"].done()
        assert not commit.done()
        with pytest.raises(
            errors.CommitTimeoutError, match="item 'gate' was not durable after 0 s"
        ):
            commit.items["gate"].result(0)
        gate.open()
        commit.result(PATIENCE_S)
        assert commit.items["gate"].done()


def test_it_is_awaited_from_any_loop_any_number_of_times(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr:
        model = mgr.save(1, {"w": W}).items["default"]

        async def wait() -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(wait_once)
            await model

        async def wait_once() -> None:
            await model

        anyio.run(wait)
        trio.run(wait)


def test_it_cancels_the_save(tmp_path: Path) -> None:
    with manager(tmp_path) as mgr, closed_gate() as gate:
        commit = mgr.save(1, items={"model": {"w": W}, "gate": gate})
        commit.items["model"].result(PATIENCE_S)
        assert commit.items["gate"].cancel()
        assert isinstance(commit.items["gate"].exception(PATIENCE_S), errors.CommitCancelledError)
        with pytest.raises(errors.CommitCancelledError):
            commit.result(PATIENCE_S)
        assert not commit.items["gate"].cancel()
    assert not list(tmp_path.glob("1*"))


def test_an_item_that_is_not_saved_has_the_error_of_the_save(tmp_path: Path) -> None:
    class Failing(GateHandler):
        name = "failing"

        async def stage(self, item: Any, writer: Any) -> Any:
            async def commit() -> Any:
                raise OSError("no")

            return commit()

    with ckpt.sync.CheckpointManager(tmp_path, handlers=[Failing()]) as mgr:
        commit = mgr.save(1, items={"gate": Gate()})
        error = commit.exception(PATIENCE_S)
        assert isinstance(error, errors.HandlerError)
        assert commit.items["gate"].exception(PATIENCE_S) is error


def test_the_items_of_a_save_that_a_policy_refuses(tmp_path: Path) -> None:
    never = ckpt.save_when.Steps([7])
    with ckpt.sync.CheckpointManager(tmp_path, save_when=never) as mgr:
        commit = mgr.save(1, {"w": W})
        with pytest.raises(errors.SaveSkippedError):
            commit.items["default"].result(PATIENCE_S)


def test_one_shot_saves_have_them_too(tmp_path: Path) -> None:
    commit = ckpt.sync.save(tmp_path / "a", items={"model": {"w": W}}, durable=False)
    commit.items["model"].result(PATIENCE_S)
    commit.result(PATIENCE_S)


def test_the_wait_of_one_shot_saves_is_measured(tmp_path: Path) -> None:
    """It is no longer than the time since the call."""
    gate, began = Gate(), time.perf_counter()
    saves = [
        ckpt.sync.save(tmp_path / "0", items={"g": gate}, durable=False, handlers=[GateHandler()]),
        ckpt.sync.save(tmp_path / "1", {"w": W}, durable=False),
    ]
    gate.open()
    waited = [each.result(PATIENCE_S).statistics.waited or 0.0 for each in saves]
    assert max(waited) <= time.perf_counter() - began


@pytest.mark.parametrize("point", ["items", "in_root"])
def test_who_got_the_error_of_a_save_from_a_future_has_checked_it(
    point: str, tmp_path: Path
) -> None:
    class Failing(GateHandler):
        name = "failing"

        async def stage(self, item: Any, writer: Any) -> Any:
            async def commit() -> Any:
                raise OSError("no")

            return commit()

    with ckpt.sync.CheckpointManager(tmp_path, handlers=[Failing()]) as mgr:
        commit = mgr.save(1, items={"gate": Gate()})
        future = commit.items["gate"] if point == "items" else commit.in_root
        with pytest.raises(errors.HandlerError):
            future.result(PATIENCE_S)
        # Neither the next save nor the end of the manager raises it again.
        mgr.save(2, {"w": W}).result(PATIENCE_S)
