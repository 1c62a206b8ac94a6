"""docs/explanation/scaling-tables.md has the tables of the recorded simulation, and that runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.pages import updated
from docs.explanation.scaling import scale_report, scale_simulation


def test_the_page_shows_what_was_recorded() -> None:
    page = scale_report.PAGE.read_text(encoding="utf-8")
    for name, tables in scale_report.tables().items():
        assert updated(page, name, tables) == page
    rows = json.loads(scale_simulation.RESULTS.read_text(encoding="utf-8"))
    assert [(row["name"], row["hosts"]) for row in rows] == [
        (case.name, case.hosts) for case in scale_simulation.CASES
    ]


def test_the_simulation_runs_the_real_code() -> None:
    found = scale_simulation.run(scale_simulation.SMOKE)
    case = scale_simulation.SMOKE
    assert found["chunks"] == case.matrices * case.shards + case.vectors
    assert found["manifest_bytes"] > 32 * found["chunks"]
    assert found["share_bytes"] == pytest.approx(found["bytes"] / case.hosts, rel=0.1)


def test_the_model_of_a_save_follows_its_formulas() -> None:
    row = {
        "hosts": 100,
        "share_files": 10,
        "share_bytes": 5e9,
        "records_bytes": 155e6,
        "index_bytes": 1e8,
        "manifest_bytes": 2e8,
        "unpack": 1.0,
        "join": 2.0,
        "index": 3.0,
        "encode": 4.0,
        "decode": 5.0,
        "bytes": 100e9,
        "shards": 80,
    }
    save = scale_report.save_time(row)
    assert save["write"] == pytest.approx(5.0)
    assert save["service"] == pytest.approx(800 / 8900 + 1.0 + 4 * 0.0005)
    assert save["join"] == pytest.approx(10.0)
    assert save["publish"] == pytest.approx(0.08 + 3.0)
    assert save["total"] == pytest.approx(sum(save.values()) - save["total"])
    restore = scale_report.restore_time(row)
    assert restore["read"] == pytest.approx(10.0)
    assert restore["manifest"] == pytest.approx(0.04 + 2.0 + 5.0)
    many = scale_report.save_time({**row, "hosts": 10_000, "share_bytes": 1e6})
    assert many["write"] == pytest.approx(100_000 / 3500)
