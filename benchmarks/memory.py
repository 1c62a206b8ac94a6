"""Host memory that a library holds beyond the state, while it saves and the state is trained on.

A process per library, watched from another process, which the work under test cannot hold up.
Everything is counted from a moment at which the state exists and the library has saved and restored
something tiny, so that what it takes once, its modules and threads, is told apart.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax

from benchmarks import workloads
from benchmarks.peers import PEERS, CkptPeer, Peer
from benchmarks.results import BYTES, Sample
from benchmarks.rounds import Log, in_new_process
from benchmarks.workloads import PyTree, size_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchmarks.results import Scenario
    from benchmarks.rounds import Setting

NAME = KIND = "memory"
BUDGET, SAVES, LASTING_SAVES = "budget_bytes", "saves", "lasting_saves"
_EVERY_SECONDS = 0.002
# The kernel's names of what the process alone holds. The rest of the total are mapped files, page
# cache that the system may take back.
_OWN = ("RssAnon", "RssShmem")
_TOTAL = "VmRSS"


def run(setting: Setting) -> Scenario:
    """Returns the memory of ckpt with a budget, and of Orbax.

    The number of rounds has no meaning here: every save is a sample.
    """
    facts = {
        BUDGET: float((4 if setting.smoke else 256) << 20),
        SAVES: 3.0 if setting.smoke else 20.0,
        LASTING_SAVES: 5.0 if setting.smoke else 100.0,
    }
    measures = {}
    for name in setting.both:
        place = setting.directory / name
        measured = in_new_process(_child, name, place, setting.smoke, facts)
        measures[name] = {key: Sample(None, values, BYTES) for key, values in measured.items()}
        peaks = {key: f"{sample.high / 2**20:.1f}" for key, sample in measures[name].items()}
        sys.stderr.write(f"{NAME}, {name}, MiB: {peaks}\n")
    shapes = workloads.large_shapes(setting.smoke)
    summary = "f32 in equal large leaves, a donating step during every save"
    scenario = Log(NAME, 0).result(KIND, summary, shapes, **facts)
    scenario.measures.update(measures)
    return scenario


def _child(
    name: str, directory: Path, smoke: bool, facts: dict[str, float]
) -> dict[str, list[float]]:
    budget = int(facts[BUDGET])
    state = workloads.make(workloads.large_shapes(smoke))
    before = _settled()
    _save_something_tiny(name, directory / "tiny", budget)
    fixed = _settled() - before

    with Sampler() as sampler:
        with closing(_opened(name, directory / "saves", budget)) as peer:
            state, own, total = _peaks(peer, sampler, state, int(facts[SAVES]))
            peak = _restore_peak(peer, sampler, state)
        del state
        array = workloads.make({"array": workloads.f32(2 * budget // 4096, 1024)})
        with closing(_opened(name, directory / "array", budget)) as peer:
            array, array_own, array_total = _peaks(peer, sampler, array, 3)
        del array
    return {
        "fixed_bytes": [float(fixed)],
        "saves_own_bytes": own,
        "saves_total_bytes": total,
        "restore_total_bytes": [peak],
        "array_own_bytes": array_own,
        "array_total_bytes": array_total,
        "drift_bytes": [_drift(name, directory / "drift", smoke, facts)],
    }


def _opened(name: str, directory: Path, budget_bytes: int) -> Peer:
    directory.mkdir(parents=True)
    if name == "ckpt":
        return CkptPeer(directory, budget_bytes=budget_bytes)
    return PEERS[name].open(directory)


def _save_something_tiny(name: str, directory: Path, budget_bytes: int) -> None:
    tree = workloads.make(workloads.leaf_shapes(100))
    with closing(_opened(name, directory, budget_bytes)) as peer:
        peer.save(0, tree)
        jax.block_until_ready(peer.restore(0, peer.target(tree)))


def _peaks(
    peer: Peer, sampler: Sampler, state: PyTree, saves: int
) -> tuple[PyTree, list[float], list[float]]:
    """Returns the state, and the peaks over it of every save: held by the process, and in all."""
    own, total = [], []
    state = workloads.advance(state)
    _settled()
    base = _resident(os.getpid())
    for step in range(saves):
        sampler.start()
        pending = peer.save_async(step, state)
        state = workloads.advance(state)
        pending.wait()
        peaks = sampler.stop()
        own.append(float(peaks["own"] - base["own"]))
        total.append(float(peaks["total"] - base["total"]))
        peer.delete(step)
    return state, own, total


def _restore_peak(peer: Peer, sampler: Sampler, state: PyTree) -> float:
    """Returns the peak of a restore beyond the state that was there and the one it gives."""
    peer.save(10_000, state)
    target = peer.target(state)
    base = _settled()
    sampler.start()
    restored = jax.block_until_ready(peer.restore(10_000, target))
    peak = sampler.stop()["total"]
    return float(peak - base - size_bytes(restored))


def _drift(name: str, directory: Path, smoke: bool, facts: dict[str, float]) -> float:
    """Returns how much more is held after the last saves than after the first ones."""
    state = workloads.make({"array": workloads.f32(256 if smoke else 16384, 1024)})
    held = []
    with closing(_opened(name, directory, int(facts[BUDGET]))) as peer:
        for step in range(int(facts[LASTING_SAVES])):
            pending = peer.save_async(step, state)
            state = workloads.advance(state)
            pending.wait()
            peer.delete(step)
            held.append(_resident(os.getpid())["own"])
    tenth = max(1, len(held) // 10)
    return statistics.median(held[-tenth:]) - statistics.median(held[tenth : 2 * tenth])


def _settled() -> int:
    """Gives unused memory back to the system and returns what is resident in all."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        # What malloc keeps for later would hide as much of a library's peak.
        libc.malloc_trim(0)
    return _resident(os.getpid())["total"]


def _resident(pid: int) -> dict[str, int]:
    """Returns the resident bytes of a process: `own`, and `total` with mapped files."""
    found = {"own": 0, "total": 0}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in (*_OWN, _TOTAL):
            found["total" if name == _TOTAL else "own"] += int(value.split()[0]) * 1024
    return found


class Sampler:
    """A second process that watches this one."""

    def __enter__(self) -> Self:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(os.getpid(), theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.start()
        self.stop()  # it is up
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def start(self) -> dict[str, int]:
        """Begins a watch; returns what is resident of each kind."""
        return self._ask("start")

    def stop(self) -> dict[str, int]:
        """Ends the watch; returns the peak of each kind."""
        return self._ask("stop")

    def _ask(self, word: str) -> dict[str, int]:
        self._pipe.send(word)
        found: dict[str, int] = self._pipe.recv()
        return found


def _watch(pid: int, pipe: Connection[Any, Any]) -> None:
    """Samples from each start to the stop after it, until the other end goes away."""
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        peaks = _resident(pid)
        pipe.send(peaks)
        while not pipe.poll(_EVERY_SECONDS):
            for kind, value in _resident(pid).items():
                peaks[kind] = max(peaks[kind], value)
        pipe.recv()
        pipe.send(peaks)
