"""What snapshots in shared memory cost, and how soon a run goes on from one.

    python -m benchmarks.tiers                                     # prints the table
    python -m benchmarks.tiers --page docs/how-to/surviving.md     # writes it into the page

Every figure is of a new process, and `snapshot` and `save`, memory and disk take turns. Each
process touches memory, and frees it, before its clock starts; see `first_restore.py`. What is read
from the disk was dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pagecache
from benchmarks.__main__ import default_dir
from benchmarks.figures import size, table, times, value, write_between
from benchmarks.machine import facts
from benchmarks.processes import in_new_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    import ckpt.sync

__all__ = ["measured"]

START, END = "<!-- tiers:start -->", "<!-- tiers:end -->"
LEAVES, SAVES, STEP = 16, 6, 7
BLOCKED = "blocked by the first `{}` of a process"
LATER = "blocked by each one after it"
RESTORE = '`restore(like=...)`, `memory="{}"`'
_PATIENCE_S, _LOOK_S = 300, 0.002


def measured(place: Path, rounds: int, nbytes: int) -> dict[str, list[tuple[float, float | None]]]:
    """Returns by row the seconds of every round: in memory, and on the disk."""
    rows: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for number in range(rounds):
        with _memory() as memory:
            ways = ("snapshot", "save")
            blocked = {}
            for way in ways if number % 2 else reversed(ways):
                root = place / f"{number}-{way}"
                blocked[way] = in_new_process(_blocked, way, root, memory, nbytes)
                shutil.rmtree(root)
            for row, *both in zip(_BLOCKED_ROWS, *(blocked[way] for way in ways), strict=True):
                rows[row].append((both[0], both[1]))
            root = place / f"{number}-killed"
            rows["from `kill -9` to the step in the root"].append(
                (_killed(root, memory, nbytes), None)
            )
            for kind in ("jax", "files"):
                found = {}
                places = (memory, None)
                for where in places if number % 2 else reversed(places):
                    pagecache.drop(root)
                    found[where] = in_new_process(_restored, root, where, nbytes, kind)
                rows[RESTORE.format(kind)].append((found[memory], found[None]))
            shutil.rmtree(root)
    return rows


_BLOCKED_ROWS = (BLOCKED.format("snapshot"), LATER)


@contextmanager
def _memory() -> Iterator[Path]:
    folder = tempfile.mkdtemp(dir="/dev/shm", prefix="bench-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _blocked(way: str, root: Path, memory: Path, nbytes: int) -> tuple[float, float]:
    """Returns how long the first call, and the median of the later ones, held the caller."""
    import jax

    _touch(4 * nbytes)
    seconds = []
    with _manager(root, memory) as mgr:
        for step in range(1 + SAVES):
            state = _state(step, nbytes)
            jax.block_until_ready(state)
            began = time.perf_counter()
            commit = getattr(mgr, way)(step, state)
            seconds.append(time.perf_counter() - began)
            assert commit.result()
            mgr.wait_until_finished()
    return seconds[0], statistics.median(seconds[1:])


def _killed(root: Path, memory: Path, nbytes: int) -> float:
    """Returns the time from the death of a process to its last snapshot in the root."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_snapshot, args=(theirs, root, memory, nbytes))
    child.start()
    assert ours.recv() == STEP
    assert child.pid is not None
    began = time.perf_counter()
    os.kill(child.pid, signal.SIGKILL)
    while not (root / str(STEP)).exists():
        time.sleep(_LOOK_S)
        assert time.perf_counter() < began + _PATIENCE_S
    seconds = time.perf_counter() - began
    child.join()
    return seconds


def _snapshot(told: Connection, root: Path, memory: Path, nbytes: int) -> None:
    """Takes two snapshots, and waits to be killed."""
    with _manager(root, memory) as mgr:
        for step in (STEP - 1, STEP):
            mgr.snapshot(step, _state(step, nbytes)).result()
        mgr.wait_until_finished()
        told.send(STEP)
        time.sleep(_PATIENCE_S)


def _restored(root: Path, memory: Path | None, nbytes: int, kind: Any) -> float:
    """Returns how long a restore takes, from memory or from the root."""
    import jax

    like = _state(0, nbytes)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    _touch(4 * nbytes)
    # Not closed: a manager that is closed gives the memory back.
    mgr = _manager(root, memory)
    mgr.__enter__()
    assert mgr.latest_step() == STEP
    began = time.perf_counter()
    state = jax.block_until_ready(mgr.restore(STEP, like=like, memory=kind))
    seconds = time.perf_counter() - began
    for one, other in zip(state, _state(STEP, nbytes), strict=True):
        assert (one == other).all()
    return seconds


def _manager(root: Path, memory: Path | None) -> ckpt.sync.CheckpointManager:
    import ckpt.sync

    return ckpt.sync.CheckpointManager(
        ckpt.storage.Local(root, hard_links=False),
        keep=ckpt.keep.Latest(1),
        tiers=[ckpt.tiers.SharedMemory(directory=str(memory))] if memory else [],
    )


def _state(step: int, nbytes: int) -> list[Any]:
    import jax
    import jax.numpy as jnp

    shape = (nbytes // LEAVES // 4 // 1024, 1024)
    keys = jax.random.split(jax.random.key(step), LEAVES)
    return [jax.random.normal(key, shape, jnp.float32) for key in keys]


def _touch(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes) as memory:
        memory[:: mmap.PAGESIZE] = bytes(-(-nbytes // mmap.PAGESIZE))


def markdown(
    rows: Mapping[str, Sequence[tuple[float, float | None]]], nbytes: int, where: Mapping[str, Any]
) -> str:
    """Returns the table."""
    count = len(next(iter(rows.values())))
    text = (
        f"{size(nbytes)} in {LEAVES} arrays; medians of {count} rounds, and of their ratios; "
        f"{where['cores']} cores, {where['file_system']}, arrays on {where['devices']}."
    )
    lines = []
    for row, found in rows.items():
        near = value(statistics.median(one for one, _ in found))
        far = [other for _, other in found if other is not None]
        if far:
            ratio = times(statistics.median(other / one for one, other in found if other))
            lines.append((row, near, value(statistics.median(far)), ratio))
        else:
            lines.append((row, near, "", ""))
    head = ("", "in memory", "on the disk", "disk / memory")
    return f"{text}\n\n{table(head, lines)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args(arguments)
    nbytes = chosen.mib << 20
    with tempfile.TemporaryDirectory(prefix="bench-", dir=default_dir()) as top:
        where = in_new_process(facts, Path(top))
        text = markdown(measured(Path(top), chosen.rounds, nbytes), nbytes, where)
    sys.stdout.write(text)
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
