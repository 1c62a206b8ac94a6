"""Operations of make-believe processes: every interleaving, failure and delay, in made-up time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ckpt._job.agreement.failures import introduce
from ckpt._job.agreement.operation import Operation
from ckpt.coordination._jobs import MemoryKeyValues
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    CoordinationTimeoutError,
    StorageError,
    TargetMismatchError,
)
from tests.support.virtual_time import LIMIT, in_made_up_time

STAGES = ("lead", "report", "decide", "conclude")
OUTCOME = b"committed"


class Slow:
    """`MemoryKeyValues` whose requests take a while each, on the way there and back."""

    def __init__(self, inner: MemoryKeyValues, seed: int, worst: float) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._worst = worst
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def request(*args: Any) -> Any:
            self.requests.append(f"{name} {args[0]}")
            await anyio.sleep(self._random.random() * self._worst)
            answer = await getattr(self._inner, name)(*args)
            await anyio.sleep(self._random.random() * self._worst)
            return answer

        return request


@dataclass(frozen=True)
class Act:
    """What a process does when it comes to a stage."""

    what: Literal["nothing", "work", "idle", "fail", "cancel", "die"] = "nothing"
    seconds: float = 0.0


@dataclass
class End:
    """How a process ended."""

    outcome: bytes | None = None
    error: BaseException | None = None
    failed: bool | None = None
    decided: bool = False
    dead: bool = False
    at: float = 0.0
    parts: list[bytes] | None = None


class Died(Exception):
    pass


@dataclass
class Process:
    index: int
    count: int
    acts: dict[str, Act] = field(default_factory=dict)
    watching: bool = True

    async def run(self, values: Any, name: str = "op") -> End:
        end = End()
        operation = Operation(values, self.index, self.count, name, "the save of step 5", LIMIT)
        scope = anyio.CancelScope()
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    if self.watching:
                        tasks.start_soon(operation.watch)
                    await self._do("lead", operation, scope)
                    assert await operation.lead(b"begin" if self.index == 0 else None) == b"begin"
                    await self._do("report", operation, scope)
                    end.parts = await operation.report(b"part %d" % self.index)
                    await self._do("decide", operation, scope)
                    if self.index == 0:
                        assert end.parts is not None
                        await operation.decide()
                        end.decided = True
                    await self._do("conclude", operation, scope)
                    end.outcome = await operation.conclude(OUTCOME if self.index == 0 else None)
                    tasks.cancel_scope.cancel()
            if scope.cancelled_caught:
                end.error = CommitCancelledError("it was cancelled there")
                end.failed = await operation.fail(end.error)
        except BaseException as error:
            if only(error, Died):
                end.dead = True
                return end
            end.error = await operation.settle(error)
            while isinstance(end.error, BaseExceptionGroup):
                end.error = end.error.exceptions[0]
            end.failed = await operation.fail(error)
        end.at = anyio.current_time()
        return end

    async def _do(self, stage: str, operation: Operation, scope: anyio.CancelScope) -> None:
        act = self.acts.get(stage, Act())
        if act.what == "idle":
            await anyio.sleep(act.seconds)
        elif act.what == "work":
            for _ in range(int(act.seconds / 10)):
                await anyio.sleep(10)
                operation.advance(1 << 20)
        elif act.what == "fail":
            raise StorageError(f"process {self.index} has no space", errno=28, step=5)
        elif act.what == "cancel":
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        elif act.what == "die":
            raise Died


def only(error: BaseException, kind: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(only(each, kind) for each in error.exceptions)
    return isinstance(error, kind)


async def run_all(processes: list[Process], values: Any) -> list[End]:
    ends: dict[int, End] = {}

    async def run(process: Process) -> None:
        ends[process.index] = await process.run(values)

    async with anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(run, process)
    return [ends[index] for index in range(len(processes))]


def core(error: BaseException | None) -> tuple[type, str]:
    """An error without the words on who met it."""
    assert isinstance(error, CheckpointError), repr(error)
    head, _, rest = error.message.partition(": ")
    return type(error), rest if head.startswith("process ") and "host" in head else error.message


ACTS = st.one_of(
    st.just(Act()),
    st.builds(Act, st.just("work"), st.sampled_from([10.0, 90.0, 400.0])),
    st.builds(Act, st.just("idle"), st.sampled_from([0.1, 5.0, 59.0, 61.0, 200.0])),
    st.builds(Act, st.sampled_from(["fail", "cancel", "die"])),
)


@st.composite
def jobs(draw: st.DrawFn) -> list[Process]:
    count = draw(st.integers(2, 8))
    # Few do anything special, or nothing would ever succeed.
    acts = draw(
        st.dictionaries(
            st.tuples(st.integers(0, count - 1), st.sampled_from(STAGES)), ACTS, max_size=3
        )
    )
    return [
        Process(index, count, {stage: act for (who, stage), act in acts.items() if who == index})
        for index in range(count)
    ]


@given(jobs(), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.1]))
def test_all_come_to_the_same_end_whatever_happens(
    processes: list[Process], seed: int, latency: float
) -> None:
    memory = MemoryKeyValues()

    async def main() -> tuple[list[End], bytes | None]:
        ends = await run_all(processes, Slow(memory, seed, latency))
        return ends, await memory.wait("op/verdict", 0)

    ends, verdict = in_made_up_time(main)
    acts = [act for process in processes for act in process.acts.values()]
    # Nobody hangs: all that was slept, and a few limits.
    assert max(end.at for end in ends) <= sum(act.seconds for act in acts) + 4 * LIMIT
    alive = [end for end in ends if not end.dead]
    decided = verdict is not None and verdict[:1] == b"g"
    event(f"verdict {verdict[:1]!r}" if verdict else "no verdict")
    # The election has one winner, and everybody knows which.
    assert ends[0].decided == decided or ends[0].dead
    assert all(end.failed in (None, not decided) for end in alive)
    if not decided:
        assert all(end.outcome is None for end in alive)
        # One failure, everywhere; a process that was cancelled says that it was.
        told = {
            core(end.error)
            for end, process in zip(ends, processes, strict=True)
            if not end.dead and not cancelled(process)
        }
        assert len(told) <= 1
    for process, end in zip(processes, ends, strict=True):
        if end.error is None and not end.dead:
            assert end.outcome == OUTCOME
        if end.parts is not None and process.index == 0:
            assert end.parts == [b"part %d" % index for index in range(process.count)]
    if all(act.what in ("nothing", "work") for act in acts):
        # Who moves is waited for, however slow.
        assert all(end.outcome == OUTCOME for end in ends)


def cancelled(process: Process) -> bool:
    return any(act.what == "cancel" for act in process.acts.values())


def acting(count: int, **acts: tuple[int, Act]) -> list[Process]:
    """Processes of which one does something at a stage: `report=(3, Act("die"))`."""
    return [
        Process(index, count, {stage: act for stage, (who, act) in acts.items() if who == index})
        for index in range(count)
    ]


def ends_of(processes: list[Process], latency: float = 0.0) -> list[End]:
    async def main() -> list[End]:
        return await run_all(processes, Slow(MemoryKeyValues(), 0, latency))

    return in_made_up_time(main)


@pytest.mark.parametrize("stage", ["lead", "report"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_failure_is_raised_everywhere_at_once(stage: str, index: int) -> None:
    ends = ends_of(acting(4, **{stage: (index, Act("fail"))}), 0.01)
    for each, end in enumerate(ends):
        assert type(end.error) is StorageError
        assert (end.error.errno, end.error.step, end.failed) == (28, 5, True)
        said = f"process {index} has no space"
        assert end.error.message.endswith(said)
        assert (end.error.message == said) == (each == index)
        assert end.at < 1.0


@pytest.mark.parametrize("index", [0, 2])
def test_a_failure_reaches_those_who_only_wait(index: int) -> None:
    for stage, waiting in (("lead", "lead"), ("report", "outcome")):
        # The primary is late, or slow to finish: the others wait for it.
        processes = acting(4, **{stage: (index, Act("fail"))})
        if index:
            processes[0].acts[stage] = Act("idle", 30.0)
        for process in processes:
            process.watching = False
        ends = ends_of(processes)
        for end in ends[1:]:
            assert type(end.error) is StorageError, waiting
            assert end.at < 1.0
        assert type(ends[0].error) is StorageError


def test_a_failure_reaches_a_primary_that_only_waits() -> None:
    processes = acting(4, report=(3, Act("fail")))
    processes[1].acts["report"] = Act("work", 500.0)
    processes[0].watching = False
    ends = ends_of(processes)
    assert type(ends[0].error) is StorageError
    assert ends[0].at < 1.0


def test_who_dies_before_all_were_told_of_its_failure_holds_nobody_up() -> None:
    async def main() -> list[End]:
        values = MemoryKeyValues()
        # All that it comes to is the election.
        half = Operation(values, 2, 3, "op", "a save", LIMIT)
        await half.fail(StorageError("half told"))
        for key in ("begin", "outcome"):
            values._values.pop(f"op/{key}")
        processes = [Process(0, 3, {"lead": Act("idle", 50.0)}), Process(1, 3)]
        for process in processes:
            process.watching = False
        return await run_all(processes, values)

    ends = in_made_up_time(main)
    assert all(type(end.error) is StorageError for end in ends)
    assert ends[1].at <= LIMIT / 6 + 1


@pytest.mark.parametrize("index", [1, 2])
def test_a_failure_reaches_those_who_work(index: int) -> None:
    busy = Act("idle", 50.0)
    processes = acting(4, report=(index, Act("fail")), decide=(3, busy))
    processes[3].acts["report"] = busy
    for end in ends_of(processes):
        assert end.at < 1.0
        assert type(end.error) is StorageError


def test_after_the_decision_only_the_primary_can_spoil_it() -> None:
    ends = ends_of(acting(3, conclude=(2, Act("fail")), decide=(2, Act("idle", 1.0))))
    assert [end.outcome for end in ends] == [OUTCOME, OUTCOME, None]
    assert ends[2].failed is False
    ends = ends_of(acting(3, conclude=(0, Act("fail"))))
    assert {core(end.error) for end in ends} == {(StorageError, "process 0 has no space")}
    assert ends[0].failed is False


@pytest.mark.parametrize(
    ("stage", "index", "name", "word"),
    [
        ("lead", 0, "begin", "never came to it"),
        ("lead", 3, "write", "never came to it"),
        ("report", 3, "write", "came to it, and has gone silent"),
        ("report", 0, "publish", "came to it, and has gone silent"),
        ("conclude", 0, "publish", "came to it, and has gone silent"),
    ],
)
def test_a_process_that_died_is_named(stage: str, index: int, name: str, word: str) -> None:
    for what in (Act("die"), Act("idle", 1000.0)):
        ends = ends_of(acting(5, **{stage: (index, what)}))
        for end in ends[:index] + ends[index + 1 :]:
            assert isinstance(end.error, CoordinationTimeoutError)
            assert isinstance(end.error, TimeoutError)
            assert end.error.missing == (index,)
            assert LIMIT <= end.at <= LIMIT * 7 / 6 + 2
            for text in (f"process {index} of 5", word, f"stage '{name}'", "60 s", "step 5"):
                assert text in end.error.message


def test_several_that_are_missing_are_named_together() -> None:
    processes = acting(40, lead=(7, Act("die")), report=(35, Act("die")))
    processes[36].acts["lead"] = Act("die")
    # They have said on which host they run before; one of them has not.

    async def main() -> list[End]:
        values = MemoryKeyValues()
        await introduce(values, 7)
        return await run_all(processes, values)

    end = in_made_up_time(main)[0]
    assert isinstance(end.error, CoordinationTimeoutError)
    assert end.error.missing == (7, 35, 36)
    assert "process 35 of 40 (host " in end.error.message
    assert "process 7 of 40 (host " in end.error.message
    assert "process 36 of 40 never came to it" in end.error.message


def test_one_who_waits_for_a_slow_process_is_no_missing_one() -> None:
    ends = ends_of(acting(3, report=(2, Act("work", 1000.0))))
    assert [end.outcome for end in ends] == [OUTCOME] * 3
    # The primary as well: the others see it move before they get an outcome, and a beginning.
    for stage in ("lead", "decide", "conclude"):
        ends = ends_of(acting(3, **{stage: (0, Act("work", 1000.0))}))
        assert [end.outcome for end in ends] == [OUTCOME] * 3


def test_a_cancelled_process_makes_all_fail() -> None:
    ends = ends_of(acting(3, report=(1, Act("cancel"))))
    assert core(ends[0].error) == core(ends[2].error)
    assert isinstance(ends[0].error, CommitCancelledError)
    assert "process 1 of 3" in ends[0].error.message


def test_a_process_tells_the_others_while_it_is_being_cancelled() -> None:
    async def main() -> CheckpointError:
        values = Slow(MemoryKeyValues(), 0, 0.1)
        first, second = (Operation(values, i, 2, "op", "a save", LIMIT) for i in range(2))
        with anyio.CancelScope() as scope:
            scope.cancel()
            assert await second.fail(CommitCancelledError("no more"))
        with pytest.raises(CommitCancelledError, match="process 1 of 2") as caught:
            await first.lead(b"")
        return caught.value

    assert in_made_up_time(main).message.endswith("no more")


def test_a_failure_before_the_decision_undoes_it() -> None:
    processes = acting(3, decide=(2, Act("fail")))
    processes[0].acts["decide"] = Act("idle", 5.0)
    processes[0].watching = False
    ends = ends_of(processes)
    assert not ends[0].decided
    assert {core(end.error) for end in ends} == {(StorageError, "process 2 has no space")}


def test_who_has_reported_is_not_missed_while_another_is_waited_for() -> None:
    # The primary waits for 1, which works; 2 has come long ago; 3 is quiet, but not for too long.
    processes = acting(4, report=(1, Act("work", 200.0)))
    processes[3].acts |= {"lead": Act("idle", 25.0), "report": Act("idle", 50.0)}
    assert [end.outcome for end in ends_of(processes)] == [OUTCOME] * 4


def test_processes_that_disagree_on_their_number_all_say_so() -> None:
    for processes in (
        [Process(0, 2), Process(1, 3)],
        [Process(0, 3), Process(1, 2), Process(2, 3)],
    ):
        for end in ends_of(processes):
            assert type(end.error) is CoordinationError
            assert "takes part as one of" in end.error.message


def test_a_name_that_was_used_before_is_refused() -> None:
    async def main() -> list[End]:
        values = MemoryKeyValues()
        assert all(end.error is None for end in await run_all(acting(2), values))
        return await run_all(acting(2), values)

    primary, other = in_made_up_time(main)
    assert "was used before" in str(primary.error)
    assert "has reported before" in str(other.error)


def test_what_is_late_satisfies_nobody_else() -> None:
    """A process left over from an attempt that failed neither helps nor harms the next."""

    async def main() -> list[End]:
        values = MemoryKeyValues()
        late = Process(1, 2, {"report": Act("idle", 100.0)})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.run, values, "op-1")
            first = await Process(0, 2).run(values, "op-1")
            assert isinstance(first.error, CoordinationTimeoutError)
            # Process 1 does not come to the second attempt; what it still says of the first is not
            # taken for it.
            second = await Process(0, 2).run(values, "op-2")
            assert isinstance(second.error, CoordinationTimeoutError)
        return await run_all(acting(2), values)

    assert [end.outcome for end in in_made_up_time(main)] == [OUTCOME] * 2


def test_one_process_shares_nothing() -> None:
    async def main() -> list[str]:
        values = Slow(MemoryKeyValues(), 0, 0.0)
        end = await Process(0, 1).run(values)
        assert (end.outcome, end.parts) == (OUTCOME, [b"part 0"])
        alone = Operation(values, 0, 1, "alone", "a save", LIMIT)
        await alone.watch()
        assert await alone.fail(ValueError("x"))
        error = ValueError("x")
        assert await alone.settle(error) is error
        await alone.decide()
        assert not await alone.fail(error)
        return values.requests

    assert in_made_up_time(main) == []


@pytest.mark.parametrize("count", [2, 32, 33, 100])
def test_requests_grow_with_the_number_of_processes_and_no_faster(count: int) -> None:
    async def main() -> list[Slow]:
        memory = MemoryKeyValues()
        shared = [Slow(memory, index, 0.0) for index in range(count)]

        async def run(process: Process) -> None:
            assert (await process.run(shared[process.index])).outcome == OUTCOME

        async with anyio.create_task_group() as tasks:
            # All have reported when the primary looks.
            for process in acting(count, report=(0, Act("idle", 1.0))):
                tasks.start_soon(run, process)
        return shared

    shared = in_made_up_time(main)
    assert max(len(each.requests) for each in shared[1:]) <= 5
    # A wait and a list for every 32 of the reports.
    assert len(shared[0].requests) <= 9 + 2 * (count // 32)
    assert not [request for each in shared[1:] for request in each.requests if "list" in request]


class Broken:
    """Values of which nothing comes back: errors of somebody else's library, or silence."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def request(*_: Any) -> Any:
            if self._error is not None:
                raise self._error
            await anyio.sleep_forever()

        return request


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_shared_may_fail_or_stay_silent(index: int) -> None:
    async def main(error: Exception | None) -> End:
        return await Process(index, 2).run(Broken(error))

    async def fails() -> End:
        return await main(OSError("connection to https://me:pw@host refused"))

    async def stays_silent() -> End:
        return await main(None)

    end = in_made_up_time(fails)
    assert type(end.error) is CoordinationError
    assert isinstance(end.error.__cause__, OSError)
    assert "OSError: connection to https://***@host" in end.error.message
    end = in_made_up_time(stays_silent)
    assert type(end.error) is CoordinationTimeoutError
    assert "no answer for 60 s" in end.error.message
    # To say so takes a second, each time.
    assert end.at <= LIMIT + 3


