"""What snapshots in memory and drains to a store cost, and how soon a run continues from one.

Every figure is of a new process, and what is compared takes turns. `tiers`: each process touches
memory, and frees it, before its clock starts; see `first_calls.py`. What is read from the disk was
dropped from the page cache before.

`drains`: the same loop trains and saves to a disk alone, and to a disk whose steps are copied on to
S3 behind a slow line. The store and the line are processes of this machine, which a real run does
not pay for: they have a processor of their own, and the trainer and its agent have the others.
Needs the dependency group `stores`.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import ckpt.sync
from benchmarks.results import machine_facts
from benchmarks.rounds import drop, in_new_process, timed_commit, touch_memory
from benchmarks.tables import size, table, times, value
from benchmarks.workloads import abstract
from tests.support.snapshots import shared_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

LEAVES, SAVES, STEP = 16, 6, 7
BLOCKED = ("blocked by the first `snapshot` of a process", "blocked by each one after it")
RESTORE = '`restore(like=...)`, `memory="{}"`'
_PATIENCE_S, _LOOK_S = 300, 0.002
ASKED = 1.05
# A save is copied on for a good half of the time until the next one.
DRAIN_LEAVES, DRAINED_SAVES, WARM_SAVES, SECONDS_A_SAVE = 8, 4, 1, 2.5
_CALIBRATION = 20

WAYS = ("disk", "drain")


# What a run has taken: `blocked` is the median of the calls of `save`, `trained` the loop with its
# saves, `trainer` and `agent` the processor time of both in it, all in seconds; `drained` is how
# many steps were on the store at the end of the loop.
Run = dict[str, float]


def tiers(place: Path, *, rounds: int = 5, mib: int = 512) -> str:
    """Returns what snapshots in shared memory cost, and restores from them, beside the disk."""
    nbytes = mib << 20
    where = in_new_process(machine_facts, place)
    lines = []
    for row, found in _measured(place, rounds, nbytes).items():
        far = [(other, other / one) for one, other in found if other is not None]
        cells = ["", ""]
        if far:
            seconds, ratio = (statistics.median(each) for each in zip(*far, strict=True))
            cells = [value(seconds), times(ratio)]
        lines.append((row, value(statistics.median(one for one, _ in found)), *cells))
    return (
        f"{size(nbytes)} in {LEAVES} arrays; medians of {rounds} rounds, and of their ratios; "
        f"{where['cores']} cores, {where['file_system']}, arrays on {where['devices']}.\n\n"
        + table(("", "in memory", "on the disk", "disk / memory"), lines)
    )


def _measured(place: Path, rounds: int, nbytes: int) -> dict[str, list[tuple[float, float | None]]]:
    """Returns by row the seconds of every round: in memory, and on the disk."""
    rows: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for number in range(rounds):
        with shared_memory() as memory:
            ways = ("snapshot", "save")
            blocked = {}
            for way in ways if number % 2 else reversed(ways):
                root = place / f"{number}-{way}"
                blocked[way] = in_new_process(_blocked, way, root, memory, nbytes)
                shutil.rmtree(root)
            for row, *both in zip(BLOCKED, *(blocked[way] for way in ways), strict=True):
                rows[row].append((both[0], both[1]))
            root = place / f"{number}-killed"
            rows["from `kill -9` to the step in the root"].append(
                (_killed(root, memory, nbytes), None)
            )
            for kind in ("jax", "files"):
                found = {}
                places = (memory, None)
                for where in places if number % 2 else reversed(places):
                    drop(root)
                    found[where] = in_new_process(_restored, root, where, nbytes, kind)
                rows[RESTORE.format(kind)].append((found[memory], found[None]))
            shutil.rmtree(root)
    return rows


def _blocked(way: str, root: Path, memory: Path, nbytes: int) -> tuple[float, float]:
    """Returns how long the first call, and the median of the later ones, held the caller."""
    touch_memory(4 * nbytes)
    seconds = []
    with _memory_manager(root, memory) as mgr:
        for step in range(1 + SAVES):
            state = _state(step, nbytes)
            jax.block_until_ready(state)
            blocked, _, done = timed_commit(partial(getattr(mgr, way), step, state))
            assert done
            seconds.append(blocked)
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
    with _memory_manager(root, memory) as mgr:
        for step in (STEP - 1, STEP):
            mgr.snapshot(step, _state(step, nbytes)).result()
        mgr.wait_until_finished()
        told.send(STEP)
        time.sleep(_PATIENCE_S)


def _restored(root: Path, memory: Path | None, nbytes: int, kind: Any) -> float:
    """Returns how long a restore takes, from memory or from the root."""
    like = abstract(_state(0, nbytes))
    touch_memory(4 * nbytes)
    # Not closed: a manager that is closed gives the memory back.
    mgr = _memory_manager(root, memory)
    mgr.__enter__()
    assert mgr.latest_step() == STEP
    began = time.perf_counter()
    state = jax.block_until_ready(mgr.restore(STEP, like=like, memory=kind))
    seconds = time.perf_counter() - began
    for one, other in zip(state, _state(STEP, nbytes), strict=True):
        assert (one == other).all()
    return seconds


def _memory_manager(root: Path, memory: Path | None) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(
        ckpt.storage.Local(root, hard_links=False),
        keep=ckpt.keep.Latest(1),
        tiers=[ckpt.tiers.SharedMemory(directory=str(memory))] if memory else [],
    )


def _state(step: int, nbytes: int) -> list[Any]:
    shape = (nbytes // LEAVES // 4 // 1024, 1024)
    keys = jax.random.split(jax.random.key(step), LEAVES)
    return [jax.random.normal(key, shape, jnp.float32) for key in keys]


def drains(place: Path, *, rounds: int = 7, mib: int = 128) -> str:
    """Returns what a drain to S3 costs the training that saves to the disk before it."""
    from benchmarks.object_stores import BANDWIDTH, LATENCY_S, set_environment

    set_environment()
    nbytes = mib << 20
    found = _runs(place, rounds, nbytes)

    def row(name: str, part: str, asked: str = "") -> tuple[str, ...]:
        both = [[runs[way][part] for runs in found] for way in WAYS]
        ratio = statistics.median(drain / disk for disk, drain in zip(*both, strict=True))
        return name, *(value(statistics.median(each)) for each in both), f"{ratio:.3f}x", asked

    agent = statistics.median(runs["drain"]["agent"] for runs in found)
    drained = statistics.median(runs["drain"]["drained"] for runs in found)
    asked = f"{ASKED}x"
    rows = [
        row("blocked by a `save`", "blocked", asked),
        row("the loop, with its saves", "trained", asked),
        row("processor time of the trainer", "trainer"),
        ("processor time of the agent", "", value(agent), "", ""),
    ]
    head = ("", "disk alone", "disk that drains to S3", "drain / disk", "asked: at most")
    return (
        f"{DRAINED_SAVES} saves of {size(nbytes)} with about {SECONDS_A_SAVE:g} s of training "
        f"after each; S3 with {LATENCY_S * 1e3:.0f} ms before every request and "
        f"{BANDWIDTH / 1e6:.0f} MB/s; "
        f"medians of {rounds} rounds, and of their ratios. Trainer and agent share "
        f"{max(1, len(os.sched_getaffinity(0)) - 1)} of {len(os.sched_getaffinity(0))} processors, "
        "store and line have the other. "
        f"When the loop ended, S3 had {drained:.0f} of the steps.\n\n"
        f"{table(head, rows)}"
    )


def _runs(place: Path, rounds: int, nbytes: int) -> list[dict[str, Run]]:
    """Returns what the runs of each round have taken."""
    from benchmarks.object_stores import BANDWIDTH, LATENCY_S, line

    usable = sorted(os.sched_getaffinity(0))
    ours, others = set(usable[:-1]) or set(usable), set(usable[-1:])
    found = []
    with _on_processors(others), line("s3", LATENCY_S, BANDWIDTH) as store:
        # How many steps make the time between two saves: the same number for all.
        steps = in_new_process(_steps_between_saves, ours, nbytes)
        for number in range(rounds):
            runs: dict[str, Run] = {}
            for way in WAYS if number % 2 else reversed(WAYS):
                disk = place / f"{number}-{way}"
                root = store.open(f"{number}") if way == "drain" else None
                runs[way] = in_new_process(_run, disk, root, ours, steps, nbytes)
                shutil.rmtree(disk)
            found.append(runs)
    return found


@contextmanager
def _on_processors(which: set[int]) -> Iterator[None]:
    """Gives what is started in the body these processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, which)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run(disk: Path, root: Any, processors: set[int], steps: int, nbytes: int) -> Run:
    os.sched_setaffinity(0, processors)
    train, state = _training(nbytes)
    blocked = []
    with _drain_manager(disk, root) as mgr:
        for number in range(WARM_SAVES + DRAINED_SAVES):
            if number == WARM_SAVES:
                _wait_for_drains(mgr, root)
                began, trainer, agent = time.perf_counter(), time.process_time(), _agent_time()
            called = time.perf_counter()
            mgr.save(number, state)
            if number >= WARM_SAVES:
                blocked.append(time.perf_counter() - called)
            for _ in range(steps):
                state = jax.block_until_ready(train(state))
        return {
            "blocked": statistics.median(blocked),
            "trained": time.perf_counter() - began,
            "trainer": time.process_time() - trainer,
            "agent": _agent_time() - agent,
            "drained": _drained(mgr, root),
        }


