"""`ckpt bisect`: where two runs diverge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
from ckpt._format.manifest_head import FILE_NAME
from ckpt._inspection.divergence import FEW_STEPS
from tests.support.command import check_golden, ckpt_command, environment, in_this_process, settled
from tests.support.manifests import contradict, document_of, rewrite

Capsys = pytest.CaptureFixture[str]


def saved(root: Path, states: Mapping[int, Any], **options: Any) -> Path:
    """Save a run with vital signs, and return its root."""
    with ckpt.sync.CheckpointManager(
        root, **{"extensions": [ckpt.extensions.VitalSigns()]} | options
    ) as mgr:
        for step, state in states.items():
            mgr.save(step, state, metrics={"seconds": np.random.default_rng().random()})
    return root


def state(step: int, change: float = 0.0) -> dict[str, Any]:
    layer = {"kernel": jnp.full((4, 4), step + 1.0), "bias": jnp.ones(4)}
    return {
        "params": {"a": {"kernel": jnp.full((4, 4), step + 1.0 + change)}, "b": layer},
        "count": step,
    }


def found_in(capsys: Capsys, *arguments: object) -> Any:
    ran = in_this_process(capsys, "bisect", *arguments, "--json")
    assert ran.status == (0 if ran.json["is_same"] else 1)
    return ran.json


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that diverge at step 4, and of which each has a step that the other has not."""
    return (
        saved(tmp_path / "a", {step: state(step) for step in (1, 2, 3, 4, 5, 9)}),
        saved(tmp_path / "b", {step: state(step, 2.0 * (step > 3)) for step in (1, 2, 4, 5, 6)}),
    )


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, runs: tuple[Path, Path], tmp_path: Path) -> None:
    ran = ckpt_command("bisect", *runs, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (1, "")
    check_golden(f"bisect{'_json' if as_json else ''}", settled(ran.out, path=tmp_path))


def test_it_tells_steps_and_leaves(runs: tuple[Path, Path], capsys: Capsys) -> None:
    found = found_in(capsys, *runs)
    assert (found["last_same"], found["first_different"]) == (2, 4)
    assert (found["only_first"], found["only_second"]) == ([3, 9], [6])
    assert (found["common"], found["looked_at"], found["in_order"]) == (4, 3, True)
    [changed] = found["differences"]["contents"]
    assert changed["leaf"]["path"] == "params.a.kernel"
    assert [each["norm"] for each in changed["signs"]] == [20.0, 28.0]


def test_runs_on_other_meshes_are_compared(tmp_path: Path, capsys: Capsys) -> None:
    values = np.random.default_rng(0).random((512, 512), np.float32)

    def on(devices: int, step: int, bit: int = 0) -> Any:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
        array = values + step
        array.view(np.uint32)[step, 7] ^= bit
        return {"w": jax.device_put(array, NamedSharding(mesh, PartitionSpec("x")))}

    one = saved(tmp_path / "one", {step: on(2, step) for step in range(4)})
    same = saved(tmp_path / "same", {step: on(8, step) for step in range(4)})
    other = saved(tmp_path / "other", {step: on(8, step, int(step > 1)) for step in range(4)})
    assert found_in(capsys, one, same)["is_same"] is True
    found = found_in(capsys, one, other)
    assert (found["last_same"], found["first_different"]) == (1, 2)
    # Without vital signs in one of them, that is not known, and said of each step.
    plain = saved(tmp_path / "plain", {step: on(8, step) for step in range(4)}, extensions=[])
    found = found_in(capsys, one, plain)
    assert (found["is_same"], found["last_same"], found["first_different"]) == (False, None, None)
    assert [each["step"] for each in found["skipped"]] == [0, 1, 2, 3]
    assert all(each["reason"].startswith("w: other chunks") for each in found["skipped"])
    ran = in_this_process(capsys, "bisect", one, plain)
    assert "step 3 is not known: w: other chunks" in ran.out
    assert "are not known to differ" in ran.out
    # Where the chunks are the same, digests tell.
    alike = saved(tmp_path / "alike", {step: on(2, step) for step in range(4)}, extensions=[])
    assert found_in(capsys, one, alike)["is_same"] is True


def long_run(folder: Path, name: str, differing: set[int], count: int) -> Path:
    """Return a run of many steps, of which some differ from those of other runs."""
    saved(folder / "steps", {0: state(0), 1: state(0, 1.0)}) if not folder.exists() else None
    root = folder / name
    for step in range(count):
        source = folder / "steps" / str(int(step in differing))
        shutil.copytree(source, root / str(step), copy_function=os.link)
        document = document_of(source) | {"step": step}
        (root / str(step) / FILE_NAME).unlink()
        rewrite(root / str(step), document)
    return root


@pytest.mark.parametrize("parting", [0, 1, 57, 98, 99, 100])
def test_long_runs_are_searched_by_halving(parting: int, tmp_path: Path, capsys: Capsys) -> None:
    one = long_run(tmp_path / "runs", "one", set(), 100)
    other = long_run(tmp_path / "runs", "other", set(range(parting, 100)), 100)
    found = found_in(capsys, one, other)
    assert found["last_same"] == (parting - 1 if parting else None)
    assert found["first_different"] == (parting if parting < 100 else None)
    assert found["is_same"] is (parting == 100)
    assert found["in_order"] is False
    assert found["looked_at"] <= 7
    assert "--in-order" in in_this_process(capsys, "bisect", one, other).out
    again = found_in(capsys, one, other, "--in-order")
    assert (again["first_different"], again["in_order"]) == (found["first_different"], True)


def test_runs_that_come_together_again(tmp_path: Path, capsys: Capsys) -> None:
    one = long_run(tmp_path / "runs", "one", set(), FEW_STEPS + 1)
    other = long_run(tmp_path / "runs", "other", {3, 4}, FEW_STEPS + 1)
    # Halving assumes that there is none of these, and says so.
    assert found_in(capsys, one, other)["is_same"] is True
    assert "assumed to be like" in in_this_process(capsys, "bisect", one, other).out
    assert found_in(capsys, one, other, "--in-order")["first_different"] == 3
    # A few steps are all looked at.
    shutil.rmtree(other / "0")
    assert found_in(capsys, one, other)["first_different"] == 3


def test_leaves_and_items_that_one_run_alone_has(tmp_path: Path, capsys: Capsys) -> None:
    one = saved(tmp_path / "one", {1: {"w": 1}, 2: {"w": 1, "x": jnp.ones(2)}})
    other = saved(tmp_path / "other", {1: {"w": 1}, 2: {"w": 1, "y": 3}})
    found = found_in(capsys, one, other)["differences"]
    assert [each["path"] for each in found["removed"]] == ["x"]
    assert [each["path"] for each in found["added"]] == ["y"]
    roots = tmp_path / "three", tmp_path / "four"
    for root, seed in zip(roots, (0, 1), strict=True):
        with ckpt.sync.CheckpointManager(root) as mgr:
            items: dict[str, Any] = {"m": {"w": 1}, "rng": np.random.default_rng(0)}
            mgr.save(1, items=items)
            mgr.save(2, items=items | {"rng": np.random.default_rng(seed)})
            mgr.save(3, items=items | ({"extra": "text"} if seed else {}))
    found = found_in(capsys, *roots)
    assert found["first_different"] == 2
    assert [each["item"] for each in found["differences"]["items"]] == ["rng"]


def test_damaged_steps_are_passed_over_and_said(runs: tuple[Path, Path], capsys: Capsys) -> None:
    manifest = document_of(runs[1] / "2")
    manifest["items"]["default"]["leaves"]["form"] = "AAAA"
    rewrite(runs[1] / "2", manifest)
    found = found_in(capsys, *runs)
    assert (found["last_same"], found["first_different"]) == (1, 4)
    [skipped] = found["skipped"]
    assert skipped["step"] == 2
    assert str(runs[1] / "2") in skipped["reason"]


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)], ids=str)
def test_steps_whose_manifests_are_damaged_are_not_taken_for_missing_ones(
    damaged: tuple[int, ...], runs: tuple[Path, Path], capsys: Capsys
) -> None:
    for at in damaged:
        (runs[at] / "2" / FILE_NAME).write_bytes(b"{}")
    ran = in_this_process(capsys, "bisect", *runs, "--json")
    found = ran.json
    assert (found["last_same"], found["first_different"]) == (1, 4)
    assert (found["only_first"], found["only_second"], found["common"]) == ([3, 9], [6], 4)
    [skipped] = found["skipped"]
    assert skipped["step"] == 2
    assert all(str(runs[at] / "2") in skipped["reason"] for at in damaged)
    told = in_this_process(capsys, "bisect", *runs).out
    assert f"step 2 is not known: {runs[damaged[0]] / '2' / FILE_NAME}: the manifest is" in told


