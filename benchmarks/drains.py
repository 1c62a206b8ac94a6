"""What a drain to S3 costs the training that saves to the disk before it.

    python -m benchmarks.drains                                     # prints the table
    python -m benchmarks.drains --page docs/how-to/surviving.md     # writes it into the page

The same loop trains and saves to a disk alone, and to a disk whose steps are copied on to S3
behind a slow line; a new process each, in turns. The store and the line are processes of this
machine, which a real run does not pay for: they have a processor of their own, and the trainer and
its agent have the others. Needs the dependency group `stores`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.figures import size, table, value, write_between
from benchmarks.processes import in_new_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import ckpt.sync

__all__ = ["measured"]

START, END = "<!-- drains:start -->", "<!-- drains:end -->"
LATENCY_S, BANDWIDTH = 0.04, 100e6
ASKED = 1.05
# A save is copied on for a good half of the time until the next one.
LEAVES, SAVES, WARM_SAVES, SECONDS_A_SAVE = 8, 4, 1, 2.5
_CALIBRATION = 20

Way = Literal["disk", "drain"]
WAYS: tuple[Way, Way] = ("disk", "drain")


@dataclass(frozen=True, slots=True)
class Run:
    """What one run has taken, in seconds.

    Attributes:
        blocked: The median of the calls of `save`.
        trained: The loop, with its saves.
        trainer: Processor time of the process in it.
        agent: Processor time of its agent in it.
        drained: How many steps were on the store at the end of the loop.
    """

    blocked: float
    trained: float
    trainer: float = 0.0
    agent: float = 0.0
    drained: int = 0


def measured(place: Path, rounds: int, nbytes: int) -> list[dict[Way, Run]]:
    """Returns what the runs of each round have taken."""
    from benchmarks.object_stores import line

    usable = sorted(os.sched_getaffinity(0))
    ours, others = set(usable[:-1]) or set(usable), set(usable[-1:])
    found = []
    with _on_processors(others), line("s3", LATENCY_S, BANDWIDTH) as store:
        # How many steps make the time between two saves: the same number for all.
        steps = in_new_process(_steps_between_saves, ours, nbytes)
        for number in range(rounds):
            runs: dict[Way, Run] = {}
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
    import jax

    train, state = _training(nbytes)
    blocked = []
    with _manager(disk, root) as mgr:
        for number in range(WARM_SAVES + SAVES):
            if number == WARM_SAVES:
                _wait_for_drains(mgr, root)
                began, trainer, agent = time.perf_counter(), time.process_time(), _agent_time()
            called = time.perf_counter()
            mgr.save(number, state)
            if number >= WARM_SAVES:
                blocked.append(time.perf_counter() - called)
            for _ in range(steps):
                state = jax.block_until_ready(train(state))
        taken = Run(
            statistics.median(blocked),
            time.perf_counter() - began,
            time.process_time() - trainer,
            _agent_time() - agent,
            _drained(mgr, root),
        )
    return taken


def _steps_between_saves(processors: set[int], nbytes: int) -> int:
    os.sched_setaffinity(0, processors)
    import jax

    train, state = _training(nbytes)
    began = time.perf_counter()
    for _ in range(_CALIBRATION):
        state = jax.block_until_ready(train(state))
    return max(1, round(SECONDS_A_SAVE * _CALIBRATION / (time.perf_counter() - began)))


def _training(nbytes: int) -> tuple[Any, Any]:
    """Returns a compiled step, and a state: every array of it changes in each step."""
    import jax
    import jax.numpy as jnp

    rows = nbytes // LEAVES // 4 // 1024
    state = [jnp.full((rows, 1024), number, jnp.float32) for number in range(1, LEAVES + 1)]

    def step(state: list[jax.Array]) -> list[jax.Array]:
        batch = state[0][:512]
        for _ in range(3):
            batch = jnp.tanh(batch @ state[1][:1024]) * 0.01
        return [each + 1e-3 * jnp.mean(batch) for each in state]

    train = jax.jit(step, donate_argnums=0)
    return train, jax.block_until_ready(train(state))


def _manager(disk: Path, root: Any) -> ckpt.sync.CheckpointManager:
    import ckpt.sync

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


def markdown(rounds: Sequence[Mapping[Way, Run]], nbytes: int) -> str:
    """Returns the table."""

    def row(name: str, part: str, asked: str = "") -> tuple[str, ...]:
        both = [[getattr(runs[way], part) for runs in rounds] for way in WAYS]
        ratio = statistics.median(drain / disk for disk, drain in zip(*both, strict=True))
        return name, *(value(statistics.median(each)) for each in both), f"{ratio:.3f}x", asked

    agent = statistics.median(runs["drain"].agent for runs in rounds)
    drained = statistics.median(runs["drain"].drained for runs in rounds)
    asked = f"{ASKED}x"
    rows = [
        row("blocked by a `save`", "blocked", asked),
        row("the loop, with its saves", "trained", asked),
        row("processor time of the trainer", "trainer"),
        ("processor time of the agent", "", value(agent), "", ""),
    ]
    head = ("", "disk alone", "disk that drains to S3", "drain / disk", "asked: at most")
    return (
        f"{SAVES} saves of {size(nbytes)} with about {SECONDS_A_SAVE:g} s of training after each; "
        f"S3 with {LATENCY_S * 1e3:.0f} ms before every request and {BANDWIDTH / 1e6:.0f} MB/s; "
        f"medians of {len(rounds)} rounds, and of their ratios. Trainer and agent share "
        f"{max(1, len(os.sched_getaffinity(0)) - 1)} of {len(os.sched_getaffinity(0))} processors, "
        "store and line have the other. "
        f"When the loop ended, S3 had {drained:.0f} of the steps.\n\n"
        f"{table(head, rows)}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args(arguments)
    from tests.stores import servers

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(servers.environment())
    nbytes = chosen.mib << 20
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        text = markdown(measured(Path(place), chosen.rounds, nbytes), nbytes)
    sys.stdout.write(text)
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
