"""Calls are native coroutine functions; the syntax of the other API says what to do."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest
import trio

import ckpt
import ckpt.sync
from ckpt import errors


def test_a_call_that_is_dropped_warns_and_does_nothing(tmp_path: Path) -> None:
    mgr = ckpt.CheckpointManager(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"CheckpointManager\.save' was never awaited"):
        mgr.save(1, {"w": 1})  # type: ignore[unused-coroutine]
    assert list(tmp_path.iterdir()) == []


def test_messages_of_python_name_no_private_class(tmp_path: Path) -> None:
    for manager in (ckpt.CheckpointManager, ckpt.sync.CheckpointManager):
        unknown: Any = {"max_to_keep": 3}
        with pytest.raises(TypeError, match=r"^CheckpointManager\.__init__\(\) got an unexpected"):
            manager(tmp_path, **unknown)
    mgr = ckpt.CheckpointManager(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"'CheckpointManager\.latest_step' was never awaited"):
        mgr.latest_step()  # type: ignore[unused-coroutine]


CALLS = [ckpt.save, ckpt.load, ckpt.metadata, ckpt.verify, ckpt.open_array, ckpt.convert]
CALLS += [ckpt.merge, ckpt.adopt, ckpt.CheckpointManager.save, ckpt.CheckpointManager.restore]
CALLS += [ckpt.types.PartialSave.save, ckpt.types.Trash.steps, ckpt.types.Watch.aclose]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_calls_are_native_coroutine_functions(call: Any) -> None:
    """Dispatchers and mocks tell a coroutine function by that."""
    assert inspect.iscoroutinefunction(call)


def test_mocks_of_a_manager_are_awaited_like_one() -> None:
    mgr = mock.create_autospec(ckpt.CheckpointManager, instance=True)
    mgr.latest_step.return_value = 7

    async def main() -> None:
        assert await mgr.latest_step() == 7
        await mgr.save(8, {"w": 1})

    anyio.run(main)
    mgr.save.assert_awaited_once_with(8, {"w": 1})


def test_calls_are_coroutines_for_everything_that_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert asyncio.run(ckpt.save(path, {"w": 1})).path == str(path)
    assert trio.run(ckpt.load, path) == {"w": 1}
    assert anyio.run(ckpt.load, path) == {"w": 1}
    call = ckpt.load(path)
    assert asyncio.iscoroutine(call)
    call.close()

    async def main() -> None:
        found = await asyncio.gather(ckpt.load(path), asyncio.create_task(ckpt.load(path)))
        assert found == [{"w": 1}, {"w": 1}]
        assert await asyncio.wait_for(ckpt.load(path), 60) == {"w": 1}
        task = asyncio.create_task(ckpt.load(path))
        assert "load" in repr(task)
        await asyncio.sleep(0)
        assert "load" in repr(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(errors.NotACheckpointError):
            await ckpt.load(tmp_path / "no")

    asyncio.run(main())


def test_names_and_help_are_those_of_the_functions() -> None:
    for function in (ckpt.load, ckpt.CheckpointManager.save, ckpt.CheckpointManager.restore):
        assert "Args:" in (inspect.getdoc(function) or "")
        assert next(iter(inspect.signature(function).parameters)) in ("path", "self")
    assert ckpt.CheckpointManager.restore.__qualname__ == "CheckpointManager.restore"


def plain_with(path: Path) -> None:
    with ckpt.CheckpointManager(path):  # type: ignore[attr-defined]
        pass


def plain_for(path: Path) -> None:
    for _ in ckpt.watch(path):  # type: ignore[attr-defined]
        pass


async def async_with(path: Path) -> None:
    async with ckpt.sync.CheckpointManager(path):  # type: ignore[attr-defined]
        pass


async def async_for(path: Path) -> None:
    async for _ in ckpt.sync.watch(path):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("use", [plain_with, plain_for, async_with, async_for])
def test_the_syntax_of_the_other_api(use: Any, tmp_path: Path) -> None:
    def act() -> None:
        if inspect.iscoroutinefunction(use):
            anyio.run(use, tmp_path)
        else:
            use(tmp_path)

    with pytest.raises(errors.InvalidArgumentError, match=r"use '(async )?(with|for) .*ckpt"):
        act()
    assert list(tmp_path.iterdir()) == []
