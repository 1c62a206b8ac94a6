"""An interval that is found while the program runs: the policy, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt._steps.saves.history import OverheadEstimate


@dataclass
class Run:
    """A training run under a fake clock, as a manager sees it.

    Attributes:
        step_seconds: What a step takes by itself.
        blocked: What the call of a save takes.
        slowdown: By what part of itself a step is slower beside a save.
        save_seconds: What a save takes after its call.
    """

    policy: Any
    step_seconds: float = 0.3
    blocked: float = 0.05
    slowdown: float = 0.1
    save_seconds: float = 4.0
    now: float = 1.7e9
    step: int = 0
    lost: float = 0.0
    begun: list[float] = field(default_factory=list)
    committed: list[ckpt.keep.SavedStep] = field(default_factory=list)
    pace: OverheadEstimate = field(default_factory=OverheadEstimate)
    saving: ckpt.keep.SavedStep | None = None
    ends: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.now

    def go_on(self, seconds: float) -> None:
        """Train for so long."""
        until = self.now + seconds
        while self.now < until:
            self.pace.asked(self.step, self.now)
            if (
                ckpt.save_when.refusal_of(self.policy, self.step, self.committed, self.context())
                is None
            ):
                self.begin()
            took = self.step_seconds
            if self.saving is not None:
                # Only the part of the step that is beside the save is slower.
                beside = min(self.step_seconds * (1 + self.slowdown), max(self.ends - self.now, 0))
                slower = beside * self.slowdown / (1 + self.slowdown)
                took += slower
                self.lost += slower
            self.now += took
            self.step += 1
            if self.saving is not None and self.now >= self.ends:
                self.pace.end_save(0, self.ends, self.blocked)
                self.committed.append(self.saving)
                self.saving = None

    def begin(self) -> None:
        assert self.saving is None, "saves must not queue"
        self.saving = ckpt.keep.SavedStep(self.step, self.now)
        self.begun.append(self.now)
        self.pace.begin_save(0, self.now)
        self.now += self.blocked
        self.lost += self.blocked
        self.ends = self.now + self.save_seconds

    def context(self) -> ckpt.save_when.SaveContext:
        saving = () if self.saving is None else (self.saving,)
        return ckpt.save_when.SaveContext(
            now=self.now,
            saving=saving,
            last_time=self.begun[-1] if self.begun else None,
            step_seconds=self.pace.step_seconds,
            lost_seconds=self.pace.lost_seconds,
            save_seconds=self.pace.save_seconds,
        )

    def loss(self, since: float, lost_before: float) -> float:
        return (self.lost - lost_before) / (self.now - since)

    def intervals(self) -> list[float]:
        return [b - a for a, b in zip(self.begun, self.begun[1:], strict=False)]


@settings(max_examples=25)
@given(
    st.sampled_from([0.01, 0.03, 0.2]),
    st.floats(0.05, 2),
    st.floats(0.001, 3),
    st.floats(0, 1),
    st.floats(0.1, 20),
)
def test_the_loss_stays_below_the_bound_and_close_to_it(
    fraction: float, step: float, blocked: float, slowdown: float, save: float
) -> None:
    run = Run(ckpt.save_when.BoundedOverhead(fraction), step, blocked, slowdown, save)
    # Until two saves were made: the first is made before anything is known.
    while len(run.begun) < 3:
        run.go_on(step)
    since, before, count = run.now, run.lost, len(run.begun)
    one = before / (count - 1)
    while len(run.begun) < count + 8:
        run.go_on(step)
    assert run.loss(since, before) <= fraction * 1.001 + one / (run.now - since)
    # If it could be more, it is nearly as much as it may be.
    if one / fraction > save + blocked + 4 * step:
        late = step * (1 + slowdown)
        for interval in run.intervals()[2:]:
            assert interval <= (one / fraction) * 1.001 + 2 * late


def test_the_first_save_is_made_to_measure_one() -> None:
    run = Run(ckpt.save_when.BoundedOverhead())
    run.go_on(1.0)
    assert run.begun == [1.7e9]
    run.go_on(300)
    # 0.05 s, and a tenth of about 14 steps of 0.3 s.
    cost = 0.05 + 0.1 * 13 * 0.3
    assert run.pace.lost_seconds is not None
    assert run.pace.lost_seconds == pytest.approx(cost, rel=0.1)
    assert run.intervals()[-1] == pytest.approx(run.pace.lost_seconds / 0.03, rel=0.05)


def test_the_interval_follows_what_a_save_costs() -> None:
    run = Run(ckpt.save_when.BoundedOverhead(0.05))
    run.go_on(400)
    quick = run.intervals()[-1]
    run.blocked *= 20
    run.go_on(2000)
    slow = run.intervals()[-1]
    assert slow > 2 * quick
    since, before = run.now, run.lost
    run.go_on(2000)
    assert run.loss(since, before) <= 0.055
    run.blocked /= 20
    run.go_on(2000)
    assert run.intervals()[-1] == pytest.approx(quick, rel=0.05)


def test_steps_that_get_faster_do_not_hide_what_is_lost() -> None:
    """With saves that cost little by themselves there is hardly a step without one."""
    run = Run(ckpt.save_when.BoundedOverhead(0.05), step_seconds=1.0, blocked=0.001, slowdown=0.0)
    run.go_on(500)
    run.step_seconds, run.slowdown = 0.25, 0.5
    run.go_on(3000)
    since, before = run.now, run.lost
    run.go_on(1000)
    assert run.loss(since, before) <= 0.055


def test_bounds_of_the_interval() -> None:
    often = Run(ckpt.save_when.BoundedOverhead(0.001, at_most_seconds=30))
    often.go_on(400)
    assert max(often.intervals()) < 31
    seldom = Run(ckpt.save_when.BoundedOverhead(0.5, at_least_seconds=60))
    seldom.go_on(400)
    assert min(seldom.intervals()) >= 60
    # No bound makes saves queue.
    slow = Run(ckpt.save_when.BoundedOverhead(0.001, at_most_seconds=1), save_seconds=20.0)
    slow.go_on(400)
    assert min(slow.intervals()) >= 20


def test_saves_that_cost_nothing_are_made_one_after_the_other() -> None:
    run = Run(ckpt.save_when.BoundedOverhead(), blocked=0.0, slowdown=0.0)
    run.go_on(300)
    assert max(run.intervals()[1:]) < 4.0 + 5 * 0.3


def test_a_resumed_run_measures_anew() -> None:
    policy = ckpt.save_when.BoundedOverhead()
    context = ckpt.save_when.SaveContext(1000.0)
    assert ckpt.save_when.refusal_of(policy, 8, [ckpt.keep.SavedStep(7, 999.0)], context) is None
