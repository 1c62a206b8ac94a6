"""`ckpt rm` by policies, and what `ckpt ls` says of the policy of a run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._inspection import kept_steps
from ckpt._inspection.kept_steps import kept_for
from ckpt._inspection.removals import Removal
from ckpt.cli.commands import rm as rm_command
from tests.cli.test_tidying import steps, tree
from tests.support.command import check_golden, ckpt_command, environment, settled

NOTE = ".ckpt-run/preservation.json"


def run_of(root: Path, *numbers: int, **options: Any) -> None:
    with ckpt.sync.CheckpointManager(root, **options) as mgr:
        for step in numbers:
            mgr.save(step, {"w": np.ones(4)}, metrics={"loss": abs(step - 20) + 1.0})


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """Return a root of one's own with the steps 10, 20 (pinned), 30, 40 and 50."""
    root = Path(shutil.copytree(run_root, tmp_path / "runs" / "a"))
    run_of(root, 40, 50)
    return root


def test_what_no_option_keeps_is_deleted(root: Path) -> None:
    before = tree(root)
    options = ("--keep-last", 1, "--keep-every", 40)
    dry = ckpt_command("rm", root, *options, "--dry-run")
    assert tree(root) == before
    ran = ckpt_command("rm", root, *options)
    assert (dry.status, ran.status, dry.err, ran.err) == (0, 0, "", "")
    check_golden("rm_policies", settled(dry.out + ran.out, root=root))
    assert steps(root) == [20, 40, 50]
    again = ckpt_command("rm", root, *options)
    assert again.out.endswith("nothing to delete\n")


def test_deletions_by_policies_as_json(root: Path) -> None:
    ran = ckpt_command("rm", root, "--keep-best", "loss:max", "--trash", "bin", "--json")
    check_golden("rm_policies_json", settled(ran.out, root=root))
    assert steps(root) == [20, 50]
    assert sorted(path.name for path in (root / "bin").iterdir()) == ["10", "30", "40"]


@pytest.mark.parametrize(
    "options",
    [("--keep-best", "loss"), ("--keep-last", "0"), ("--keep-within", "7 days"), ("-x",)],
)
def test_wrong_options_delete_nothing(options: tuple[str, ...], root: Path) -> None:
    before = tree(root)
    ran = ckpt_command("rm", root, *options)
    assert (ran.status, ran.out) == (2, "")
    assert tree(root) == before


def test_policies_are_for_one_root(root: Path, items_path: Path) -> None:
    for path in (root / "10", items_path, root / "none"):
        assert ckpt_command("rm", path, "--keep-last", "1").status == 2
    assert ckpt_command("rm", root, root, "--keep-last", "1").status == 2
    ran = ckpt_command("rm", root)
    assert (ran.status, "say what to keep" in ran.err) == (2, True)
    assert steps(root) == [10, 20, 30, 40, 50]


