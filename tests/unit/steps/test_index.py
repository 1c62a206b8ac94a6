"""Lists of steps: right whatever others do, and cheap."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._format.manifest import decode, encode
from ckpt._steps.index import StepIndex
from ckpt.storage import open_root
from ckpt.storage._local import posix


def make_root(root: Path, count: int) -> None:
    """Make a root of many steps, all of which are copies of one but for the number."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, {"n": 1.5}, metrics={"loss": 2.0}).result()
    manifest = decode((root / "0" / "ckpt.json").read_bytes(), where="0")
    for step in range(1, count):
        os.mkdir(root / str(step))
        copy = replace(manifest, step=step, files={})
        (root / str(step) / "ckpt.json").write_bytes(encode(copy))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read, in order."""
    seen: list[str] = []
    read: Callable[..., Any] = posix.read_head

    def counted(top: Path, path: str, limit: int, most: int) -> Any:
        if path.endswith("ckpt.json"):
            seen.append(path)
        return read(top, path, limit, most)

    monkeypatch.setattr(posix, "read_head", counted)
    return seen


def test_a_root_of_many_steps_is_opened_without_reading_them(
    tmp_path: Path, reads: list[str]
) -> None:
    make_root(tmp_path, 10_000)
    reads.clear()
    with ckpt.sync.CheckpointManager(tmp_path, save_when=ckpt.save_when.EverySteps(100)) as mgr:
        assert reads == ["9999/ckpt.json"]
        assert mgr.latest_step() == 9999
        assert reads == ["9999/ckpt.json"]
        assert mgr.restore() == {"n": 1.5}
        assert not mgr.should_save(10_001)
        assert mgr.save(10_100, {"n": 3})
        mgr.wait_until_finished()
        assert len(reads) < 10
        assert mgr.all_steps() == [*range(10_000), 10_100]
        assert len(reads) < 10_010
        reads.clear()
        # What has not changed is not read again.
        assert mgr.all_steps() == [*range(10_000), 10_100]
        assert mgr.best_step("loss", "min") == 9999
        assert reads == []
        mgr.reload()
        mgr.latest_step()
        assert reads == ["10100/ckpt.json"]


def test_what_others_do_to_a_root_is_seen_at_once(tmp_path: Path) -> None:
    make_root(tmp_path, 5)
    with (
        ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr,
        ckpt.sync.CheckpointManager(tmp_path) as other,
    ):
        assert mgr.all_steps() == [0, 1, 2, 3, 4]
        other.delete(2)
        assert mgr.all_steps() == [0, 1, 3, 4]
        other.save(2, {"n": 2}, metrics={"loss": 1.0}).result()
        assert mgr.all_steps() == [0, 1, 2, 3, 4]
        assert mgr.best_step("loss", "min") == 2
        other.save(2, {"n": 2}, metrics={"loss": 3.0}, if_exists="replace").result()
        assert mgr.best_step("loss", "min") == 4
        assert mgr.best_step("loss", "max") == 2
        (tmp_path / "4" / "ckpt.json").write_bytes(b"damaged")
        assert mgr.all_steps() == [0, 1, 2, 3]
        assert mgr.latest_step() == 3
        shutil.rmtree(tmp_path / "3")
        (tmp_path / "1").rename(tmp_path / "17")
        assert mgr.all_steps() == [0, 2]
        (tmp_path / "17").rename(tmp_path / "1")
        assert mgr.all_steps() == [0, 1, 2]


def test_the_latest_step_is_opened_by_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an index that has not seen it before: no second one tells that it is committed."""
    asked: list[str] = []

    async def main() -> None:
        storage = open_root("memory://latest/once")

        def counted(name: str, ask: Any) -> Any:
            async def asks(*args: Any) -> Any:
                asked.append(name)
                return await ask(*args)

            return asks

        for name in ("step_dirs", "stamps", "read", "read_each"):
            monkeypatch.setattr(storage, name, counted(name, getattr(storage, name)))
        opened = await StepIndex(storage).open_latest()
        assert opened is not None
        assert opened.manifest.step == 4

    with ckpt.sync.CheckpointManager("memory://latest/once") as mgr:
        for step in (3, 4):
            mgr.save(step, {"n": step})
    asyncio.run(main())
    # The first one asks whether a run ever went back there.
    assert asked == ["read", "step_dirs", "read"]


def test_the_index_remembers_no_more_than_there_is(tmp_path: Path) -> None:
    async def main() -> None:
        index = StepIndex(open_root(tmp_path))
        assert list(await index.refresh()) == [0, 1, 2, 3, 4]
        for step in range(4):
            shutil.rmtree(tmp_path / str(step))
        assert list(await index.refresh()) == [4]
        assert len(index._known) == 1

    make_root(tmp_path, 5)
    asyncio.run(main())


def test_lists_that_are_made_at_the_same_time_are_whole(tmp_path: Path) -> None:
    """Also where one of them forgets what another one is about to answer with."""

    async def main() -> None:
        storage = open_root(tmp_path)
        index = StepIndex(storage)
        read_each = storage.read_each

        async def late(*args: Any) -> Any:
            found = await read_each(*args)
            index.forget()
            return found

        await index.refresh()
        (tmp_path / "3" / "ckpt.json").touch()
        storage.read_each = late  # type: ignore[assignment]
        assert list(await index.refresh()) == [0, 1, 2, 3, 4]

    make_root(tmp_path, 5)
    asyncio.run(main())
