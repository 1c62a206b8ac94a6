"""`ckpt stats`: where the time of saves went."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._inspection.save_times import StepTimes, summaries
from ckpt.cli.output import Duration, seconds_text
from tests.support.command import (
    check_golden,
    ckpt_command,
    in_this_process,
    on_terminal,
    settled,
    without_styles,
)


def figures(text: str) -> str:
    """Return an output without its figures, which differ from run to run."""
    text = re.sub(r"[\d.e+]+ (ms|s|min|[KMG]iB/s|B/s)(?=\W)", "<figure>", text)
    text = re.sub(r"[+-]\d+%", "<change>", text)
    text = re.sub(r'"(rate|median|worst|change)":[\d.e-]+', r'"\1":"<figure>"', text)
    return re.sub(r'"worst_step":\d+', '"worst_step":"<step>"', text)


def times(step: int, blocked: float | None, rate: float | None = None) -> StepTimes:
    now = datetime.now(UTC)
    return StepTimes(step, now, now, 1, blocked, None, None, None, rate)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("of", ["root", "step"])
def test_output(of: str, as_json: bool, run_root: Path) -> None:
    path = run_root if of == "root" else run_root / "20"
    ran = ckpt_command("stats", path, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (0, "")
    name = f"stats_{of}_json" if as_json else f"stats_{of}"
    check_golden(name, settled(figures(ran.out), root=run_root))


def test_the_times_are_those_of_the_manifest(run_root: Path) -> None:
    (step,) = ckpt_command("stats", run_root, "--last", 1, "--json").json["steps"]
    info = ckpt.sync.metadata(run_root / "30").info
    assert step["step"] == 30
    for name in ("blocked", "waited", "staged", "written"):
        assert step[name] == getattr(info.statistics, name)
    assert step["rate"] == pytest.approx(step["stored_bytes"] / (step["written"] - step["waited"]))


def test_the_worst_is_the_longest_time_and_the_lowest_rate() -> None:
    blocked, rate = summaries([times(1, 0.1, 5.0), times(2, 0.4, 3.0), times(3, None, 9.0)])
    assert (blocked.median, blocked.worst, blocked.worst_step) == (0.25, 0.4, 2)
    assert (rate.median, rate.worst, rate.worst_step) == (5.0, 3.0, 2)


@given(st.integers(3, 20), st.floats(0.5, 4.0))
def test_a_trend_is_told_from_enough_steps(half: int, growth: float) -> None:
    values = [1.0] * half + [growth] * half
    (found,) = summaries([times(step, value) for step, value in enumerate(values)])
    assert found.change == pytest.approx(growth - 1)
    (few,) = summaries([times(step, value) for step, value in enumerate(values[:5])])
    assert few.change is None


def test_a_row_with_the_trend_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(6):
            mgr.save(step, {"w": np.ones(4)})
    lines = in_this_process(capsys, "stats", tmp_path).out.splitlines()
    assert lines[-3].split()[0] == "trend"
    assert "later half" in lines[-2]
    few = in_this_process(capsys, "stats", tmp_path, "--last", 5).out.splitlines()
    assert [line.split()[0] for line in few[-3:-1]] == ["median", "worst"]


def test_steps_without_times_are_listed(run_root: Path, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as mgr:
        mgr.save(5, args=ocp.args.StandardSave({"w": jnp.zeros(4)}))
        mgr.wait_until_finished()
    ran = ckpt_command("stats", tmp_path, "--json")
    assert ran.status == 0
    assert [each["blocked"] for each in ran.json["steps"]] == [None]
    assert ckpt_command("stats", tmp_path).status == 0


def test_a_damaged_step_is_counted(run_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(run_root, root)
    manifest = root / "20" / "ckpt.json"
    # Its head is whole, so that it is listed.
    data = bytearray(manifest.read_bytes())
    data[-200] ^= 1
    manifest.write_bytes(data)
    ran = ckpt_command("stats", root, "--json")
    assert [each["step"] for each in ran.json["steps"]] == [10, 30]
    assert ran.json["unreadable"] == [20]


@pytest.mark.parametrize(("what", "status"), [("missing", 2), ("empty", 0)])
def test_places_without_steps(what: str, status: int, tmp_path: Path) -> None:
    path = tmp_path if what == "empty" else tmp_path / "missing"
    ran = ckpt_command("stats", path)
    assert ran.status == status
    assert ran.out == (f"{tmp_path}: 0 steps\n" if what == "empty" else "")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_fits_the_terminal(columns: int, run_root: Path) -> None:
    _, shown = on_terminal("stats", run_root, columns=columns)
    table = without_styles(shown).splitlines()[:-1]
    assert len(table) == 6
    assert columns < 60 or max(map(len, table)) <= columns


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("20min", 1200), ("2 d", 172_800), ("5ms", 0.005)],
)
def test_durations(written: str, seconds: float) -> None:
    assert Duration().convert(written, None, None) == pytest.approx(seconds)


@given(st.floats(1e-3, 1e7))
def test_a_duration_can_be_read_back(seconds: float) -> None:
    again = Duration(zero=True).convert(seconds_text(seconds), None, None)
    assert again == pytest.approx(seconds, rel=0.006)


def test_a_step_of_another_library_has_no_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ocp.CheckpointManager(tmp_path) as orbax:
        orbax.save(1, args=ocp.args.StandardSave({"a": np.arange(4.0)}))
    for path in (tmp_path, tmp_path / "1"):
        ran = in_this_process(capsys, "stats", path, "--json")
        [step] = ran.json["steps"]
        assert (step["stored_bytes"], step["rate"]) == (None, None)
        assert "0 B" not in in_this_process(capsys, "stats", path).out
