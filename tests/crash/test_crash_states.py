"""Power cuts at every moment of a record, and proof that they find a missing sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.crash_states import look, power_cuts, recorded, states_of
from tests.reliability.scenarios import record, scenarios, template
from tests.support.crash_states import read_tree
from tests.support.disk_model import DiskModel, Tree
from tests.support.faults import SYNCS, FileOperation
from tests.support.traced_disk import Disk


@pytest.mark.slow
def test_every_state_after_a_power_cut_has_whole_steps_only(tmp_path: Path) -> None:
    power_cuts(tmp_path, 220).check(faults=150)


def is_sync(operation: FileOperation, what: Callable[[str], bool]) -> bool:
    return operation.name in SYNCS and what(operation.path)


# What a library that forgot a sync would lose: a scenario, and the paths that are not synced.
FORGOTTEN: dict[str, tuple[str, Callable[[str], bool]]] = {
    "data files": ("save", lambda path: "/d/" in path),
    "the manifest": ("save", lambda path: path.endswith("/ckpt.json")),
    "the attempt": ("save", lambda path: path.count("/") == 1),
    "directories of items": ("save", lambda path: path.endswith("/state")),
    "directories of data files": ("save", lambda path: path.endswith("/d")),
    "directories of shared files": ("share", lambda path: "2." in path and path.endswith("/d")),
    "the root, of a save": ("save", lambda path: path == "run"),
    "the root, of an overwrite": ("overwrite", lambda path: path == "run"),
    "the root, of a deletion": ("delete", lambda path: path == "run"),
    "the root, of a preservation": ("preserve", lambda path: path == "run"),
    "data files of a step that lost an item": (
        "drop",
        lambda path: path.count("/") == 1 and "0." in path,
    ),
    "the root, of a dropped item": ("drop", lambda path: path == "run"),
    "the directory of a new root": ("fresh", lambda path: path == "."),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_sync_that_is_forgotten_is_found(tmp_path: Path, forgotten: str) -> None:
    name, what = FORGOTTEN[forgotten]
    scenario = scenarios(large=False)[name]
    states, heard = recorded(tmp_path, scenario, lambda each: not is_sync(each, what), losses=1)
    after = [state for state in states if state.may_follow(heard)]
    # The states after the acknowledgement come first: most are found there, and at once.
    chosen = [*states_of(after, 30, 0), *states_of(states, 60, 0)]
    assert any(look(scenario, state, heard, tmp_path / "state") for state in chosen)


@pytest.mark.parametrize("name", ["save", "overwrite", "delete", "preserve", "fresh"])
def test_the_model_agrees_with_that_of_traced_system_calls(tmp_path: Path, name: str) -> None:
    scenario = scenarios(large=False)[name]
    root = tmp_path / "x" / "run"
    template(scenario, root, large=False)
    before = read_tree(root.parent)
    operations, _ = record(scenario, root)
    events = [(each.began, False, each) for each in operations]
    events += [(each.ended or 0, True, each) for each in operations if each.error is None]
    disk, began, compared = Disk(), {}, 0
    for time, is_end, operation in sorted(events, key=lambda event: event[:2]):
        if not is_end:
            began[operation.number] = disk.now()
            continue
        play(disk, operation, began[operation.number], before)
        if operation.may_change or operation.name in SYNCS:
            past = [each for each in operations if each.ended is not None and each.ended <= time]
            # Not every one, since a model is made anew for each.
            if operation.number % 3 and operation is not operations[-1]:
                continue
            compared += 1
            assert not_durable(before, past) == set(disk.not_durable("/top")), operation
    assert compared >= 4


def play(disk: Disk, operation: FileOperation, began: int, before: Tree) -> None:
    """Let an operation happen to the other model, in which all paths are absolute."""
    paths = [absolute(path) for path in (operation.path, operation.target) if path is not None]
    name = operation.name
    if name in SYNCS:
        disk.synced(paths[0], began)
    elif name == "renameat2" and operation.flags & 2:
        disk.apply("exchange", tuple(paths))
    elif name in ("rename", "replace", "renameat2"):
        disk.apply("rename", tuple(paths))
    elif name in ("unlink", "remove", "rmdir"):
        disk.apply("remove", tuple(paths))
    elif name == "mkdir" or (name == "open" and operation.may_change):
        disk.apply("make", tuple(paths))
    elif name in ("write", "pwrite", "posix_fallocate"):
        disk.apply("change", tuple(paths))


def absolute(path: str) -> str:
    return "/top" if path == "." else f"/top/{path}"


def not_durable(before: Tree, operations: list[FileOperation]) -> set[str]:
    """Return the paths that our model would not promise to be there after a power cut."""
    model = DiskModel.of(before, operations)
    found = {
        model.path_of(number)
        for effect in model.effects
        for number in effect.needs
        if all(start <= effect.time for start, _ in model.syncs.get(number, ()))
    }
    return {absolute(path) for path in found if path is not None}
