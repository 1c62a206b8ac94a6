"""When a manager saves: what policies are told, and what comes before them."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.storage._local import notes
from ckpt.testing.clock import set_clock
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler


def plain(root: Path, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[GateHandler()], **settings)


def test_a_refused_save_does_not_wait_for_those_under_way(tmp_path: Path) -> None:
    gate = Gate()
    with plain(tmp_path, save_when=ckpt.save_when.EverySteps(2)) as mgr:
        under_way = [
            mgr.save(0, items={"state": {"n": 0}, "gate": gate}),
            mgr.save(2, items={"state": {"n": 2}, "gate": gate}),
        ]
        try:
            # Two are under way, so a save that is made would wait for the first of them.
            commit = mgr.save(3, {"n": 3})
            assert not commit
            assert commit.done()
            assert "multiple of 2" in str(commit.skipped)
        finally:
            gate.open()
        assert all(each.result(PATIENCE_S) for each in under_way)
        assert mgr.all_steps() == [0, 2]


def test_a_policy_is_told_what_there_is(tmp_path: Path) -> None:
    told: list[tuple[int, list[ckpt.keep.SavedStep], ckpt.save_when.SaveContext]] = []
    now = 1000.0

    def look(
        step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
    ) -> bool:
        assert all(each.nbytes for each in previous), "the bytes of its files"
        told.append((step, [replace(each, nbytes=None) for each in previous], context))
        return step % 2 == 0

    with set_clock(lambda: now), plain(tmp_path, save_when=look) as mgr:
        for step in range(4):
            now += 10.0
            commit = mgr.save(step, {"n": step}, metrics={"loss": step / 2})
            assert bool(commit) == (step % 2 == 0)
            mgr.wait_until_finished()
    steps = [step for step, _, _ in told]
    assert steps == [0, 1, 2, 3]
    # They were saved without vital signs.
    zero = ckpt.keep.SavedStep(0, 1010.0, {"loss": 0.0})
    two = ckpt.keep.SavedStep(2, 1030.0, {"loss": 1.0})
    assert [previous for _, previous, _ in told] == [[], [zero], [zero], [zero, two]]
    contexts = [context for _, _, context in told]
    assert [context.now for context in contexts] == [1010.0, 1020.0, 1030.0, 1040.0]
    assert [context.last_time for context in contexts] == [None, 1010.0, 1010.0, 1030.0]
    assert all(context.saving == () and not context.preempted for context in contexts)
    assert contexts[0].save_seconds is None
    assert contexts[3].save_seconds is not None
    # A new manager goes by what is on the disk.
    told.clear()
    with set_clock(lambda: now), plain(tmp_path, save_when=look) as mgr:
        assert not mgr.should_save(5)
        assert told[0][1] == [zero, two]
        assert told[0][2].last_time is None


def test_the_newest_step_alone_can_be_looked_at(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(
        step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
    ) -> bool:
        seen.append((bool(previous), previous[-1].step if previous else None, len(previous)))
        return True

    with plain(tmp_path, save_when=look) as mgr:
        for step in range(3):
            mgr.save(step, {"n": 0}).result(PATIENCE_S)
    assert seen == [(False, None, 0), (True, 0, 1), (True, 1, 2)]


def test_time_since_the_last_save_counts_saves_of_earlier_runs(tmp_path: Path) -> None:
    now = 1000.0
    policy = ckpt.save_when.EverySeconds(100)
    with set_clock(lambda: now), plain(tmp_path, save_when=policy) as mgr:
        assert mgr.save(0, {"n": 0})
        now += 99.0
        mgr.wait_until_finished()
        assert not mgr.save(1, {"n": 0})
    with set_clock(lambda: now), plain(tmp_path, save_when=policy) as mgr:
        assert not mgr.should_save(2)
        now += 1.0
        assert mgr.should_save(2)


@pytest.mark.parametrize(
    "policy",
    [ckpt.save_when.EverySeconds(100), ckpt.save_when.Continuously(100)],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("reopened", [False, True])
def test_after_the_clock_was_set_back_one_step_is_saved_and_intervals_go_on_from_it(
    policy: Any, reopened: bool, tmp_path: Path
) -> None:
    now = 100_000.0
    with set_clock(lambda: now):
        mgr = plain(tmp_path, save_when=policy)
        assert mgr.save(0, {"n": 0}).result(PATIENCE_S)
        if reopened:
            mgr.close()
            mgr = plain(tmp_path, save_when=policy)
    now = 50_000.0
    saved = []
    for step in range(1, 41):
        commit = mgr.save(step, {"n": 0})
        if commit:
            commit.result(PATIENCE_S)
            saved.append(step)
        now += 10.0
    mgr.close()
    assert saved == [1, 11, 21, 31]


def test_a_save_that_fails_after_the_clock_was_set_back_does_not_count(tmp_path: Path) -> None:
    now = 1000.0
    with set_clock(lambda: now), plain(tmp_path, save_when=ckpt.save_when.EverySeconds(100)) as mgr:
        assert mgr.save(0, {"n": 0}).result(PATIENCE_S)
        now = 500.0
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(1, {"n": object()})
        assert mgr.save(2, {"n": 1}).result(PATIENCE_S)
        assert not mgr.save(3, {"n": 1})


def test_a_failed_save_is_no_last_save(tmp_path: Path) -> None:
    now = 1000.0
    with set_clock(lambda: now), plain(tmp_path, save_when=ckpt.save_when.EverySeconds(100)) as mgr:
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(1, {"n": object()})
        assert mgr.save(2, {"n": 1})


@pytest.mark.parametrize("answer", [RuntimeError("no idea"), "yes", 1, None])
def test_a_policy_that_fails_is_an_error_of_the_call_and_nothing_is_left(
    tmp_path: Path, answer: Any
) -> None:
    def policy(step: int, previous: Any, context: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with plain(tmp_path, save_when=policy) as mgr:
        with pytest.raises(errors.InvalidArgumentError, match="policy") as caught:
            mgr.save(4, {"n": 1})
        assert caught.value.step == 4
        with pytest.raises(errors.InvalidArgumentError, match="policy"):
            mgr.should_save(4)
        # It is asked about nothing that is forced.
        assert mgr.save(4, {"n": 1}, force=True).result(PATIENCE_S)
        assert mgr.all_steps() == [4]


@pytest.mark.parametrize(
    "policy", [ckpt.save_when.EverySteps, 3, ckpt.keep.Latest(3), "all"], ids=repr
)
def test_what_is_no_save_policy_is_refused_at_once(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        plain(tmp_path, save_when=policy)


@pytest.mark.parametrize(
    "policy", [ckpt.keep.Latest, 0, ckpt.save_when.EverySteps(3), "all"], ids=repr
)
def test_what_is_no_keep_policy_is_refused_at_once(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        plain(tmp_path, keep=policy)


def test_saves_called_at_the_same_time_know_of_each_other(tmp_path: Path) -> None:
    """`Continuously` never has two under way, though all are called before one is decided about."""
    called = threading.Event()
    continuous = ckpt.save_when.Continuously()

    def policy(
        step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
    ) -> bool:
        assert called.wait(PATIENCE_S)
        return ckpt.save_when.refusal_of(continuous, step, previous, context) is None

    async def main() -> None:
        async with ckpt.CheckpointManager(
            tmp_path, save_when=policy, handlers=[GateHandler()]
        ) as mgr:
            gate = Gate()
            tasks = [
                asyncio.create_task(mgr.save(step, items={"state": {"n": step}, "gate": gate}))
                for step in range(5)
            ]
            # Each runs up to where it waits for the library.
            await asyncio.sleep(0)
            called.set()
            try:
                commits = await asyncio.gather(*tasks)
            finally:
                gate.open()
            assert [bool(commit) for commit in commits] == [True, False, False, False, False]

    asyncio.run(main())


def test_the_final_save_of_a_preempted_run_is_made_whatever_policy_and_backlog_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[ckpt.types.Event] = []
    now = 1000.0
    gate = Gate()
    with (
        set_clock(lambda: now),
        plain(
            tmp_path,
            staging=ckpt.Staging(backlog="skip"),
            save_when=ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted([signal.SIGUSR1])
            ),
            observers=[events.append],
        ) as mgr,
        caplog.at_level(logging.INFO, "ckpt"),
    ):
        first = mgr.save(0, items={"state": {"n": 0}, "gate": gate})
        now += 60.0
        assert not mgr.save(1, {"n": 1})
        assert not mgr.reached_preemption(1)
        signal.raise_signal(signal.SIGUSR1)
        # The answer for a step never changes, so that the save of it and the question agree.
        assert not mgr.reached_preemption(1)
        now += 5.0
        assert mgr.should_save(2)
        final = mgr.save(2, {"n": 2})
        assert mgr.reached_preemption(2)
        gate.open()
        assert first.result(PATIENCE_S)
        assert final.result(PATIENCE_S)
        # One final save: who goes on all the same goes by the policy again.
        assert not mgr.save(3, {"n": 3})
        assert not mgr.should_save(3)
        assert mgr.reached_preemption(3)
        mgr.wait_until_finished()
        assert mgr.all_steps() == [0, 2]
    (kept,) = [event for event in events if event.phase == "preempted"]
    assert kept.step == 2
    assert (kept.ended_ns - kept.began_ns) / 1e9 == pytest.approx(65.0)
    assert any("preempted" in line and "65 s" in line for line in caplog.messages)


def test_a_final_save_that_failed_was_none(tmp_path: Path) -> None:
    with plain(
        tmp_path,
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1000), ckpt.save_when.Preempted([signal.SIGUSR1])
        ),
    ) as mgr:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(1, {"n": object()})
        assert mgr.save(2, {"n": 2})
        assert not mgr.save(3, {"n": 3})


def test_who_knows_how_a_save_ended_finds_that_observers_know(tmp_path: Path) -> None:
    told: list[str | None] = []

    def slow(event: ckpt.types.Event) -> None:
        if event.phase == "end":
            time.sleep(0.2)
            told.append(event.outcome)

    gate = Gate()
    with plain(tmp_path, save_when=ckpt.save_when.EverySteps(2), observers=[slow]) as mgr:
        mgr.save(0, {"n": 1.0}).result(PATIENCE_S)
        assert told == ["ok"]
        mgr.save(1, {"n": 1.0})
        assert told[1:] == ["skipped"]
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(2, {"n": object()})
        assert told[2:] == ["failed"]
        cancelled = mgr.save(4, items={"state": {"n": 4}, "gate": gate})
        cancelled.cancel()
        assert cancelled.exception(PATIENCE_S) is not None
        assert told[3:] == ["cancelled"]
        with mgr.partial(6) as part:
            part.save({"n": 1.0})
        assert told[4:] == ["ok"]


def test_every_operation_ends_with_one_event_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[ckpt.types.Event] = []
    gate = Gate()
    with (
        plain(tmp_path, save_when=ckpt.save_when.EverySteps(2), observers=[events.append]) as mgr,
        caplog.at_level(logging.INFO, "ckpt"),
    ):
        mgr.save(0, {"n": 1.0}).result(PATIENCE_S)
        mgr.save(1, {"n": 1.0})
        with pytest.raises(errors.UnsupportedLeafError):
            mgr.save(2, {"n": object()})
        cancelled = mgr.save(4, items={"state": {"n": 4}, "gate": gate})
        cancelled.cancel()
        assert cancelled.exception(PATIENCE_S) is not None
        mgr.restore(0)
        with pytest.raises(errors.TargetMismatchError):
            mgr.restore(0, like={"m": 1.0})
        mgr.verify(0)
        mgr.delete(0)
        for missing in (mgr.restore, mgr.verify, mgr.delete):
            with pytest.raises(errors.StepNotFoundError):
                missing(77)
    ends = [event for event in events if event.phase == "end"]
    assert [(each.operation, each.step, each.outcome) for each in ends] == [
        ("save", 0, "ok"),
        ("save", 1, "skipped"),
        ("save", 2, "failed"),
        ("save", 4, "cancelled"),
        ("restore", 0, "ok"),
        ("restore", 0, "failed"),
        ("verify", 0, "ok"),
        ("delete", 0, "ok"),
        ("restore", 77, "failed"),
        ("verify", 77, "failed"),
        ("delete", 77, "failed"),
    ]
    assert all(each.outcome is None for each in events if each.phase != "end")
    assert "multiple of 2" in str(ends[1].reason)
    assert "'n'" in str(ends[2].reason)
    assert [line.split()[0] for line in caplog.messages] == [
        "saved",
        "restored",
        "verified",
        "deleted",
    ]


def test_the_final_save_is_not_superseded(tmp_path: Path) -> None:
    gate = Gate()
    with plain(
        tmp_path,
        staging=ckpt.Staging(backlog="supersede"),
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted([signal.SIGUSR1])
        ),
    ) as mgr:
        first = mgr.save(1, items={"state": {"n": 1}, "gate": gate})
        signal.raise_signal(signal.SIGUSR1)
        final = mgr.save(2, {"n": 2})
        try:
            job = ThreadPoolExecutor(1).submit(mgr.save, 3, {"n": 3})
        finally:
            gate.open()
        assert first.result(PATIENCE_S)
        assert final.result(PATIENCE_S), final.skipped
        assert job.result(PATIENCE_S).result(PATIENCE_S)
        assert mgr.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("call", ["save", "should_save"])
def test_a_call_that_is_cancelled_while_its_policy_looks_back_ends(
    tmp_path: Path, call: str
) -> None:
    looking, cancelled = threading.Event(), threading.Event()

    def look(
        step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
    ) -> bool:
        if step == 2:
            looking.set()
            assert cancelled.wait(PATIENCE_S)
        return not previous or previous[-1].step < len(previous) + step

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path, save_when=look) as mgr:
            await (await mgr.save(1, {"n": 1}))
            job = mgr.should_save(2) if call == "should_save" else mgr.save(2, {"n": 2})
            task = asyncio.create_task(job)
            await asyncio.to_thread(looking.wait, PATIENCE_S)
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            cancelled.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE_S)
            # Nothing is held up by it.
            assert await asyncio.wait_for(mgr.save(3, {"n": 3}), PATIENCE_S)
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            assert await mgr.all_steps() == [1, 3]

    asyncio.run(main())


def test_a_manager_that_only_reads_would_save_nothing(tmp_path: Path) -> None:
    with plain(tmp_path, mode="r") as mgr:
        assert not mgr.should_save(1)


@pytest.mark.parametrize(
    "number", [10**400, 10**5000, {"many"}, None, object()], ids=["great", "huge", *"abc"]
)
def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path, number: Any) -> None:
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.InvalidArgumentError, match="loss"):
            mgr.save(1, {"n": 1}, metrics={"loss": number})
        assert mgr.all_steps() == []


def test_a_restore_that_is_cancelled_says_so(tmp_path: Path) -> None:
    loading = threading.Event()

    class Slow(GateHandler):
        async def load(self, *args: Any) -> None:
            loading.set()
            await anyio.sleep_forever()

    events: list[ckpt.types.Event] = []

    async def main() -> None:
        gate = Gate()
        gate.open()
        async with ckpt.CheckpointManager(
            tmp_path, handlers=[Slow()], observers=[events.append]
        ) as mgr:
            await (await mgr.save(1, items={"gate": gate}))
            task = asyncio.create_task(mgr.restore(1))
            await asyncio.to_thread(loading.wait, PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    ends = [(each.operation, each.outcome) for each in events if each.phase == "end"]
    assert ends == [("save", "ok"), ("restore", "cancelled")]


@pytest.mark.parametrize(
    "step", [10**5000, -(10**5000), 10**19], ids=["huge", "below zero", "too great"]
)
def test_a_number_that_nobody_would_write_is_no_step(tmp_path: Path, step: int) -> None:
    with plain(tmp_path) as mgr, pytest.raises(errors.InvalidArgumentError, match="step="):
        mgr.save(step, {"n": 1})


def test_a_restore_that_goes_on_with_another_step_is_one_operation(tmp_path: Path) -> None:
    """The step it began with is deleted under it; nobody is told of a failure."""

    class Moving(GateHandler):
        async def load(self, *args: Any) -> str:
            if trainer.latest_step() == 1:
                return "loaded"
            await anyio.to_thread.run_sync(move_on)
            raise errors.CorruptCheckpointError("half of it is gone")

    def move_on() -> None:
        trainer.save(1, items={"gate": gate}).result(PATIENCE_S)
        trainer.delete(0)

    events: list[ckpt.types.Event] = []
    gate = Gate()
    gate.open()
    reader = ckpt.sync.CheckpointManager(tmp_path, handlers=[Moving()], observers=[events.append])
    with plain(tmp_path) as trainer, reader:
        trainer.save(0, items={"gate": gate}).result(PATIENCE_S)
        assert reader.restore() == {"gate": "loaded"}
        trainer.save(2, {"n": 1.0}).result(PATIENCE_S)
        with pytest.raises(errors.TargetMismatchError):
            reader.restore(like={"m": 1.0})
    ends = [(each.step, each.outcome) for each in events if each.phase == "end"]
    assert ends == [(1, "ok"), (2, "failed")]


def test_a_deletion_that_cannot_be_announced_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[ckpt.types.Event] = []
    with plain(tmp_path, observers=[events.append]) as mgr:
        mgr.save(0, {"n": 1}).result(PATIENCE_S)
        with monkeypatch.context() as patch:
            refused = OSError(errno.EACCES, "not here")
            patch.setattr(notes, "put_brief", Mock(side_effect=refused))
            with pytest.raises(errors.StorageError, match="not here"):
                mgr.delete(0)
        assert mgr.all_steps() == [0]
    ends = [(e.operation, e.outcome) for e in events if e.phase == "end"]
    assert ends == [("save", "ok"), ("delete", "failed")]


def test_a_manager_that_is_dropped_is_gone_at_once(tmp_path: Path) -> None:
    """Nothing of it waits for the garbage collector: errors to tell, and handlers of signals."""
    gc.collect()
    gc.disable()
    try:
        mgr = plain(tmp_path, keep=ckpt.keep.Latest(1))
        for step in range(3):
            mgr.save(step, {"n": step}).result(PATIENCE_S)
        mgr.wait_until_finished()
        service = weakref.ref(mgr._service)
        thread = mgr._loop._thread
        del mgr
        assert thread is not None
        thread.join(PATIENCE_S)
        assert service() is None
    finally:
        gc.enable()
