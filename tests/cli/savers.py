"""A process that is in the middle of a save, for as long as a test wants it to be."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.command import environment

# The arrays of the step are written, its manifest is not, and of its small files some may be.
_PROGRAM = """
import sys, threading
import numpy as np
import ckpt
from tests.support.gated_item import Gate, GateHandler

gate, written = Gate(), threading.Event()

def observe(event):
    if event.phase == "write":
        written.set()

options = {"handlers": [GateHandler()], "observers": [observe]}
with ckpt.sync.CheckpointManager(sys.argv[1], **options) as mgr:
    mgr.save(int(sys.argv[2]), items={"state": np.ones(1000), "gate": gate})
    assert gate.reached.wait(60)
    assert written.wait(60)
    print("reached", flush=True)
    sys.stdin.readline()
    gate.open()
"""


def without_sizes(text: str) -> str:
    """Return an output without sizes: those of unfinished saves differ."""
    return re.sub(r"\b[\d.]+ ([KMG]i)?B\b", "<size>", text)


@contextlib.contextmanager
def saving(root: Path, step: int) -> Iterator[subprocess.Popen[str]]:
    """Run the body while another process saves a step; it goes on once it is told anything."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(root), str(step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment({"PYTHONPATH": str(Path(__file__).parents[2])}),
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "reached\n"
            yield child
        finally:
            child.kill()
