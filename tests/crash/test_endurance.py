"""A run of weeks: nothing in the process or on the disk grows with the number of saves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.endurance import grown, saves_in_a_row


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: a thousand times durable takes minutes."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_saves_in_a_row_leave_nothing_behind(in_memory: Path) -> None:
    saves_in_a_row(in_memory, 1000).check(faults=0)


def test_growth_is_noticed() -> None:
    before: dict[str, Any] = {
        "files": 20,
        "threads": 4,
        "tasks": 9,
        "rss": 200 << 20,
        "objects": {"ckpt._commit.Commit": 1},
        "steps": [7, 8],
        "root": ["7", "8"],
    }
    assert grown(before, before, saves=800) == []
    cached = {"objects": before["objects"] | {"jax.Cached": 100}}
    assert grown(before, before | cached, saves=800) == []
    for what, value in (
        ("files", 24),
        ("threads", 9),
        ("tasks", 16),
        ("rss", 240 << 20),
        ("objects", {"ckpt._commit.Commit": 60}),
        ("objects", {"ckpt._commit.Commit": 1, "ckpt.other": 50}),
        ("objects", {"ckpt._commit.Commit": 1, "builtins.list": 800}),
        ("root", ["7", "8", "9.orbax-checkpoint-tmp-1"]),
    ):
        assert len(grown(before, before | {what: value}, saves=800)) == 1
