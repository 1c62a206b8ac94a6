"""Whatever is done to a root, in whatever order, it holds what was committed and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.reliability.machine import machine


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_managers_list_and_restore_what_was_committed(tmp_path: Path) -> None:
    machine(tmp_path, settings().max_examples // 3).check(faults=10)
