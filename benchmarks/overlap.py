"""Training lost per save: what an asynchronous save costs a real, donating train loop.

Blocked time alone flatters a peer that keeps views of the buffers: the runtime then copies them
inside the next step. Lost time is the blocked time plus, for every step until the commit, the
time it took beyond the median undisturbed step. Noise can make single steps faster, so the sum
is signed.
"""

from __future__ import annotations

import importlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from benchmarks.rounds import Log, Setting, opened, settle
from benchmarks.workloads import Trainer, check_equal, trainer_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers import Peer, Pending
    from benchmarks.results import Scenario
    from benchmarks.workloads import Shapes

NAME = KIND = "overlap"
_UNDISTURBED_STEPS = 15
# A save that commits within a step may still have made the next ones slower.
_LEAST_STEPS_AFTER_SAVE = 3
# One save in this many seconds of training, for the figure in steps per second. A slower commit
# makes it longer.
_SAVE_EVERY_SECONDS = 2.0
# How closely the end of a save is told; a closer look would itself slow the steps.
_LOOK_SECONDS = 0.005
# For the picture: train steps before and after a save. The first save pays for cold memory; the
# last one is drawn.
_STEPS_BESIDE, _SAVES = 5, 3


def run(setting: Setting, shapes: Shapes | None = None) -> Scenario:
    """Returns what saves cost a train loop; call it in a fresh process.

    Peers without an asynchronous save are left out. `shapes` are those of the trainer's state.
    """
    trainer = Trainer(shapes or trainer_shapes(setting.smoke))
    log = Log(NAME, setting.rounds)
    every = 0.2 if setting.smoke else _SAVE_EVERY_SECONDS
    with opened(setting.asynchronous, setting.directory) as running:
        for turn, name, peer in log.turns(running):
            log.add(turn, name, _one_turn(peer, trainer, turn, every, check=turn == 0))
    summary = "params and both Adam moments under a donating train step"
    return log.result(KIND, summary, trainer.state, save_every_seconds=every)


def _one_turn(
    peer: Peer, trainer: Trainer, step: int, every: float, *, check: bool
) -> dict[str, float]:
    settle()
    calm = trainer.undisturbed(_UNDISTURBED_STEPS)
    window = max(_LEAST_STEPS_AFTER_SAVE, round(every / statistics.median(calm)))
    expected = jax.tree.map(jnp.copy, trainer.state) if check else None
    adopted = peer.adopt(jax.block_until_ready(trainer.state))

    start = time.perf_counter()
    pending = peer.save_async(step, adopted)
    blocked = time.perf_counter() - start
    del adopted  # a view of a buffer would make the next donation a copy
    with ThreadPoolExecutor(max_workers=1) as executor:
        # In a thread, because a step is long: at its end the commit may be long over.
        ended = executor.submit(_time_of_end, pending)
        saving = trainer.until(lambda steps: ended.done() and steps >= _LEAST_STEPS_AFTER_SAVE)
    committed = ended.result() - start
    after = trainer.until(lambda steps: len(saving) + steps >= window)
    wall = time.perf_counter() - start
    pending.wait()
    # Undisturbed steps from before and after, because the machine drifts.
    undisturbed = statistics.median(calm + trainer.undisturbed(_UNDISTURBED_STEPS))

    if expected is not None:
        restored = peer.restore(step, peer.target(expected))
        check_equal(peer.as_jax(restored, expected), expected)
    peer.delete(step)
    slowdown = sum(seconds - undisturbed for seconds in saving)
    return {
        "lost": blocked + slowdown,
        "blocked": blocked,
        "slowdown": slowdown,
        "worst_step": max(saving),
        "undisturbed_step": undisturbed,
        "committed": committed,
        # The share of the save's duration in which training continued as if there were no save.
        "overlap_ratio": 1 - (blocked + slowdown) / max(committed, blocked),
        "saving_steps_per_second": (len(saving) + len(after)) / wall,
        "calm_steps_per_second": 1 / undisturbed,
    }


def _time_of_end(pending: Pending) -> float:
    while not pending.done():
        time.sleep(_LOOK_SECONDS)
    return time.perf_counter()


def traced_save(directory: Path, smoke: bool) -> Any:
    """Returns the timeline of one save of ckpt beside the train loop.

    Args:
        directory: A new folder on the disk to measure.
        smoke: Whether to use the small state.
    """
    trainer = Trainer(trainer_shapes(smoke))
    trace = importlib.import_module("ckpt.observers").Trace()
    sync = importlib.import_module("ckpt.sync")

    def train(steps: int) -> None:
        for _ in range(steps):
            with trace.span("train step"):
                trainer.step()

    with sync.CheckpointManager(directory, observers=[trace]) as manager:
        for save in range(1, _SAVES + 1):
            settle()
            trace.clear()
            train(_STEPS_BESIDE)
            with trace.span("blocked", step=save):
                commit = manager.save(save, trainer.state)
            while not commit.done():
                train(1)
            train(_STEPS_BESIDE)
            commit.result()
    return trace.timeline(step=_SAVES)
