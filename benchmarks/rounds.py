"""What all scenarios share: what they are given, how they time, how peers take turns.

Peers take turns inside every round (A B C, B C A), so that a slow minute of the machine falls
on all of them. A timed part starts from a flushed disk and a collected heap.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.peers import PEERS, Peer
from benchmarks.results import BYTES, PER_SECOND, SHARE, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

ValueT = TypeVar("ValueT")

# Measures that are not in seconds, by the end of their name.
_UNITS = {"_bytes": BYTES, "_per_second": PER_SECOND, "_ratio": SHARE}


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
        """The peers whose save goes on in the background."""
        return tuple(name for name in self.peers if PEERS[name].is_asynchronous)

    def only(self, *names: str) -> tuple[str, ...]:
        """Returns those of these peers that take part."""
        return tuple(name for name in self.peers if name in names)


@dataclass(frozen=True, slots=True)
class Log:
    """Collects the samples of a scenario, and tells the person who waits how far it is."""

    scenario: str
    rounds: int
    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, turn: int, row: str, measured: Mapping[str, float]) -> None:
        """Takes what one peer, or another row of the table, gave in one round."""
        for measure, value in measured.items():
            self.values[row][measure].append(value)
        label = f"round {turn}/{self.rounds}" if turn else "first round"
        figures = "  ".join(f"{measure} {value:.4g}" for measure, value in measured.items())
        sys.stderr.write(f"{self.scenario}, {label}, {row}: {figures}\n")

    def samples(self) -> dict[str, dict[str, Sample]]:
        """Returns the samples of each row and measure, the first round apart."""
        return {
            row: {
                measure: Sample.of(values, unit_of(measure)) for measure, values in measures.items()
            }
            for row, measures in self.values.items()
        }


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


def in_turn(running: Mapping[str, ValueT], turn: int) -> list[tuple[str, ValueT]]:
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


def settle() -> None:
    """Pays what earlier work left behind, so that the next timed part does not."""
    gc.collect()
    os.sync()
