"""A forgotten `await`, and the syntax of the other API, say what to do."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

import ckpt
import ckpt.sync
from ckpt import errors


@pytest.mark.parametrize(
    "use",
    [
        lambda call: call["w"],
        lambda call: call.result(),
        lambda call: list(call),
        lambda call: call.step,
    ],
)
def test_a_call_that_is_used_as_its_result(use: Any, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": 1})
    with pytest.raises(errors.NotAwaitedError, match=r"await ckpt\.load.*ckpt\.sync\.load"):
        use(ckpt.load(tmp_path / "a"))
    mgr = ckpt.CheckpointManager(tmp_path / "b")
    with pytest.raises(errors.NotAwaitedError, match=r"await mgr\.save.*ckpt\.sync"):
        use(mgr.save(1, {"w": 1}))


def test_a_call_that_is_dropped_warns(tmp_path: Path) -> None:
    mgr = ckpt.CheckpointManager(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"mgr\.save\(\.\.\.\) was never awaited, so it did"):
        mgr.save(1, {"w": 1})  # type: ignore[unused-coroutine]
    assert list(tmp_path.iterdir()) == []


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
