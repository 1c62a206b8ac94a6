"""How late the beats of a caller's event loop are, beside every flow of the library.

Every flow runs from an event loop that beats every 2 ms, first in the fresh process and then once
more. The table is the worst of ten runs, each in a process of its own, alone and beside two busy
processes. A beat is also late where the thread of the loop waits for a core. The system counts
that, and what is left is time in which somebody held the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ckpt
from benchmarks import workloads
from benchmarks.event_loop import p99
from benchmarks.rounds import drop, in_new_process
from benchmarks.tables import digits, table
from benchmarks.workloads import abstract

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_BEAT_SECONDS = 0.002
# What is wanted of the p99 and of the worst beat, in seconds.
_BOUNDS = 0.01, 0.05


class Lag(NamedTuple):
    """How late a beat was; `held` is what of it was no wait for a core."""

    seconds: float
    held: float


def late(place: Path, *, rounds: int = 10, beside: int = 2, smoke: bool = False) -> str:
    """Returns the worst figures of so many runs, alone and beside busy processes."""
    columns: list[dict[str, tuple[float, ...]]] = []
    loads: list[list[float]] = []
    for count in (0, beside):
        worst: dict[str, tuple[float, ...]] = {}
        loads.append([])
        for number in range(rounds):
            loads[-1].append(os.getloadavg()[0])
            with _busy(count):
                found = in_new_process(_run, smoke, place)
            for name, lags in found.items():
                figures = _figures(lags)
                pairs = zip(figures, worst.get(name, figures), strict=True)
                worst[name] = tuple(map(max, pairs))
            sys.stderr.write(f"beside {count} busy processes, run {number + 1}/{rounds}\n")
        columns.append(worst)
    rows = [
        (name, *(f"{digits(figure * 1e3)} ms" for column in columns for figure in column[name]))
        for name in columns[0]
    ]
    within = [
        sum(each[0] <= _BOUNDS[0] and each[1] <= _BOUNDS[1] for each in column.values())
        for column in columns
    ]
    alone, busy = (f"{digits(min(each))} to {digits(max(each))}" for each in loads)
    head = ("", "alone: p99", "worst", "held", f"beside {beside} busy: p99", "worst", "held")
    return (
        f"The worst of {rounds} runs, each in a new process. The machine has {os.cpu_count()} "
        f"cores. Its load before each run was {alone}; of those beside {beside} busy processes "
        f"{busy}. Within both bounds: {within[0]} of {len(rows)} flows alone, {within[1]} beside "
        f"them.\n\n{table(head, rows)}"
    )


def _figures(lags: list[Lag]) -> tuple[float, float, float]:
    """Returns the p99, the worst, and the worst that was no wait for a core."""
    seconds = [each.seconds for each in lags]
    return p99(seconds), max(seconds), max(each.held for each in lags)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _run(smoke: bool, parent: Path) -> dict[str, list[Lag]]:
    with tempfile.TemporaryDirectory(prefix="late-", dir=parent) as place:
        return asyncio.run(_measured(smoke, Path(place)))


async def _measured(smoke: bool, root: Path) -> dict[str, list[Lag]]:
    found = {}
    async with ckpt.CheckpointManager(root / "run", keep=ckpt.keep.Latest(2)) as mgr:
        for name, call in _flows(mgr, root / "run", smoke).items():
            for label in ("first", "later"):
                found[f"{name}, {label}"] = await beats_during(call)
    return found


def _flows(
    mgr: ckpt.CheckpointManager, place: Path, smoke: bool
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the flows; each may run any number of times, in this order."""
    large = workloads.make(workloads.large_shapes(smoke))
    small = {f"leaf_{n}": n * 1.0 for n in range(50 if smoke else 5000)}
    steps = iter(range(10**9))
    latest = -1

    async def save(tree: Any) -> None:
        nonlocal latest
        latest = next(steps)
        await (await mgr.save(latest, tree))

    async def restore_cold() -> None:
        drop(place / str(latest))
        await mgr.restore()

    return {
        "save of 5,000 leaves": lambda: save(small),
        "restore of 5,000 leaves": lambda: mgr.restore(),
        "save": lambda: save(large),
        "restore": lambda: mgr.restore(),
        "restore from the disk": restore_cold,
        "restore like": lambda: mgr.restore(None, abstract(large)),
        "verify": lambda: mgr.verify(latest),
        "convert": lambda: ckpt.convert(place / str(latest), place / "copy", if_exists="replace"),
    }


async def beats_during(call: Callable[[], Awaitable[Any]]) -> list[Lag]:
    """Awaits a call; returns the lags of the running loop meanwhile."""
    lags: list[Lag] = []
    beating = asyncio.create_task(_beat(lags))
    try:
        await call()
        await asyncio.sleep(2 * _BEAT_SECONDS)
    finally:
        beating.cancel()
    return lags


async def _beat(lags: list[Lag]) -> None:
    thread = threading.get_native_id()
    before, waited = time.perf_counter(), _waited_for_core(thread)
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        now, waited_now = time.perf_counter(), _waited_for_core(thread)
        late_by = now - before - _BEAT_SECONDS
        lags.append(Lag(late_by, max(late_by - (waited_now - waited), 0.0)))
        before, waited = now, waited_now


def _waited_for_core(thread: int) -> float:
    """Return the seconds for which a thread could run and had no core, 0 if nobody counts them."""
    try:
        counted = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return int(counted.split()[1]) / 1e9
