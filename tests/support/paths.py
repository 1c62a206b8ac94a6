"""Where things are: the repository, programs that tests start, and golden checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["GOLDEN", "PROGRAMS", "ROOT", "let_programs_import_tests"]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "programs"
GOLDEN = ROOT / "tests" / "unit" / "format" / "golden"


def let_programs_import_tests() -> None:
    """Put the repository on the path of every Python that this process starts."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, known)])
