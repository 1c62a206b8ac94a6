"""Runs one loop: `python -m tests.interop.loops NAME ROOT UNTIL`, or begins it: `... before`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_, name, root, until = sys.argv
loop = importlib.import_module(f"tests.interop.loops.{name}")
if until == "before":
    loop.before(Path(root))
else:
    loop.train(Path(root), int(until))
