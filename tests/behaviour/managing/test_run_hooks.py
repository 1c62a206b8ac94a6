"""The hooks of extensions beside the saves and restores of a run: what is called, when, where."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._steps.run_hooks import RunHooks
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CorruptCheckpointError,
    InvalidArgumentError,
    StepNotFoundError,
    TargetMismatchError,
)
from ckpt.tiers import SharedMemory, Tier
from tests.support.simulated_job import FAR, closed, managers, saved, together
from tests.support.snapshots import shared_memory

STATE = {"w": np.arange(6.0), "step": 3}


class Refused(CheckpointError):
    pass


def place(root: Any) -> str:
    return os.path.basename(root.storage.location)


class Noting(RunHooks):
    """Notes each call with the name of the place, and raises where that is asked for."""

    def __init__(self, raising: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raising = raising
        self.held: anyio.Event | None = None

    def _note(self, name: str, *more: Any) -> None:
        self.calls.append((name, *more))
        if name == self.raising:
            raise Refused(f"{name} is refused")

    async def opening(self, root: Any) -> None:
        self._note("opening", place(root))

    async def before_save(self, step: int) -> None:
        self._note("before_save", step)

    async def before_restore(self, root: Any, manifest: Any) -> None:
        if self.held is not None:
            await self.held.wait()
        self._note("before_restore", place(root), manifest.step)

    async def restored(self, root: Any, manifest: Any) -> None:
        self._note("restored", place(root), manifest.step)

    def committed(self, info: Any, save: str, commit: Any) -> bool:
        self.calls.append(("committed", Path(info.path).parent.name, info.step))
        return True


@dataclass(frozen=True)
class Noted:
    """An extension of these hooks, with a note on each step."""

    hooks: Noting = field(default_factory=Noting)

    def _join(self, engine: Any) -> None:
        engine.hooks = (*engine.hooks, lambda _: self.hooks)


def manager(root: Path, hooks: Noting, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, extensions=[Noted(hooks)], **options)


def spoil(step_dir: Path) -> None:
    for path in step_dir.rglob("*"):
        if path.is_file() and path.name != "ckpt.json":
            path.write_bytes(bytes(len(path.read_bytes())))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in (1, 2):
            mgr.save(step, STATE)
    return tmp_path / "run"


def test_a_run_calls_them_in_order(tmp_path: Path) -> None:
    hooks = Noting()
    with manager(tmp_path / "run", hooks) as mgr:
        assert hooks.calls == [("opening", "run")]
        assert mgr.resume(STATE)[0] == 0
        mgr.save(1, STATE).result()
        mgr.restore()
        mgr.restore(1)
    assert hooks.calls[1:] == [
        ("before_save", 1),
        ("committed", "run", 1),
        *[("before_restore", "run", 1), ("restored", "run", 1)] * 2,
    ]


def test_a_manager_that_is_not_entered_opens_with_its_first_save(root: Path) -> None:
    hooks = Noting()
    mgr = manager(root, hooks)
    assert mgr.restore() is not None
    assert [each[0] for each in hooks.calls] == ["before_restore", "restored"]
    mgr.save(3, STATE).result()
    mgr.save(4, STATE).result()
    assert [each[0] for each in hooks.calls].count("opening") == 1
    mgr.close()


def test_readers_call_them_too(root: Path) -> None:
    hooks = Noting()
    with manager(root, hooks, mode="r") as mgr:
        assert mgr.resume(STATE)[0] == 3
        mgr.metadata(1)
        mgr.verify(1)
    calls = [("opening", "run"), ("before_restore", "run", 2), ("restored", "run", 2)]
    assert hooks.calls == calls


def test_another_run_that_this_one_begins_from_is_none_of_theirs(
    tmp_path: Path, root: Path
) -> None:
    hooks = Noting()
    with manager(tmp_path / "new", hooks) as mgr:
        assert mgr.resume(STATE, source=root / "2")[0] == 0
    assert hooks.calls == [("opening", "new")]


def test_a_hook_that_refuses_ends_the_restore_before_anything_is_read(root: Path) -> None:
    hooks = Noting("before_restore")
    spoil(root / "2")
    with manager(root, hooks) as mgr:
        for call in (mgr.restore, lambda: mgr.resume(STATE), lambda: mgr.restore(2)):
            # With a fallback, too: the step is not damaged.
            with pytest.raises(Refused):
                call()
    assert [each[0] for each in hooks.calls] == ["opening", *["before_restore"] * 3]


def test_an_opening_that_fails_is_tried_again(root: Path) -> None:
    hooks = Noting("opening")
    mgr = manager(root, hooks)
    with pytest.raises(Refused), mgr:
        pytest.fail("was entered")
    hooks.raising = ""
    with manager(root, hooks) as mgr:
        assert mgr.latest_step() == 2
    assert hooks.calls == [("opening", "run")] * 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda mgr: mgr.restore(7), StepNotFoundError),
        (lambda mgr: mgr.restore(2, {"v": ...}), TargetMismatchError),
    ],
)
def test_a_restore_that_fails_restored_nothing(
    root: Path, call: Callable[[Any], Any], error: type[Exception]
) -> None:
    hooks = Noting()
    with manager(root, hooks) as mgr, pytest.raises(error):
        call(mgr)
    assert "restored" not in [each[0] for each in hooks.calls]


def test_steps_that_are_passed_over_are_not_restored(root: Path) -> None:
    spoil(root / "2")
    hooks = Noting()
    with manager(root, hooks) as mgr:
        with pytest.raises(CorruptCheckpointError):
            mgr.restore()
        hooks.calls.clear()
        assert mgr.resume(STATE)[0] == 2
    calls = [("before_restore", 2), ("before_restore", 1), ("restored", 1)]
    assert [(name, *more) for name, _, *more in hooks.calls] == calls


def test_a_cancelled_restore_ends_in_the_hook(root: Path) -> None:
    hooks = Noting()

    async def run() -> None:
        async with ckpt.CheckpointManager(root, extensions=[Noted(hooks)]) as mgr:
            hooks.held = anyio.Event()
            with anyio.move_on_after(0.2) as scope:
                await mgr.restore()
            assert scope.cancelled_caught
            hooks.held = None
            assert (await mgr.restore())["step"] == 3

    asyncio.run(run())
    assert [each[0] for each in hooks.calls] == ["opening", "before_restore", "restored"]


def test_a_save_that_is_cancelled_is_not_committed(root: Path) -> None:
    hooks = Noting()
    with manager(root, hooks) as mgr:
        commit = mgr.save(3, STATE)
        if commit.cancel():
            with pytest.raises(CommitCancelledError):
                commit.result()
    names = [each[0] for each in hooks.calls]
    assert names[:2] == ["opening", "before_save"]
    assert ("committed" in names) == (3 in ckpt.sync.CheckpointManager(root, mode="r").all_steps())


def test_each_tier_is_a_place_of_its_own(tmp_path: Path) -> None:
    hooks = Noting()
    with manager(tmp_path / "root", hooks, tiers=[Tier(tmp_path / "disk")]) as mgr:
        mgr.save(1, STATE).in_root.result(60)
        mgr.restore()
    assert hooks.calls == [
        ("opening", "disk"),
        ("opening", "root"),
        ("before_save", 1),
        ("committed", "disk", 1),
        ("before_restore", "disk", 1),
        ("restored", "disk", 1),
    ]


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def test_memory_is_a_place_of_its_own(tmp_path: Path, memory: Path) -> None:
    hooks = Noting()
    tiers = [SharedMemory(directory=str(memory), flush=False)]
    with manager(tmp_path / "run", hooks, tiers=tiers) as mgr:
        mgr.snapshot(1, STATE).result()
        mgr.restore()
    at_memory = [each for each in hooks.calls if each[1] != "run"]
    names = ["opening", "before_save", "committed", "before_restore", "restored"]
    assert [each[0] for each in at_memory] == names


@pytest.mark.parametrize("own_disks", [False, True])
def test_all_processes_of_a_job_call_them(tmp_path: Path, own_disks: bool) -> None:
    every = [Noting(), Noting()]
    each = [{"extensions": [Noted(hooks)]} for hooks in every]
    mgrs = managers(tmp_path, each=each, own_disks=own_disks)
    together(*(mgr.__enter__ for mgr in mgrs))
    saved(mgrs, 1, {"a": np.arange(4)})
    together(*(mgr.restore for mgr in mgrs))
    closed(mgrs)
    names = ["opening", "before_save", "committed", "before_restore", "restored"]
    assert [[call[0] for call in hooks.calls] for hooks in every] == [names, names]


@pytest.mark.parametrize("name", ["opening", "before_save", "before_restore"])
@pytest.mark.parametrize("refusing", [0, 1])
def test_what_one_process_refuses_fails_in_all(tmp_path: Path, name: str, refusing: int) -> None:
    ckpt.sync.save(tmp_path / "1", {"a": np.arange(4)})
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"a": np.arange(4)}, if_exists="replace")
    each = [{"extensions": [Noted(Noting(name if it == refusing else ""))]} for it in range(2)]
    mgrs = managers(tmp_path, each=each, seconds=FAR)

    def run(mgr: Any) -> Any:
        with mgr:
            if name == "before_restore":
                return mgr.restore()
            return mgr.save(2, {"a": np.arange(4)}).result()

    found = together(*(lambda mgr=mgr: run(mgr) for mgr in mgrs))
    assert [isinstance(error, CheckpointError) for error in found] == [True, True]
    assert f"{name} is refused" in str(found[refusing])
    assert f"{name} is refused" in str(found[1 - refusing])


@pytest.mark.parametrize(
    "given", [Noted(), [Noted], [Noted(), 3], "signs", [ckpt.extensions.VitalSigns]]
)
def test_other_things_are_no_extensions(tmp_path: Path, given: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a list of ckpt\.extensions"):
        ckpt.sync.CheckpointManager(tmp_path, extensions=given)


def test_an_extension_is_given_once(tmp_path: Path) -> None:
    given: Sequence[Any] = [Noted(), ckpt.extensions.VitalSigns(), Noted()]
    with pytest.raises(InvalidArgumentError, match="Noted at most once"):
        ckpt.sync.CheckpointManager(tmp_path, extensions=given)
