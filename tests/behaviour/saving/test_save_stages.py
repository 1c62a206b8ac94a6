"""The stages of saves, as their commits show them, from the call to each of the ends."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._commit import NEXT_STAGES, CommitHooks, Stage
from ckpt._format.manifest import ItemEntry
from ckpt.handlers._base import Deferred
from tests.support.conditions import until
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler

# In this budget, arrays of LARGE are staged one after the other, each when the last is written.
BUDGET = 1 << 20
LARGE: dict[str, Any] = {name: jnp.ones(1 << 17, jnp.float32) for name in "abcd"}
SMALL = {"w": np.zeros(3)}

Stages = list[str]
# What became of each save, in the order of calls.
Seen = list[Stages]


class Broken:
    """An item that cannot be saved: staging it fails, or writing it."""

    def __init__(self, when: str) -> None:
        self.when = when


class BrokenHandler:
    name = "broken"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Broken)

    async def stage(self, item: Broken, writer: Any) -> Awaitable[ItemEntry]:
        async def commit() -> ItemEntry:
            raise errors.InvalidArgumentError("broken while it is written")

        if item.when == "staged":
            raise errors.InvalidArgumentError("broken while it is staged")
        return Deferred(commit)

    async def load(self, entry: Any, like: Any, adapt: Any, reader: Any) -> Any:
        raise NotImplementedError


def manager(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    handlers: list[Any] = [GateHandler(), BrokenHandler()]
    return ckpt.sync.CheckpointManager(root, handlers=handlers, **options)


def viewing(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return manager(root, staging=ckpt.Staging(BUDGET, "view"), **options)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The stages of each save that the test makes, in the order of the calls."""
    stages_of: dict[int, Stages] = {}
    # Kept, so that no other commit gets the id of one that is gone.
    commits: list[ckpt.Commit] = []
    every: Seen = []

    def stage(self: ckpt.Commit) -> str:
        return stages_of[id(self)][-1]

    def enter(self: ckpt.Commit, stage: str) -> None:
        if id(self) not in stages_of:
            commits.append(self)
            every.append(stages_of.setdefault(id(self), []))
        stages_of[id(self)].append(stage)

    monkeypatch.setattr(ckpt.Commit, "_stage", property(stage, enter), raising=False)
    return every


def staged_before_the_call_returns(root: Path) -> None:
    with manager(root) as mgr:
        mgr.save(1, SMALL)


def held_after_the_call_has_returned(root: Path) -> None:
    with viewing(root) as mgr:
        mgr.save(1, LARGE)


def refused_by_a_policy(root: Path) -> None:
    with manager(root, save_when=lambda *_: False) as mgr:
        assert not mgr.save(1, SMALL)


def with_a_policy_that_fails(root: Path) -> None:
    def policy(*_: Any) -> bool:
        raise ZeroDivisionError

    with manager(root, save_when=policy) as mgr, pytest.raises(Exception, match="policy"):
        mgr.save(1, SMALL)


def after_a_failure_that_nobody_has_seen(root: Path) -> None:
    with manager(root) as mgr:
        failed = mgr.save(1, items={"x": Broken("written")})
        until(failed.done)
        with pytest.raises(errors.InvalidArgumentError, match="earlier save"):
            mgr.save(2, SMALL)


def failing_while_it_is_staged(root: Path) -> None:
    with manager(root) as mgr, pytest.raises(errors.InvalidArgumentError, match="staged"):
        mgr.save(1, items={"x": Broken("staged")})


def behind_a_save_of_the_same_step(root: Path) -> None:
    gate = Gate()
    with manager(root) as mgr:
        mgr.save(1, items={"gate": gate})
        assert mgr.save(1, SMALL, if_exists="skip").skipped
        with pytest.raises(errors.StepExistsError):
            mgr.save(1, SMALL, if_exists="error")
        gate.open()


def of_a_step_that_exists(root: Path) -> None:
    with manager(root) as mgr:
        mgr.save(1, SMALL).result(PATIENCE_S)
        assert mgr.save(1, SMALL, if_exists="skip").skipped
        # They are equal, which shows once all is written.
        assert mgr.save(1, SMALL).skipped


