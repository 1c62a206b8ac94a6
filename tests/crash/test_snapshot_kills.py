"""Kills of programs that take snapshots in memory, and of the agents that write the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.snapshots import (
    at_calls,
    at_random,
    beside_keepers,
    in_compiles,
    with_keepers,
)
from tests.support.kills import can_watch

needs_watching = pytest.mark.skipif(not can_watch(), reason="system calls cannot be watched here")


def test_a_kill_at_a_random_moment_loses_no_snapshot(tmp_path: Path) -> None:
    at_random(tmp_path, 12, seed=1).check(faults=1)


@needs_watching
def test_a_kill_at_a_system_call_loses_no_snapshot(tmp_path: Path) -> None:
    at_calls(tmp_path, 8).check(faults=7)


def test_a_signal_in_a_compile_loses_no_snapshot(tmp_path: Path) -> None:
    in_compiles(tmp_path, 3).check(faults=3)


def test_a_kill_of_a_trainer_and_its_agent_loses_no_snapshot(tmp_path: Path) -> None:
    with_keepers(tmp_path, 10, seed=1).check(faults=2)


def test_a_restart_beside_an_agent_that_writes_loses_no_snapshot(tmp_path: Path) -> None:
    beside_keepers(tmp_path, 6, seed=1).check(faults=2)


# More of each: `nox -s reliability`, which takes hours.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills_at_random_moments_lose_no_snapshot(tmp_path: Path) -> None:
    at_random(tmp_path, 40).check(faults=3)


@pytest.mark.slow
@needs_watching
@pytest.mark.timeout(900)
def test_kills_at_many_system_calls_lose_no_snapshot(tmp_path: Path) -> None:
    at_calls(tmp_path, 30).check(faults=28)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_signals_in_compiles_lose_no_snapshot(tmp_path: Path) -> None:
    in_compiles(tmp_path, 12).check(faults=12)
