"""What Python prints for an error of the library: the call, the message, and the cause."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.support.paths import ROOT

MOST_FRAMES = 5
PACKAGE = str(ROOT / "ckpt")


class Broken:
    """A handler whose code raises an error of its own."""

    name = "broken"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, set)

    async def stage(self, item: Any, writer: Any) -> Any:
        return self.look_up({}, "mine")

    def look_up(self, table: dict[str, int], key: str) -> int:
        return table[key]

    async def load(self, *_: Any) -> Any:
        raise AssertionError


def mismatch(mgr: Any, path: Path) -> Any:
    return mgr.restore(1, {"w": jnp.ones(4), "b": jnp.ones(5)})


def unsupported(mgr: Any, path: Path) -> Any:
    return mgr.save(2, {"w": object(), "v": object()})


def exists(mgr: Any, path: Path) -> Any:
    return mgr.save(1, {"w": 1})


def missing(mgr: Any, path: Path) -> Any:
    return mgr.restore(9)


def argument(mgr: Any, path: Path) -> Any:
    return mgr.save(2, {"w": 1}, custom_metadata={1: 2})


def handler(mgr: Any, path: Path) -> Any:
    return mgr.save(2, {1, 2})


def damaged(mgr: Any, path: Path) -> Any:
    (path / "1" / "ckpt.json").write_bytes(b"{")
    return mgr.restore(1)


def refused(mgr: Any, path: Path) -> Any:
    (path / "1" / "ckpt.json").unlink()
    (path / "1" / "ckpt.json").mkdir()
    return mgr.restore(1)


CALLS = [mismatch, unsupported, exists, missing, argument, handler, damaged, refused]


def check(error: BaseException) -> str:
    shown = "".join(traceback.format_exception(error))
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(PACKAGE)
    ]
    assert 0 < len(own) <= MOST_FRAMES, shown
    assert "Exception Group" not in shown
    assert shown.count(str(error)) == 1, shown
    assert "concurrent/futures" not in shown
    return shown


@pytest.mark.parametrize("call", CALLS)
def test_a_plain_call(call: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, handlers=[Broken()]) as mgr:
        mgr.save(1, {"w": jnp.ones(3), "b": jnp.ones(3)}, durable=True)
        for _ in range(2):
            with pytest.raises(errors.CheckpointError) as caught:
                call(mgr, tmp_path)
            shown = check(caught.value)
            assert f"in {call.__name__}\n" in shown
            if call in (damaged, refused):
                break


@pytest.mark.parametrize("call", CALLS)
def test_an_awaited_call(call: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path, handlers=[Broken()]) as mgr:
            await mgr.save(1, {"w": jnp.ones(3), "b": jnp.ones(3)}, durable=True)
            with pytest.raises(errors.CheckpointError) as caught:
                await call(mgr, tmp_path)
            check(caught.value)

    asyncio.run(main())


def test_the_cause_in_the_code_of_a_user_is_shown(tmp_path: Path) -> None:
    mgr = ckpt.sync.CheckpointManager(tmp_path, handlers=[Broken()])
    with pytest.raises(errors.HandlerError) as caught:
        mgr.save(1, {1})
    assert isinstance(caught.value.__cause__, KeyError)
    shown = check(caught.value)
    assert "in look_up\n" in shown
    mgr.close()


def test_the_cause_of_the_system_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mgr = ckpt.sync.CheckpointManager(tmp_path / "file" / "run")
    with pytest.raises(errors.StorageError) as caught:
        mgr.save(1, {"w": 1})
    check(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    mgr.close()


def test_a_commit_that_is_awaited_often_does_not_pile_up_frames(tmp_path: Path) -> None:
    mgr = ckpt.sync.CheckpointManager(tmp_path, save_when=ckpt.save_when.EverySteps(10))
    commit = mgr.save(1, {"w": 1})
    for _ in range(10):
        with pytest.raises(errors.SaveSkippedError) as caught:
            commit.result()
        check(caught.value)
    mgr.close()


def test_the_log_has_the_whole_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ckpt")
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": jnp.ones(3)}, durable=True)
        with pytest.raises(errors.TargetMismatchError):
            mgr.restore(1, {"w": jnp.ones(4)})
    assert "match_target" in caplog.text


def test_a_one_shot_call(tmp_path: Path) -> None:
    for call in (ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify):
        with pytest.raises(errors.NotACheckpointError) as caught:
            call(tmp_path)
        check(caught.value)
