"""A fault at any file operation: an error for the caller, nothing lost, nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability import cancels, faults, io_errors
from tests.reliability.scenarios import SAVE, SCENARIOS, manager, scenarios, template

OTHERS = [scenario for scenario in SCENARIOS if scenario is not SAVE]


def test_without_a_fault_the_scenario_of_sharing_shares(tmp_path: Path) -> None:
    """Or none of its faults would be about links."""
    scenario = scenarios()["share"]
    root = tmp_path / "root"
    template(scenario, root)
    with manager(root) as mgr:
        scenario.act(root, mgr, lambda: None)
        assert mgr.metadata(2).info.statistics.shared_bytes > 0


@pytest.mark.slow
def test_a_save_that_dies_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    tally = faults.crashes(tmp_path, 1000, scenarios=[SAVE])
    tally.check(faults=70)


@pytest.mark.slow
@pytest.mark.parametrize("campaign", ["crashes", "transient_errors", "persistent_errors"])
def test_whatever_fails_in_the_middle_loses_nothing(tmp_path: Path, campaign: str) -> None:
    chosen = OTHERS if campaign == "crashes" else SCENARIOS
    tally = getattr(faults, campaign)(tmp_path, 32, seed=5, scenarios=chosen)
    tally.check(faults=20)


@pytest.mark.slow
def test_a_name_or_its_durability_that_is_refused_is_taken_back(tmp_path: Path) -> None:
    chosen = [scenarios()[name] for name in ("save", "overwrite", "delete", "fresh")]
    tally = faults.transient_errors(
        tmp_path, 1000, seed=1, scenarios=chosen, matching=faults.is_decisive
    )
    tally.check(faults=20)


def test_short_writes_go_on(tmp_path: Path) -> None:
    io_errors.short_writes(tmp_path, 10).check(faults=8)


def test_slow_operations_show_nothing_by_halves(tmp_path: Path) -> None:
    io_errors.slow_operations(tmp_path, 8, seed=30).check(faults=8)
    io_errors.slow_operations(tmp_path / "later", 8, seed=72).check(faults=1)


def test_every_error_of_leaves_that_failed_together_is_told(tmp_path: Path) -> None:
    io_errors.failing_leaves(tmp_path, 4).check(faults=10)


def test_a_restore_that_cannot_read_is_right_or_says_so(tmp_path: Path) -> None:
    io_errors.failing_reads(tmp_path, 150).check(faults=100)


def test_a_cancelled_save_is_over_when_it_says_so(tmp_path: Path) -> None:
    cancels.cancelled_commits(tmp_path / "commits", 25).check(faults=10)
    cancels.cancelled_calls(tmp_path / "calls", 25, seed=1).check(faults=15)
