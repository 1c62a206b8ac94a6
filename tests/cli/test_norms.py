"""`ckpt stats --norms`: the norms of layers over steps, and how they are chosen and read."""

from __future__ import annotations

import base64
import itertools
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._format.manifest_head import FILE_NAME
from ckpt._inspection import norms
from ckpt._inspection.locations import root_at
from ckpt._inspection.norms import NormReader, chosen_steps, layer_of
from ckpt._steps.opened import open_step
from tests.support.command import check_golden, ckpt_command, environment, in_this_process, settled
from tests.support.manifests import contradict, document_of, rewrite

Capsys = pytest.CaptureFixture[str]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def state(step: int) -> dict[str, Any]:
    layers = [{"kernel": np.full((4, 4), step * (n + 1.0)), "bias": np.ones(4)} for n in range(2)]
    if step == 40:
        layers[1]["kernel"][1] = math.nan
    params = {"embed": np.full(9, -float(step)), "layers": layers}
    tied = {"again": params["embed"], "key": jax.random.key(0), "name": "x"}
    return {"params": params, "tied": tied, "count": np.int32(step)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of six steps, of which one has no vital signs and one has NaN."""
    for step in range(10, 70, 10):
        signs = [ckpt.extensions.VitalSigns()] if step != 20 else []
        with ckpt.sync.CheckpointManager(tmp_path / "run", extensions=signs) as mgr:
            mgr.save(step, state(step))
    return tmp_path / "run"


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, root: Path) -> None:
    ran = ckpt_command("stats", "--norms", root, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"norms{'_json' if as_json else ''}", settled(ran.out, root=root))


def arrays_of(step: int) -> dict[str, list[Floats]]:
    found = state(step)
    layers = found["params"]["layers"]
    return {
        # The tied array counts once, where it is stored; keys, texts and integers have no norm.
        "params.embed": [found["params"]["embed"]],
        **{f"params.layers.{n}": list(each.values()) for n, each in enumerate(layers)},
    }


def test_norms_are_those_of_all_arrays_of_a_layer(root: Path, capsys: Capsys) -> None:
    found = in_this_process(capsys, "stats", "--norms", root, "--json").json
    assert found["steps"] == [10, 20, 30, 40, 50, 60]
    assert (found["unknown"], found["unreadable"], found["nonfinite"]) == ([20], [], [40])
    layers = {each["name"]: each for each in found["layers"]}
    assert layers.keys() == arrays_of(10).keys()
    for at, step in enumerate(found["steps"]):
        for name, arrays in arrays_of(step).items():
            layer = layers[name]
            assert layer["leaves"] == len(arrays)
            figures = [layer[key][at] for key in ("norms", "absmax", "nonfinite")]
            if step == 20:
                assert figures == [None, None, None]
                continue
            flat = np.concatenate([np.ravel(each).astype(float) for each in arrays])
            finite = flat[np.isfinite(flat)]
            assert figures[0] == pytest.approx(np.linalg.norm(finite), rel=1e-6)
            assert figures[1:] == [np.abs(finite).max(), len(flat) - len(finite)]


def test_a_layer_is_chosen_by_patterns_and_depth(root: Path, capsys: Capsys) -> None:
    def names(*arguments: object) -> list[str]:
        found = in_this_process(capsys, "stats", "--norms", root, *arguments, "--json").json
        return [each["name"] for each in found["layers"]]

    assert names("--select", "params.layers") == ["params.layers.0", "params.layers.1"]
    assert names("--select", "params.*.*.bias", "--select", "count") == [
        "count",
        "params.layers.0",
        "params.layers.1",
    ]
    assert names("--depth", 1) == ["params"]
    assert "params.layers.1.kernel" in names("--depth", 3)


def test_the_step_with_nan_is_among_few_steps(root: Path, capsys: Capsys) -> None:
    found = in_this_process(capsys, "stats", "--norms", root, "--steps", 2, "--json").json
    assert (found["steps"], found["total"]) == ([10, 40, 60], 6)
    told = in_this_process(capsys, "stats", "--norms", root, "--steps", 2).out
    assert "step 40: params.layers.1 has 4 values that are not finite" in told
    assert told.endswith("3 layers, 3 of 6 steps\n")


@pytest.mark.parametrize(
    ("path", "depth", "layer"),
    [
        ("params.layers.0.attn.q", 2, "params.layers.0"),
        ("params.layers_3.attn.q", 2, "params.layers_3"),
        ("opt_state.0.mu.layers.0.w", 2, "opt_state.0.mu"),
        ("opt_state.0.mu.layers.0.w", 3, "opt_state.0.mu.layers.0"),
        ("0.1.w", 1, "0.1.w"),
        ("w", 2, "w"),
        ("3", 2, "3"),
    ],
)
def test_a_number_belongs_to_the_key_before_it(path: str, depth: int, layer: str) -> None:
    assert layer_of(path, depth) == layer


@given(st.integers(0, 3000), st.integers(0, 80))
def test_steps_are_chosen_evenly(count: int, most: int) -> None:
    steps = [3 * number for number in range(count)]
    found = chosen_steps(steps, most)
    assert len(found) <= max(most, 2)
    assert len(found) >= min(count, max(most, 2) // 2)
    assert found == sorted(set(found))
    if steps:
        assert (found[0], found[-1]) == (steps[0], steps[-1])
    distances = {after - before for before, after in itertools.pairwise(found[:-1])}
    assert len(distances) <= 1
    # A run that goes on by one step has all but its last and its new one chosen again, or half.
    again = chosen_steps([*steps, 3 * count], most)
    assert len(set(again) - set(found)) <= 1 or len(again) <= len(found)
    assert set(again[:-1]) <= set(found)


def test_no_manifest_is_read_twice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    async def seen(storage: Any, step_dir: str, step: int) -> Any:
        read.append(step)
        return await open_step(storage, step_dir, step)

    monkeypatch.setattr(norms, "open_step", seen)

    async def looks() -> list[list[int]]:
        reader = NormReader(await root_at(str(root)), most=64)
        found = []
        for change in (lambda: None, lambda: None, save_another, save_one_again):
            await anyio.to_thread.run_sync(change)
            read.clear()
            table = await reader.read()
            assert len(table.steps) == table.total
            found.append(list(read))
        return found

    def save_another() -> None:
        with ckpt.sync.CheckpointManager(root, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
            mgr.save(70, state(70))

    def save_one_again() -> None:
        with ckpt.sync.CheckpointManager(root, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
            mgr.save(20, state(20), if_exists="replace")

    assert anyio.run(looks) == [[10, 20, 30, 40, 50, 60], [], [70], [20]]


def test_damaged_steps_are_named_and_read_again(root: Path) -> None:
    whole = (root / "30" / FILE_NAME).read_bytes()
    wrong = document_of(root / "30")
    wrong["items"]["default"]["leaves"]["form"] = "AAAA"
    rewrite(root / "30", wrong)
    ran = ckpt_command("stats", "--norms", root)
    assert (ran.status, ran.err) == (0, "")
    assert "steps that cannot be read: 30" in ran.out

    async def looks() -> list[list[int]]:
        reader = NormReader(await root_at(str(root)), most=64)
        found = [(await reader.read()).unreadable]
        (root / "30" / FILE_NAME).write_bytes(whole)
        return [*found, (await reader.read()).unreadable]

    assert anyio.run(looks) == [[30], []]


def test_a_step_whose_tree_contradicts_itself_is_named(root: Path, capsys: Capsys) -> None:
    contradict(root / "30")
    found = in_this_process(capsys, "stats", "--norms", root, "--json").json
    assert (found["steps"], found["unreadable"]) == ([10, 20, 40, 50, 60], [30])
    ran = in_this_process(capsys, "stats", "--norms", root)
    assert (ran.status, ran.err) == (0, "")
    assert "steps that cannot be read: 30" in ran.out


def test_a_step_without_arrays_does_not_lack_signs(tmp_path: Path, capsys: Capsys) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(1, {"w": np.ones(2)})
        mgr.save(2, {"count": 3})
    found = in_this_process(capsys, "stats", "--norms", tmp_path, "--json").json
    assert (found["steps"], found["unknown"]) == ([1, 2], [])


@pytest.mark.parametrize("column", ["norms", "absmax"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -7.0])
@pytest.mark.filterwarnings("error")
def test_numbers_that_no_array_can_have_are_not_known(
    number: float, column: str, tmp_path: Path, capsys: Capsys
) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": np.ones(2), "x": np.ones(4)})
    lying = document_of(tmp_path / "run" / "2")
    columns = lying["items"]["default"]["leaves"]
    told = np.frombuffer(base64.b64decode(columns[column])).copy()
    told[columns["names"].index("w")] = number
    columns[column] = base64.b64encode(told.tobytes()).decode()
    rewrite(tmp_path / "run" / "2", lying)
    found = in_this_process(capsys, "stats", "--norms", tmp_path / "run", "--json").json
    layers = {each["name"]: each for each in found["layers"]}
    assert [each is None for each in layers["w"]["norms"]] == [False, True]
    assert layers["w"]["absmax"] == [1.0, None]
    assert layers["x"]["norms"] == [2.0, 2.0]
    page = in_this_process(capsys, "ui", tmp_path / "run", "--export", tmp_path / "page.html")
    assert (page.status, page.err) == (0, "")
    assert in_this_process(capsys, "verify", tmp_path / "run" / "2").status == 1


def test_runs_without_signs_say_so(tmp_path: Path, capsys: Capsys) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": np.ones(2)})
    with ocp.CheckpointManager(tmp_path / "orbax") as orbax:
        orbax.save(1, args=ocp.args.StandardSave({"w": np.ones(2)}))
    hint = (
        "steps without vital signs: 1; save with extensions=[ckpt.extensions.VitalSigns()] "
        "to have them"
    )
    for name in ("run", "orbax"):
        ran = in_this_process(capsys, "stats", "--norms", tmp_path / name)
        assert ran.status == 0
        assert ran.out.splitlines() == [
            hint,
            f"{tmp_path / name}: 0 layers, 0 of 1 step",
        ]


def test_wrong_uses(root: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(root / "10", tmp_path / "single")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((root, "--select", "params.layer"), "has no array that fits 'params.layer' (is it"),
        ((root, "--select", ""), "expected a leaf path"),
        ((root, "--steps", 1), "--steps"),
        ((root, "--depth", 0), "--depth"),
        ((root, "--last", 1), "goes without --last"),
        ((tmp_path / "empty",), "has no committed step"),
        ((root / "10",), "is a single checkpoint, not a root of steps"),
        ((tmp_path / "missing",), str(tmp_path / "missing")),
    ]
    for arguments, text in cases:
        ran = in_this_process(capsys, "stats", "--norms", *arguments)
        assert (ran.status, ran.out) == (2, ""), arguments
        assert text in ran.err


def test_norms_are_shown_without_jax(root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt", "stats", "--norms", str(root)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert ran.returncode == 0
    assert not imported & {"jax", "tensorstore", "pydantic"}
