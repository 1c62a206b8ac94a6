"""Joins: parts of steps meet in a root, whatever agents choose, fail at, and whoever is gone."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import ckpt
from ckpt._conversion.copies.step_copy import at_once
from ckpt._runtime.loop import call_once
from ckpt._tiers.drains import drainer as drainer_module
from ckpt._tiers.drains import join_notes
from ckpt._tiers.drains.drain import DrainBacklog, DrainResult
from ckpt._tiers.drains.drainer import DrainRoute, draining
from ckpt._tiers.drains.follower import Follower
from ckpt._tiers.drains.join_notes import PARTS, STATES, JoinNotes, save_at
from ckpt._tiers.drains.leader import transfer_of
from ckpt.storage._manifests import read_manifest
from ckpt.storage._resolve import open_root
from tests.support.drained_roots import attempts
from tests.support.faults import Fail, FaultyFiles, FileOperation
from tests.support.joined_roots import (
    Agents,
    assert_joined,
    made_parts,
    no_notes,
    notes_of,
    quick_notes,
)
from tests.support.manifests import document_of, rewrite

__all__ = ["quick_notes"]

pytestmark = pytest.mark.usefixtures("quick_notes")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    made_parts(root, 3, 1, 2, 3)
    return root


@pytest.fixture(params=["disk", "memory"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path / "far" if request.param == "disk" else f"memory://{uuid.uuid4().hex}/far"


@pytest.fixture
def agents(saved: Path, tmp_path: Path, far: Any) -> Agents:
    shutil.copytree(saved, tmp_path / "near")
    return Agents([tmp_path / "near" / str(process) for process in range(3)], far)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainer_module, "pause_after", lambda failures: 0.001)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():  # noqa: ASYNC110
        await anyio.sleep(0.001)


def written(far: Path) -> int:
    """The bytes of the arrays and items in a root, some of which may go at this moment."""
    total = 0
    for path in far.glob("3.*/**/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def damage(part: Path, step: int) -> None:
    file = next(path for path in (part / str(step)).rglob("*.bin"))
    file.write_bytes(bytes(file.stat().st_size))


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(
        text in record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    )


def test_the_parts_become_one_step_whatever_is_asked_for_first(agents: Agents) -> None:
    with ckpt.sync.CheckpointManager(agents.parts[0]) as mgr:
        mgr.pin(2, "paper")
    agents.all_drain(1, 2, 3)
    for outcomes in agents.outcomes:
        assert sorted(outcomes) == [(1, "copied"), (2, "copied"), (3, "copied")]
    assert all(each.nbytes >= 3_200_000 for told in agents.told for each in told)
    assert_joined(agents.far, agents.parts, 1, 2, 3)
    no_notes(agents.far)
    with ckpt.sync.CheckpointManager(agents.far, mode="r") as mgr:
        assert [each.name for each in mgr.pins()[2]] == ["paper"]


@pytest.mark.parametrize("far", ["disk"], indirect=True)
def test_notes_have_the_names_of_the_format(agents: Agents, far: Path) -> None:
    with FaultyFiles(far, sync=False) as files:
        agents.all_drain(1)
    names = {path for each in files.operations for path in (each.path, each.target or "")}
    (save,) = {name[12:-5] for name in names if re.fullmatch(r"\.ckpt-joins/[^/]+\.lead", name)}
    said = [re.fullmatch(rf"\.ckpt-join-parts/{save}\.\w+\.(\d)\..+", name) for name in names]
    # The agent of part 0 leads here, and says nothing to itself.
    assert {each[1] for each in said if each} == {"1", "2"}


def test_a_step_that_is_there_is_passed_over(agents: Agents) -> None:
    agents.all_drain(2)
    agents.all_drain(2, 1)
    for told in agents.told:
        again = next(each for each in told[1:] if each.step == 2)
        assert (again.outcome, again.nbytes) in (("there", 0), ("copied", 0))
    assert_joined(agents.far, agents.parts, 1, 2)


def test_another_step_of_the_number_stays(agents: Agents) -> None:
    with ckpt.sync.CheckpointManager(agents.far) as mgr:
        mgr.save(1, {"mine": np.ones(3)}).result()
    agents.all_drain(1)
    assert agents.outcomes == [[(1, "blocked")]] * 3
    with ckpt.sync.CheckpointManager(agents.far, mode="r") as mgr:
        assert list(mgr.restore(1)) == ["mine"]


def test_a_run_that_went_back_goes_on_from_what_was_joined(agents: Agents) -> None:
    """The root still has a greater step of before, which the joined one leaves behind."""
    with ckpt.sync.CheckpointManager(agents.far) as mgr:
        mgr.save(7, {"mine": np.ones(3)}).result()
    before = call_once(lambda: read_manifest(open_root(agents.far), "7"))
    for part in agents.parts:
        rewrite(part / "3", document_of(part / "3") | {"left_behind": [before.created_ns]})
    agents.all_drain(3)
    with ckpt.sync.CheckpointManager(agents.far, mode="r") as mgr:
        assert mgr.all_steps() == [3, 7]
        assert mgr.latest_step() == 3


@pytest.mark.parametrize(
    ("process", "how"),
    [(0, "damaged"), (0, "deleted"), (1, "damaged"), (1, "deleted"), (1, "manifest")],
)
def test_a_part_that_will_not_come_ends_the_step_everywhere(
    agents: Agents, process: int, how: str
) -> None:
    part = agents.parts[process]

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            drainers = [await stack.enter_async_context(agents.agent(n)) for n in range(3)]
            if how == "damaged":
                damage(part, 2)
            elif how == "manifest":
                path = part / "2" / "ckpt.json"
                path.write_bytes(path.read_bytes()[:-40])
            await drainers[process].request(2)
            if how == "deleted":
                shutil.rmtree(part / "2")
            for n in range(3):
                if n != process:
                    await drainers[n].request(2)
                await drainers[n].request(3)
            for drainer in drainers:
                assert await drainer.finish() == []

    agents.run(main)
    outcome = "deleted" if how == "deleted" else "damaged"
    for n, told in enumerate(agents.told):
        ended = {each.step: each for each in told}
        assert ended[3].outcome == "copied"
        assert ended[2].outcome == outcome
        reason = ended[2].reason or ""
        assert str(part) in reason
        if n != process and process:
            assert f"process {process} of 3: " in reason
    assert_joined(agents.far, agents.parts, 3)


def test_too_many_steps_given_up_by_one_are_given_up_by_all(agents: Agents) -> None:
    async def main() -> None:
        async with (
            agents.agent(0) as leader,
            agents.agent(2) as other,
            agents.agent(1, most_waiting=2) as follower,
        ):
            for step in (1, 2, 3):
                await follower.request(step)
            assert follower.left == [3, 2]
            for step in (1, 2, 3):
                await leader.request(step)
                await other.request(step)
            for each in (leader, other, follower):
                assert await each.finish() == []

    agents.run(main)
    for told in agents.told:
        ended = {each.step: each for each in told}
        assert [ended[step].outcome for step in (1, 2, 3)] == ["given up", "copied", "copied"]
        assert "too many newer steps wait" in (ended[1].reason or "")
    last = next(each for each in agents.told[2] if each.step == 1)
    assert "process 1 of 3: " in (last.reason or "")
    assert_joined(agents.far, agents.parts, 2, 3)


def test_steps_given_up_by_the_leader_are_given_up_by_all(agents: Agents) -> None:
    async def main() -> None:
        async with agents.agent(0, most_waiting=1) as leader, agents.agent(1) as other:
            await other.request(1)
            await other.request(2)
            for step in (1, 2, 3):
                await leader.request(step)
            await until(lambda: bool(agents.told[1]))

    agents.run(main)
    # One is under way and one may wait; which one is given up depends on how far the leader was.
    assert agents.outcomes[1] == agents.outcomes[0]
    assert [outcome for _, outcome in agents.outcomes[1]] == ["given up"]


def test_a_follower_that_says_nothing_is_named_and_others_wait_no_longer(
    agents: Agents,
    no_pauses: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(join_notes, "SILENT_SECONDS", 0.3)

    async def main() -> None:
        async with agents.agent(0) as leader, agents.agent(1) as first:
            for each in (leader, first):
                await each.request(3)
            await until(lambda: warnings(caplog, "process 2 of 3 said nothing") == 1)
            for each in (leader, first):
                await each.request(2)
            async with agents.agent(2) as second:
                # It has the older one, which is as new to the leader as the other one was.
                await second.request(2)
                assert await second.finish() == []
                assert leader.left == [3]
                # It comes late.
                await second.request(3)
                for each in (leader, first, second):
                    assert await each.finish() == []

    agents.run(main)
    assert warnings(caplog, "process 2 of 3 said nothing") == 1
    assert_joined(agents.far, agents.parts, 2, 3)
    no_notes(agents.far)


def test_a_leader_that_says_nothing_is_named(
    agents: Agents,
    no_pauses: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(join_notes, "SILENT_SECONDS", 0.3)

    async def main() -> None:
        async with agents.agent(1) as follower:
            await follower.request(3)
            await until(lambda: warnings(caplog, "process 0 of 3") == 1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agents.drain, 0, 3)
                tasks.start_soon(agents.drain, 2, 3)
                assert await follower.finish() == []

    agents.run(main)
    assert_joined(agents.far, agents.parts, 3)


# One piece a moment: a part takes a second, or six.
SLOW = {"bytes_per_second": 4e6}
SLOWER = {"bytes_per_second": 5e5}


@pytest.mark.parametrize("process", [0, 1])
def test_an_agent_that_dies_while_it_copies_is_followed_by_another(
    agents: Agents, process: int, no_pauses: None
) -> None:
    is_disk = isinstance(agents.far, Path)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for other in {0, 1, 2} - {process}:
                tasks.start_soon(agents.drain, other, 3)
            async with agents.agent(process, **SLOWER) as drainer:
                await drainer.request(3)
                if is_disk:
                    # The other two are done, and some of this one.
                    await until(lambda: written(agents.far) > 8_900_000)
                else:
                    await anyio.sleep(0.6)
            await agents.drain(process, 3)

    agents.run(main)
    assert agents.outcomes == [[(3, "copied")]] * 3
    if is_disk:
        # Whole files were taken over.
        assert agents.told[process][0].nbytes < 3_200_000
    assert_joined(agents.far, agents.parts, 3)
    no_notes(agents.far)
    if is_disk:
        assert attempts(agents.far) == []


def test_two_agents_of_each_part_do_not_disturb_each_other(agents: Agents) -> None:
    """Those of a run that has ended copy what is left while those of the next one begin."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for process in [0, 1, 2] * 2:
                tasks.start_soon(agents.drain, process, 2, 3)

    agents.run(main)
    for told in agents.told:
        assert sorted(each.step for each in told) == [2, 2, 3, 3]
        assert all(each.is_safe for each in told)
    assert_joined(agents.far, agents.parts, 2, 3)