def _steps_between_saves(processors: set[int], nbytes: int) -> int:
    os.sched_setaffinity(0, processors)
    train, state = _training(nbytes)
    began = time.perf_counter()
    for _ in range(_CALIBRATION):
        state = jax.block_until_ready(train(state))
    return max(1, round(SECONDS_A_SAVE * _CALIBRATION / (time.perf_counter() - began)))


def _training(nbytes: int) -> tuple[Any, Any]:
    """Returns a compiled step, and a state: every array of it changes in each step."""
    rows = nbytes // DRAIN_LEAVES // 4 // 1024
    state = [jnp.full((rows, 1024), number, jnp.float32) for number in range(1, DRAIN_LEAVES + 1)]

    def step(state: list[jax.Array]) -> list[jax.Array]:
        batch = state[0][:512]
        for _ in range(3):
            batch = jnp.tanh(batch @ state[1][:1024]) * 0.01
        return [each + 1e-3 * jnp.mean(batch) for each in state]

    train = jax.jit(step, donate_argnums=0)
    return train, jax.block_until_ready(train(state))


def _drain_manager(disk: Path, root: Any) -> ckpt.sync.CheckpointManager:
    kept = ckpt.keep.Latest(2)
    if root is None:
        return ckpt.sync.CheckpointManager(disk, keep=kept)
    tier = ckpt.tiers.Tier(disk, keep=kept)
    return ckpt.sync.CheckpointManager(root, tiers=[tier])


def _wait_for_drains(mgr: ckpt.sync.CheckpointManager, root: Any) -> None:
    """Waits until what the warm-up has saved is where it goes."""
    mgr.wait_until_finished()
    while root is not None and _drained(mgr, root) < WARM_SAVES:
        time.sleep(0.1)


def _drained(mgr: ckpt.sync.CheckpointManager, root: Any) -> int:
    if root is None:
        return 0
    tiers = [mgr.metadata(step).info.tiers for step in mgr.all_steps()]
    return sum(not where[-1].startswith("/") for where in tiers)


def _agent_time() -> float:
    """Returns the processor time of the processes that this one has started, in seconds."""
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            # What is behind the name, which may hold anything.
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
