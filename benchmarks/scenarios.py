"""Every scenario by name, and the processes they run in."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from benchmarks import measure, overlap
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.results import Scenario

ParamsT = ParamSpec("ParamsT")
ValueT = TypeVar("ValueT")

NAMES = (*WORKLOADS, overlap.NAME)


def in_new_process(
    function: Callable[ParamsT, ValueT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ValueT:
    """Returns what a function of this package gives in a new interpreter.

    There first saves are first saves, and nothing inherits the memory of earlier work.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *args, **kwargs).result()


def run_all(
    names: Sequence[str], *, peers: Sequence[str], rounds: int, smoke: bool, directory: Path
) -> list[Scenario]:
    """Returns the samples of these scenarios; see `benchmarks.measure.run` for the arguments.

    Each has a process of its own, except in a smoke run, where starting them would take longer
    than the work.
    """
    groups = [list(names)] if smoke else [[name] for name in names]
    done: list[Scenario] = []
    for group in groups:
        done += in_new_process(_run_group, group, peers, rounds, smoke, directory)
    return done


def _run_group(
    names: Sequence[str], peers: Sequence[str], rounds: int, smoke: bool, directory: Path
) -> list[Scenario]:
    done = []
    for name in names:
        place = directory / name
        if name == overlap.NAME:
            scenario = overlap.run(peers=peers, rounds=rounds, smoke=smoke, directory=place)
        else:
            scenario = measure.run(
                WORKLOADS[name], peers=peers, rounds=rounds, smoke=smoke, directory=place
            )
        done.append(scenario)
    return done