def test_errors_keep_their_kind_and_lose_their_secrets() -> None:
    async def raised(error: BaseException) -> CheckpointError:
        values = MemoryKeyValues()
        first, second = (Operation(values, i, 2, "op", "a save", LIMIT) for i in range(2))
        assert await first.fail(error)
        heard = await second.settle(RuntimeError("later"))
        assert isinstance(heard, CheckpointError)
        with pytest.raises(type(heard)) as caught:
            await second.lead(None)
        assert str(caught.value) == str(heard)
        return heard

    async def main() -> None:
        group = BaseExceptionGroup("", [OSError("a"), StorageError("b", errno=5, leaf="x")])
        heard = await raised(group)
        assert isinstance(heard, StorageError)
        assert (heard.errno, heard.leaf) == (5, "x")
        heard = await raised(TargetMismatchError("differs", problems=("x: y",), item="state"))
        assert isinstance(heard, TargetMismatchError)
        assert (heard.problems, heard.item) == (("x: y",), "state")
        heard = await raised(ZeroDivisionError("https://me:secret@host/ is bad"))
        assert type(heard) is CheckpointError
        assert heard.message.endswith("ZeroDivisionError: https://***@host/ is bad")
        heard = await raised(KeyboardInterrupt())
        assert type(heard) is CheckpointError

        class Mine(StorageError):
            pass

        assert type(await raised(Mine("mine"))) is StorageError

    in_made_up_time(main)
