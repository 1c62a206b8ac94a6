"""Steps of farther places, copied back to the nearest tier on demand."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
import ckpt.sync
from ckpt._tiers.agent.messages import Call
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepExistsError,
    StepNotFoundError,
    StepPinnedError,
    StorageError,
)
from ckpt.testing.compare import differences
from ckpt.tiers import SharedMemory, Tier
from tests.support.damage import Cut, Damage, Delete, FlipBit, files_of
from tests.support.numbered_states import state_of
from tests.support.snapshots import PATIENCE_S, shared_memory, steps_of


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def manager(base: Path, **tier: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(base / "root", tiers=[Tier(base / "disk", **tier)])


def in_root(base: Path, *steps: int) -> None:
    with ckpt.sync.CheckpointManager(base / "root") as mgr:
        for step in steps:
            mgr.save(step, state_of(step)).result()


def largest_of(step: Path) -> str:
    return max(files_of(step), key=lambda file: (step / file).stat().st_size)


def attempts(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if "tmp" in name]


def test_a_step_is_local_afterwards(tmp_path: Path) -> None:
    in_root(tmp_path, 1, 2)
    with manager(tmp_path) as mgr:
        info = mgr.prefetch(1)
        assert info.step == 1
        assert info.path == str(tmp_path / "disk/1")
        assert info.tiers == (str(tmp_path / "disk"), str(tmp_path / "root"))
        assert mgr.prefetch().step == 2
        shutil.rmtree(tmp_path / "root/1/default")
        assert differences(state_of(1), mgr.restore(1)) == []
    # Any program may read it there.
    assert steps_of(tmp_path / "disk") == [1, 2]


def test_with_asyncio(tmp_path: Path) -> None:
    in_root(tmp_path, 7)

    async def main() -> None:
        async with ckpt.CheckpointManager(
            tmp_path / "root", tiers=[Tier(tmp_path / "disk")]
        ) as mgr:
            infos: list[ckpt.StepInfo] = []

            async def fetch() -> None:
                infos.append(await mgr.prefetch())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetch)
                tasks.start_soon(fetch)
            assert [info.step for info in infos] == [7, 7]

    anyio.run(main)
    assert steps_of(tmp_path / "disk") == [7]


def test_its_tier_keeps_it_until_it_is_unpinned(tmp_path: Path) -> None:
    in_root(tmp_path, 1)
    with manager(tmp_path, keep=ckpt.keep.Latest(2)) as mgr:
        mgr.prefetch(1)
        for step in range(2, 6):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)
        mgr.wait_until_finished()
        assert steps_of(tmp_path / "disk") == [1, 4, 5]
        with pytest.raises(StepPinnedError, match="prefetched"):
            mgr.delete(1)
    with manager(tmp_path, keep=ckpt.keep.Latest(2)) as mgr:
        assert mgr.unpin(1, "prefetched")
        mgr.save(6, state_of(6)).in_root.result(PATIENCE_S)
        mgr.wait_until_finished()
        assert steps_of(tmp_path / "disk") == [5, 6]
        assert 1 in mgr.all_steps()
        assert mgr.pins() == {}


def test_it_is_not_copied_on_again(tmp_path: Path) -> None:
    in_root(tmp_path, 1)
    tiers = [Tier(tmp_path / "disk"), Tier(tmp_path / "between")]
    for _ in range(2):
        with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=tiers) as mgr:
            mgr.prefetch(1)
            mgr.save(len(mgr.all_steps()) + 1, state_of(len(mgr.all_steps()) + 1))
    assert steps_of(tmp_path / "disk") == [1, 2, 3]
    assert steps_of(tmp_path / "between") == [2, 3]
    assert steps_of(tmp_path / "root") == [1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [lambda file: FlipBit(file, 99), lambda file: Cut(file, 10), lambda file: Delete(file)],
    ids=["flipped", "cut", "lost"],
)
def test_what_is_damaged_near_is_replaced(damage: Callable[[str], Damage], tmp_path: Path) -> None:
    in_root(tmp_path, 1)
    with manager(tmp_path) as mgr:
        mgr.prefetch(1)
        near = tmp_path / "disk/1"
        damage(largest_of(near)).apply(near)
        mgr.prefetch(1)
        assert mgr.verify(1).ok
    assert steps_of(tmp_path / "disk") == [1]


def test_the_next_place_is_tried_where_one_is_damaged(tmp_path: Path) -> None:
    in_root(tmp_path, 1)
    shutil.copytree(tmp_path / "root", tmp_path / "between")
    FlipBit(largest_of(tmp_path / "between/1"), 99).apply(tmp_path / "between/1")
    tiers = [Tier(tmp_path / "disk"), Tier(tmp_path / "between")]
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=tiers) as mgr:
        mgr.prefetch(1)
        assert steps_of(tmp_path / "disk") == [1]
        mgr.unpin(1, "prefetched")
        shutil.rmtree(tmp_path / "disk/1")
        FlipBit(largest_of(tmp_path / "root/1"), 99).apply(tmp_path / "root/1")
        with pytest.raises(CorruptCheckpointError, match="between"):
            mgr.prefetch(1)
    assert steps_of(tmp_path / "disk") == []
    assert attempts(tmp_path / "disk") == []


def test_errors_say_what_to_do(tmp_path: Path, memory: Path) -> None:
    in_root(tmp_path, 1)
    fast = SharedMemory(directory=str(memory), flush=False)
    plain = ckpt.sync.CheckpointManager(tmp_path / "root")
    in_memory = ckpt.sync.CheckpointManager(tmp_path / "root", tiers=[fast])
    for mgr in (plain, in_memory):
        with mgr, pytest.raises(InvalidArgumentError, match=r"tiers=\[ckpt.tiers.Tier"):
            mgr.prefetch(1)
    with ckpt.sync.CheckpointManager(
        tmp_path / "root", tiers=[fast, Tier(tmp_path / "disk")]
    ) as mgr:
        with pytest.raises(StepNotFoundError, match="have steps 1"):
            mgr.prefetch(2)
        with pytest.raises(InvalidArgumentError):
            mgr.prefetch(-1)
        mgr.snapshot(3, state_of(3)).result()
        with pytest.raises(StepNotFoundError, match="only a snapshot"):
            mgr.prefetch()
        assert mgr.prefetch(1).path == str(tmp_path / "disk/1")
    with manager(tmp_path / "empty") as mgr, pytest.raises(StepNotFoundError):
        mgr.prefetch()


def test_another_save_in_its_place_is_not_replaced(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "disk") as mgr:
        mgr.save(1, state_of(2)).result()
    shutil.copytree(tmp_path / "disk", tmp_path / "root")
    shutil.rmtree(tmp_path / "root/1")
    in_root(tmp_path, 1)
    with manager(tmp_path) as mgr:
        with pytest.raises(StepExistsError, match="ckpt rm"):
            mgr.prefetch(1)
        assert differences(state_of(1), mgr.restore(1)) == []


def test_a_disk_that_refuses_is_left_as_it_was(tmp_path: Path) -> None:
    """The agent inherits the limit of this process for the size of files."""
    in_root(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
        with manager(tmp_path) as mgr:
            with pytest.raises(StorageError) as caught:
                mgr.prefetch(1)
            assert caught.value.errno == errno.EFBIG
            assert steps_of(tmp_path / "disk") == []
            assert attempts(tmp_path / "disk") == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_an_agent_that_is_killed_is_asked_again(tmp_path: Path) -> None:
    in_root(tmp_path, 1)
    with manager(tmp_path) as mgr:
        mgr.latest_step()
        agent = mgr._service._agent  # type: ignore[attr-defined]
        send = agent._send

        def killed(message: Any) -> bool:
            if isinstance(message, Call):
                agent._send = send
                assert agent._process is not None
                agent._process.kill()
                agent._process.wait()
            return bool(send(message))

        agent._send = killed
        assert mgr.prefetch(1).path == str(tmp_path / "disk/1")
    assert steps_of(tmp_path / "disk") == [1]
