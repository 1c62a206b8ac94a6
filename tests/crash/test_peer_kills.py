"""Kills of jobs whose snapshots have copies on peers, together with the loss of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.peers import at_random


def test_a_killed_job_that_loses_a_host_goes_on_from_memory(tmp_path: Path) -> None:
    at_random(tmp_path, 3, seed=1).check(faults=0)


# More: `nox -s reliability`, which takes hours.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_killed_jobs_that_lose_a_host_go_on_from_memory(tmp_path: Path) -> None:
    at_random(tmp_path, 20).check(faults=1)
