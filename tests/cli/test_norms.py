"""The norms of layers over steps, which the page of a run shows: how they are chosen and read."""

from __future__ import annotations

import base64
import itertools
import math
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
from ckpt._inspection.norms import NormReader, NormTable, chosen_steps, layer_of
from ckpt._steps.opened import open_step
from tests.support.command import in_this_process
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


def norms_of(root: Path, most: int = 64) -> NormTable:
    async def read() -> NormTable:
        return await NormReader(await root_at(str(root)), most=most).read()

    return anyio.run(read)


def arrays_of(step: int) -> dict[str, list[Floats]]:
    found = state(step)
    layers = found["params"]["layers"]
    return {
        # The tied array counts once, where it is stored; keys, texts and integers have no norm.
        "params.embed": [found["params"]["embed"]],
        **{f"params.layers.{n}": list(each.values()) for n, each in enumerate(layers)},
    }


def test_norms_are_those_of_all_arrays_of_a_layer(root: Path) -> None:
    found = norms_of(root)
    assert found.steps == [10, 20, 30, 40, 50, 60]
    assert (found.unknown, found.unreadable, found.nonfinite) == ([20], [], [40])
    layers = {each.name: each for each in found.layers}
    assert layers.keys() == arrays_of(10).keys()
    for at, step in enumerate(found.steps):
        for name, arrays in arrays_of(step).items():
            layer = layers[name]
            assert layer.leaves == len(arrays)
            figures = [layer.norms[at], layer.absmax[at], layer.nonfinite[at]]
            if step == 20:
                assert figures == [None, None, None]
                continue
            flat = np.concatenate([np.ravel(each).astype(float) for each in arrays])
            finite = flat[np.isfinite(flat)]
            assert figures[0] == pytest.approx(np.linalg.norm(finite), rel=1e-6)
            assert figures[1:] == [np.abs(finite).max(), len(flat) - len(finite)]


def test_the_step_with_nan_is_among_few_steps(root: Path) -> None:
    found = norms_of(root, most=2)
    assert (found.steps, found.total) == ([10, 40, 60], 6)
    assert {each.name: each.nonfinite for each in found.layers} == {
        "params.embed": [0, 0, 0],
        "params.layers.0": [0, 0, 0],
        "params.layers.1": [0, 4, 0],
    }


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("params.layers.0.attn.q", "params.layers.0"),
        ("params.layers_3.attn.q", "params.layers_3"),
        ("opt_state.0.mu.layers.0.w", "opt_state.0.mu"),
        ("0.1.w.b.0.c", "0.1.w.b.0"),
        ("w", "w"),
        ("3", "3"),
    ],
)
def test_a_number_belongs_to_the_key_before_it(path: str, layer: str) -> None:
    assert layer_of(path) == layer


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

    async def looks() -> list[list[int]]:
        reader = NormReader(await root_at(str(root)), most=64)
        found = [(await reader.read()).unreadable]
        (root / "30" / FILE_NAME).write_bytes(whole)
        return [*found, (await reader.read()).unreadable]

    assert anyio.run(looks) == [[30], []]


def test_a_step_whose_tree_contradicts_itself_is_named(root: Path) -> None:
    contradict(root / "30")
    found = norms_of(root)
    assert (found.steps, found.unreadable) == ([10, 20, 40, 50, 60], [30])


def test_a_step_without_arrays_does_not_lack_signs(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(1, {"w": np.ones(2)})
        mgr.save(2, {"count": 3})
    found = norms_of(tmp_path)
    assert (found.steps, found.unknown) == ([1, 2], [])


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
    leaves = lying["items"]["default"]["leaves"]
    columns = leaves["extensions"]["vital_signs"]
    told = np.frombuffer(base64.b64decode(columns[column])).copy()
    told[leaves["names"].index("w")] = number
    columns[column] = base64.b64encode(told.tobytes()).decode()
    rewrite(tmp_path / "run" / "2", lying)
    layers = {each.name: each for each in norms_of(tmp_path / "run").layers}
    assert [each is None for each in layers["w"].norms] == [False, True]
    assert layers["w"].absmax == [1.0, None]
    assert layers["x"].norms == [2.0, 2.0]
    page = in_this_process(capsys, "ui", tmp_path / "run", "--export", tmp_path / "page.html")
    assert (page.status, page.err) == (0, "")
    assert in_this_process(capsys, "verify", tmp_path / "run" / "2").status == 1


def test_the_steps_of_runs_without_signs_are_named(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": np.ones(2)})
    with ocp.CheckpointManager(tmp_path / "orbax") as orbax:
        orbax.save(1, args=ocp.args.StandardSave({"w": np.ones(2)}))
    for name in ("run", "orbax"):
        assert norms_of(tmp_path / name).unknown == [1]