MEMBERS = st.one_of(
    st.integers(1, 5).map(lambda n: (["--keep-last", str(n)], ckpt.keep.Latest(n))),
    st.integers(1, 9).map(lambda n: (["--keep-every", str(n)], ckpt.keep.EverySteps(n))),
    st.integers(0, 30).map(lambda n: (["--keep-step", str(n)], ckpt.keep.Steps([n]))),
    st.integers(1, 90).map(lambda n: (["--keep-within", f"{n}min"], ckpt.keep.Newer(60 * n))),
    st.just((["--keep-hourly"], ckpt.keep.EverySeconds(3600))),
    st.just((["--keep-daily"], ckpt.keep.EverySeconds(86_400))),
    st.tuples(st.integers(1, 3), st.sampled_from(["min", "max"])).map(
        lambda each: (
            ["--keep-best", f"a:b:{each[1]}:{each[0]}"],
            ckpt.keep.Best(each[0], "a:b", "min" if each[1] == "min" else "max"),
        )
    ),
)
METRICS: st.SearchStrategy[dict[str, float] | None] = st.one_of(
    st.none(), st.just({}), st.floats(-5, 5).map(lambda value: {"a:b": value})
)
RUNS = st.dictionaries(st.integers(0, 30), METRICS, max_size=12).map(
    lambda found: [
        ckpt.keep.SavedStep(step, 1.7e9 + 1000.0 * step, metrics)
        for step, metrics in sorted(found.items())
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MEMBERS, min_size=1, max_size=4, unique_by=lambda each: each[0][0]), RUNS)
def test_what_stays_is_what_the_policies_keep(
    members: list[tuple[list[str], Any]], run: list[ckpt.keep.SavedStep]
) -> None:
    asked: list[Any] = []

    async def act(_: Any, policy: Any, *__: Any, **___: Any) -> Removal:
        asked.append(policy)
        return Removal("", [], done=False)

    async def place(_: str) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.cli.commands.rm.forget_steps", act, raising=True)
        patch.setattr("ckpt.cli.commands.rm.root_at", place)
        arguments = [text for options, _ in members for text in options]
        command = rm_command.rm
        ran = click.testing.CliRunner().invoke(command, ["x", *arguments], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    [policy] = asked
    now = 1.7e9 + 31_000.0
    wanted = ckpt.keep.steps_kept(ckpt.keep.Any(*(each for _, each in members)), run, now)
    assert ckpt.keep.steps_kept(policy, run, now) == wanted
    reasons = kept_for(policy, run, now)
    assert {step for step, texts in reasons.items() if texts} == wanted


def test_a_list_tells_what_the_run_deletes_next_and_why(tmp_path: Path) -> None:
    policy = ckpt.keep.Any(
        ckpt.keep.Latest(2), ckpt.keep.EverySteps(20), ckpt.keep.Best(1, "loss", "min")
    )
    run_of(tmp_path, 5, 10, 15, 20, 25, 30, keep=policy)
    found = ckpt_command("ls", tmp_path)
    check_golden("ls_policy", settled(found.out, root=tmp_path))
    before = {each["step"]: each for each in ckpt_command("ls", tmp_path, "--json").json["steps"]}
    going = {step for step, each in before.items() if each["goes_next"]}
    assert going == {25}
    run_of(tmp_path, 35, keep=policy)
    assert before.keys() - set(steps(tmp_path)) == going
    # Another policy takes its place.
    run_of(tmp_path, 40, keep=ckpt.keep.Latest(3))
    assert ckpt_command("ls", tmp_path, "--json").json["keeps"] == "newest 3"


def test_a_root_that_keeps_all_gets_no_note(tmp_path: Path) -> None:
    run_of(tmp_path, 1)
    assert not (tmp_path / ".ckpt-run").exists()
    assert ckpt_command("ls", tmp_path, "--json").json["keeps"] is None
    run_of(tmp_path, 2, keep=lambda step: True)
    found = ckpt_command("ls", tmp_path, "--json").json
    assert "<lambda>" in found["keeps"]
    assert {each["goes_next"] for each in found["steps"]} == {None}


def test_a_note_is_written_only_when_it_changes(tmp_path: Path) -> None:
    run_of(tmp_path, 1, keep=ckpt.keep.Latest(2))
    before = (tmp_path / NOTE).stat()
    run_of(tmp_path, 2, keep=ckpt.keep.Latest(2))
    assert (tmp_path / NOTE).stat().st_mtime_ns == before.st_mtime_ns
    with ckpt.sync.CheckpointManager(tmp_path, mode="r", keep=ckpt.keep.Latest(1)):
        pass
    assert (tmp_path / NOTE).stat().st_ino == before.st_ino


def test_only_who_is_told_what_to_keep_changes_the_note(tmp_path: Path) -> None:
    def noted() -> Any:
        return json.loads((tmp_path / NOTE).read_bytes())

    run_of(tmp_path, 1, keep=ckpt.keep.Latest(2), trash="bin")
    first = noted()
    # An evaluator that writes metrics, a program that adds a step, one that only reads.
    run_of(tmp_path, 2)
    with ckpt.sync.CheckpointManager(tmp_path, mode="r", keep=ckpt.keep.Latest(1)):
        pass
    assert noted() == first
    # A program that was told one of the two says nothing of the other.
    run_of(tmp_path, 3, trash="other")
    assert noted()["preservation"] == first["preservation"]
    assert noted()["deletion"]["trash"] == "other"
    run_of(tmp_path, 4, keep=ckpt.keep.Latest(3))
    assert noted()["preservation"] == {"kind": "latest_n", "n": 3}
    assert noted()["deletion"]["trash"] == "other"
    # A run that stops deleting says so.
    run_of(tmp_path, 5, keep=ckpt.keep.All(), trash=ckpt.keep.Deletion())
    assert ckpt_command("ls", tmp_path, "--json").json["keeps"] == "all"
    assert noted()["deletion"]["trash"] is None


def test_a_damaged_note_stays_if_nobody_knows_better(tmp_path: Path) -> None:
    run_of(tmp_path, 1, trash="bin")
    (tmp_path / NOTE).write_bytes(b"{")
    run_of(tmp_path, 2)
    # Else `ckpt rm` would delete for good what goes to a trash.
    assert ckpt_command("rm", tmp_path / "1").status == 2


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"preservation": 1}',
        b'{"preservation": {"kind": "latest_n", "n": -1}}',
        b'{"preservation": {"kind": "latest_n", "m": 1}}',
        b'{"preservation": {"kind": "os.system", "text": "\\u001b[31m"}, "deletion": {"x": 1}}',
        b'{"preservation": {"kind": ["any"]}, "deletion": [1]}',
        json.dumps({"preservation": {"kind": "any", "policies": [{"kind": "custom"}]}}).encode(),
        b"x" * 100_000,
    ],
)
def test_a_note_that_says_nothing_predicts_nothing(note: bytes, tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    (tmp_path / ".ckpt-run").mkdir()
    (tmp_path / NOTE).write_bytes(note)
    ran = ckpt_command("ls", tmp_path)
    assert (ran.status, ran.err) == (0, "")
    assert "next" not in ran.out
    assert "\x1b" not in ran.out
    run_of(tmp_path, 3, keep=ckpt.keep.Latest(2))
    assert ckpt_command("ls", tmp_path, "--json").json["keeps"] == "newest 2"


def test_steps_go_to_the_trash_of_the_run(tmp_path: Path) -> None:
    run_of(tmp_path / "a", 1, 2, 3, trash="bin")
    assert ckpt_command("rm", tmp_path / "a" / "1").status == 0
    assert [each["step"] for each in ckpt_command("trash", tmp_path / "a", "--json").json] == [1]
    ran = ckpt_command("rm", tmp_path / "a", "--keep-last", "1", "--for-good", "--json")
    assert {each["trash"] for each in ran.json["steps"]} == {None}
    assert sorted(path.name for path in (tmp_path / "a" / "bin").iterdir()) == ["1"]
    # A root must not say where else steps go.
    run_of(tmp_path / "b", 1, 2, trash=tmp_path / "elsewhere")
    ran = ckpt_command("rm", tmp_path / "b" / "1")
    assert (ran.status, "--trash" in ran.err) == (2, True)
    assert ckpt_command("rm", tmp_path / "b" / "1", "--trash", tmp_path / "elsewhere").status == 0
    assert (tmp_path / "elsewhere" / "1").is_dir()


def test_texts_of_policies() -> None:
    texts: dict[Any, str] = {
        ckpt.keep.EverySteps(10, exact=False, max_to_keep=3): "one of 10, at most 3",
        ckpt.keep.ClosestToEvery(10): "closest to every 10",
        ckpt.keep.EverySeconds(604_800): "weekly",
        ckpt.keep.EverySeconds(7200): "one in 2 h",
        ckpt.keep.Newer(1.5): "within 1.5 s",
        ckpt.keep.Best(2, "loss", "min"): "best 2 loss",
        ckpt.keep.All(): "all",
    }
    for policy, text in texts.items():
        assert kept_steps.text_of(policy) == text


# It stands still before it deletes the first step, as on a disk that hangs.
_STOPPED = """
import sys
import anyio
from ckpt._steps.removal import retention
from ckpt.cli.app import run

async def stop(*_):
    print("reached", flush=True)
    await anyio.sleep_forever()

retention.spare_foreign_files = stop
sys.exit(run(sys.argv[1:]))
"""


def test_an_interrupted_deletion_leaves_whole_steps(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STOPPED, "rm", str(root), "--keep-last", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "reached\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "ckpt: interrupted\n")
    assert steps(root) == [10, 20, 30, 40, 50]
    assert ckpt_command("rm", root, "--keep-last", "1").status == 0
    assert steps(root) == [20, 50]


def test_items_that_were_dropped_are_shown(tmp_path: Path) -> None:
    policies: dict[str, Any] = {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(2)}
    with ckpt.sync.CheckpointManager(tmp_path, keep=policies) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, items={"params": {"w": np.ones(4)}, "opt_state": {"m": np.ones(9)}})
    lines = ckpt_command("ls", tmp_path).out.splitlines()
    assert lines[1].endswith("without opt_state")
    assert lines[2].endswith("loses opt_state with the next save")
    assert lines[-1].endswith("keeps: all (params), newest 2 (*)")
    found = ckpt_command("show", tmp_path / "1").out
    (line,) = (each for each in found.splitlines() if each.startswith("dropped"))
    assert re.fullmatch(
        r"dropped +opt_state: [0-9.]+ (B|KiB), [0-9-]+ [0-9:]+ UTC, by Latest\(2\)", line
    )
    about = json.loads(ckpt_command("show", tmp_path / "1", "--json").out)
    assert [(each["name"], each["policy"]) for each in about["dropped"]] == [
        ("opt_state", "Latest(2)")
    ]
    # What is deleted by hand is whole steps.
    assert ckpt_command("rm", tmp_path, "--keep-last", 1).status == 0
    assert steps(tmp_path) == [3]
