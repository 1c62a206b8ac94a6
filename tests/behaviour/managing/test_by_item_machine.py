"""Random lives of a root whose items have policies of their own, against the plain rule."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.keep._by_item import text_of
from tests.reliability.scenarios import leftovers
from tests.support.faults import FaultyFiles
from tests.support.trees import assert_same
from tests.unit.policies import reference_policies as model
from tests.unit.policies.test_by_item import rule_of

ITEMS = ["params", "opt_state", "ema_fast", "rng"]
POLICY: st.SearchStrategy[Any] = st.sampled_from(
    [
        ckpt.keep.Latest(1),
        ckpt.keep.Latest(3),
        ckpt.keep.EverySteps(5),
        ckpt.keep.Steps([2, 9]),
        ckpt.keep.Steps([]),
        ckpt.keep.All(),
        ckpt.keep.Best(1, "loss", "min"),
        ckpt.keep.Any(ckpt.keep.Latest(2), ckpt.keep.EverySteps(4)),
    ]
)
PATTERN = st.sampled_from(["params", "opt_state", "ema_*", "p*", "*"])
POLICIES = st.dictionaries(PATTERN, POLICY, min_size=1, max_size=3)


def value(item: str, step: int, number: int) -> dict[str, Any]:
    return {"x": np.full(20, 1000 * number + step, np.int64), "name": item}


class ByItemMachine(RuleBasedStateMachine):
    """What is there, item by item, and what was dropped, beside a real root."""

    @initialize(policies=POLICIES)
    def begin(self, policies: dict[str, Any]) -> None:
        self.stack = contextlib.ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        self.stack.enter_context(FaultyFiles(self.root.parent, sync=False))
        # By step: its items with the numbers of their contents, and what was dropped, with why.
        self.items: dict[int, dict[str, int]] = {}
        self.dropped: dict[int, dict[str, str | None]] = {}
        self.pinned: set[int] = set()
        self.count = 0
        self.newest: int | None = None
        self.mgr: Any = None
        self.open(policies)

    def open(self, policies: dict[str, Any]) -> None:
        if self.mgr is not None:
            self.mgr.close()
        self.policies, self.newest = policies, None
        self.mgr = ckpt.sync.CheckpointManager(self.root, keep=policies)

    @rule(policies=POLICIES)
    def open_another(self, policies: dict[str, Any]) -> None:
        self.open(policies)

    @rule(step=st.integers(0, 20), names=st.sets(st.sampled_from(ITEMS), min_size=1))
    def save(self, step: int, names: set[str]) -> None:
        self.count += 1
        items = {name: value(name, step, self.count) for name in sorted(names)}
        metrics = {"loss": float(step * 7 % 11)}
        self.mgr.save(step, items=items, metrics=metrics, if_exists="replace").result(60)
        self.mgr.wait_until_finished()
        self.items[step] = dict.fromkeys(items, self.count)
        self.dropped[step] = {}
        self.newest = step
        self.preserve()

    def preserve(self) -> None:
        """Let go what is not kept: each item by itself, asked of all steps that have it."""
        steps = [
            ckpt.keep.SavedStep(step, float(step), {"loss": float(step * 7 % 11)})
            for step in sorted(self.items)
        ]
        whole = {self.newest, max(self.items), *self.pinned}
        going = []
        for item in ITEMS:
            policy = rule_of(item, self.policies)
            having = [each for each in steps if item in self.items[each.step]]
            kept = set() if policy is None else model.kept(policy, having, 0.0)
            going += [
                (each.step, item, text_of(policy))
                for each in having
                if policy is not None and each.step not in kept | whole
            ]
        for step, item, text in going:
            del self.items[step][item]
            self.dropped[step][item] = text
        for step in [step for step, left in self.items.items() if not left]:
            del self.items[step], self.dropped[step]

    def some_step(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.items)))

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        step = self.some_step(data)
        if step in self.pinned:
            with pytest.raises(errors.StepPinnedError):
                self.mgr.delete(step)
            return
        self.mgr.delete(step)
        del self.items[step], self.dropped[step]

    @precondition(lambda self: self.items)
    @rule(data=st.data(), item=st.sampled_from(ITEMS))
    def delete_item(self, data: st.DataObject, item: str) -> None:
        step = self.some_step(data)
        if step in self.pinned or item not in self.items[step] or len(self.items[step]) == 1:
            with pytest.raises((errors.StepPinnedError, errors.InvalidArgumentError)):
                self.mgr.delete(step, item=item)
            return
        self.mgr.delete(step, item=item)
        del self.items[step][item]
        self.dropped[step][item] = None

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        step = self.some_step(data)
        if step in self.pinned:
            self.mgr.unpin(step, "paper")
        else:
            self.mgr.pin(step, "paper")
        self.pinned ^= {step}

    @rule(item=st.sampled_from(ITEMS))
    def fall_back(self, item: str) -> None:
        """The newest step that has the item, past those that have lost it."""
        for step in sorted(self.items, reverse=True):
            if item in self.items[step]:
                found = self.mgr.restore(items=[item], fallback=True)
                assert_same(found, {item: value(item, step, self.items[step][item])})
                return
            if item not in self.dropped[step]:
                return
        if self.items:
            with pytest.raises(errors.ItemDroppedError):
                self.mgr.restore(items=[item], fallback=True)

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        with ckpt.sync.CheckpointManager(self.root, mode="r") as reader:
            assert reader.all_steps() == sorted(self.items)
            for step, items in self.items.items():
                info = reader.metadata(step).info
                assert set(info.items) == set(items)
                assert {each.item: each.policy for each in info.dropped} == self.dropped[step]
                wanted = {name: value(name, step, number) for name, number in items.items()}
                assert_same(reader.restore(step), {name: wanted[name] for name in info.items})
                assert reader.verify(step)
                for item in self.dropped[step]:
                    have = sorted(each for each, kept in self.items.items() if item in kept)
                    text = ", ".join(map(str, have)) or "no step has it now"
                    with pytest.raises(errors.ItemDroppedError) as caught:
                        reader.restore(step, items=[item])
                    assert text in str(caught.value)

    def teardown(self) -> None:
        self.mgr.close()
        assert set(leftovers(self.root)) <= {".ckpt-pins"}
        self.stack.close()


ByItemMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=14, deadline=None)
TestByItem = ByItemMachine.TestCase
