"""`ckpt stats --goodput`: what saving costs a run, where it was interrupted, how often to save."""

from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._format.manifest import decode, encode
from ckpt._inspection.save_costs import FACTOR, SavePoint, daly, expected_loss, save_costs, young
from tests.support.command import check_golden, ckpt_command, on_terminal, without_styles


class Failure(msgspec.Struct, frozen=True):
    """A failure of a synthetic run: after which save, so many steps later, and so long."""

    save: int
    steps: int
    down_seconds: float


def run_of(
    saves: int, every: int, step_seconds: float, blocked: float, failures: list[Failure]
) -> list[SavePoint]:
    """Return the saves of a run that goes back to its last save whenever it fails."""
    now, points = 1e9, []
    redone = {each.save: each for each in failures}
    for number in range(saves):
        points.append(SavePoint(number * every, now, now + 2 * blocked, blocked, 2 * blocked))
        now += blocked
        failure = redone.get(number)
        if failure is not None:
            now += failure.steps * step_seconds + failure.down_seconds
        now += every * step_seconds
    return points


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, float, float, list[Failure]]:
    """Draw runs whose failures are rare, and cost more than half of what an interval takes."""
    saves = draw(st.integers(12, 60))
    every = draw(st.integers(10, 500))
    step_seconds = draw(st.floats(0.05, 20))
    blocked = draw(st.floats(0.001, 0.1)) * every * step_seconds
    places = draw(st.sets(st.integers(0, saves - 2), max_size=saves // 3 - 1))
    usual = every * step_seconds + blocked
    failures = [
        Failure(
            place,
            draw(st.integers(0, every - 1)),
            draw(st.floats(FACTOR - 1 + 0.01, 10)) * usual,
        )
        for place in sorted(places)
    ]
    return saves, every, step_seconds, blocked, failures


@given(runs())
def test_every_failure_that_can_be_seen_is_found(
    run: tuple[int, int, float, float, list[Failure]],
) -> None:
    saves, every, step_seconds, blocked, failures = run
    found = save_costs(run_of(saves, every, step_seconds, blocked, failures))
    assert [each.after_step for each in found.interruptions] == [
        each.save * every for each in failures
    ]
    usual = step_seconds + blocked / every
    assert found.step_seconds == pytest.approx(usual, rel=1e-4)
    assert found.interval_seconds == pytest.approx(every * usual, rel=1e-4)
    for each, failure in zip(found.interruptions, failures, strict=True):
        lost = failure.steps * step_seconds + failure.down_seconds
        assert each.lost_seconds == pytest.approx(lost, rel=1e-3)
        # Which part of it was work is not known, but no more than was lost.
        assert each.most_lost_steps >= math.floor(failure.steps * step_seconds / usual)
    if failures:
        worked = found.seconds - sum(
            each.steps * step_seconds + each.down_seconds for each in failures
        )
        assert found.mtbf_seconds == pytest.approx(worked / len(failures), rel=1e-3)
    else:
        assert (found.mtbf_seconds, found.suggestion) == (None, None)
    assert found.blocked_seconds == pytest.approx(saves * blocked)


@given(runs())
def test_deleted_steps_do_not_look_like_interruptions(
    run: tuple[int, int, float, float, list[Failure]],
) -> None:
    saves, every, step_seconds, blocked, _ = run
    points = run_of(saves, every, step_seconds, blocked, [])
    kept = [each for number, each in enumerate(points) if number % 5 == 0 or number > saves - 4]
    found = save_costs(kept)
    assert found.interruptions == []
    assert found.step_seconds == pytest.approx(step_seconds + blocked / every, rel=1e-4)


@given(runs(), st.floats(0, FACTOR - 1.02))
def test_what_costs_less_than_the_rule_can_see_is_not_made_up(
    run: tuple[int, int, float, float, list[Failure]], share: float
) -> None:
    saves, every, step_seconds, blocked, failures = run
    down = share * (every * step_seconds + blocked)
    short = [Failure(each.save, 0, down) for each in failures]
    assert save_costs(run_of(saves, every, step_seconds, blocked, short)).interruptions == []


@given(st.floats(0.01, 100), st.floats(1000, 1e6))
def test_no_interval_loses_less_than_that_of_young(cost: float, mtbf: float) -> None:
    best = expected_loss(young(cost, mtbf), cost, mtbf)
    assert best == pytest.approx(math.sqrt(2 * cost / mtbf))
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert expected_loss(factor * young(cost, mtbf), cost, mtbf) > best


@given(st.floats(0.5, 100), st.floats(300, 1e6))
def test_no_interval_finishes_sooner_than_that_of_daly(cost: float, mtbf: float) -> None:
    """The exact expected time of a run whose failures come at random; equation 20 of Daly."""

    def slowdown(work: float) -> float:
        return mtbf * math.expm1((work + cost) / mtbf) / work

    best = slowdown(daly(cost, mtbf))
    for factor in (0.7, 0.85, 1.15, 1.4):
        assert slowdown(factor * daly(cost, mtbf)) > best * (1 - 1e-9)


def test_daly_where_a_save_takes_longer_than_the_machine_lives() -> None:
    assert daly(100, 50) == 50
    assert daly(1, 1e6) == pytest.approx(young(1, 1e6), rel=1e-3)


def test_the_suggestion_is_no_shorter_than_a_save_takes() -> None:
    points = [SavePoint(n, n * 100.0, n * 100.0 + 90, 0.01, 90.0) for n in range(6)]
    found = save_costs(points, mtbf=3600).suggestion
    assert found is not None
    assert found.daly_seconds < 10
    assert found.seconds == 90


def test_steps_that_were_saved_anew_are_no_interruptions() -> None:
    points = [SavePoint(n, n * 10.0, n * 10.0 + 1, 0.1) for n in range(8)]
    points[3] = SavePoint(3, 500.0, 501.0, 0.1)
    found = save_costs(points)
    assert [(each.after_step, each.before_step) for each in found.interruptions] == [(2, 3)]


def write_run(root: Path, failures: list[Failure]) -> None:
    """Make real steps, and give them the times of a synthetic run."""
    with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.All()) as mgr:
        for point in run_of(9, 100, 0.5, 2.0, failures):
            mgr.save(point.step, {"w": jnp.zeros(2)}).result()
            file = root / str(point.step) / "ckpt.json"
            set_times(file, point)


def set_times(file: Path, point: SavePoint) -> None:
    manifest = decode(file.read_bytes(), where="the test")
    file.write_bytes(
        encode(
            msgspec.structs.replace(
                manifest,
                created_ns=int(point.began * 1e9),
                committed_ns=int(point.committed * 1e9),
                statistics={"blocked": point.blocked, "written": point.written},
            )
        )
    )


@pytest.fixture(scope="module")
def interrupted_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("goodput") / "runs"
    write_run(root, [Failure(3, 40, 300.0)])
    return root


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("mtbf", [None, "6h"])
def test_output(mtbf: str | None, as_json: bool, interrupted_root: Path) -> None:
    arguments = ["--mtbf", mtbf] if mtbf else []
    ran = ckpt_command(
        "stats", "--goodput", interrupted_root, *arguments, *(["--json"] if as_json else [])
    )
    assert (ran.status, ran.err) == (0, "")
    name = "_".join(["goodput", *([mtbf] if mtbf else []), *(["json"] if as_json else [])])
    check_golden(name, ran.out.replace(str(interrupted_root), "<root>"))


def test_a_root_whose_steps_were_saved_without_interruption(run_root: Path) -> None:
    found = ckpt_command("stats", "--goodput", run_root, "--json").json["costs"]
    assert found["saves"] == 3
    assert found["blocked_seconds"] > 0
    assert found["suggestion"] is None


def test_places_and_options_that_are_refused(run_root: Path, tmp_path: Path) -> None:
    assert ckpt_command("stats", "--goodput", run_root / "10").status == 2
    assert ckpt_command("stats", "--goodput", tmp_path / "missing").status == 2
    ran = ckpt_command("stats", "--goodput", run_root, "--mtbf", "often")
    assert ran.status == 2
    assert "expected a time" in ran.err
    assert ckpt_command("stats", "--goodput", tmp_path).out == f"{tmp_path}: no steps\n"


def test_the_table_fits_a_terminal(interrupted_root: Path) -> None:
    status, shown = on_terminal("stats", "--goodput", interrupted_root, columns=80)
    assert status == 0
    assert "\x1b[1m" in shown
    (header,) = [each for each in without_styles(shown).splitlines() if "after step" in each]
    assert len(header) <= 80
