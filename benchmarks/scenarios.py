"""Every scenario by name, how often it is repeated, and the processes it runs in."""

from __future__ import annotations

import sys
import traceback
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import (
    blocked,
    blocked_loop,
    first_restore,
    first_save,
    growth,
    heartbeat,
    memory,
    overlap,
    throughput,
)
from benchmarks.peers import PEERS
from benchmarks.processes import cpu_devices, in_new_process
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.results import Scenario
    from benchmarks.rounds import Setting

_SMOKE_ROUNDS = 1


@dataclass(frozen=True, slots=True)
class ScenarioKind:
    """How to run a scenario.

    Attributes:
        run: Gives its samples, or None with a message where it cannot be run.
        rounds: Measured rounds by default: fewer where a round is long.
        quick_rounds: Measured rounds of a quick run.
        devices: CPU devices it needs.
        makes_processes: Whether it makes its own new processes.
    """

    run: Callable[[Setting], Scenario | None]
    rounds: int
    quick_rounds: int
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
        blocked.NAME: ScenarioKind(blocked.run, 5, 3),
        heartbeat.NAME: ScenarioKind(heartbeat.run, 5, 3),
        blocked_loop.NAME: ScenarioKind(blocked_loop.run, 5, 3),
        memory.NAME: ScenarioKind(memory.run, 1, 1, makes_processes=True),
        first_save.NAME: ScenarioKind(first_save.run, 5, 3, makes_processes=True),
        **{
            name: ScenarioKind(
                partial(first_restore.run, name=name), 5, 3, state.devices, makes_processes=True
            )
            for name, state in first_restore.STATES.items()
        },
        **{
            name: ScenarioKind(partial(growth.run, axis=axis), 3, 2)
            for name, axis in growth.AXES.items()
        },
    }
)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: tiny sizes, fewer rounds, or this many rounds of everything."""

    smoke: bool = False
    quick: bool = False
    rounds: int | None = None

    def rounds_of(self, kind: ScenarioKind) -> int:
        if self.rounds is not None:
            return self.rounds
        if self.smoke:
            return _SMOKE_ROUNDS
        return kind.quick_rounds if self.quick else kind.rounds


def run_all(
    names: Sequence[str], setting: Setting, amount: Amount
) -> tuple[list[Scenario], list[str]]:
    """Returns the samples of these scenarios, and the names of those that failed.

    Each has a process of its own, except in a smoke run, where starting them would take longer
    than the work. One that fails leaves its traceback and does not stop the others.

    Args:
        names: Names from `SCENARIOS`.
        setting: The peers, and the folder in which each scenario gets its own.
        amount: How much of it.
    """
    done: dict[str, Scenario | None] = {}
    for group in _groups(names, together=amount.smoke):
        settings = [_setting(name, setting, amount) for name in group]
        with cpu_devices(SCENARIOS[group[0]].devices):
            if SCENARIOS[group[0]].makes_processes:
                done |= _run_group(group, settings)
                continue
            try:
                done |= in_new_process(_run_group, group, settings)
            except BrokenProcessPool:
                traceback.print_exc()
    failed = [name for name in names if name not in done]
    return [each for name in names if (each := done.get(name)) is not None], failed


def _groups(names: Sequence[str], *, together: bool) -> list[list[str]]:
    """Returns the names in groups that may share a process."""
    groups: dict[object, list[str]] = {}
    for name in names:
        kind = SCENARIOS[name]
        shares = together and not kind.makes_processes
        groups.setdefault(kind.devices if shares else name, []).append(name)
    return list(groups.values())


def _setting(name: str, setting: Setting, amount: Amount) -> Setting:
    kind = SCENARIOS[name]
    peers = tuple(each for each in setting.peers if name in (PEERS[each].scenarios or (name,)))
    if kind.devices > 1:
        peers = tuple(each for each in peers if PEERS[each].takes_sharded)
    return replace(
        setting, peers=peers, rounds=amount.rounds_of(kind), directory=setting.directory / name
    )


def _run_group(names: Sequence[str], settings: Sequence[Setting]) -> dict[str, Scenario | None]:
    done = {}
    for name, setting in zip(names, settings, strict=True):
        try:
            done[name] = SCENARIOS[name].run(setting)
        except Exception:
            sys.stderr.write(f"{name} failed:\n")
            traceback.print_exc()
    return done
