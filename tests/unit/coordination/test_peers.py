"""What processes that share a root agree on, and do together: in one thread, in made-up time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import pytest

from ckpt._format.manifest import JsonValue
from ckpt._job.agreement.operation import Operation, gathered
from ckpt._job.agreement.peers import Peers
from ckpt._job.multihost_save import MultihostSave
from ckpt._job.processes import SeparateRoots, SharedRoot
from ckpt.coordination._jobs import MemoryKeyValues
from ckpt.errors import CoordinationError, CoordinationTimeoutError, StorageError
from tests.support.virtual_time import LIMIT, Silent, in_made_up_time

T = TypeVar("T")


class Job:
    def __init__(
        self, index: int, count: int, values: Any, *, own_disks: bool = False, name: str = ""
    ) -> None:
        self.process_index, self.process_count = index, count
        self.own_disks, self.name = own_disks, name
        self._values = values

    def key_values(self) -> Any:
        return self._values


def peers_of(
    values: Any,
    *budgets: int,
    own_disks: bool = False,
    location: str = "root",
    name: str = "",
) -> list[Peers]:
    budgets = budgets or (100, 100)
    jobs = [
        Job(index, len(budgets), values, own_disks=own_disks, name=name)
        for index in range(len(budgets))
    ]
    return [Peers(job, LIMIT, location, budget) for job, budget in zip(jobs, budgets, strict=True)]


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Make calls at the same time; return what each gave, or raised."""
    found: dict[int, Any] = {}

    async def make(number: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[number] = await call()
        except Exception as error:
            found[number] = error

    async with anyio.create_task_group() as tasks:
        for number, call in enumerate(calls):
            tasks.start_soon(make, number, call)
    return [found[number] for number in range(len(calls))]


async def later(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    await anyio.sleep(seconds)
    return await call()


def manager_of(operation: Operation) -> str:
    return operation.name.rsplit("/", 2)[0]


async def opened(pair: list[Peers], kind: str = "x") -> list[Any]:
    return await together(*(lambda p=p: p.operation(kind, p.turn(kind), kind) for p in pair))


async def left(values: MemoryKeyValues) -> list[str]:
    names = [*values._values, *values._counts]
    return [each for each in names if not each.startswith(("processes/", "ckpt/opened/"))]


def processes_of(peers: Peers) -> Any:
    """Return what a manager sees of `peers`; the root is not looked at."""
    return (SeparateRoots if peers.own_disks else SharedRoot)(peers, cast("Any", None))


def test_who_publishes_and_in_which_order_calls_count() -> None:
    shared, apart = (peers_of(MemoryKeyValues(), own_disks=own) for own in (False, True))
    begun: list[str] = []

    async def act(peers: Peers) -> None:
        begun.append(f"{'own' if peers.own_disks else 'common'} {peers.index}")

    for each in (*shared, *apart):
        anyio.run(processes_of(each).begin, partial(act, each))
    assert begun == ["common 0", "own 0", "own 1"]
    assert [MultihostSave(each, "s", "s").publishes for each in shared] == [True, False]
    assert [MultihostSave(each, "s", "s").publishes for each in apart] == [True, True]
    assert [shared[0].turn(kind) for kind in "abab"] == [0, 0, 1, 1]


def test_a_name_is_for_one_manager_only_and_the_least_budget_for_all() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        pairs = [peers_of(values, 300, 200), peers_of(values, 100, 200)]
        names = [[manager_of(each) for each in await opened(pair)] for pair in pairs]
        assert names[0][0] == names[0][1] != names[1][0] == names[1][1]
        assert [each.budget_bytes for pair in pairs for each in pair] == [200, 200, 100, 100]

    in_made_up_time(main)


def test_calls_at_once_open_a_manager_once() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        calls = [
            lambda p=p, k=k: p.operation(k, 0, k) for p in peers_of(values) for k in ("x", "y")
        ]
        assert len({manager_of(each) for each in await together(*calls)}) == 1
        assert [count for name, count in values._counts.items() if "/opened/" in name] == [1, 1]

    in_made_up_time(main)


@pytest.mark.parametrize("own_disks", [False, True])
def test_managers_of_different_roots_are_opened_in_any_order(own_disks: bool) -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        one, two = (
            peers_of(values, own_disks=own_disks, location="any" if own_disks else root, name=root)
            for root in ("one", "two")
        )
        order = [one[0], two[0], two[1], one[1]]
        names = await together(
            *(
                lambda p=p, at=at: later(at, lambda: p.operation("x", 0, "x"))
                for at, p in enumerate(order)
            )
        )
        first, second, third, fourth = map(manager_of, names)
        assert first == fourth != second == third

    in_made_up_time(main)


def test_a_manager_that_one_process_alone_has_opened_harms_no_later_one() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        for alone in range(2):
            pair = peers_of(values)
            with pytest.raises(CoordinationTimeoutError) as caught:
                await pair[alone].operation("x", 0, "x")
            assert caught.value.missing == (1 - alone,)
            first, second = await opened(peers_of(values))
            assert first.name == second.name

    in_made_up_time(main)


def test_who_cannot_open_says_so_also_while_it_is_cancelled() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        pair = peers_of(values)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pair[1].cannot_open(StorageError("no such place"))
        with pytest.raises(StorageError, match=r"process 1 of 2 .*: no such place"):
            await pair[0].operation("x", 0, "x")
        assert anyio.current_time() < 1.0
        # Once it is opened there is nothing to say of it.
        pair = peers_of(values)
        await opened(pair)
        await pair[0].cannot_open(StorageError("no such place"))
        assert [type(each) for each in await opened(peers_of(values))] == [Operation] * 2

    in_made_up_time(main)


@pytest.mark.parametrize("word", ["processes/", "/opened/"])
def test_values_that_do_not_answer_hold_nobody_up(word: str) -> None:
    async def main() -> None:
        silent = Silent(MemoryKeyValues(), word)
        began = anyio.current_time()
        await peers_of(silent)[0].cannot_open(StorageError("no such place"))
        assert anyio.current_time() - began < 3.0
        began = anyio.current_time()
        with pytest.raises(CoordinationTimeoutError, match="opening root, process 1") as caught:
            await peers_of(silent)[1].operation("x", 0, "x")
        assert caught.value.missing == (0,)
        assert anyio.current_time() - began <= LIMIT + 3.0

    in_made_up_time(main)


@pytest.mark.parametrize("error", [None, OSError("gone")])
@pytest.mark.parametrize("own_disks", [False, True])
def test_what_cannot_be_removed_spoils_nothing(error: Exception | None, own_disks: bool) -> None:
    async def main() -> None:
        pair = peers_of(Silent(MemoryKeyValues(), "ended", error), own_disks=own_disks)

        async def act() -> JsonValue:
            return 5

        assert await together(
            *(lambda p=p: processes_of(p).everywhere("x", 1, "x", act) for p in pair)
        ) == [5, 5]
        assert anyio.current_time() < 5.0

    in_made_up_time(main)


def test_the_primary_acts_and_all_have_its_answer_or_its_error() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        pair = peers_of(values)
        acted: list[int] = []

        def acting(index: int, error: Exception | None = None) -> Callable[[], Awaitable[Any]]:
            async def act() -> JsonValue:
                acted.append(index)
                if error is not None:
                    raise error
                return {"by": index}

            return lambda: pair[index].on_primary("x", "doing x", act)

        assert await together(acting(0), acting(1)) == [{"by": 0}] * 2
        assert await left(values) == []
        found = await together(*(acting(each, StorageError("no room")) for each in (0, 1)))
        assert [type(each) for each in found] == [StorageError] * 2
        assert "process 0 of 2" in str(found[1])
        assert acted == [0, 0]
        assert anyio.current_time() < 1.0
        # Whoever calls alone hears who is missing; those who come together later do not.
        assert isinstance((await together(acting(1)))[0], CoordinationTimeoutError)
        assert await together(acting(0), acting(1)) == [{"by": 0}] * 2

    in_made_up_time(main)


class Slow:
    """Values that take their time to set what ends with a word."""

    def __init__(self, word: str) -> None:
        self._inner, self._word = MemoryKeyValues(), word

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def put(self, key: str, value: bytes) -> bool:
        if key.endswith(self._word):
            await anyio.sleep(5.0)
        return await self._inner.put(key, value)


@pytest.mark.parametrize("word", ["x/0/verdict", "x/0/outcome"])
def test_a_primary_that_is_cancelled_when_it_has_acted_tells_so_all_the_same(word: str) -> None:
    async def main() -> None:
        pair = peers_of(Slow(word))

        async def act() -> JsonValue:
            return "done"

        async def cancelled() -> None:
            with anyio.move_on_after(2.0):
                await pair[0].on_primary("x", "x", act)

        await opened(pair, "y")
        found = await together(cancelled, lambda: pair[1].on_primary("x", "x", act))
        assert found == [None, "done"]

    in_made_up_time(main)


@pytest.mark.parametrize("limits", [5, 50])
def test_a_primary_that_is_busy_is_waited_for_but_not_for_ever(limits: int) -> None:
    async def main() -> None:
        pair = peers_of(MemoryKeyValues())
        ends: dict[int, float] = {}

        async def act() -> JsonValue:
            await anyio.sleep(limits * LIMIT)
            return True

        async def call(peers: Peers) -> JsonValue:
            try:
                return await peers.on_primary("x", "x", act)
            finally:
                ends[peers.index] = anyio.current_time()

        found = await together(*(lambda p=p: call(p) for p in pair))
        if limits == 5:
            assert found == [True, True]
        else:
            assert [type(each) for each in found] == [CoordinationTimeoutError] * 2
            assert 10 * LIMIT < ends[1] < 12 * LIMIT

    in_made_up_time(main)


def test_own_disks_are_all_acted_on() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        acted: list[int] = []

        def acting(peers: Peers) -> Callable[[], Awaitable[Any]]:
            async def act() -> JsonValue:
                acted.append(peers.index)
                return peers.index

            return lambda: processes_of(peers).everywhere("x", 1, "x", act)

        assert await together(*map(acting, peers_of(values, own_disks=True))) == [0, 1]
        assert sorted(acted) == [0, 1]
        assert await left(values) == []

    in_made_up_time(main)


def test_all_or_none_waits_for_who_moves_and_raises_what_the_first_one_met() -> None:
    async def main() -> None:
        pair = peers_of(MemoryKeyValues(), own_disks=True)

        async def gathers(operation: Operation) -> list[Any]:
            return await gathered(operation, 0, "gathered")

        def call(index: int, act: Callable[[Operation], Awaitable[Any]]) -> Any:
            return lambda: pair[index].all_or_none("x", "x", act)

        async def nothing(operation: Operation) -> str:
            return "done"

        assert await together(call(0, nothing), call(1, moves_only(pair[1]))) == ["done"] * 2
        assert anyio.current_time() >= 3 * LIMIT
        assert (
            await together(call(0, gathers), call(1, lambda o: gathered(o, 1, "gathered")))
            == [[0, 1]] * 2
        )

        async def fails(operation: Operation) -> None:
            await anyio.sleep(1.0)
            raise StorageError("no room")

        async def fails_later(operation: Operation) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2.0)
            raise CoordinationError("what comes of it")

        for index in (0, 1):
            for other in (nothing, fails_later, lambda _: anyio.sleep_forever()):
                began = anyio.current_time()
                calls = [call(index, fails), call(1 - index, other)]
                found = await together(*calls)
                assert [type(each) for each in found] == [StorageError] * 2
                assert found[0].message == "no room"
                assert found[1].message.startswith(f"process {index} of 2")
                assert anyio.current_time() - began < 4.0

    in_made_up_time(main)


def test_of_two_errors_at_once_all_raise_the_same() -> None:
    async def main() -> None:
        pair = peers_of(MemoryKeyValues(), own_disks=True)

        def failing(peers: Peers) -> Callable[[], Awaitable[Any]]:
            async def act(operation: Operation) -> None:
                raise StorageError(f"no room on disk {peers.index}")

            return lambda: peers.all_or_none("x", "x", act)

        for _ in range(5):
            found = await together(*map(failing, pair))
            assert len({str(each)[-4:] for each in found}) == 1

    in_made_up_time(main)


def moves_only(peers: Peers) -> Callable[[Operation], Awaitable[str]]:
    async def act(operation: Operation) -> str:
        for _ in range(30):
            await anyio.sleep(LIMIT / 10)
            peers.advance(1)
        return "done"

    return act


def test_who_does_something_else_is_named_with_what_it_does() -> None:
    async def main() -> None:
        pair = peers_of(MemoryKeyValues())
        await opened(pair)

        async def act() -> JsonValue:
            return None

        first, second = await together(
            lambda: pair[0].all_or_none("a", "doing a", lambda _: act()),
            lambda: pair[1].all_or_none("b", "doing b", lambda _: act()),
        )
        assert "which came to doing b last) never came to it" in str(first)
        assert "which came to doing a last) never came to it" in str(second)

    in_made_up_time(main)
