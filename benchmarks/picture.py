"""A picture of one save of ckpt beside the train loop of the overlap scenario."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import settle
from benchmarks.trainer import Trainer, usual_shapes

if TYPE_CHECKING:
    from pathlib import Path

NAME = "picture"
_STEPS_BEFORE = _STEPS_AFTER = 5
# The first save pays for cold memory; the last one is drawn.
_SAVES = 3


def draw(folder: Path, directory: Path, smoke: bool) -> None:
    """Writes overlap.png where matplotlib is installed.

    Args:
        folder: Where the pictures go.
        directory: A new folder on the disk to measure.
        smoke: Whether to use the small state.
    """
    observers = importlib.import_module("ckpt.observers")
    trace = observers.Trace()
    _train(trace, directory, Trainer(usual_shapes(smoke)))
    timeline = trace.timeline(step=_SAVES)
    try:
        # Only here: it imports the library.
        picture = importlib.import_module("benchmarks.save_picture")
        picture.draw_png(timeline, folder / "overlap.png")
    except ImportError as error:
        sys.stderr.write(f"overlap.png: left out, {error}\n")


def _train(trace: Any, directory: Path, trainer: Trainer) -> None:
    sync = importlib.import_module("ckpt.sync")
    with sync.CheckpointManager(directory, observers=[trace]) as manager:
        for save in range(1, _SAVES + 1):
            settle()
            trace.clear()
            _steps(trace, trainer, _STEPS_BEFORE)
            with trace.span("blocked", step=save):
                commit = manager.save(save, trainer.state)
            while not commit.done():
                _steps(trace, trainer, 1)
            _steps(trace, trainer, _STEPS_AFTER)
            commit.result()


def _steps(trace: Any, trainer: Trainer, count: int) -> None:
    for _ in range(count):
        with trace.span("train step"):
            trainer.step()
