"""A pytest fixture that kills a training program, and compares its resume with a run without kill.

Import it into your `conftest.py`, and call it with the program and the options of `ckpt drill`:

    from ckpt.testing.drill import resume_drill

    def test_training_resumes(resume_drill):
        resume_drill([sys.executable, "train.py"], steps=20)

The program calls `mgr.mark(step, state)` at the beginning of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt._proof.drill import DrillReport, drill

__all__ = ["resume_drill"]


@pytest.fixture
def resume_drill(tmp_path: Path) -> Callable[..., DrillReport]:
    """Return a function that drills a program, and fails the test if it does not resume."""

    def run(command: list[str], **given: Any) -> DrillReport:
        found = drill(command, scratch=tmp_path / "drill", **given)
        if not found.ok:
            pytest.fail(str(found), pytrace=False)
        return found

    return run
