"""Which step is drained next, and which is given up: against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckpt._tiers.drains.drain import DrainBacklog, pause_after

MOST = 3
STEPS = st.integers(0, 9)


class Waiting(RuleBasedStateMachine):
    """Steps are asked for, drained, fail and are given up in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog = DrainBacklog(MOST)
        self.failures: dict[int, int] = {}
        self.under_way: tuple[int, int] | None = None

    @rule(step=STEPS)
    def ask(self, step: int) -> None:
        self.backlog.add(step)
        # A step under way may have been saved anew: it waits once more.
        self.failures.setdefault(step, 0)

    @precondition(lambda self: self.under_way is None)
    @rule()
    def begin(self) -> None:
        order = self.backlog.order
        assert sorted(order) == sorted(self.failures)
        if not order:
            return
        fewest = min(self.failures.values())
        step = max(s for s, count in self.failures.items() if count == fewest)
        assert order[0] == step
        self.backlog.begin(step)
        self.under_way = step, self.failures.pop(step)

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def fail(self) -> None:
        assert self.under_way is not None
        step, count = self.under_way
        self.backlog.fail()
        self.failures[step] = count + 1
        self.under_way = None

    @rule()
    def put_back(self) -> None:
        self.backlog.put_back()
        if self.under_way is not None:
            self.failures.update([self.under_way])
            self.under_way = None

    @precondition(lambda self: self.under_way is not None)
    @rule()
    def end(self) -> None:
        self.backlog.end()
        self.failures = dict.fromkeys(self.failures, 0)
        self.under_way = None

    @rule(pinned=st.sets(STEPS))
    def give_up(self, pinned: set[int]) -> None:
        step = self.backlog.give_up(pinned)
        busy = {*pinned, *(self.under_way or ())[:1]}
        free = [each for each in sorted(self.failures) if each not in busy]
        if len(self.failures) <= MOST or not free:
            assert step is None
        else:
            assert step == free[0]
            del self.failures[step]

    @invariant()
    def same(self) -> None:
        assert self.backlog.waiting == sorted(self.failures, reverse=True)
        under_way = set() if self.under_way is None else {self.under_way[0]}
        assert self.backlog.left == sorted(self.failures.keys() | under_way, reverse=True)
        assert self.backlog.is_too_long == (len(self.failures) > MOST)
        assert all((step in self.backlog) == (step in self.backlog.left) for step in range(10))


TestWaiting = Waiting.TestCase


def test_a_step_that_always_fails_keeps_no_other() -> None:
    backlog = DrainBacklog(16)
    for step in (1, 2, 3):
        backlog.add(step)
    drained = []
    for _ in range(5):
        if not backlog.order:
            break
        found = backlog.order[0]
        backlog.begin(found)
        if found == 3:
            backlog.fail()
        else:
            drained.append(found)
            backlog.end()
    assert drained == [2, 1]
    assert backlog.left == [3]


@given(st.integers(1, 10**9))
def test_pauses_grow_from_a_second_to_a_minute(failures: int) -> None:
    assert 1 <= pause_after(failures) <= pause_after(failures + 1) <= 60
    assert pause_after(1) == 1
    assert pause_after(7) == 60
