"""The first save of a process: imports, cold memory, nothing cached. A new process per sample."""

from __future__ import annotations

import importlib
from contextlib import closing
from typing import TYPE_CHECKING

from benchmarks import workloads
from benchmarks.peers import PEERS
from benchmarks.processes import in_new_process
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, timed, timed_save

if TYPE_CHECKING:
    from pathlib import Path

NAME = KIND = "first_save"


def run(setting: Setting) -> Scenario:
    """Returns what the first save of a process costs; peers alternate, process by process.

    The first round is kept apart here too: it pays for reading the libraries from disk.
    """
    log = Log(NAME, setting.rounds)
    for turn in range(setting.rounds + 1):
        for name in setting.asynchronous:
            place = setting.directory / f"{turn}"
            log.add(turn, name, in_new_process(_child, name, place / name, setting.smoke))
    shapes = workloads.large_shapes(setting.smoke)
    return Scenario(
        name=NAME,
        kind=KIND,
        summary="f32 in equal large leaves, a new process for every save",
        leaves=len(shapes),
        size_bytes=workloads.shapes_bytes(shapes),
        measures=log.samples(),
    )


def _child(name: str, directory: Path, smoke: bool) -> dict[str, float]:
    kind = PEERS[name]
    tree = workloads.make(workloads.large_shapes(smoke))
    directory.mkdir(parents=True)
    imported, _ = timed(lambda: importlib.import_module(kind.module or "benchmarks"))
    opened, peer = timed(lambda: kind.open(directory))
    seconds = {"import": imported, "open": opened}
    with closing(peer):
        for step, which in enumerate(("first", "second")):
            tree = workloads.advance(tree)
            seconds[f"{which}_blocked"], seconds[f"{which}_save"] = timed_save(peer, step, tree)
            peer.delete(step)
    return seconds
