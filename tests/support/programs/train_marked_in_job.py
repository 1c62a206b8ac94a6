"""Trains over all processes of a job, with marks, and tells what was logged about them.

train_marked_in_job.py ROOT END RUN...

Each run is `train`, or `forget`: that one goes on with another random key.
"""

from __future__ import annotations

import logging
import sys

import jax

import ckpt.sync
from tests.behaviour.proof.small_training import first_state, mesh_of, placed, step_of
from tests.support.real_jobs import tell

said: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def main(root: str, end: int, forgets: bool) -> None:
    mesh = mesh_of(jax.device_count())
    with ckpt.sync.CheckpointManager(root) as mgr:
        start, state = mgr.resume(placed(first_state(), mesh))
        if start and forgets:
            state = placed({**state, "rng": jax.random.key(7)}, mesh)
        for step in range(start, end):
            mgr.mark(step, state)
            state = step_of(state)
            if step == 3:
                mgr.save(step, state)


logger = logging.getLogger("ckpt")
logger.addHandler(Listener())
logger.setLevel(logging.INFO)
for run in sys.argv[3:]:
    said.clear()
    main(sys.argv[1], int(sys.argv[2]), run == "forget")
    tell([text for text in said if "repeated" in text or "is not what it was" in text])
