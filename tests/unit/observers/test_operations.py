"""Phases of one kind are put together, whatever the order and however many there are."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._events import Event
from ckpt.observers._names import ObservedOperation, Operations
from ckpt.observers._tracing.timeline import measure
from tests.unit.observers.examples import TIMES, US, a_whole_save, end, event

INTERVALS = st.lists(st.tuples(TIMES, st.integers(0, 10_000)), min_size=1, max_size=30)


def told(*events: Event) -> list[ObservedOperation]:
    operations = Operations()
    return [found for each in events if (found := operations.take(each)) is not None]


def test_a_save_is_told_once_with_its_phases_taken_together() -> None:
    save, preserve = told(*a_whole_save(7))
    assert (save.name, save.step, save.is_ok) == ("save", 7, True)
    assert save.end is not None
    phases = {phase.name: phase for phase in save.phases}
    assert list(phases) == ["wait", "blocked", "plan", "stage", "write", "publish"]
    stage, write = phases["stage"], phases["write"]
    assert (stage.began_ns, stage.ended_ns, stage.count) == (20 * US, 100 * US, 2)
    # Two overlap: the time counts once, the bytes twice.
    assert (stage.seconds, stage.nbytes) == (pytest.approx(80e-6), 8 << 20)
    assert (write.seconds, write.nbytes) == (pytest.approx(190e-6), 8 << 20)
    # It comes after the save has ended, and stands alone.
    assert (preserve.end, [phase.name for phase in preserve.phases]) == (None, ["preserve"])


def test_what_was_nearly_lost_stands_alone_before_the_end_and_after_it() -> None:
    lost = event("preempted", -5000, 290)
    for events in [(lost, *a_whole_save()), (*a_whole_save(), lost)]:
        alone = [found for found in told(*events) if found.end is None]
        assert {found.phases[0].name for found in alone} == {"preempted", "preserve"}
        (save,) = (found for found in told(*events) if found.end is not None)
        assert "preempted" not in {phase.name for phase in save.phases}


def test_operations_that_go_on_at_once_are_told_apart() -> None:
    found = told(
        event("write", 0, 10, step=1, nbytes=5),
        event("write", 5, 20, step=2, nbytes=6),
        event("read", 5, 20, step=1, operation="restore", nbytes=7),
        event("write", 5, 20, step=None, nbytes=8),
        end(0, 30, step=2),
        end(0, 30, "cancelled", step=1),
        end(0, 30, step=1, operation="restore"),
        end(0, 30, step=None),
    )
    assert [(each.step, each.phases[0].nbytes) for each in found] == [
        *((2, 6), (1, 5), (1, 7), (None, 8)),
    ]
    assert [each.is_ok for each in found] == [True, False, True, True]


def test_what_never_ended_is_not_taken_for_the_next_one() -> None:
    (found,) = told(event("stage", 0, 10), event("write", 110, 120, lane=0), end(100, 130))
    assert [phase.name for phase in found.phases] == ["write"]


@given(INTERVALS, st.randoms(use_true_random=False))
def test_the_seconds_of_a_phase_are_those_in_which_one_was_running(
    intervals: list[tuple[int, int]], rng: random.Random
) -> None:
    spans = [(began, began + length) for began, length in intervals]
    rng.shuffle(spans)
    (found,) = told(
        *(event("write", began, ended, nbytes=3) for began, ended in spans), end(-1, 10**9)
    )
    phases = {phase.name: phase for phase in found.phases}
    assert phases["write"].seconds == pytest.approx(measure(spans) * US / 1e9)
    assert (phases["write"].nbytes, phases["write"].count) == (3 * len(spans), len(spans))


def test_operations_that_never_end_are_forgotten_when_others_come() -> None:
    operations = Operations()
    for step in range(5000):
        operations.take(event("plan", step, step + 1, step=step))
    first = operations.take(end(0, 9000, step=0))
    last = operations.take(end(0, 9000, step=4999))
    assert first is not None
    assert last is not None
    assert (first.phases, [phase.name for phase in last.phases]) == ((), ["plan"])


def test_the_one_that_was_heard_of_last_is_remembered_longest() -> None:
    operations = Operations()
    operations.take(event("plan", 0, 1, step=-1))
    for step in range(5000):
        operations.take(event("plan", step, step + 1, step=step))
        operations.take(event("stage", step, step + 1, step=-1))
    found = operations.take(end(0, 9000, step=-1))
    assert found is not None
    assert [phase.name for phase in found.phases] == ["plan", "stage"]


def test_any_number_of_batches_takes_little_memory() -> None:
    operations = Operations()
    operations.take(event("write", 0, 1))
    tracemalloc.start()
    try:
        for n in range(50_000):
            # With gaps, so none of them joins another.
            operations.take(event("write", 2 * n, 2 * n + 1, nbytes=1))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 2 << 20
    found = operations.take(end(0, 200_000))
    assert found is not None
    (write,) = found.phases
    assert (write.count, write.nbytes) == (50_001, 50_000)
    # Where it is not exact it is no more than the time from the first to the last.
    assert 0.05 <= write.seconds <= 0.1
