"""What observers hear of each operation: the phases that the documentation lists."""

from __future__ import annotations

import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt.types import Event
from tests.support.snapshots import PATIENCE_S

NBYTES = 1 << 20
PHASES = {
    "save": {
        *("wait", "blocked", "plan", "snapshot", "stage", "encode", "digest", "write"),
        *("record", "publish", "preserve", "preempted", "end"),
    },
    "restore": {"plan", "read", "place", "end"},
    "verify": {"plan", "read", "digest", "end"},
    "delete": {"end"},
    "drain": {"end"},
}
# Phases that tell of all bytes of the arrays, however they are cut.
WHOLE = {("save", "plan"), ("save", "stage"), ("restore", "plan"), ("restore", "read")}


def state_of(step: int) -> dict[str, object]:
    """Two arrays of half a MiB; the first one is compressed, the second one cannot be."""
    noise = np.random.default_rng(step).integers(0, 1 << 32, (256, 512), np.uint32)
    return {"even": jnp.full((256, 512), step, jnp.float32), "noise": jnp.asarray(noise)}


def test_every_phase_of_every_operation_is_told(tmp_path: Path) -> None:
    events: list[Event] = []
    with ckpt.sync.CheckpointManager(
        tmp_path / "root",
        tiers=[ckpt.tiers.Tier(tmp_path / "disk")],
        staging="device",
        keep=ckpt.keep.Latest(2),
        formats={"even": ckpt.ArrayFormat(compression=ckpt.Zstd(1))},
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(10), ckpt.save_when.Preempted([signal.SIGUSR1])
        ),
        observers=[events.append],
    ) as mgr:
        for step in (10, 20, 30):
            mgr.save(step, state_of(step)).in_root.result(PATIENCE_S)
        mgr.restore(30)
        mgr.verify(20)
        signal.raise_signal(signal.SIGUSR1)
        mgr.reached_preemption(30)
        mgr.save(31, state_of(31)).in_root.result(PATIENCE_S)
        mgr.wait_until_finished()
        mgr.delete(30)
    told: dict[str, set[str]] = {}
    moved: dict[tuple[str, str, int | None], int] = {}
    for each in events:
        told.setdefault(each.operation, set()).add(each.phase)
        key = (each.operation, each.phase, each.step)
        moved[key] = moved.get(key, 0) + each.nbytes
        assert each.began_ns <= each.ended_ns
        assert (each.outcome == "ok") == (each.phase == "end")
    assert told == PHASES
    for operation, phase in WHOLE:
        assert moved[operation, phase, 30] == NBYTES, (operation, phase)
    assert {step for operation, _, step in moved if operation == "verify"} == {20}
    assert {step for _, phase, step in moved if phase == "preempted"} == {31}
    # It has been one of three for which there was room before it was deleted.
    assert {step for operation, _, step in moved if operation == "delete"} >= {30}