def test_of_many_damaged_manifests_each_is_named(tmp_path: Path, capsys: Capsys) -> None:
    one, other = (long_run(tmp_path / "runs", name, set(), 30) for name in ("one", "other"))
    for step in range(29):
        (one / str(step) / FILE_NAME).unlink()
        (one / str(step) / FILE_NAME).write_bytes(b"{}")
    ran = in_this_process(capsys, "bisect", one, other, "--json")
    assert (ran.status, ran.json["only_second"], ran.json["last_same"]) == (1, [], 29)
    assert [each["step"] for each in ran.json["skipped"]] == list(range(29))
    assert "21 more steps are not known" in in_this_process(capsys, "bisect", one, other).out


def test_a_damaged_step_that_one_run_alone_has_is_no_difference(
    runs: tuple[Path, Path], capsys: Capsys
) -> None:
    shutil.rmtree(runs[1])
    shutil.copytree(runs[0], runs[1])
    shutil.rmtree(runs[1] / "3")
    (runs[0] / "3" / FILE_NAME).write_bytes(b"{}")
    ran = in_this_process(capsys, "bisect", *runs, "--json")
    assert (ran.status, ran.json["skipped"], ran.json["only_first"]) == (0, [], [])
    # The list of steps has said it.
    assert "step 3 is damaged" in ran.err


