"""The benchmark harness runs and records every scenario and measure. No timing is judged."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt.sync
from benchmarks import growth, integrity, late_beats, pages, report, results, scenarios, tables
from benchmarks.results import BYTES, Results, Sample, Scenario
from benchmarks.rounds import unit_of
from ckpt._engine.memory import staging
from ckpt._format.manifest_head import digest
from ckpt.errors import CorruptCheckpointError
from tests.support.paths import ROOT

PEERS = ("ckpt", "orbax")

_THROUGHPUT = {"save", "blocked", "restore", "restore_cold"}
_LAGS = {f"{phase}_{what}" for phase in ("commit", "restore") for what in ("p50", "p99", "max")}
_MEASURES = {
    "overlap": {
        "lost",
        "blocked",
        "slowdown",
        "worst_step",
        "undisturbed_step",
        "committed",
        "overlap_ratio",
        "saving_steps_per_second",
        "calm_steps_per_second",
    },
    "blocked_small": {"blocked", "committed"},
    "heartbeat": _LAGS | {f"snapshot_{what}" for what in ("p50", "p99", "max")},
    "blocked_loop": {
        "unblocked",
        "asleep",
        "spinning",
        "asleep_rate_ratio",
        "spinning_rate_ratio",
    },
    "memory": {
        "fixed_bytes",
        "saves_own_bytes",
        "saves_total_bytes",
        "restore_total_bytes",
        "array_own_bytes",
        "array_total_bytes",
        "drift_bytes",
    },
    "first_save": {
        "import",
        "open",
        "first_blocked",
        "first_save",
        "second_blocked",
        "second_save",
    },
    "first_restore": {
        "import",
        "open",
        "restore",
        "first_restore",
        "step",
        "first_step",
        "reused_ratio",
    },
}
_FLOORS = {"memcpy": {"restore"}, "device_put": {"restore", "read", "put"}}
_BASELINES = {"nothing": _LAGS, "other process": _LAGS}


def expected_rows(scenario: Scenario) -> dict[str, set[str]]:
    if scenario.kind == "throughput":
        return dict.fromkeys(PEERS, _THROUGHPUT) | _FLOORS
    if scenario.kind == "growth":
        sizes = {name.partition("@")[2] for name in scenario.measures["ckpt"]}
        assert len(sizes) == scenario.facts["points"] > 1
        points = {f"{measure}@{size}" for measure in ("save", "restore") for size in sizes}
        return dict.fromkeys(PEERS, points)
    measures = _MEASURES.get(scenario.kind) or _MEASURES[scenario.name]
    rows = dict.fromkeys(PEERS, measures)
    return rows | _BASELINES if scenario.name == "heartbeat" else rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_smoke_run_records_every_scenario_and_measure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--peer", *PEERS]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr

    run = results.read(tmp_path / "out" / "results.json")
    assert run.smoke
    assert [each.name for each in run.scenarios] == list(scenarios.SCENARIOS)
    for scenario in run.scenarios:
        rows = {row: set(measures) for row, measures in scenario.measures.items()}
        assert rows == expected_rows(scenario), scenario.name
        assert all(
            sample.rounds for measures in scenario.measures.values() for sample in measures.values()
        )
    assert (tmp_path / "out" / "overlap.png").stat().st_size
    page = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert all(f"### {each.name}:" in page for each in run.scenarios)
    assert all(each.row in page for each in tables.TARGETS)


BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")


def test_a_save_and_a_restore_run_without_digests_in_the_benchmark(tmp_path: Path) -> None:
    state = {"w": jnp.ones(1000), "b": jnp.ones(3)}
    with integrity._replaced(integrity._SAVING):
        ckpt.sync.save(tmp_path / "without", state)
    ckpt.sync.save(tmp_path / "with", state)
    with pytest.raises(CorruptCheckpointError, match="digest"):
        ckpt.sync.load(tmp_path / "without")
    with integrity._replaced(integrity._RESTORING):
        ckpt.sync.load(tmp_path / "without")
    ckpt.sync.load(tmp_path / "with")


def test_a_benchmark_of_digests_fails_where_the_engine_does_not_use_them() -> None:
    with (
        pytest.raises(RuntimeError, match=r"no module of ckpt\._engine imports unused"),
        integrity._replaced([*integrity._SAVING, unused]),
    ):
        pass
    assert staging.digest is digest  # type: ignore[attr-defined]


def unused() -> None:
    """Stands for a function that the engine no longer has."""


def test_a_line_is_found_again_from_its_points() -> None:
    amounts = [1.0, 10.0, 100.0, 1000.0]
    found = growth.line(amounts, [0.5 + 0.25 * each for each in amounts])
    assert found.slope == pytest.approx(0.25)
    assert found.intercept == pytest.approx(0.5)
    assert found.r_squared == pytest.approx(1)


def test_a_small_error_at_the_largest_size_hardly_moves_the_intercept() -> None:
    amounts = [1.0, 10.0, 100.0, 1000.0]
    seconds = [0.5 + 0.25 * each for each in amounts]
    seconds[-1] *= 1.05
    assert growth.line(amounts, seconds).intercept == pytest.approx(0.5, rel=0.05)


def sample_run(name: str, **machine: object) -> Results:
    measures = {
        "ckpt": {"save": Sample(0.9, [0.25, 0.5, 0.75])},
        "orbax": {"save": Sample(9.0, [4.0, 4.0, 4.0])},
    }
    scenario = Scenario(name, "throughput", "", 1, 2**20, measures)
    return Results(False, "2020-01-01", dict(machine), [scenario])


def test_targets_are_judged_by_medians_and_say_what_is_not_measured() -> None:
    lines = {each.row: each.line(sample_run("large")) for each in tables.TARGETS}
    assert lines["save, large leaves: speed vs Orbax"][2:] == ("8x", "met")
    assert lines["save, small leaves: speed vs Orbax"][2:] == ("", "not measured")


def test_a_target_that_is_not_reached_is_called_missed() -> None:
    lines = {each.row: each.line(sample_run("small")) for each in tables.TARGETS}
    assert lines["save, small leaves: speed vs Orbax"][2:] == ("8x", "**missed**")


def test_a_recorded_run_reads_back_equal(tmp_path: Path) -> None:
    run = sample_run("large")
    run.write(tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == run


def test_runs_of_parts_merge_only_if_they_come_from_one_machine() -> None:
    merged = results.merged([sample_run("large", cores=2), sample_run("small", cores=2)])
    assert [each.name for each in merged.scenarios] == ["large", "small"]
    with pytest.raises(ValueError, match="different machines"):
        results.merged([sample_run("large", cores=2), sample_run("small", cores=4)])


def test_only_what_stands_between_the_markers_of_the_page_is_rewritten() -> None:
    page = "before\n<!-- a:start -->\nold\n<!-- a:end -->\nafter\n"
    updated = pages.updated(page, "a", "new\n")
    assert updated == "before\n<!-- a:start -->\n\nnew\n\n<!-- a:end -->\nafter\n"
    for wrong in ("no markers", page * 2, "<!-- a:end --><!-- a:start -->"):
        with pytest.raises(ValueError, match="needs one"):
            pages.updated(wrong, "a", "new")


@pytest.mark.parametrize("name", pages.TABLES)
def test_every_table_is_a_function_and_has_a_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = pages.page_of(name).read_text(encoding="utf-8")
    assert "new table" in pages.updated(page, name, "new table")
    module = importlib.import_module(f"benchmarks.{pages.TABLES[name]}")
    first, *options = inspect.signature(getattr(module, name)).parameters.values()
    assert first.name == "place"
    assert all(option.default is not option.empty for option in options)


def test_the_command_for_tables_gives_the_options_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- late:start --><!-- late:end -->")
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []

    def late(place: Path, *, rounds: int = 10, smoke: bool = False) -> str:
        made.append(place)
        (place / "file").touch()
        return f"{rounds} rounds"

    monkeypatch.setattr(late_beats, "late", late)
    pages.main(["late", "--rounds", "2", "--dir", str(tmp_path)])
    pages.main(["late", "--smoke", "--write"])
    assert page.read_text() == "<!-- late:start --><!-- late:end -->"
    pages.main(["late", "--write"])
    assert page.read_text() == "<!-- late:start -->\n\n10 rounds\n\n<!-- late:end -->"
    assert capsys.readouterr().out.startswith("2 rounds\n10 rounds\n\n**Smoke run")
    assert made[0].parent == tmp_path
    assert not any(place.exists() for place in made)


def test_measures_in_other_units_are_known_by_their_names() -> None:

    assert unit_of("drift_bytes") == BYTES
    assert unit_of("save@1000") == "s"


def test_each_published_run_is_one_line_of_the_history(tmp_path: Path) -> None:
    run = results.read(ROOT / report.RESULTS)
    file = tmp_path / results.HISTORY
    results.append_history(replace(run, date="2026-01-02"), file)
    results.append_history(replace(run, date="2026-01-01"), file)
    results.append_history(replace(run, date="2026-01-02"), file)
    records = results.read_history(file)
    assert [each["date"] for each in records] == ["2026-01-01", "2026-01-02"]
    scenario = run.scenario("large")
    assert scenario is not None
    ours = records[0]["medians"]["large"]["ckpt"]["save"]
    assert ours == pytest.approx(scenario.measures["ckpt"]["save"].median)
    shown = report.history(records)
    assert "| 2026-01-01 | 2026-01-02 |" in shown
    assert report.history([{**records[0], "medians": {}}]).count("\n") == 2


def test_the_page_shows_the_history_that_is_recorded() -> None:
    page = (ROOT / report.PAGE).read_text(encoding="utf-8")
    records = results.read_history((ROOT / report.PAGE).with_suffix("") / results.HISTORY)
    assert report.history(records) in page
    assert records[-1]["date"] == results.read(ROOT / report.RESULTS).date
