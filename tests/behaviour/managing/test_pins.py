"""Pinned steps are not deleted, and no order of events lets an evaluator lose what it holds."""

from __future__ import annotations

import contextvars
import errno
import itertools
import json
import os
import platform
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from ckpt._settings import Timeouts
from ckpt._steps import pins as pins_module
from ckpt._steps.pins import (
    check_pin_name,
    deletion_of,
    forget_expired,
    hold,
    pin,
    pins,
    refuse_pinned,
    unpin,
)
from ckpt.errors import InvalidArgumentError, StepNotFoundError, StepPinnedError, StorageError
from ckpt.storage._base import StorageTraits
from ckpt.storage._local.storage import LocalStorage

T = TypeVar("T")
FOLDER = ".ckpt-pins"
STEP = 5


# A root whose every operation is one step of a schedule.


class Died(BaseException):
    """The process ended."""


class Turns:
    """Lets one party at a time do one operation, in the order of a list of choices."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.options: list[int] = []
        self.waiting: dict[str, anyio.Event] = {}
        self.live: set[str] = set()

    async def turn(self, party: str) -> None:
        self.waiting[party] = event = anyio.Event()
        self.go_on()
        await event.wait()

    def end(self, party: str) -> None:
        self.live.discard(party)
        self.go_on()

    def go_on(self) -> None:
        if self.live and self.live == set(self.waiting):
            ready = sorted(self.waiting)
            place = len(self.options)
            choice = self.choices[place] if place < len(self.choices) else 0
            self.options.append(len(ready))
            self.waiting.pop(ready[choice % len(ready)]).set()


PARTY: contextvars.ContextVar[str] = contextvars.ContextVar("PARTY")


class Root:
    """A store in memory; whoever is in `dead_after` dies after so many operations."""

    location = "memory"
    traits = StorageTraits(600.0, 1 << 30, None, shares_files=False, shares_at_once=False)

    def __init__(self, turns: Turns, dead_after: dict[str, int] | None = None) -> None:
        self.turns = turns
        self.dead_after = dict(dead_after or {})
        self.written: dict[str, float] = {}
        self.steps = {STEP}
        self.holding = 0
        self.now = 0.0

    async def turn(self) -> None:
        party = PARTY.get()
        if self.dead_after.get(party) == 0:
            raise Died
        await self.turns.turn(party)
        if party in self.dead_after:
            self.dead_after[party] -= 1

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        await self.turn()
        if name in self.written:
            return False
        self.written[name] = self.now
        return True

    async def read(self, step_dir: str, name: str, limit: int) -> bytes | None:
        return b'{"owner": "somebody"}' if name in self.written else None

    async def notes(self, folder: str) -> dict[str, float]:
        await self.turn()
        return {name.split("/")[1]: self.now - time for name, time in self.written.items()}

    async def touch_note(self, name: str) -> bool:
        await self.turn()
        if name in self.written:
            self.written[name] = self.now
        return name in self.written

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        await self.turn()
        return self.written.pop(name, None) is not None

    async def is_committed(self) -> bool:
        await self.turn()
        return STEP in self.steps

    async def remove(self) -> None:
        await self.turn()
        assert not self.holding, "the step was deleted while somebody held it"
        self.steps.discard(STEP)


async def evaluator(root: Root) -> str:
    async def look() -> bool | None:
        return await root.is_committed() or None

    held = await hold(root, STEP, look)  # type: ignore[arg-type]
    if held is None:
        return "went without"
    assert STEP in root.steps
    root.holding += 1
    for _ in range(2):
        await root.turn()
        assert STEP in root.steps
    root.holding -= 1
    await held[0].drop()
    return "held"


async def pinner(root: Root) -> str:
    try:
        await pin(root, STEP, "best", root.is_committed)  # type: ignore[arg-type]
    except StepNotFoundError:
        return "went without"
    assert STEP in root.steps
    root.holding += 1
    return "held"


async def deleter(root: Root) -> str:
    async with deletion_of(root, STEP) as pinned:  # type: ignore[arg-type]
        if pinned:
            return "left it"
        await root.remove()
    return "deleted"


PARTIES = {"evaluator": evaluator, "pinner": pinner, "deleter": deleter}


async def play(
    names: list[str], choices: list[int], dead_after: dict[str, int]
) -> tuple[Root, dict[str, str], list[int]]:
    """Let the parties play in one order; the outcomes of those that lived, and the choices."""
    turns = Turns(choices)
    root = Root(turns, dead_after)
    outcomes: dict[str, str] = {}

    async def run(name: str) -> None:
        PARTY.set(name)
        try:
            outcomes[name] = await PARTIES[name.split(" ")[0]](root)
        except Died:
            if name.startswith("evaluator"):
                # Who holds a step and dies holds it no more.
                root.holding = 0
        finally:
            turns.end(name)

    turns.live = set(names)
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(run, name)
    return root, outcomes, turns.options


async def all_orders(
    names: list[str], dead_after: dict[str, int] | None = None
) -> list[tuple[Root, dict[str, str]]]:
    """Play every order there is."""
    played = []
    choices: list[int] = []
    while True:
        root, outcomes, options = await play(names, choices, dead_after or {})
        played.append((root, outcomes))
        choices += [0] * (len(options) - len(choices))
        while choices and choices[-1] == options[len(choices) - 1] - 1:
            choices.pop()
        if not choices:
            return played
        choices[-1] += 1


@pytest.fixture(autouse=True)
def _pauses_are_turns(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "schedule" in request.node.name:
        # Who waits for somebody else's operation lets it go on, and looks again.
        monkeypatch.setattr(pins_module, "_PAUSE_SECONDS", 0)
        monkeypatch.setattr(pins_module, "_LOOKS", 3)


def run_schedules(work: Callable[[], Awaitable[T]]) -> T:
    return anyio.run(work)


@pytest.mark.parametrize("who", ["evaluator", "pinner"])
def test_schedules_of_a_deletion_and_a_pin(who: str) -> None:
    played = run_schedules(lambda: all_orders([who, "deleter"]))
    ends = set()
    for root, outcomes in played:
        ends.add(tuple(sorted(outcomes.items())))
        # What the parties are told is what is so.
        assert (outcomes["deleter"] == "deleted") == (STEP not in root.steps)
        assert set(root.written) == ({f"{FOLDER}/5.best"} if root.holding else set())
    assert len(played) > 100
    assert {"held", "went without"} == {dict(end)[who] for end in ends}
    assert {"deleted", "left it"} == {dict(end)["deleter"] for end in ends}
    # Whoever comes after the other is never turned away.
    assert (("deleter", "left it"), (who, "held")) in ends
    if who == "evaluator":
        assert (("deleter", "deleted"), (who, "held")) in ends


def test_schedules_of_two_deletions_and_two_pins() -> None:
    """Too many for all: many at random."""
    names = ["deleter 1", "deleter 2", "evaluator 1", "evaluator 2"]
    chance = random.Random(0)

    async def work() -> int:
        deleted = 0
        for _ in range(1500):
            choices = [chance.randrange(12) for _ in range(60)]
            root, _, _ = await play(names, choices, {})
            assert root.written == {}
            deleted += STEP not in root.steps
        return deleted

    assert 0 < run_schedules(work) < 1500


@pytest.mark.parametrize("dies", ["evaluator", "deleter"])
def test_schedules_in_which_one_dies_at_any_moment(dies: str) -> None:
    async def work() -> None:
        for moment in itertools.count(0):
            played = await all_orders(["evaluator", "deleter"], {dies: moment})
            for root, _ in played:
                root.turns = Turns([])
                root.dead_after = {}
                await aftermath(root)
            if all(dies in outcomes for _, outcomes in played):
                break
        assert moment > 3

    async def aftermath(root: Root) -> None:
        PARTY.set("later")
        root.turns.live = {"later"}
        if root.written and STEP in root.steps:
            # Nobody knows whether the dead one lives.
            expected = {"evaluator": "left it", "deleter": "went without"}[dies]
            assert await {"evaluator": deleter, "deleter": evaluator}[dies](root) == expected
        root.now += Root.traits.lease_seconds + 1
        if STEP in root.steps:
            assert await evaluator(root) == "held"
            assert await deleter(root) == "deleted"
        await forget_expired(root)  # type: ignore[arg-type]
        assert root.written == {}

    run_schedules(work)


def test_schedules_of_two_that_write_the_same_pin() -> None:
    """The first of them takes it back where it gives up; the other does not go without it."""
    names = ["pinner 1", "pinner 2", "deleter"]
    chance = random.Random(0)

    async def work() -> set[tuple[str, ...]]:
        ends = set()
        for _ in range(1500):
            choices = [chance.randrange(6) for _ in range(60)]
            root, outcomes, _ = await play(names, choices, {})
            ends.add(tuple(outcomes[name] for name in names))
            assert set(root.written) == ({f"{FOLDER}/5.best"} if root.holding else set())
        return ends

    assert {("held", "held", "left it"), ("went without", "went without", "deleted")} <= (
        run_schedules(work)
    )


# A root on a disk.


def run(work: Callable[[LocalStorage], Awaitable[T]], root: Path, lease: float = 600) -> T:
    return anyio.run(work, LocalStorage(root, Timeouts(lease=lease)))


async def there() -> bool:
    return True


async def gone() -> bool:
    return False


def aged(root: Path, seconds: float) -> None:
    """Let time pass for everything pinned by then."""
    for note in (root / FOLDER).iterdir():
        then = note.stat().st_mtime - seconds
        os.utime(note, (then, then))


def pinned_names(root: Path) -> dict[int, list[str]]:
    found = run(pins, root)
    return {step: [each.name for each in those] for step, those in found.items()}


def test_pins_are_kept_until_they_are_taken_away(tmp_path: Path) -> None:
    async def work(storage: LocalStorage) -> None:
        assert await pins(storage) == {}
        assert not await unpin(storage, 5, "best")
        await pin(storage, 5, "best", there)
        await pin(storage, 5, "paper.v2", there)
        await pin(storage, 5, "best", there)
        await pin(storage, 30, "best", there)
        await pin(storage, 0, "first", there)

    run(work, tmp_path)
    aged(tmp_path, 1e6)
    assert pinned_names(tmp_path) == {0: ["first"], 5: ["best", "paper.v2"], 30: ["best"]}
    assert list(pinned_names(tmp_path)) == [0, 5, 30]
    one = run(pins, tmp_path)[30][0]
    assert one.seconds is None
    assert one.owner == f"{platform.node()}, process {os.getpid()}"
    assert str(one) == f"'best' of {one.owner}"
    assert run(lambda storage: unpin(storage, 5, "best"), tmp_path)
    assert not run(lambda storage: unpin(storage, 5, "best"), tmp_path)
    assert pinned_names(tmp_path) == {0: ["first"], 5: ["paper.v2"], 30: ["best"]}
    run(forget_expired, tmp_path)
    for step, name in ((0, "first"), (5, "paper.v2"), (30, "best")):
        assert run(partial(unpin, step=step, name=name), tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_step_that_is_not_there_is_not_pinned(tmp_path: Path) -> None:
    with pytest.raises(StepNotFoundError, match=r"step 5: there is no such step in .*not pinned"):
        run(lambda storage: pin(storage, 5, "best", gone), tmp_path)
    assert os.listdir(tmp_path) == []
    # A pin that was there before is not taken back.
    run(lambda storage: pin(storage, 5, "best", there), tmp_path)
    with pytest.raises(StepNotFoundError):
        run(lambda storage: pin(storage, 5, "best", gone), tmp_path)
    assert pinned_names(tmp_path) == {5: ["best"]}


@pytest.mark.parametrize(
    "name",
    ["", ".x", "-x", "a/b", "..", "a b", "ä", "x" * 101, "lease-x", "deleting-", 5, None, b"x"],
)
def test_names_that_no_pin_can_have_are_refused(tmp_path: Path, name: Any) -> None:
    for call in (lambda s: pin(s, 5, name, there), lambda s: unpin(s, 5, name)):
        with pytest.raises(InvalidArgumentError, match=r"pin name .*: expected 1 to 100 letters"):
            run(call, tmp_path)
    assert os.listdir(tmp_path) == []
    assert check_pin_name("x" * 100) == "x" * 100


def test_a_pinned_step_is_not_deleted_and_the_pins_are_named(tmp_path: Path) -> None:
    async def refused(storage: LocalStorage) -> None:
        async with deletion_of(storage, 5) as pinned:
            refuse_pinned(storage, 5, pinned)

    async def work(storage: LocalStorage) -> None:
        await pin(storage, 5, "best", there)
        await refused_others(storage)
        with pytest.raises(StepPinnedError, match=r"step 5: .*'best' of .*Unpin it first$"):
            await refused(storage)
        held = await hold(storage, 5, there_for_sure)
        assert held is not None
        with pytest.raises(StepPinnedError, match=r"'lease-.* of .*or wait until it has been read"):
            await refused(storage)
        await unpin(storage, 5, "best")
        with pytest.raises(StepPinnedError, match="'lease-"):
            await refused(storage)
        await held[0].drop()
        await refused(storage)

    async def refused_others(storage: LocalStorage) -> None:
        for other in (4, 6, 50, 55):
            async with deletion_of(storage, other) as pinned:
                assert pinned == ()

    run(work, tmp_path)
    assert os.listdir(tmp_path) == []


async def there_for_sure() -> bool | None:
    return True


def test_a_lease_counts_until_it_runs_out(tmp_path: Path) -> None:
    async def work(storage: LocalStorage) -> None:
        held = await hold(storage, 5, there_for_sure)
        assert held is not None
        assert held[1] is True
        (one,) = (await pins(storage))[5]
        assert one.seconds == 600
        aged(tmp_path, 590)
        assert 5 in await pins(storage)
        assert await held[0].renew()
        aged(tmp_path, 590)
        assert 5 in await pins(storage)
        aged(tmp_path, 20)
        assert await pins(storage) == {}
        # It is renewed still, unless somebody has taken it for dead.
        assert await held[0].renew()
        assert 5 in await pins(storage)
        aged(tmp_path, 610)
        async with deletion_of(storage, 6) as pinned:
            assert pinned == ()
        assert not await held[0].renew()
        await held[0].drop()

    run(work, tmp_path)
    assert os.listdir(tmp_path) == []


def test_nobody_waits_for_ever_for_a_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "_LOOKS", 3)

    async def work(storage: LocalStorage) -> None:
        async with deletion_of(storage, 5):
            assert await hold(storage, 5, there_for_sure) is None
            with pytest.raises(StepNotFoundError, match="or it is being deleted"):
                await pin(storage, 5, "best", there)
            assert await pins(storage) == {}
            # Of others nobody knows.
            held = await hold(storage, 6, there_for_sure)
            assert held is not None
            await held[0].drop()
            # Its process has died, and that was long ago.
            aged(tmp_path, 610)
            held = await hold(storage, 5, there_for_sure)
            assert held is not None
            await held[0].drop()

    run(work, tmp_path)


def test_a_lease_that_may_have_run_out_before_it_is_held_is_none(tmp_path: Path) -> None:
    async def slow() -> bool | None:
        await anyio.sleep(0.1)
        return True

    async def work(storage: LocalStorage) -> None:
        assert await hold(storage, 5, slow) is None

    run(work, tmp_path, lease=0.2)
    assert os.listdir(tmp_path) == []


def test_on_a_full_disk_a_step_can_be_deleted(tmp_path: Path) -> None:
    async def work(storage: LocalStorage) -> None:
        await pin(storage, 5, "best", there)

        async def full(*_: object, **__: object) -> bool:
            raise StorageError("no space left on device", errno=errno.ENOSPC)

        storage.put_note = full
        async with deletion_of(storage, 6) as pinned:
            assert pinned == ()
        async with deletion_of(storage, 5) as pinned:
            assert [each.name for each in pinned] == ["best"]

        async def forbidden(*_: object, **__: object) -> bool:
            raise StorageError("permission denied", errno=errno.EACCES)

        storage.put_note = forbidden
        with pytest.raises(StorageError, match="permission denied"):
            async with deletion_of(storage, 6):
                raise AssertionError

    run(work, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"{", b'{"owner": 5}', b"[" * 5000, b"\xff", b"x" * 10000]
)
def test_pins_with_a_strange_content_are_pins(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "5.best").write_bytes(content)
    found = run(pins, tmp_path)
    assert [each.owner for each in found[5]] == ["an unknown process"]


def test_strange_names_are_no_pins(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    token = "0" * 32
    for name in (
        *("best", ".best", "x.best", "05.best", "5", "5.", "5..x", "-1.best", "5.a b"),
        *(f"{10**19}.best", f"6.deleting-600.000-{token}"),
    ):
        (tmp_path / FOLDER / name).touch()
    assert run(pins, tmp_path) == {}
    # Time limits of no use are those of a mistake; what is no lease is a pin.
    (tmp_path / FOLDER / f"5.lease-999999999.000-{token}").touch()
    (tmp_path / FOLDER / f"7.lease-600-{token}").touch()
    aged(tmp_path, 8 * 86400)
    assert pinned_names(tmp_path) == {7: [f"lease-600-{token}"]}


@pytest.mark.parametrize("what", ["hold", "delete", "pin"])
def test_what_is_cancelled_leaves_nothing(tmp_path: Path, what: str) -> None:
    """At every turn of the loop."""

    async def look() -> bool | None:
        await anyio.lowlevel.checkpoint()
        return True

    async def act(storage: LocalStorage) -> None:
        if what == "hold":
            held = await hold(storage, 5, look)
            assert held is not None
            await held[0].drop()
        elif what == "delete":
            async with deletion_of(storage, 5):
                await anyio.lowlevel.checkpoint()
        else:
            await pin(storage, 5, "best", there)

    async def work(storage: LocalStorage) -> None:
        for turns in itertools.count(0):
            ended = False
            async with anyio.create_task_group() as tasks:

                async def cancel(count: int = turns, scope: Any = tasks.cancel_scope) -> None:
                    for _ in range(count):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                tasks.start_soon(cancel)
                await act(storage)
                ended = True
            # A pin that was asked for may be there.
            assert list((await pins(storage)).values()) in ([], [pinned_best])
            await unpin(storage, 5, "best")
            assert os.listdir(tmp_path) == []
            if ended:
                break
        assert turns > 3

    run(lambda storage: pin(storage, 5, "best", there), tmp_path)
    pinned_best = run(pins, tmp_path)[5]
    run(lambda storage: unpin(storage, 5, "best"), tmp_path)
    run(work, tmp_path)


def test_orbax_opens_a_root_with_pins(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    run(lambda storage: pin(storage, 5, "best", there), tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.JsonSave({"a": 1}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        assert manager.latest_step() == 1
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    ) as manager:
        assert manager.all_steps() == [1]
    assert pinned_names(tmp_path) == {5: ["best"]}
    assert json.loads((tmp_path / FOLDER / "5.best").read_bytes())["owner"]
