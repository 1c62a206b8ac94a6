"""A run under any policies and a fake clock, against a model; and 2,000 steps under all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ckpt
from ckpt._steps.saves.history import OverheadEstimate
from tests.unit.policies import reference_policies as model
from tests.unit.policies.reference_policies import (
    METRICS,
    PRESERVATION,
    SAVING,
    is_odd,
    loss_and_more,
    wants_tens,
)


class Root:
    """The steps of one root: what a manager does with policies, without its files."""

    def __init__(self, save_policy: Any, preservation: Any) -> None:
        self.save_policy = save_policy
        self.preservation = preservation
        self.now = 1000.0
        self.steps: list[ckpt.keep.SavedStep] = []
        self.saving: list[ckpt.keep.SavedStep] = []
        self.begun: list[ckpt.keep.SavedStep] = []
        self.pace = OverheadEstimate()
        # Every step that was ever committed, as if none had been deleted.
        self.every: dict[int, ckpt.keep.SavedStep] = {}
        self.pinned: set[int] = set()

    def context(self, step: int, preempted: bool = False) -> ckpt.save_when.SaveContext:
        self.pace.asked(step, self.now)
        return ckpt.save_when.SaveContext(
            now=self.now,
            preempted=preempted,
            saving=tuple(self.saving),
            last_time=self.begun[-1].time if self.begun else None,
            step_seconds=self.pace.step_seconds,
            lost_seconds=self.pace.lost_seconds,
            save_seconds=self.pace.save_seconds,
        )

    def ask(self, step: int, metrics: Any = None, preempted: bool = False) -> str | None:
        """Begin a save if the policy wants one."""
        context = self.context(step, preempted)
        refusal = ckpt.save_when.refusal_of(self.save_policy, step, self.steps, context)
        assert refusal == ckpt.save_when.refusal_of(self.save_policy, step, self.steps, context)
        wanted = model.is_saved(self.save_policy, step, self.steps, context)
        assert (refusal is None) == wanted, (refusal, context)
        assert refusal is None or refusal
        if refusal is None:
            self.saving.append(ckpt.keep.SavedStep(step, self.now, metrics))
            self.begun.append(self.saving[-1])
            self.pace.begin_save(step, self.now)
        return refusal

    def end(self, *, failed: bool = False) -> None:
        """End the oldest save; delete what is not kept then."""
        saved = self.saving.pop(0)
        self.pace.end_save(saved.step, self.now, None if failed else 0.25)
        if failed:
            self.begun.remove(saved)
            return
        self.every[saved.step] = saved
        self.steps = sorted([*self.steps, saved], key=lambda each: each.step)
        self.preserve()

    def preserve(self) -> None:
        before = list(self.steps)
        kept = ckpt.keep.steps_kept(self.preservation, self.steps, self.now)
        assert kept == ckpt.keep.steps_kept(self.preservation, self.steps, self.now)
        assert self.steps == before
        latest = {self.steps[-1].step}
        self.steps = [s for s in self.steps if s.step in kept | latest | self.pinned]
        # Deleting what is not kept changes nothing about what is.
        assert ckpt.keep.steps_kept(self.preservation, self.steps, self.now) == kept

    def expected(self) -> set[int]:
        """What a root has that never deleted anything before now, and is asked once."""
        every = sorted(self.every.values(), key=lambda each: each.step)
        wanted = model.kept(self.preservation, every, self.now)
        return wanted | {each.step for each in every[-1:]} | (self.pinned & set(self.every))


# Most policies by themselves save little.
EAGER = SAVING.map(
    lambda policy: ckpt.save_when.Any(
        policy, ckpt.save_when.EverySteps(2), ckpt.save_when.Continuously(9)
    )
)


class PolicyMachine(RuleBasedStateMachine):
    """Steps ascend; time passes; saves end late, or fail; programs are killed."""

    @initialize(save_policy=SAVING | EAGER, preservation=PRESERVATION)
    def begin(self, save_policy: Any, preservation: Any) -> None:
        self.root = Root(save_policy, preservation)
        self.step = 0
        # No time has passed since the last deletion, so that nothing has grown too old.
        self.checked = True

    @rule(
        steps=st.lists(
            st.tuples(st.integers(1, 7), st.integers(0, 15), METRICS, st.booleans()),
            min_size=5,
            max_size=12,
        ),
        ends=st.booleans(),
    )
    def train(self, steps: list[tuple[int, int, Any, bool]], ends: bool) -> None:
        """Make steps and ask about each; its save ends at once, or some time later."""
        for further, seconds, metrics, preempted in steps:
            self.step += further
            self.root.now += seconds
            self.checked = self.checked and seconds == 0
            if len(self.root.saving) < 2:
                self.root.ask(self.step, metrics, preempted)
            if ends:
                self.end(failed=False)

    @rule(failed=st.sampled_from([False, False, False, True]))
    def end(self, failed: bool) -> None:
        if self.root.saving:
            self.root.end(failed=failed)
            self.checked = not failed or self.checked

    @rule()
    def start_again(self) -> None:
        """The program is killed, and goes on: saves under way are gone, and so is what it knew."""
        self.root.saving.clear()
        self.root.begun.clear()
        self.root.pace = OverheadEstimate()

    @rule()
    def pin_the_latest(self) -> None:
        if self.root.steps:
            self.root.pinned.add(self.root.steps[-1].step)

    @invariant()
    def the_latest_is_there(self) -> None:
        if self.root.every:
            assert self.root.steps[-1].step == max(self.root.every)

    @invariant()
    def what_is_there_is_what_one_deletion_of_all_would_leave(self) -> None:
        if self.checked:
            assert {saved.step for saved in self.root.steps} == self.root.expected()

    @invariant()
    def pinned_steps_are_there(self) -> None:
        assert self.root.pinned <= {saved.step for saved in self.root.steps}

    @invariant()
    def nothing_there_was_not_saved(self) -> None:
        assert all(self.root.every[saved.step] == saved for saved in self.root.steps)


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_two_thousand_steps_under_all_policies() -> None:
    members = (
        ckpt.keep.Latest(3),
        ckpt.keep.EverySteps(500),
        ckpt.keep.EverySteps(300, exact=False, max_to_keep=2),
        ckpt.keep.ClosestToEvery(350, max_to_keep=4),
        ckpt.keep.EverySeconds(600),
        ckpt.keep.Newer(30),
        ckpt.keep.Best(2, "loss", "min"),
        ckpt.keep.Best(2, loss_and_more, "max", keep_without_metrics=False),
        ckpt.keep.Steps([7, 100, 1003]),
        lambda step: step == 1111,
    )
    root = Root(
        ckpt.save_when.Any(
            ckpt.save_when.First(),
            ckpt.save_when.EverySteps(100),
            ckpt.save_when.Steps([7, 1003, 1111]),
            ckpt.save_when.EverySeconds(120),
            ckpt.save_when.Preempted(),
            ckpt.save_when.BoundedOverhead(0.02),
            wants_tens,
        ),
        ckpt.keep.Any(*members),
    )
    refused, most = 0, 0
    for step in range(2000):
        metrics = {"loss": math.nan if step % 130 == 0 else (step * 7919 % 1000) / 1000}
        if root.ask(step, metrics, preempted=step == 1999) is not None:
            refused += 1
        root.now += 1 + 0.1 * len(root.saving)
        if root.saving and root.now - root.saving[0].time > 4:
            root.end()
            most = max(most, len(root.steps))
            assert root.steps[-1].step == max(root.every)
            assert {7, 100, 1003, 1111} & set(root.every) <= {s.step for s in root.steps}
    while root.saving:
        root.end()
    found = {saved.step for saved in root.steps}
    assert found == root.expected()
    assert {0, 7, 100, 500, 1003, 1111, 1500, 1999} <= found
    assert is_odd(max(found))
    # Each was refused, or saved; each kind of policy has a share.
    assert refused + len(root.every) == 2000
    assert 200 < len(root.every) < 600
    assert most < 40
    assert best_losses(root) <= found


def best_losses(root: Root) -> set[int]:
    numbers = [s for s in root.every.values() if s.metrics and not math.isnan(s.metrics["loss"])]
    ranked = sorted(numbers, key=lambda s: (s.metrics["loss"], -s.step))  # type: ignore[index]
    return {saved.step for saved in ranked[:2]}


def test_the_model_would_notice() -> None:
    """Its machine fails for a policy that deletes what it has kept before."""

    class Drifting:
        """Keeps every second of what there is: again and again."""

        def keep(self, steps: Any, now: float) -> set[int]:
            return {saved.step for saved in steps[::2]}

    root = Root(lambda *_: True, Drifting())
    failures = 0
    for step in range(9):
        root.ask(step)
        try:
            root.end()
        except AssertionError:
            failures += 1
    assert failures
    assert replace(ckpt.keep.SavedStep(1, 0.0), step=2) == ckpt.keep.SavedStep(2, 0.0)