def test_an_end_that_was_missed_is_found_in_the_root(agents: Agents) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for process in range(3):
                tasks.start_soon(agents.drain, process, 3)
        storage = open_root(agents.far)
        for name in (await notes_of(agents.far))[0]:
            await storage.drop_note(f"{STATES}/{name}")
        await agents.drain(1, 3)

    agents.run(main)
    assert agents.outcomes[1] == [(3, "copied"), (3, "there")]


def test_notes_that_no_agent_needs_are_swept(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        storage = open_root(agents.far)
        await storage.prepare()
        await storage.put_note(f"{STATES}/old.lead", b"{}", replace=True)
        for name in ("dead.attempt.1.alive", "dead.attempt.2.done", "other.-.1.refused", "what"):
            await storage.put_note(f"{PARTS}/{name}", b"{}", replace=True)
        notes = join_notes.JoinNotes(storage)
        await notes.sweep()
        # A refusal may come before the lead, and what is not ours stays.
        assert await notes_of(agents.far) == (["old.lead"], ["other.-.1.refused", "what"])
        monkeypatch.setattr(join_notes, "KEPT_SECONDS", -1)
        await notes.sweep()
        assert await notes_of(agents.far) == ([], ["what"])

    agents.run(main)


def test_a_root_that_is_away_is_tried_again(saved: Path, tmp_path: Path, no_pauses: None) -> None:
    """For all agents, at any moment, several times over."""
    agents = Agents([saved / str(each) for each in range(3)], tmp_path / "far")
    is_down, met = False, 0

    def plan(operation: FileOperation) -> Fail | None:
        nonlocal met
        if not is_down:
            return None
        met += 1
        return Fail(errno.ESTALE)

    async def main() -> None:
        nonlocal is_down
        async with anyio.create_task_group() as tasks:
            for each in range(3):
                tasks.start_soon(partial(agents.drain, each, 2, 3, **SLOW))
            for pause in (0.05, 0.3, 0.4, 0.5):
                await anyio.sleep(pause)
                is_down = True
                await anyio.sleep(0.03)
                is_down = False

    with FaultyFiles(tmp_path / "far", plan, sync=False):
        agents.run(main)
    assert met
    for outcomes in agents.outcomes:
        assert sorted(step for step, _ in outcomes) == [2, 3]
        assert all(each.is_safe for told in agents.told for each in told)
    assert_joined(agents.far, agents.parts, 2, 3)


def test_agents_that_wait_for_nothing_ask_the_root_for_nothing(saved: Path, tmp_path: Path) -> None:
    agents = Agents([saved / str(each) for each in range(3)], tmp_path / "far")

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            drainers = [await stack.enter_async_context(agents.agent(n)) for n in range(3)]
            for drainer in drainers:
                await drainer.request(1)
            for drainer in drainers:
                assert await drainer.finish() == []
            with FaultyFiles(tmp_path / "far", sync=False) as files:
                found = -1
                # What they had begun may go on; no pause between looks is nearly as long as this.
                while found < len(files.operations):
                    found = len(files.operations)
                    await anyio.sleep(0.5)

    agents.run(main)


@pytest.mark.parametrize("process", [0, 1])
def test_a_part_that_is_gone_before_its_agent_hears_of_it(agents: Agents, process: int) -> None:
    """A disk was replaced, say: no other agent waits for it."""
    shutil.rmtree(agents.parts[process] / "3")

    async def drain(each: int) -> None:
        save = await save_at(open_root(agents.parts[2]), "3")
        async with agents.agent(each) as drainer:
            await drainer.request(3, save)
            await drainer.request(2)
            assert await drainer.finish() == []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for each in range(3):
                tasks.start_soon(drain, each)

    agents.run(main)
    for outcomes in agents.outcomes:
        assert sorted(outcomes) == [(2, "copied"), (3, "deleted")]
    reasons = [each.reason or "" for told in agents.told for each in told if each.step == 3]
    assert all(f"{agents.parts[process]}/3 is not there" in each for each in reasons)
    assert_joined(agents.far, agents.parts, 2)


def test_items_that_were_deleted_from_all_parts_are_not_in_the_step(agents: Agents) -> None:
    for part in agents.parts:
        with ckpt.sync.CheckpointManager(part) as mgr:
            mgr.delete(3, item="reader_1")
    agents.all_drain(3)
    assert agents.outcomes == [[(3, "copied")]] * 3
    with ckpt.sync.CheckpointManager(agents.far, mode="r") as mgr:
        assert mgr.verify(3, deep=True).ok
        assert "reader_1" not in mgr.metadata(3).items
        assert [each.item for each in mgr.metadata(3).info.dropped] == ["reader_1"]


def test_an_end_is_noted_though_the_leader_is_left_at_once(agents: Agents) -> None:
    async def lead() -> None:
        with anyio.CancelScope() as scope:
            route = DrainRoute(open_root(agents.parts[0]), open_root(agents.far))

            def told(drained: DrainResult) -> None:
                scope.cancel()

            async with draining(route, told, strategy=transfer_of(0, 3)) as drainer:
                await drainer.request(3)
                await anyio.sleep_forever()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lead)
            for each in (1, 2):
                tasks.start_soon(agents.drain, each, 3)

    agents.run(main)
    assert agents.outcomes[1:] == [[(3, "copied")]] * 2
    no_notes(agents.far)


