"""Event loops that other libraries have patched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Patched loops run no callbacks of a task that has ended, so nothing may wait for those.
SCRIPT = """
import asyncio, sys
import nest_asyncio
import numpy as np
import ckpt

async def main():
    async with ckpt.CheckpointManager("run") as mgr:
        await mgr.save(1, {"w": np.ones(3)})
    assert (await ckpt.load("run/1"))["w"].sum() == 3

nest_asyncio.apply()
asyncio.run(main())
"""


def test_a_program_that_nests_loops_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, timeout=120, check=True)
