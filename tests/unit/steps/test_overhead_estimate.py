"""What saving costs the training beside it."""

from __future__ import annotations

import pickle
import statistics
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._steps.saves.history import OverheadEstimate


@dataclass
class Training:
    """A loop under a clock of its own that asks its pace about every step, or every so many."""

    pace: OverheadEstimate
    seconds_per_step: float
    now: float = 1000.0
    step: int = 0
    stride: int = 1

    def steps(self, count: int, slower: float = 0.0) -> None:
        """Make `count` strides; each takes `slower` longer than usual."""
        for _ in range(count):
            self.pace.asked(self.step, self.now)
            self.step += self.stride
            self.now += self.stride * self.seconds_per_step + slower

    def save(self, blocked: float, strides: int, slower: float, ends: float = 1.0) -> float:
        """Make one save, and strides beside it until some part of the last one.

        Returns:
            How long the save took.
        """
        began = self.now
        self.pace.asked(self.step, self.now)
        self.pace.begin_save(self.step, self.now)
        self.now += blocked
        self.step += self.stride
        key = self.step - self.stride
        self.now += self.stride * self.seconds_per_step + slower
        self.steps(strides - 1, slower)
        last = self.stride * self.seconds_per_step + slower
        ended = self.now - last * (1 - ends)
        self.pace.end_save(key, ended, blocked)
        return ended - began


PACES = st.floats(0.001, 100)
STALLS = st.floats(0, 50)


