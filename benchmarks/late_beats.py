"""What keeps a caller's event loop waiting: `python -m benchmarks.late_beats [--beside N]`.

Every flow of the library runs from an event loop that beats every 2 ms, first in the fresh process
and then ten times. Where a beat is late by more than `--late` seconds, the stacks of all threads
are written while it is, by a thread that does not need the interpreter lock: the one that holds it
is in a call into C, such as `mmap.madvise` was. `--beside 2` runs two busy processes meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import ckpt
from benchmarks import workloads
from benchmarks.trees import abstract

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

Flow = tuple[str, "Callable[[], Awaitable[Any]]"]
_BEAT_SECONDS = 0.002


class Beats:
    """Beats of the running loop; the stacks behind late ones go to a file."""

    def __init__(self, late_seconds: float, stacks: Path) -> None:
        """Write stacks when a beat is late by so much."""
        self._late = late_seconds
        self._stacks = stacks

    async def during(self, call: Callable[[], Awaitable[Any]]) -> tuple[list[float], str]:
        """Await a call; return the lags meanwhile, and the stacks behind late beats."""
        lags: list[float] = []
        with self._stacks.open("w", encoding="utf-8") as file:
            beating = asyncio.create_task(self._beat(lags, file))
            try:
                await call()
                await asyncio.sleep(2 * _BEAT_SECONDS)
            finally:
                beating.cancel()
                faulthandler.cancel_dump_traceback_later()
        return lags, self._stacks.read_text(encoding="utf-8")

    async def _beat(self, lags: list[float], file: IO[str]) -> None:
        before = time.perf_counter()
        while True:
            faulthandler.dump_traceback_later(_BEAT_SECONDS + self._late, file=file)
            await asyncio.sleep(_BEAT_SECONDS)
            now = time.perf_counter()
            lags.append(now - before - _BEAT_SECONDS)
            before = now


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

    return [
        ("save of 5,000 leaves", lambda: save(small)),
        ("restore of 5,000 leaves", lambda: mgr.restore()),
        ("save", lambda: save(large)),
        ("restore", lambda: mgr.restore()),
        ("restore like", lambda: mgr.restore(None, abstract(large))),
        ("verify", lambda: mgr.verify(latest)),
        (
            "convert",
            lambda: ckpt.convert(place / str(latest), place / "copy", overwrite=True),
        ),
    ]


async def _measure(late_seconds: float, smoke: bool, place: Path) -> None:
    root = place / "run"
    policy = ckpt.policies.LatestN(2)
    beats = Beats(late_seconds, place / "stacks")
    async with ckpt.CheckpointManager(root, preservation=policy) as mgr:
        for name, call in _flows(mgr, root, smoke):
            for label, count in (("first", 1), ("next ten", 2 if smoke else 10)):
                lags: list[float] = []
                holders: Counter[str] = Counter()
                for _ in range(count):
                    found, stacks = await beats.during(call)
                    lags += found
                    holders.update(_holders(stacks))
                lags.sort()
                p99 = lags[min(len(lags) - 1, len(lags) * 99 // 100)]
                worst = f"worst {lags[-1] * 1e3:.1f} ms"
                sys.stdout.write(f"{name}, {label}: p99 {p99 * 1e3:.1f} ms, {worst}\n")
                for where, times in holders.most_common(3):
                    sys.stdout.write(f"    {times} x {where}\n")


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


def main() -> None:
    """Run every flow, and print how late the beats were and who was running then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside")
    parser.add_argument("--late", type=float, default=0.02, help="seconds that are late")
    parser.add_argument("--smoke", action="store_true", help="small states")
    parser.add_argument("--dir", type=Path, help="where to save to")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="late-", dir=chosen.dir) as place, _busy(chosen.beside):
        asyncio.run(_measure(chosen.late, chosen.smoke, Path(place)))


if __name__ == "__main__":
    main()
