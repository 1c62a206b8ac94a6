"""A process that is in the middle of a save, for as long as a test wants it to be."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.command import environment

# The arrays of the step are written, and its manifest is not.
_PROGRAM = """
import sys
import numpy as np
import ckpt
from tests.support.gated_item import Gate, GateHandler

gate = Gate()
with ckpt.sync.CheckpointManager(sys.argv[1], handlers=[GateHandler()]) as mgr:
    mgr.save(int(sys.argv[2]), items={"state": np.ones(1000), "gate": gate})
    assert gate.reached.wait(60)
    print("reached", flush=True)
    sys.stdin.readline()
    gate.open()
"""


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
