"""Kills of agents that join the parts of steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.joins import at_random


@pytest.mark.timeout(300)
def test_a_kill_at_a_random_moment_of_a_join_loses_nothing(tmp_path: Path) -> None:
    at_random(tmp_path, 8, seed=1).check(faults=1)


# More of them: `nox -s reliability`.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_at_random_moments_of_joins_lose_nothing(tmp_path: Path) -> None:
    at_random(tmp_path, 60).check(faults=10)
