"""The table of docs/explanation/reliability.md is the recorded one, and its campaigns exist."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from tests.reliability import report
from tests.reliability.__main__ import CAMPAIGNS, Campaign, record, run
from tests.reliability.tally import Tally
from tests.support.paths import ROOT


def test_the_page_shows_what_was_recorded() -> None:
    page = (ROOT / report.PAGE).read_text()
    records = report.read(ROOT / report.RESULTS)
    assert report.updated(page, records) == page
    known = {campaign.function for campaign in CAMPAIGNS}
    assert {each.campaign for each in records} <= known
    assert all(each.losses == 0 and each.runs > 0 for each in records)


def test_every_campaign_is_a_function_of_a_directory_a_count_and_a_seed() -> None:
    for campaign in CAMPAIGNS:
        module, _, name = campaign.function.rpartition(".")
        function = getattr(importlib.import_module(f"tests.reliability.{module}"), name)
        assert list(inspect.signature(function).parameters)[:3] == ["directory", "count", "seed"]


def test_a_campaign_that_is_run_again_replaces_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report.PAGE.parent.mkdir(parents=True)
    report.PAGE.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    first, second = CAMPAIGNS[:2]
    record(second, Tally(7, 5), 60.0)
    record(first, Tally(1000, 900), 90.0)
    record(second, Tally(8, 6, ["a step"]), 30.0)
    assert [(each.campaign, each.runs) for each in report.read()] == [
        (first.function, 1000),
        (second.function, 8),
    ]
    page = report.PAGE.read_text()
    assert "| 1,000 | 900 | none | 1.5 |" in page
    assert "| 8 | 6 | **1** | 0.5 |" in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page


def test_a_short_campaign_runs() -> None:
    campaign = Campaign("short writes", "io_errors.short_writes", 3)
    tally, seconds = run(campaign, campaign.count, 0)
    tally.check(faults=1)
    assert seconds > 0


def test_a_tally_with_losses_or_without_faults_is_no_proof() -> None:
    Tally(3, 3).check(faults=3)
    with pytest.raises(AssertionError, match="gone"):
        (Tally(1, 1) + Tally(1, 1, ["step 3 is gone"])).check(faults=1)
    with pytest.raises(AssertionError, match="only 1 faults"):
        Tally(9, 1).check(faults=2)