# Where one run has such nodes, it has other containers; where both have, leaves are looked at.
@pytest.mark.parametrize("contradicting", [(0,), (1,), (0, 1)], ids=str)
def test_a_step_whose_tree_contradicts_itself_does_not_end_the_search(
    contradicting: tuple[int, ...], runs: tuple[Path, Path], capsys: Capsys
) -> None:
    for at in contradicting:
        contradict(runs[at] / "2")
    found = found_in(capsys, *runs)
    assert (found["last_same"], found["first_different"]) == (1, 4)
    [skipped] = found["skipped"]
    assert skipped["step"] == 2
    assert f"{runs[contradicting[0]] / '2'}: node 1 does not belong" in skipped["reason"]


def test_the_status_is_what_the_help_says(tmp_path: Path, capsys: Capsys) -> None:
    """A step that could not be compared, before a last one that is the same."""

    def cut(name: str, chunk_bytes: int) -> Path:
        formats = {"**": ckpt.ArrayFormat(chunk_bytes=chunk_bytes)}
        for step in (1, 2, 3):
            states = {step: {"w": np.arange(3000.0)}}
            signs = [ckpt.extensions.VitalSigns()] if step != 2 else []
            saved(tmp_path / name, states, extensions=signs, formats=formats)
        return tmp_path / name

    ran = in_this_process(capsys, "bisect", cut("one", 8192), cut("other", 4096))
    assert ran.status == 1
    assert "last same step   3" in ran.out
    assert "step 2 is not known" in ran.out
    told = " ".join(ckpt_command("bisect", "--help").out.split())
    assert "0 if the runs are the same at the last step that both have, and every step" in told


def test_steps_that_are_not_known_do_not_make_runs_the_same(
    runs: tuple[Path, Path], capsys: Capsys
) -> None:
    manifest = document_of(runs[0] / "2")
    manifest["items"]["default"]["leaves"]["form"] = "AAAA"
    rewrite(runs[0] / "2", manifest)
    assert found_in(capsys, runs[0], runs[0])["is_same"] is False


def test_runs_of_orbax_are_not_known(tmp_path: Path, capsys: Capsys) -> None:
    for name in ("one", "other"):
        with ocp.CheckpointManager(tmp_path / name) as orbax:
            for step in (1, 2):
                orbax.save(step, args=ocp.args.StandardSave({"a": jnp.arange(4.0)}))
    found = found_in(capsys, tmp_path / "one", tmp_path / "other")
    assert (found["is_same"], found["first_different"]) == (False, None)
    assert [each["step"] for each in found["skipped"]] == [1, 2]


def test_wrong_uses(runs: tuple[Path, Path], tmp_path: Path, capsys: Capsys) -> None:
    other = saved(tmp_path / "other", {7: state(7)})
    (tmp_path / "empty").mkdir()
    cases: list[tuple[tuple[object, ...], str]] = [
        ((runs[0], other), "have no step in common: the first has 1, 2, 3, 4, 5, 9, the second 7"),
        ((runs[0] / "1", runs[1]), "is a single checkpoint, not a root of steps"),
        ((runs[0], tmp_path / "empty"), "has no committed step"),
        ((runs[0], tmp_path / "missing"), str(tmp_path / "missing")),
        ((runs[0],), "RUN_B"),
        ((runs[0], runs[1], "--first", 3), "--first"),
    ]
    for arguments, text in cases:
        ran = in_this_process(capsys, "bisect", *arguments)
        assert (ran.status, ran.out) == (2, ""), arguments
        assert text in ran.err
    assert str(FEW_STEPS) in ckpt_command("bisect", "--help").out


def test_runs_are_compared_without_jax(runs: tuple[Path, Path]) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt", "bisect", *map(str, runs)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert ran.returncode == 1
    assert not imported & {"jax", "tensorstore", "pydantic"}
