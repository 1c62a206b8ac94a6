"""What managers offer, in a job of two processes: both find the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.real_jobs import run_processes

pytestmark = pytest.mark.timeout(300)

SIX = [0, 1, 2, 3, 4, 5]
FOUND: dict[str, Any] = {
    "two_roots": [[0, 0, 1, 1, 2, 2], [True, True], [0, 1, 2], [0, 1, 2]],
    "in_a_row": [[True] * 6, SIX],
    "slow_in_a_row": SIX,
    "far_ahead": [[True] * 7, [False] * 3, 100],
    "skips": [["done", "skipped", "skipped", "skipped"], [0]],
    "told_with_it": [True, {"loss": 0.25}, None, {"run": "a"}],
    "exists": ["StepExistsError", True],
    "keeps": [[True] * 5, [5]],
    "pins_and_deletes": ["StepPinnedError", [1], True, [1, 2]],
    "in_asyncio": [[0, 1, 2], True],
    "at_once": [None, True, True],
}
ALONE = "the array has shards on devices of other processes, and this process saves alone"


def test_every_call_of_a_manager_is_made_by_all(tmp_path: Path) -> None:
    children = run_processes(2, "call_in_job.py", tmp_path, timeout=240)
    by_time = [child.value.pop("by_time") for child in children]
    assert by_time[0] == by_time[1]
    decided, steps = by_time[0]
    assert steps == [step for step, was_made in enumerate(decided) if was_made]
    assert 8 in steps
    for child in children:
        alone = child.value.pop("alone")
        assert child.value == FOUND
        if child.index == 0:
            assert alone[:2] == [True, [3]]
            assert ALONE in alone[2]
