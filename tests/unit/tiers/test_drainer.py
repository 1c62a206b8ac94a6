"""The drainer: requests, their order, holds, roots that cannot be reached, the end."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import ckpt
from ckpt import errors
from ckpt._runtime.loop import call_once
from ckpt._steps.pins import pins
from ckpt._tiers.drains import drainer as drainer_module
from ckpt._tiers.drains.drain import DrainResult
from ckpt._tiers.drains.drainer import Drainer, DrainRoute, WholeStepTransfer, draining
from ckpt.storage._resolve import open_root
from tests.support.drained_roots import assert_whole, attempts, cut, made, saved_at, sizes_below
from tests.support.faults import Fail, FaultyFiles, FileOperation

PATIENCE_S = 120


class Drains:
    """A drainer between two disks, what it has told, and a switch of the target."""

    def __init__(self, near: Path, far: Path) -> None:
        self.near, self.far = near, far
        self.told: list[DrainResult] = []
        self.is_down = False
        self.is_met = False

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        return [(each.step, each.outcome) for each in self.told]

    def run(self, body: Callable[[Drainer], Awaitable[None]], **options: Any) -> None:
        def plan(_: FileOperation) -> Fail | None:
            self.is_met = self.is_met or self.is_down
            return Fail(errno.ESTALE) if self.is_down else None

        async def main() -> None:
            route = DrainRoute(open_root(self.near), open_root(self.far))
            with anyio.fail_after(PATIENCE_S):
                async with draining(route, self.told.append, **options) as drainer:
                    await body(drainer)
            assert await held(route) == set()

        with FaultyFiles(self.far, plan, sync=False):
            call_once(main)


async def held(route: DrainRoute) -> set[int]:
    """The steps of the source that have leases."""
    return {
        step
        for step, found in (await pins(route.source)).items()
        if any(pin.seconds is not None for pin in found)
    }


@pytest.fixture
def drains(tmp_path: Path) -> Drains:
    return Drains(Path(made(tmp_path / "near", 1, 2, 3, 4)), tmp_path / "far")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainer_module, "pause_after", lambda failures: 0.001)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110
        await anyio.sleep(0.001)


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(
        text in record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    )


def test_all_that_is_asked_for_is_drained(drains: Drains) -> None:
    async def body(drainer: Drainer) -> None:
        for step in (1, 3, 2):
            assert await drainer.request(step)
        assert await drainer.finish() == []
        # Once more: they are there, and nothing is copied.
        assert await drainer.request(3)
        assert await drainer.finish() == []

    drains.run(body)
    assert sorted(drains.outcomes[:3]) == [(1, "copied"), (2, "copied"), (3, "copied")]
    assert drains.outcomes[3:] == [(3, "there")]
    assert all(each.nbytes > 4_000_000 and each.seconds > 0 for each in drains.told[:3])
    assert_whole(drains.far, 1, 2, 3)


async def _all(drainer: Drainer, *steps: int) -> None:
    for step in steps:
        await drainer.request(step)


def test_the_newest_is_next(drains: Drains, no_pauses: None) -> None:
    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await _all(drainer, 2, 4, 1, 3)
        assert drainer.left == [4, 3, 2, 1]
        await until(lambda: drains.is_met)
        drains.is_down = False
        assert await drainer.finish() == []

    drains.run(body)
    # The first one to be tried while the target was down has failed, and is behind the others.
    done = [step for step, _ in drains.outcomes]
    late = next((n for n in range(1, 4) if done[n] > done[n - 1]), None)
    assert sorted(done) == [1, 2, 3, 4]
    assert late is None or sorted(done[late:], reverse=True) == done[late:]


class Doors(WholeStepTransfer):
    """Copies each step once the next door is open."""

    doors: Iterator[anyio.Event]
    met: anyio.Event

    async def drain(self, step: int) -> DrainResult:
        door = next(self.doors)
        self.met.set()
        await door.wait()
        return await super().drain(step)


def test_a_step_that_is_saved_anew_while_it_is_copied_is_copied_once_more(drains: Drains) -> None:
    first, second = doors = anyio.Event(), anyio.Event()
    Doors.doors, Doors.met = iter(doors), anyio.Event()

    async def body(drainer: Drainer) -> None:
        await drainer.request(4)
        await Doors.met.wait()
        async with ckpt.CheckpointManager(drains.near) as mgr:
            await mgr.save(4, {"w": 1}, if_exists="replace", durable=True)
        await drainer.request(4)
        first.set()
        await until(lambda: len(drains.told) == 1)
        # It waits again, so nobody may delete it.
        assert await held(DrainRoute(open_root(drains.near), open_root(drains.far))) == {4}
        second.set()
        assert await drainer.finish() == []

    drains.run(body, strategy=Doors)
    assert [each.step for each in drains.told] == [4, 4]
    assert ckpt.sync.load(drains.far / "4") == {"w": 1}


def test_a_save_that_is_asked_for_twice_is_drained_once(drains: Drains) -> None:
    door = anyio.Event()
    Doors.doors, Doors.met = iter([door]), anyio.Event()

    async def body(drainer: Drainer) -> None:
        await drainer.request(4, "the save")
        await Doors.met.wait()
        assert await drainer.request(4, "the save")
        door.set()
        assert await drainer.finish() == []

    drains.run(body, strategy=Doors)
    assert drains.outcomes == [(4, "copied")]


def test_an_outcome_tells_which_save_it_is_about(drains: Drains) -> None:
    """Who has asked may have saved the step anew meanwhile."""

    async def body(drainer: Drainer) -> None:
        await drainer.request(3, "asked")
        await drainer.finish()
        shutil.rmtree(drains.near / "4")
        assert not await drainer.request(4, "gone")

    drains.run(body)
    (copied, gone) = drains.told
    assert copied.save == saved_at(drains.far / "3")
    assert (gone.outcome, gone.save) == ("deleted", "gone")


def test_too_many_steps_are_given_up_but_not_those_that_are_pinned(drains: Drains) -> None:
    with ckpt.sync.CheckpointManager(drains.near) as mgr:
        mgr.pin(1, "paper")

    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await _all(drainer, 1, 2, 3, 4)
        # Once the one that was tried first waits again, there is one more.
        await until(lambda: len(drains.told) == 2)
        assert drainer.left == [4, 1]
        drains.is_down = False
        assert await drainer.finish() == []

    drains.run(body, most_waiting=2)
    assert drains.outcomes[:2] == [(2, "given up"), (3, "given up")]
    assert sorted(drains.outcomes[2:]) == [(1, "copied"), (4, "copied")]
    assert all("too many newer steps wait" in (each.reason or "") for each in drains.told[:2])


def test_a_root_that_is_away_is_tried_again_and_that_is_said_twice(
    drains: Drains, no_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await _all(drainer, 1, 2)
        await until(lambda: drainer._failures >= 5)
        assert await drainer.finish(seconds=0) == [2, 1]
        assert drains.told == []
        drains.is_down = False
        assert await drainer.finish() == []

    drains.run(body)
    assert sorted(drains.outcomes) == [(1, "copied"), (2, "copied")]
    assert warnings(caplog, "steps cannot be copied from") == 1
    assert warnings(caplog, "steps can be copied from") == 1
    assert_whole(drains.far, 1, 2)
    assert attempts(drains.far) == []


def test_finish_does_not_wait_for_a_pause(drains: Drains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainer_module, "pause_after", lambda failures: 2.0 * PATIENCE_S)

    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await drainer.request(1)
        await until(lambda: drainer._failures > 0)
        drains.is_down = False
        assert await drainer.finish() == []

    drains.run(body)
    assert drains.outcomes == [(1, "copied")]


def test_a_step_that_waits_is_kept_from_retention(drains: Drains) -> None:
    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await _all(drainer, 1, 2)

        def tidy() -> list[int]:
            with ckpt.sync.CheckpointManager(drains.near, keep=ckpt.keep.Latest(1)) as mgr:
                mgr.save(5, {"w": 1}).result()
                mgr.wait_until_finished()
                return mgr.all_steps()

        assert await anyio.to_thread.run_sync(tidy) == [1, 2, 5]
        drains.is_down = False
        assert await drainer.finish() == []

    drains.run(body)
    with ckpt.sync.CheckpointManager(drains.near, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(6, {"w": 1}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [6]
    assert_whole(drains.far, 1, 2)


def test_the_hold_is_renewed_while_a_step_waits(
    drains: Drains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._tiers.drains.drain._LEASE_SECONDS", 3.0)

    async def body(drainer: Drainer) -> None:
        drains.is_down = True
        await drainer.request(1)
        folder = drains.near / ".ckpt-pins"
        (note,) = os.listdir(folder)
        first = (folder / note).stat().st_mtime_ns
        await until(lambda: (folder / note).stat().st_mtime_ns > first)
        # Somebody removed it, as a deletion does with one that has run out: it is put there again.
        (folder / note).unlink()
        await until(lambda: len(os.listdir(folder)) == 1)
        drains.is_down = False

    drains.run(body)


def test_a_step_is_let_go_before_that_is_told(drains: Drains) -> None:
    """So who hears of it can tidy the root; `finish` waits for both."""

    async def main() -> None:
        route = DrainRoute(open_root(drains.near), open_root(drains.far))
        found: list[tuple[int, list[Path]]] = []

        def told(drained: DrainResult) -> None:
            found.append((drained.step, list((drains.near / ".ckpt-pins").glob("*"))))

        async with draining(route, told) as drainer:
            await _all(drainer, 1)
            assert await drainer.finish(PATIENCE_S) == []
            assert found == [(1, [])]

    call_once(main)


def test_deleted_and_damaged_steps_are_told_once(drains: Drains) -> None:
    for path in (drains.near / "2").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))

    async def body(drainer: Drainer) -> None:
        assert not await drainer.request(9)
        assert await drainer.request(2)
        await drainer.finish()
        drains.is_down = True
        assert await drainer.request(1)
        # By hand, past the hold.
        shutil.rmtree(drains.near / "1")
        drains.is_down = False
        assert await drainer.request(3)
        assert await drainer.finish() == []

    drains.run(body)
    assert sorted(drains.outcomes) == [
        (1, "deleted"), (2, "damaged"), (3, "copied"), (9, "deleted")
    ]  # fmt: skip
    assert all(each.reason for each in drains.told if not each.is_safe)
    assert_whole(drains.far, 3)


def test_leaving_stops_a_drain_and_the_next_one_goes_on(drains: Drains) -> None:
    async def leave(drainer: Drainer) -> None:
        await drainer.request(4)
        await until(lambda: sum(sizes_below(drains.far).values()) > 3_000_000)

    # One piece a moment: it is not done before it is stopped.
    drains.run(leave, bytes_per_second=20e6)
    assert drains.told == []
    with ckpt.sync.CheckpointManager(drains.far, mode="r") as mgr:
        assert mgr.all_steps() == []
    assert len(attempts(drains.far)) == 1

    async def go_on(drainer: Drainer) -> None:
        await drainer.request(4)
        assert await drainer.finish() == []
        # What is left over is swept once nothing waits.
        await until(lambda: not attempts(drains.far))

    drains.run(go_on)
    assert drains.outcomes == [(4, "copied")]
    assert drains.told[0].nbytes < 4_000_000
    assert_whole(drains.far, 4)


def test_what_a_dead_drain_left_is_swept_though_nothing_is_to_be_drained(drains: Drains) -> None:
    cut(drains.near, drains.far, 1, 3_000_000)
    assert len(attempts(drains.far)) == 1

    async def body(drainer: Drainer) -> None:
        await anyio.lowlevel.checkpoint()
        assert len(attempts(drains.far)) == 1
        assert await drainer.finish() == []

    drains.run(body)
    assert attempts(drains.far) == []


def test_an_error_of_who_is_told_is_raised_as_it_is(drains: Drains) -> None:
    async def main() -> None:
        route = DrainRoute(open_root(drains.near), open_root(drains.far))

        def told(_: DrainResult) -> None:
            raise KeyError("told")

        async with draining(route, told) as drainer:
            await drainer.request(1)
            await anyio.sleep_forever()

    with pytest.raises(KeyError, match="told"):
        call_once(main)


def test_a_root_is_not_drained_to_itself(drains: Drains) -> None:
    async def main() -> None:
        route = DrainRoute(open_root(drains.near), open_root(drains.near))
        async with draining(route, drains.told.append):
            pass

    with pytest.raises(errors.InvalidArgumentError, match="cannot be copied to itself"):
        call_once(main)
