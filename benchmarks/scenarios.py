"""Every scenario by name, how often it is repeated, and the processes it runs in."""

from __future__ import annotations

import sys
import traceback
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import event_loop, first_calls, growth, memory, overlap, throughput
from benchmarks.peers import PEERS
from benchmarks.results import Results, machine_facts
from benchmarks.rounds import cpu_devices, in_new_process
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.results import Scenario
    from benchmarks.rounds import Setting


@dataclass(frozen=True, slots=True)
class ScenarioKind:
    """How to run a scenario.

    Attributes:
        run: Gives its samples.
        rounds: Measured rounds by default: fewer where a round is long.
        quick_rounds: Measured rounds of a quick run.
        devices: CPU devices it needs.
        makes_processes: Whether it makes its own new processes.
    """

    run: Callable[[Setting], Scenario]
    rounds: int
    quick_rounds: int = 0
    devices: int = 1
    makes_processes: bool = False


SCENARIOS: Mapping[str, ScenarioKind] = MappingProxyType(
    {
        **{
            name: ScenarioKind(
                partial(throughput.run, workload=workload), 7, 3, devices=workload.devices
            )
            for name, workload in WORKLOADS.items()
        },
        overlap.NAME: ScenarioKind(overlap.run, 7, 5),
        throughput.BLOCKED_SMALL: ScenarioKind(throughput.run_blocked_small, 5, 3),
        **{
            name: ScenarioKind(partial(event_loop.run, name=name), 5, 3)
            for name in (event_loop.HEARTBEAT, event_loop.BLOCKED_LOOP)
        },
        memory.NAME: ScenarioKind(memory.run, 1, 1, makes_processes=True),
        first_calls.SAVE: ScenarioKind(first_calls.run_save, 5, 3, makes_processes=True),
        **{
            name: ScenarioKind(
                partial(first_calls.run_restore, name=name), 5, 3, state.devices, True
            )
            for name, state in first_calls.STATES.items()
        },
        **{
            name: ScenarioKind(partial(growth.run, axis=axis), 3, 2)
            for name, axis in growth.AXES.items()
        },
    }
)


def measured(
    scenarios: Mapping[str, ScenarioKind], setting: Setting, *, quick: bool = False
) -> tuple[Results, list[str]]:
    """Returns a run of these scenarios, and the names of those that failed.

    Each has a process of its own, except in a smoke run, where starting them would take longer
    than the work. One that fails leaves its traceback and does not stop the others.

    Args:
        scenarios: By name.
        setting: The peers, and the folder in which each scenario gets its own; 0 rounds are as
            many as suit the scenario.
        quick: Whether that means few of them.
    """
    facts = in_new_process(machine_facts, setting.directory)
    if facts["file_system"] == "tmpfs":
        sys.stderr.write("warning: tmpfs has no disk behind it; fsync costs nothing there\n")
    done: dict[str, Scenario] = {}
    for group in _groups(scenarios, together=setting.smoke):
        runs = {name: _prepared(name, scenarios[name], setting, quick) for name in group}
        kind = scenarios[group[0]]
        with cpu_devices(kind.devices):
            if kind.makes_processes:
                done |= _run_group(runs)
                continue
            try:
                done |= in_new_process(_run_group, runs)
            except BrokenProcessPool:
                traceback.print_exc()
    found = [done[name] for name in scenarios if name in done]
    date = datetime.now(UTC).date().isoformat()
    run = Results(setting.smoke, date, facts, found)
    return run, [name for name in scenarios if name not in done]


def _groups(scenarios: Mapping[str, ScenarioKind], *, together: bool) -> list[list[str]]:
    """Returns the names in groups that may share a process."""
    groups: dict[object, list[str]] = {}
    for name, kind in scenarios.items():
        shares = together and not kind.makes_processes
        groups.setdefault(kind.devices if shares else name, []).append(name)
    return list(groups.values())


def _prepared(name: str, kind: ScenarioKind, setting: Setting, quick: bool) -> Run:
    peers = tuple(each for each in setting.peers if name in (PEERS[each].scenarios or (name,)))
    if kind.devices > 1:
        peers = tuple(each for each in peers if PEERS[each].peer.takes_sharded)
    usual = 1 if setting.smoke else kind.quick_rounds if quick else kind.rounds
    rounds, directory = setting.rounds or usual, setting.directory / name
    return partial(kind.run, replace(setting, peers=peers, rounds=rounds, directory=directory))


def _run_group(runs: Mapping[str, Run]) -> dict[str, Scenario]:
    done = {}
    for name, run in runs.items():
        try:
            done[name] = run()
        except Exception:
            sys.stderr.write(f"{name} failed:\n")
            traceback.print_exc()
    return done


# A scenario with its setting.
Run = partial["Scenario"]
