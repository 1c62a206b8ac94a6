"""What all scenarios share: what they are given, how they time, how peers take turns.

Peers take turns inside every round (A B C, B C A), so that a slow minute of the machine falls
on all of them. A timed part starts from a flushed disk and a collected heap. What must not inherit
used memory, or is the first of its kind in a process, runs in a new interpreter.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from unittest.mock import patch

import jax
import numpy as np

from benchmarks.peers import PEERS, Peer
from benchmarks.results import BYTES, PER_SECOND, SHARE, Sample, Scenario
from benchmarks.workloads import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ParamsT = ParamSpec("ParamsT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

# Measures that are not in seconds, by the end of their name.
_UNITS = {"_bytes": BYTES, "_per_second": PER_SECOND, "_ratio": SHARE}
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario is given.

    Attributes:
        peers: Names from `PEERS`, in the order in which they take turns.
        rounds: Measured rounds; one more runs before them and is kept apart.
        smoke: Whether to use the small sizes.
        directory: A new folder on the disk to measure; not made yet.
    """

    peers: tuple[str, ...]
    rounds: int
    smoke: bool
    directory: Path

    @property
    def asynchronous(self) -> tuple[str, ...]:
        """The peers whose save continues in the background."""
        return tuple(name for name in self.peers if PEERS[name].peer.is_asynchronous)

    @property
    def both(self) -> tuple[str, ...]:
        """Those of ckpt and Orbax that take part."""
        return tuple(name for name in self.peers if name in ("ckpt", "orbax"))


@dataclass(frozen=True, slots=True)
class Log:
    """Collects the samples of a scenario, and tells the person who waits how far it is."""

    scenario: str
    rounds: int
    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def turns(self, running: Mapping[str, ValueT]) -> Iterator[tuple[int, str, ValueT]]:
        """Yields the number of each round with the peers in their order, the first round too."""
        for turn in range(self.rounds + 1):
            for name, peer in in_turn(running, turn):
                yield turn, name, peer

    def add(self, turn: int, row: str, measured: Mapping[str, float]) -> None:
        """Takes what one peer, or another row of the table, gave in one round."""
        for measure, value in measured.items():
            self.values[row][measure].append(value)
        label = f"round {turn}/{self.rounds}" if turn else "first round"
        figures = "  ".join(f"{measure} {value:.4g}" for measure, value in measured.items())
        sys.stderr.write(f"{self.scenario}, {label}, {row}: {figures}\n")

    def result(self, kind: str, summary: str, state: Any, **facts: float) -> Scenario:
        """Returns the scenario: the samples of each row and measure, the first round apart."""
        measures = {
            row: {
                measure: Sample(values[0], values[1:], unit_of(measure))
                for measure, values in measures.items()
            }
            for row, measures in self.values.items()
        }
        leaves = len(jax.tree.leaves(state))
        return Scenario(
            self.scenario, kind, summary, leaves, size_bytes(state), measures, dict(facts)
        )


def unit_of(measure: str) -> str:
    """Returns the unit that the name of a measure tells; seconds where it tells none."""
    name = measure.partition("@")[0]
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "s")


@contextmanager
def opened(names: Sequence[str], directory: Path) -> Iterator[dict[str, Peer]]:
    """Gives the named peers, each in a new directory of its own, and closes them."""
    with ExitStack() as stack:
        running = {}
        for name in names:
            place = directory / name
            place.mkdir(parents=True)
            running[name] = stack.enter_context(closing(PEERS[name].open(place)))
        yield running


def in_turn(running: Mapping[KeyT, ValueT], turn: int) -> list[tuple[KeyT, ValueT]]:
    """Returns the peers in the order of this round.

    Each round begins with another one: memory that one peer gives back is warm for the next, and
    who follows whom must not decide.
    """
    peers = list(running.items())
    first = turn % max(len(peers), 1)
    return peers[first:] + peers[:first]


def timed(action: Callable[[], ValueT]) -> tuple[float, ValueT]:
    """Returns the seconds an action took and its value; the disk is flushed before, untimed."""
    settle()
    start = time.perf_counter()
    value = action()
    return time.perf_counter() - start, value


def timed_save(peer: Peer, step: int, tree: Any) -> tuple[float, float]:
    """Returns the seconds that an asynchronous save blocked, and those until it was durable."""
    adopted = peer.adopt(tree)
    settle()
    start = time.perf_counter()
    pending = peer.save_async(step, adopted)
    blocked = time.perf_counter() - start
    pending.wait()
    return blocked, time.perf_counter() - start


def timed_commit(save: Callable[[], Any]) -> tuple[float, float, Any]:
    """Returns the seconds that a save of ckpt blocked, those until it was durable, and its info."""
    start = time.perf_counter()
    commit = save()
    blocked = time.perf_counter() - start
    info = commit.result()
    return blocked, time.perf_counter() - start, info


def settle() -> None:
    """Pays what earlier work left behind, so that the next timed part does not."""
    gc.collect()
    os.sync()


def in_new_process(
    function: Callable[ParamsT, ValueT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
) -> ValueT:
    """Returns what a function of this package gives in a new interpreter."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *args, **kwargs).result()


def in_new_processes(
    calls: Mapping[KeyT, Callable[[], ValueT]], rounds: int
) -> dict[KeyT, list[ValueT]]:
    """Returns what calls give in every round: in turn, each in a new interpreter."""
    found: dict[KeyT, list[ValueT]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in in_turn(calls, turn):
            found[name].append(in_new_process(call))
            sys.stderr.write(f"{name}, round {turn + 1}/{rounds}: {found[name][-1]}\n")
    return found


@contextmanager
def cpu_devices(count: int) -> Iterator[None]:
    """Gives new processes this many CPU devices, whatever the caller's environment says."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(_DEVICES_FLAG)]
    with patch.dict(os.environ, XLA_FLAGS=" ".join([*kept, f"{_DEVICES_FLAG}={count}"])):
        yield


def default_dir() -> Path:
    """Returns the system's temporary folder if it is on this disk, else the working directory."""
    temporary, here = Path(tempfile.gettempdir()), Path.cwd()
    return temporary if temporary.stat().st_dev == here.stat().st_dev else here


def touch_memory(nbytes: int) -> None:
    """Uses memory and gives it back.

    Memory that a virtual machine gave back to its host is five to ten times as slow to touch as
    memory that was used a moment ago.
    """
    np.empty(nbytes, np.uint8)[:: mmap.PAGESIZE] = 1


def warm(place: Path) -> None:
    """Reads every file below `place`, so that all of it is in the page cache.

    A library may have written past the cache (O_DIRECT), so every warm restore begins after this.
    """
    block = bytearray(_BLOCK_BYTES)
    for file in _files(place):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


def drop(place: Path) -> None:
    """Drops every file below `place` from the page cache, as far as the system agrees.

    The disk behind a virtual machine may still have it in the memory of its host. On tmpfs nothing
    is dropped.
    """
    os.sync()  # pages that are not written back stay
    for file in _files(place):
        with open(file, "rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
