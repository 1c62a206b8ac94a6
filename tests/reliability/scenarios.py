"""What is done to a root while something goes wrong, and how it is looked at afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt._format.manifest import decode
from ckpt._format.manifest_head import FILE_NAME, digest
from ckpt.handlers._json import JsonHandler
from ckpt.testing.compare import differences
from tests.support.faults import FaultyFiles, FileOperation, Plan

__all__ = [
    "HANDLERS",
    "NEXT",
    "ONE",
    "ONE_SHOT",
    "SAVE",
    "SCENARIOS",
    "Entries",
    "Scenario",
    "age",
    "contents",
    "items_of",
    "leftovers",
    "manager",
    "record",
    "same",
    "save",
    "scenarios",
    "template",
]

# Which number the entries of a root hold, by their names.
Entries = Mapping[str, int]
Act = Callable[[Path, Any, Callable[[], object]], object]
# A step, and its number, that nothing else has. It is small: it shows that saving goes on.
NEXT = 77
HANDLERS = {"config": JsonHandler()}
ONE = "one"


@functools.cache
def items_of(number: int, *, large: bool = True) -> dict[str, Any]:
    """Items that only this number has; with `large` one array takes the way past the page cache."""
    random = np.random.default_rng(number)
    rows = 520 if large and number != NEXT else 3
    state = {
        "kernel": random.integers(0, 1 << 30, (rows, 512)).astype(np.float32),
        "device": jnp.asarray(random.integers(0, 1 << 30, 40), jnp.int32),
        # All numbers have it, so that steps of one manager share a file.
        "frozen": np.arange(4096, dtype=np.float32),
        "step": number,
        "rate": 0.5 + number,
        "name": f"number {number}",
    }
    return {"state": state, "config": {"number": number, "list": [1, None, "x"]}}


def manager(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=HANDLERS, **options)


def save(
    mgr: ckpt.sync.CheckpointManager, step: int, number: int, *, large: bool = True
) -> ckpt.Commit:
    items = items_of(number, large=large)
    return mgr.save(step, items=items, custom_metadata=number, if_exists="replace")


@dataclass(frozen=True)
class Scenario:
    """Something that is done to a root.

    Attributes:
        name: What it is called.
        before: What the root holds, all of it acknowledged; None where there is no root yet.
        act: What is done, with a manager of the root, or None for what makes its own; calls the
            last argument when it is acknowledged.
        done: What the root may hold when that has succeeded.
        failed: What it may hold when an error was raised, and nothing else went wrong.
        opened: Whether a manager is open before it begins.
        dead: Whether the root has attempts of dead writers, too.
        options: Of the manager.
    """

    name: str
    before: Entries | None
    act: Act
    done: Sequence[Entries]
    failed: Sequence[Entries]
    opened: bool = True
    dead: bool = False
    options: Mapping[str, Any] | None = None

    @property
    def possible(self) -> list[Entries]:
        """What the root may hold if nobody knows how far it came."""
        return [*self.done, *self.failed]


def _save(step: int, number: int, *, large: bool) -> Act:
    def act(root: Path, mgr: Any, heard: Callable[[], object]) -> None:
        save(mgr, step, number, large=large).result()
        heard()
        mgr.wait_until_finished()

    return act


def _save_two(large: bool) -> Act:
    def act(root: Path, mgr: Any, heard: Callable[[], object]) -> None:
        save(mgr, 1, 1, large=large).result()
        # Where the files of step 1 cannot be linked, they are written.
        save(mgr, 2, 2, large=large).result()
        heard()
        mgr.wait_until_finished()

    return act


def _delete(root: Path, mgr: Any, heard: Callable[[], object]) -> None:
    mgr.delete(0)
    heard()


def _open(root: Path, _: object, heard: Callable[[], object]) -> None:
    with contextlib.closing(manager(root)) as mgr, mgr:
        heard()


def _fresh(large: bool) -> Act:
    def act(root: Path, _: object, heard: Callable[[], object]) -> None:
        with contextlib.closing(manager(root)) as mgr, mgr:
            save(mgr, 0, 0, large=large).result()
            heard()

    return act


def _one_shot(root: Path, _: object, heard: Callable[[], object]) -> None:
    ckpt.sync.save(root / ONE, items=items_of(1), custom_metadata=1, handlers=HANDLERS)
    heard()


def scenarios(*, large: bool = True) -> dict[str, Scenario]:
    """Return the scenarios by name; see `items_of` for `large`."""
    found = [
        Scenario("save", {"0": 0}, _save(1, 1, large=large), [{"0": 0, "1": 1}], [{"0": 0}]),
        Scenario(
            "overwrite",
            {"0": 0, "1": 1},
            _save(1, 2, large=large),
            [{"0": 0, "1": 2}],
            [{"0": 0, "1": 1}],
        ),
        Scenario(
            "delete",
            {"0": 0, "1": 1},
            _delete,
            [{"1": 1}],
            # Hidden first, made durable then: what failed after that has hidden it all the same.
            [{"0": 0, "1": 1}, {"1": 1}],
        ),
        Scenario(
            "preserve",
            {"0": 0},
            _save(1, 1, large=large),
            [{"1": 1}, {"0": 0, "1": 1}],
            [{"0": 0}],
            options={"keep": ckpt.keep.Latest(1)},
        ),
        Scenario(
            "drop",
            {"0": 0},
            _save(1, 1, large=large),
            # Step 0 with all its items, or with one that says that the other was dropped.
            [{"0": 0, "1": 1}],
            [{"0": 0}],
            options={"keep": {"config": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}},
        ),
        Scenario(
            "share",
            {"0": 0},
            _save_two(large),
            [{"0": 0, "1": 1, "2": 2}],
            [{"0": 0}, {"0": 0, "1": 1}],
        ),
        Scenario("open", {"0": 0}, _open, [{"0": 0}], [{"0": 0}], opened=False, dead=True),
        Scenario("fresh", None, _fresh(large), [{"0": 0}], [{}], opened=False),
        Scenario("one-shot", {}, _one_shot, [{ONE: 1}], [{}], opened=False),
    ]
    return {scenario.name: scenario for scenario in found}


SCENARIOS = tuple(scenarios().values())
SAVE, ONE_SHOT = SCENARIOS[0], SCENARIOS[-1]


def template(scenario: Scenario, root: Path, *, large: bool = True) -> None:
    """Make the root that a scenario begins with."""
    if scenario.before is None:
        root.parent.mkdir(parents=True, exist_ok=True)
        return
    root.mkdir(parents=True)
    with FaultyFiles(root, sync=False):
        if scenario.opened or scenario.before:
            with manager(root) as mgr:
                for name, number in scenario.before.items():
                    save(mgr, int(name), number, large=large).result()
    if scenario.dead:
        token = "0123456789abcdef" * 2
        shutil.copytree(root / "0", root / f"1.orbax-checkpoint-tmp-{token}")
        shutil.copytree(root / "0", root / f"2.orbax-checkpoint-tmp-{token[::-1]}.trash")
        (root / f".ckpt-lease-{token}").touch()
        age(root)


def age(root: Path, *, all_of_it: bool = False) -> None:
    """Let two hours pass for leases whose writer died before it had written anything into them.

    So, too, for the marks of deletions, which are leases without a lock. Of all else it is known at
    once that nobody works on it; but after a power cut leases may be lost, and then `all_of_it` has
    to be so old.
    """
    then = time.time() - 7200
    for path in (root / ".ckpt-pins").glob("*"):
        os.utime(path, (then, then))
    for name in leftovers(root):
        path = root / name
        if all_of_it or (name.startswith(".ckpt-lease-") and not path.stat().st_size):
            os.utime(path, (then, then))


def leftovers(root: Path) -> list[str]:
    """Return the names of what is unfinished in a root."""
    names = set(os.listdir(root)) - {".ckpt-run"} if root.exists() else set()
    return [name for name in names if ".orbax-checkpoint-tmp-" in name or name.startswith(".")]


def contents(root: Path, mgr: ckpt.sync.CheckpointManager, *, large: bool = True) -> dict[str, int]:
    """Return which numbers the entries of a root hold; each must be whole, bit by bit."""
    names = set(os.listdir(root)) if root.exists() else set()
    names -= {*leftovers(root), "metadata", ".ckpt-run"}
    found: dict[str, int] = {}
    steps = sorted(int(name) for name in names if name.isdigit())
    assert mgr.all_steps() == steps, f"{mgr.all_steps()} are listed, there are {steps}"
    assert mgr.latest_step() == (steps[-1] if steps else None)
    for step in steps:
        number = found[str(step)] = mgr.metadata(step).info.custom_metadata
        same(mgr.restore(step), number, large=large, dropped=dropped_of(mgr, step))
        check_files(root / str(step))
    assert mgr._service.engine.arena.used == 0
    if ONE in names:
        number = found[ONE] = ckpt.sync.metadata(root / ONE).info.custom_metadata
        same(ckpt.sync.load(root / ONE, handlers=HANDLERS), number, large=large)
        check_files(root / ONE)
    strange = names - set(found)
    assert not strange, f"{strange} are neither steps nor unfinished"
    return found


def check_files(step: Path) -> None:
    """Every file of a step is what its manifest says, also those that a restore does not read."""
    manifest = decode((step / FILE_NAME).read_bytes(), where=str(step))
    for path, entry in manifest.files.items():
        data = (step / path).read_bytes()
        assert len(data) == entry.size, f"{path} has {len(data)} bytes instead of {entry.size}"
        assert digest(data) == entry.digest, f"{path} was changed"


def dropped_of(mgr: ckpt.sync.CheckpointManager, step: int) -> set[str]:
    """Return the items that a step says it has lost; an item may be lost only so."""
    info = mgr.metadata(step).info
    dropped = {each.item for each in info.dropped}
    assert {*info.items, *dropped} == {*items_of(0)}, f"{info.items} are there, not {dropped}"
    assert all(each.policy == "Latest(1)" for each in info.dropped)
    return dropped


def same(found: Any, number: int, *, large: bool = True, dropped: Collection[str] = ()) -> None:
    every = items_of(number, large=large).items()
    expected = {name: item for name, item in every if name not in dropped}
    lines = differences(expected, found)
    assert lines == [], f"number {number} is another: {lines}"


def record(
    scenario: Scenario, root: Path, plan: Plan | None = None
) -> tuple[list[FileOperation], int]:
    """Do it; return the operations, and when it was acknowledged."""
    with FaultyFiles(root.parent, plan, sync=False) as files:
        times: list[int] = []
        with contextlib.ExitStack() as stack:
            mgr = None
            if scenario.opened:
                mgr = stack.enter_context(manager(root, **(scenario.options or {})))
                files.operations.clear()
            scenario.act(root, mgr, lambda: times.append(files.now()))
            return list(files.operations), times[0]