def test_a_step_that_the_root_has_lost_is_joined_again(agents: Agents) -> None:
    """Though it is noted that it was copied, and followers look before it is led anew."""
    agents.all_drain(3)

    async def main() -> None:
        storage = open_root(agents.far)
        await storage.remove("3")
        async with anyio.create_task_group() as tasks:
            for each in (1, 2):
                tasks.start_soon(agents.drain, each, 3)
            await anyio.sleep(0.1)
            assert [len(told) for told in agents.told[1:]] == [1, 1]
            tasks.start_soon(agents.drain, 0, 3)

    agents.run(main)
    assert_joined(agents.far, agents.parts, 3)


def follower_of(agents: Agents) -> Follower:
    storages = open_root(agents.parts[1]), open_root(agents.far)
    return Follower(DrainRoute(*storages), at_once, 1, 3)


def test_the_result_of_an_old_save_is_not_that_of_a_new_one(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is saved anew while a follower reads what has become of the old save."""
    follower, backlog = follower_of(agents), DrainBacklog(16)
    results = iter([DrainResult(4, "deleted", reason="it is gone"), DrainResult(4, "copied")])

    async def look(step: int, *, in_root: bool) -> DrainResult:
        found = next(results)
        if not found.is_safe:
            await follower.add(4, "new")
        return found

    async def main() -> DrainResult | None:
        await follower.add(4, "old")
        backlog.add(4)
        assert await follower.next(backlog) == 4
        return await follower.drain(4)

    monkeypatch.setattr(follower, "_look", look)
    assert call_once(main) == DrainResult(4, "copied", save="new")


def test_a_leader_hears_that_an_old_save_is_gone_though_a_new_one_waits(agents: Agents) -> None:
    """It would wait for the part until it takes the follower for dead."""
    follower = follower_of(agents)

    async def main() -> list[str]:
        await open_root(agents.far).prepare()
        await follower.add(4, "new")
        await follower.ended(DrainResult(4, "deleted", reason="it is gone", save="old"))
        return [note.kind for note in await JoinNotes(open_root(agents.far)).parts("old")]

    assert call_once(main) == ["refused"]
