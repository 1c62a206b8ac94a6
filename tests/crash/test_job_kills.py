"""Kills of whole jobs: what they had in memory is written by their agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.job_ends import at_random


def test_agents_write_the_last_snapshot_of_a_killed_job(tmp_path: Path) -> None:
    at_random(tmp_path, 3, seed=1).check(faults=0)


# More: `nox -s reliability`, which takes hours.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_write_the_last_snapshots_of_many_killed_jobs(tmp_path: Path) -> None:
    at_random(tmp_path, 15).check(faults=1)