def superseded_or_cancelled(root: Path, end: str, state: Any) -> None:
    gate, staging = Gate(), ckpt.Staging(BUDGET, "view", backlog="supersede")
    with manager(root, staging=staging) as mgr, ThreadPoolExecutor(1) as thread:
        mgr.save(1, items={"gate": gate})
        second = mgr.save(2, state)
        gate.reached.wait(PATIENCE_S)
        if end == "cancelled":
            second.cancel()
        else:
            thread.submit(mgr.save, 3, SMALL).result(PATIENCE_S)
        second.exception(PATIENCE_S)
        gate.open()


def in_two_parts(root: Path) -> None:
    with manager(root) as mgr, mgr.partial(1) as part:
        part.save({"a": SMALL})
        part.save({"b": SMALL})


def in_no_parts(root: Path) -> None:
    with manager(root) as mgr, mgr.partial(1) as part:
        part._save.loop.submit(part._save._finish)
        with pytest.raises(errors.InvalidArgumentError, match="there is no item to save"):
            part._save.commit.result(PATIENCE_S)
        part.discard()


def in_parts_with_a_broken_one(root: Path) -> None:
    with manager(root) as mgr:
        part = mgr.partial(1)
        part.save(items={"x": SMALL})
        with pytest.raises(errors.InvalidArgumentError, match="staged"):
            part.save(items={"y": Broken("staged")})


def in_parts_after_a_failure_that_nobody_has_seen(root: Path) -> None:
    with manager(root) as mgr:
        failed = mgr.save(1, items={"x": Broken("written")})
        until(failed.done)
        with pytest.raises(errors.InvalidArgumentError, match="earlier save"):
            mgr.partial(2).save(SMALL)


SAVED = ["waiting", "staging", "writing"]
WHOLE = [*SAVED, "publishing", "done"]
CASES: list[tuple[Callable[..., None], tuple[Any, ...], Seen]] = [
    (staged_before_the_call_returns, (), [WHOLE]),
    (held_after_the_call_has_returned, (), [WHOLE]),
    (refused_by_a_policy, (), [["waiting", "skipped"]]),
    (with_a_policy_that_fails, (), [["waiting", "failed"]]),
    (
        after_a_failure_that_nobody_has_seen,
        (),
        [[*SAVED, "failed"], ["waiting", "failed"]],
    ),
    (failing_while_it_is_staged, (), [["waiting", "staging", "failed"]]),
    (
        behind_a_save_of_the_same_step,
        (),
        [WHOLE, ["waiting", "skipped"], ["waiting", "failed"]],
    ),
    (
        of_a_step_that_exists,
        (),
        [WHOLE, ["waiting", "skipped"], [*SAVED, "publishing", "skipped"]],
    ),
    (superseded_or_cancelled, ("superseded", LARGE), [WHOLE, [*SAVED, "skipped"], WHOLE]),
    (superseded_or_cancelled, ("cancelled", LARGE), [WHOLE, [*SAVED, "failed"]]),
    (in_two_parts, (), [[*SAVED, "staging", "writing", "publishing", "done"]]),
    (in_no_parts, (), [["waiting", "publishing", "failed"]]),
    (in_parts_with_a_broken_one, (), [[*SAVED, "staging", "failed"]]),
    (
        in_parts_after_a_failure_that_nobody_has_seen,
        (),
        [[*SAVED, "failed"], ["waiting", "failed"]],
    ),
]


def test_every_step_from_stage_to_stage_is_one_that_is_taken() -> None:
    taken = {step for *_, saves in CASES for each in saves for step in itertools.pairwise(each)}
    allowed = {(stage, after) for stage, some in NEXT_STAGES.items() for after in some}
    # A save may fail at any time, and is cancelled or skipped until it has its name.
    assert {step for step in allowed if step[1] not in ("skipped", "failed")} <= taken <= allowed


@pytest.mark.parametrize("stage", get_args(Stage))
def test_a_save_that_has_ended_enters_no_stage(stage: Stage) -> None:
    hooks = CommitHooks(ckpt.Commit(1, lambda: None, lambda: None))
    hooks.fail(ValueError("broken"), owed=False)
    with pytest.raises(AssertionError):
        hooks.stage(stage)
    assert hooks.commit.stage == "failed"


@pytest.mark.parametrize(("saves", "given", "expected"), CASES)
def test_a_save_goes_through_its_stages(
    saves: Callable[..., None],
    given: tuple[Any, ...],
    expected: Seen,
    seen: Seen,
    tmp_path: Path,
) -> None:
    saves(tmp_path, *given)
    assert seen == expected