@given(
    PACES,
    st.lists(st.tuples(STALLS, STALLS, st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
    st.sampled_from([1, 8]),
    st.booleans(),
)
def test_what_a_constant_pace_loses_is_found(
    seconds: float, saves: list[tuple[float, float, int, float]], stride: int, early: bool
) -> None:
    """Whether the steps without a save come first, or only after the first save."""
    training = Training(OverheadEstimate(), seconds, stride=stride)
    lost, took = [], []
    training.steps(0 if early else 5)
    for blocked, slower, strides, ends in saves:
        took.append(training.save(blocked, strides, slower, ends))
        lost.append(min(blocked + strides * slower, took[-1]))
        training.steps(3)
    assert training.pace.step_seconds == pytest.approx(seconds, rel=1e-6)
    assert training.pace.save_seconds == pytest.approx(statistics.median(took), rel=1e-6)
    found = training.pace.lost_seconds
    assert found == pytest.approx(statistics.median(lost), rel=1e-6, abs=1e-6)


def test_nothing_is_known_before_it_is_measured() -> None:
    pace = OverheadEstimate()
    assert (pace.step_seconds, pace.lost_seconds, pace.save_seconds) == (None, None, None)
    pace.asked(0, 5.0)
    pace.begin_save("a", 5.0)
    assert (pace.step_seconds, pace.lost_seconds, pace.save_seconds) == (None, None, None)
    pace.end_save("a", 8.0, 0.5)
    assert (pace.step_seconds, pace.lost_seconds, pace.save_seconds) == (None, 0.5, 3.0)


def test_if_only_saves_are_seen_the_call_is_what_counts() -> None:
    training = Training(OverheadEstimate(), 0.3, stride=1000)
    for _ in range(8):
        training.save(0.25, 1, 40.0, ends=0.05)
    assert training.pace.step_seconds is None
    assert training.pace.lost_seconds == 0.25


def test_the_last_few_saves_count() -> None:
    training = Training(OverheadEstimate(), 1.0)
    training.steps(5)
    for stall in (90.0, 1.0, 90.0, 1.0, 1.0):
        training.save(stall, 2, 0.0)
        training.steps(2)
    assert training.pace.lost_seconds == pytest.approx(1.0)
    for _ in range(3):
        training.save(7.0, 2, 0.0)
        training.steps(2)
    assert training.pace.lost_seconds == pytest.approx(7.0)


def test_the_pace_follows_the_training() -> None:
    training = Training(OverheadEstimate(), 1.0)
    training.steps(200)
    training.seconds_per_step = 3.0
    training.steps(60)
    assert training.pace.step_seconds == pytest.approx(3.0)
    # A validation now and then does not.
    for _ in range(5):
        training.now += 100
        training.steps(20)
    assert training.pace.step_seconds == pytest.approx(3.0)


def test_steps_beside_a_save_are_no_measure_of_a_step() -> None:
    training = Training(OverheadEstimate(), 1.0)
    training.steps(2)
    training.save(0.0, 30, 5.0)
    training.steps(2)
    assert training.pace.step_seconds == pytest.approx(1.0)


def test_the_time_of_two_saves_at_once_is_lost_once() -> None:
    training = Training(OverheadEstimate(), 1.0)
    pace = training.pace
    training.steps(5)
    pace.begin_save("a", training.now)
    pace.begin_save("b", training.now)
    training.steps(4, slower=3.0)
    pace.end_save("a", training.now, 0.0)
    pace.end_save("b", training.now, 0.0)
    training.steps(2)
    # Twelve seconds, of two saves.
    assert pace.lost_seconds == pytest.approx(6.0)


def test_a_save_that_failed_is_no_measure_of_a_save() -> None:
    training = Training(OverheadEstimate(), 1.0)
    pace = training.pace
    training.steps(5)
    pace.begin_save("a", training.now)
    training.steps(4, slower=3.0)
    pace.end_save("a", training.now, None)
    training.steps(2)
    assert (pace.lost_seconds, pace.save_seconds) == (None, None)
    assert pace.step_seconds == pytest.approx(1.0)


def test_what_is_lost_lies_between_the_call_and_the_whole_save() -> None:
    faster = Training(OverheadEstimate(), 1.0)
    faster.steps(5)
    faster.save(0.5, 5, -0.9)
    assert faster.pace.lost_seconds == 0.5
    # A validation beside a save is not the fault of the save.
    paused = Training(OverheadEstimate(), 1.0)
    paused.steps(5)
    took = paused.save(0.5, 1, 1000.0, ends=0.002)
    paused.steps(2)
    assert paused.pace.lost_seconds == pytest.approx(took)


def test_asking_twice_about_a_step_changes_nothing() -> None:
    once, twice = Training(OverheadEstimate(), 1.0), Training(OverheadEstimate(), 1.0)
    for training in (once, twice):
        for _ in range(4):
            training.steps(1)
            if training is twice:
                training.pace.asked(training.step - 1, training.now - 0.5)
        training.save(0.5, 3, 0.25)
        training.steps(2)
    assert once.pace.step_seconds == twice.pace.step_seconds
    assert once.pace.lost_seconds == twice.pace.lost_seconds


def test_a_run_that_goes_back_starts_anew() -> None:
    training = Training(OverheadEstimate(), 1.0)
    training.steps(5)
    training.now += 1000
    training.step = 2
    training.steps(2)
    assert training.pace.step_seconds == pytest.approx(1.0)


def test_a_save_that_ended_before_a_run_went_back_is_not_beside_its_steps() -> None:
    training = Training(OverheadEstimate(), 1.0)
    training.step = 10
    training.save(0.5, 1, 0.0)
    training.step = 2
    training.steps(2)
    assert training.pace.step_seconds == pytest.approx(1.0)


def test_ends_of_unknown_saves_are_passed_over() -> None:
    pace = OverheadEstimate()
    pace.end_save("never begun", 5.0, 1.0)
    assert pace.save_seconds is None


def test_memory_is_bounded() -> None:
    training = Training(OverheadEstimate(), 0.5)

    def size() -> int:
        for _ in range(200):
            training.save(0.1, 3, 0.1)
            training.steps(5)
        return len(pickle.dumps(training.pace))

    first = size()
    assert abs(size() - first) < 50
    assert abs(size() - first) < 50
