"""The saver with a sync that does nothing: what a power cut takes from it, a test must notice."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

SAVER = Path(__file__).with_name("save_until_killed.py")


def forget(_: int) -> None:
    """Do nothing, and call it durable."""


os.fsync = os.fdatasync = forget  # type: ignore[assignment]
sys.argv[0] = str(SAVER)
runpy.run_path(str(SAVER), run_name="__main__")
