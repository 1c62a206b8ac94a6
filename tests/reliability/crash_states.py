"""All states in which a power cut may leave a root, each looked at: old or new, and whole."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ckpt.errors import CheckpointError
from tests.reliability.scenarios import (
    NEXT,
    Scenario,
    age,
    contents,
    leftovers,
    manager,
    record,
    same,
    save,
    scenarios,
    template,
)
from tests.reliability.tally import Tally
from tests.support.crash_states import CrashState, crash_states, read_tree
from tests.support.faults import FaultyFiles, FileOperation

__all__ = ["POWER_CUTS", "power_cuts", "recorded", "states_of"]

# What they do is made durable in an order; opening a root and a one-shot save have no other.
POWER_CUTS = ("save", "overwrite", "delete", "preserve", "drop", "fresh", "share")
# Takes operations away, as if the library did not do them.
Filter = Callable[[FileOperation], bool]


def recorded(
    directory: Path, scenario: Scenario, keep: Filter = lambda _: True, losses: int = 2
) -> tuple[list[CrashState], int]:
    """Return the states that a power cut may leave of a scenario, and when it was acknowledged."""
    root = directory / scenario.name / "run"
    template(scenario, root, large=False)
    before = read_tree(root.parent)
    operations, heard = record(scenario, root)
    states = crash_states(before, filter(keep, operations), losses=losses)
    shutil.rmtree(root.parent)
    return states, heard


def states_of(states: Sequence[CrashState], count: int, seed: int) -> list[CrashState]:
    """Choose some of many states, of every kind of root about as many."""
    if len(states) <= count:
        return list(states)
    kinds: defaultdict[tuple[str, ...], list[CrashState]] = defaultdict(list)
    for state in states:
        names = {path.split("/")[1] for path in state.tree if "/" in path}
        kinds[tuple(sorted(names))].append(state)
    choice = random.Random(seed)
    queues = [choice.sample(each, len(each)) for _, each in sorted(kinds.items())]
    chosen: list[CrashState] = []
    while len(chosen) < count:
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:count]


def power_cuts(
    directory: Path, count: int, seed: int = 0, names: Iterable[str] = POWER_CUTS
) -> Tally:
    """Cut the power at every moment of every scenario, with all that may be lost then."""
    tally = Tally()
    chosen = [scenarios(large=False)[name] for name in names]
    for scenario in chosen:
        states, heard = recorded(directory, scenario)
        for state in states_of(states, -(-count // len(chosen)), seed):
            losses = look(scenario, state, heard, directory / "state")
            tally += Tally(1, bool(state.missing), losses)
    return tally


def look(scenario: Scenario, state: CrashState, heard: int, directory: Path) -> list[str]:
    """Return what is wrong with a state that a power cut has left."""
    possible = scenario.done if state.may_follow(heard) else scenario.possible
    root = directory / "run"
    state.write(directory)
    try:
        with FaultyFiles(directory, sync=False):
            age(root, all_of_it=True)
            with manager(root) as mgr:
                left = leftovers(root)
                assert left == [], f"left {left}"
                found = contents(root, mgr, large=False)
                assert found in possible, f"found {found}"
                save(mgr, NEXT, NEXT, large=False).result()
                assert mgr.all_steps() == sorted([*map(int, found), NEXT])
                same(mgr.restore(NEXT), NEXT, large=False)
        return []
    except (AssertionError, CheckpointError, OSError) as error:
        when = "acknowledged" if state.may_follow(heard) else "not acknowledged"
        return [f"{scenario.name}, {when}, without {state.missing}: {error}"]
    finally:
        shutil.rmtree(directory)
