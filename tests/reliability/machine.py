"""A state machine: whatever is done to a root, its managers list and restore what a dict says."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt.sync
from ckpt._settings import IfTaken
from ckpt.errors import CheckpointError, CommitCancelledError, StepExistsError, StepNotFoundError
from ckpt.testing.compare import differences
from tests.reliability.kills import attempts
from tests.reliability.tally import Tally
from tests.support.faults import Crash, FaultyFiles, at
from tests.support.odd_items import Odd, OddHandler

__all__ = ["machine"]

PATIENCE_S = 120
KEPT = 4
REFUSED = 7
STEPS = st.integers(0, 9)
# Orbax leaves such attempts; they are not ours to remove.
OF_ORBAX = "5.orbax-checkpoint-tmp-17"
WHO = st.sampled_from([0, 1])


@dataclass(frozen=True, slots=True)
class NotSeven:
    """A save policy that has something against one step."""

    def refusal(
        self,
        step: int,
        previous: Sequence[ckpt.keep.SavedStep],
        context: ckpt.save_when.SaveContext,
    ) -> str | None:
        return "not this one" if step == REFUSED else None


def state(number: int) -> dict[str, Any]:
    """A tree that only this number has."""
    return {"w": np.arange(number, number + 40), "number": number, "text": f"version {number}"}


def write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, content)
    os.close(fd)


class Roots(RuleBasedStateMachine):
    """Two managers of one root and a dict that says what they have to hold.

    The first keeps everything, the second the last steps only. Syncs do not reach the disk: no
    power is cut here.
    """

    directory: Path
    tally: Tally

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=self.directory))
        self.files = FaultyFiles(self.root, sync=False)
        self.files.__enter__()
        self.model: dict[int, int] = {}
        self.strays: set[str] = set()
        self.one_shot: int | None = None
        self.version = 0
        self.managers = [self.opened(which) for which in range(2)]

    def opened(self, which: int) -> ckpt.sync.CheckpointManager:
        mgr = ckpt.sync.CheckpointManager(
            self.root,
            save_when=NotSeven(),
            keep=ckpt.keep.Latest(KEPT) if which else None,
            handlers=[OddHandler()],
        )
        return mgr.__enter__()

    def teardown(self) -> None:
        try:
            for mgr in self.managers:
                mgr.close()
            with ckpt.sync.CheckpointManager(self.root):
                pass
            wanted = {*self.strays, *map(str, self.model)}
            wanted |= {"best"} if self.one_shot is not None else set()
            # A lease that was not yet written when its owner died stays for an hour.
            newborn = {
                path.name for path in self.root.glob(".ckpt-lease-*") if not path.stat().st_size
            }
            # What a run keeps is noted there.
            assert set(os.listdir(self.root)) - {".ckpt-run"} == wanted | newborn
        finally:
            self.files.__exit__(None, None, None)
            shutil.rmtree(self.root)
            # A failing example is tried many times over; the state is not kept for each.
            self.managers = []

    def next_version(self) -> int:
        self.version += 1
        self.tally.runs += 1
        return self.version

    def refusal(self, step: int, *, if_exists: IfTaken) -> type[Exception] | None:
        """What `save` itself has to raise."""
        if str(step) in self.strays or (step in self.model and if_exists != "replace"):
            return StepExistsError
        return None

    def saved(self, which: int, step: int, version: int) -> None:
        self.model[step] = version
        if which:
            self.managers[which].wait_until_finished()
            kept = {*sorted(self.model)[-KEPT:], step}
            self.model = {each: self.model[each] for each in kept}

    @rule(which=WHO, step=STEPS, if_exists=st.sampled_from(("error", "replace")))
    def save(self, which: int, step: int, if_exists: IfTaken) -> None:
        version = self.next_version()
        mgr = self.managers[which]
        refusal = self.refusal(step, if_exists=if_exists)
        try:
            commit = mgr.save(
                step,
                state(version),
                custom_metadata=version,
                if_exists=if_exists,
            )
        except StepExistsError:
            assert refusal is StepExistsError
            return
        assert refusal is None
        if step == REFUSED:
            assert commit.skipped is not None
            return
        info = commit.result(PATIENCE_S)
        assert info is not None
        assert info.step == step
        self.saved(which, step, version)

    @rule(which=WHO, step=STEPS, if_exists=st.sampled_from(("error", "replace")))
    def fail(self, which: int, step: int, if_exists: IfTaken) -> None:
        if self.refusal(step, if_exists=if_exists) or step == REFUSED:
            return
        error = CheckpointError("on fire")
        item = Odd(state(self.next_version()), error=error)
        commit = self.managers[which].save(step, item, if_exists=if_exists)
        assert commit.exception(PATIENCE_S) is error
        self.tally.faults += 1

    @rule(which=WHO, step=STEPS, if_exists=st.sampled_from(("error", "replace")))
    def cancel(self, which: int, step: int, if_exists: IfTaken) -> None:
        if self.refusal(step, if_exists=if_exists) or step == REFUSED:
            return
        item = Odd(state(self.next_version()), hold="commit")
        commit = self.managers[which].save(step, item, if_exists=if_exists)
        assert item.reached.wait(PATIENCE_S)
        assert commit.cancel()
        assert isinstance(commit.exception(PATIENCE_S), CommitCancelledError)
        self.tally.faults += 1

    @rule(step=STEPS, number=st.integers(1, 60), if_exists=st.sampled_from(("error", "replace")))
    def crash(self, step: int, number: int, if_exists: IfTaken) -> None:
        """Let a third manager die while it opens, saves or deletes the step of its own save."""
        version = self.next_version()
        before = dict(self.model)
        done = False
        with (
            FaultyFiles(self.root, at(number, Crash()), sync=False) as files,
            contextlib.suppress(CheckpointError),
            ckpt.sync.CheckpointManager(self.root) as mgr,
        ):
            mgr.save(
                step,
                state(version),
                custom_metadata=version,
                if_exists=if_exists,
            ).result()
            done = True
            self.model[step] = version
            mgr.delete(step)
            del self.model[step]
        if not files.crashed:
            return
        self.tally.faults += 1
        # What was under way when it died happened, or did not.
        now = self.managers[0].all_steps()
        if step not in now:
            assert done or step not in before, "a crash took a step"
            self.model.pop(step, None)
        elif not done and self.managers[0].metadata(step).info.custom_metadata == version:
            self.model[step] = version

    @rule(which=WHO, step=STEPS)
    def delete(self, which: int, step: int) -> None:
        try:
            self.managers[which].delete(step)
        except StepNotFoundError:
            assert step not in self.model
        else:
            del self.model[step]

    @rule(which=WHO)
    def reopen(self, which: int) -> None:
        self.managers[which].close()
        self.managers[which] = self.opened(which)
        assert set(attempts(self.root)) <= {OF_ORBAX}

    @rule()
    def save_at_once(self) -> None:
        version = self.next_version()
        if_exists: IfTaken = "error" if self.one_shot is None else "replace"
        ckpt.sync.save(self.root / "best", state(version), if_exists=if_exists)
        self.one_shot = version

    @precondition(lambda self: self.one_shot is not None)
    @rule()
    def load_at_once(self) -> None:
        assert differences(state(self.one_shot or 0), ckpt.sync.load(self.root / "best")) == []

    @rule(which=WHO, step=STEPS)
    def restore(self, which: int, step: int) -> None:
        mgr = self.managers[which]
        if step in self.model:
            assert differences(state(self.model[step]), mgr.restore(step)) == []
            # A run that goes back leaves steps behind. That has tests of its own.
            mgr._service.saves.origin.begin_from(None, None, None)
            return
        try:
            mgr.restore(step)
        except StepNotFoundError:
            return
        raise AssertionError("a step was restored that is not there")

    @rule(name=st.sampled_from(["3", "9", "11", "007", "notes", "-1", OF_ORBAX]))
    def stray_directory(self, name: str) -> None:
        path = self.root / name
        if not path.exists():
            path.mkdir()
            write(path / "file", b"of somebody else")
            self.strays.add(name)

    @rule(name=st.sampled_from(["2", "12", "notes.txt", "ckpt.json"]), content=st.binary())
    def stray_file(self, name: str, content: bytes) -> None:
        path = self.root / name
        if not path.exists():
            write(path, content)
            self.strays.add(name)

    @precondition(lambda self: self.strays)
    @rule(data=st.data())
    def tidy(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.strays)))
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.strays.remove(name)

    @invariant()
    def both_list_what_is_there(self) -> None:
        for mgr in self.managers:
            assert mgr.all_steps() == sorted(self.model)
            assert mgr.latest_step() == max(self.model, default=None)
        if self.model:
            latest = max(self.model)
            assert self.managers[0].metadata(latest).info.custom_metadata == self.model[latest]
            restored = self.managers[1].restore()
            assert differences(state(self.model[latest]), restored) == []


def machine(directory: Path, count: int, seed: int = 0) -> Tally:
    """Run `count` random programs against the model; the first one that fails is the loss.

    Faults are the saves that fail, are cancelled, or meet the death of their process.
    """
    tally = Tally()
    chosen = settings(
        max_examples=count,
        stateful_step_count=25,
        database=None,
        deadline=None,
        derandomize=seed == 0,
        suppress_health_check=list(HealthCheck),
    )

    def make() -> Roots:
        return type("Machine", (Roots,), {"directory": directory, "tally": tally})()

    try:
        run_state_machine_as_test(make, settings=chosen)  # type: ignore[arg-type]
    except Exception as error:
        # With the program that failed, which Hypothesis adds as notes, also of those in a group.
        tally.losses.append("".join(traceback.format_exception(error)))
    return tally
