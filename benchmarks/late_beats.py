"""What keeps a caller's event loop waiting: `python -m benchmarks.late_beats [--beside N]`.

    python -m benchmarks.late_beats                                           # prints who held it
    python -m benchmarks.late_beats --page docs/explanation/performance-tables.md  # writes it

Every flow of the library runs from an event loop that beats every 2 ms, first in the fresh process
and then some more times. Where a beat is late by more than `--late` seconds, the stacks of all
threads are written while it is, by a thread that does not need the interpreter lock: the one that
holds it is in a call into C, such as `mmap.madvise` was. `--beside 2` runs two busy processes
meanwhile. The stacks are read while the threads go on, and once in a while that ends the process;
then it is begun anew.

The table is the worst of ten runs, each in a process of its own and without writing stacks, alone
and beside two busy processes. A beat is also late where the thread of the loop waits for a core.
The system counts that, and what is left is time in which somebody held the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import ckpt
from benchmarks import pagecache, workloads
from benchmarks.figures import digits, table, write_between
from benchmarks.processes import in_new_process
from benchmarks.trees import abstract

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

START, END = "<!-- late:start -->", "<!-- late:end -->"
Flow = tuple[str, "Callable[[], Awaitable[Any]]"]
_BEAT_SECONDS = 0.002
# How often a flow runs again in a process whose stacks are written, and in one of the table.
_AGAIN, _AGAIN_IN_TABLE = 10, 1
_ATTEMPTS = 5
# What is wanted of the p99 and of the worst beat, in seconds.
_BOUNDS = 0.01, 0.05


class Lag(NamedTuple):
    """How late a beat was; `held` is what of it was no wait for a core."""

    seconds: float
    held: float


@dataclass(slots=True)
class Found:
    """The beats of one flow, in order, and the stacks behind late ones."""

    lags: list[Lag] = field(default_factory=list)
    holders: Counter[str] = field(default_factory=Counter)

    @property
    def figures(self) -> tuple[float, float, float]:
        """The p99, the worst, and the worst that was no wait for a core."""
        ordered = sorted(each.seconds for each in self.lags)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return p99, ordered[-1], max(each.held for each in self.lags)


class Beats:
    """Beats of the running loop; the stacks behind late ones go to a file."""

    def __init__(self, late_seconds: float | None, stacks: Path) -> None:
        """Write stacks when a beat is late by so much; never if it is None."""
        self._late = late_seconds
        self._stacks = stacks

    async def during(self, call: Callable[[], Awaitable[Any]]) -> tuple[list[Lag], str]:
        """Await a call; return the lags meanwhile, and the stacks behind late beats."""
        lags: list[Lag] = []
        with self._stacks.open("w", encoding="utf-8") as file:
            beating = asyncio.create_task(self._beat(lags, file))
            try:
                await call()
                await asyncio.sleep(2 * _BEAT_SECONDS)
            finally:
                beating.cancel()
                faulthandler.cancel_dump_traceback_later()
        return lags, self._stacks.read_text(encoding="utf-8")

    async def _beat(self, lags: list[Lag], file: IO[str]) -> None:
        thread = threading.get_native_id()
        before, waited = time.perf_counter(), _waited_for_core(thread)
        while True:
            if self._late is not None:
                faulthandler.dump_traceback_later(_BEAT_SECONDS + self._late, file=file)
            await asyncio.sleep(_BEAT_SECONDS)
            now, waited_now = time.perf_counter(), _waited_for_core(thread)
            late = now - before - _BEAT_SECONDS
            lags.append(Lag(late, max(late - (waited_now - waited), 0.0)))
            before, waited = now, waited_now


def _waited_for_core(thread: int) -> float:
    """Return the seconds for which a thread could run and had no core, 0 if nobody counts them."""
    try:
        counted = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return int(counted.split()[1]) / 1e9


def _flows(mgr: ckpt.CheckpointManager, place: Path, smoke: bool) -> list[Flow]:
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
        pagecache.drop(place / str(latest))
        await mgr.restore()

    return [
        ("save of 5,000 leaves", lambda: save(small)),
        ("restore of 5,000 leaves", lambda: mgr.restore()),
        ("save", lambda: save(large)),
        ("restore", lambda: mgr.restore()),
        ("restore from the disk", restore_cold),
        ("restore like", lambda: mgr.restore(None, abstract(large))),
        ("verify", lambda: mgr.verify(latest)),
        (
            "convert",
            lambda: ckpt.convert(place / str(latest), place / "copy", if_exists="replace"),
        ),
    ]


async def _measure(
    late_seconds: float | None, again: int, smoke: bool, place: Path
) -> dict[str, Found]:
    root = place / "run"
    policy = ckpt.keep.Latest(2)
    beats = Beats(late_seconds, place / "stacks")
    found: dict[str, Found] = {}
    async with ckpt.CheckpointManager(root, keep=policy) as mgr:
        for name, call in _flows(mgr, root, smoke):
            for label, count in (("first", 1), ("later", again)):
                each = found[f"{name}, {label}"] = Found()
                for _ in range(count):
                    lags, stacks = await beats.during(call)
                    each.lags += lags
                    each.holders.update(_holders(stacks))
    return found


def _run(late_seconds: float | None, again: int, smoke: bool, parent: Path) -> dict[str, Found]:
    with tempfile.TemporaryDirectory(prefix="late-", dir=parent) as place:
        return asyncio.run(_measure(late_seconds, again, smoke, Path(place)))


def _holders(stacks: str) -> list[str]:
    """Return, for each time that stacks were written, the innermost frames that are not waits."""
    found = []
    for dump in stacks.split("Timeout (")[1:]:
        blocks = [block.splitlines() for block in dump.split("hread 0x")[1:]]
        tops = {block[1].strip() for block in blocks if len(block) > 1}
        found.append(" | ".join(sorted(each for each in tops if not _is_wait(each))))
    return found


def _is_wait(frame: str) -> bool:
    return any(each in frame for each in ("selectors.py", "threading.py", "queue.py", "in wait"))


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


def named(beside: int, late_seconds: float, smoke: bool, parent: Path) -> str:
    """Returns how late the beats of every flow were, and who was running then."""
    for attempt in range(_ATTEMPTS):
        try:
            with _busy(beside):
                again = 2 if smoke else _AGAIN
                found = in_new_process(_run, late_seconds, again, smoke, parent)
            break
        except BrokenProcessPool:
            if attempt == _ATTEMPTS - 1:
                raise
    lines = []
    for name, each in found.items():
        p99, worst, held = (f"{figure * 1e3:.1f} ms" for figure in each.figures)
        lines.append(f"{name}: p99 {p99}, worst {worst}, held {held}")
        lines += [f"    {times} x {where}" for where, times in each.holders.most_common(3)]
    return "\n".join(lines)


def compared(runs: int, beside: int, smoke: bool, parent: Path) -> str:
    """Returns the table: the worst figures of so many runs, alone and beside busy processes."""
    columns: list[dict[str, tuple[float, ...]]] = []
    loads: list[list[float]] = []
    for count in (0, beside):
        every = []
        loads.append([])
        for _ in range(runs):
            loads[-1].append(os.getloadavg()[0])
            with _busy(count):
                found = in_new_process(_run, None, 1 if smoke else _AGAIN_IN_TABLE, smoke, parent)
            every.append({name: each.figures for name, each in found.items()})
            sys.stderr.write(f"beside {count} busy processes, run {len(every)}/{runs}\n")
        columns.append(
            {
                name: tuple(max(one[name][at] for one in every) for at in range(3))
                for name in every[0]
            }
        )
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
        f"The worst of {runs} runs, each in a new process. The machine has {os.cpu_count()} cores. "
        f"Its load before each run was {alone}; of those beside {beside} busy processes "
        f"{busy}. Within both bounds: {within[0]} of {len(rows)} flows alone, {within[1]} beside "
        f"them.\n\n{table(head, rows)}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every flow, and print how late the beats were, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside")
    parser.add_argument("--late", type=float, default=0.02, help="seconds that are late")
    parser.add_argument("--smoke", action="store_true", help="small states")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to save to")
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    parser.add_argument("--runs", type=int, default=10, help="processes for each half of the table")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if chosen.page is None:
        sys.stdout.write(named(chosen.beside, chosen.late, chosen.smoke, chosen.dir) + "\n")
        return
    text = compared(chosen.runs, chosen.beside or 2, chosen.smoke, chosen.dir)
    sys.stdout.write(text)
    write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
