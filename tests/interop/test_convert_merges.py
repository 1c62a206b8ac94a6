"""Merges that are written: the weighted mean of checkpoints, within a budget."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._conversion.checkpoint_items import checkpoint_items
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Staging
from ckpt._steps.opened import open_step
from ckpt._steps.restore_arguments import context_of
from ckpt._steps.service import make_engine
from ckpt.exports import Safetensors
from ckpt.storage._resolve import open_step_dir

MIB = 1 << 20


def numbers(scale: float, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {
        "w": (jnp.arange(3000 * 700, dtype=jnp.float32).reshape(3000, 700) * scale).astype(dtype),
        "small": jnp.full(3, scale, dtype),
        "count": jnp.int32(scale),
        "key": jax.random.key(int(scale)),
        "n": int(scale),
    }


def test_a_merge_is_the_weighted_mean(tmp_path: Path) -> None:
    weights = {1: 0.25, 2: 0.25, 3: 0.5}
    for scale in weights:
        ckpt.sync.save(tmp_path / str(scale), numbers(scale))
    sources = {tmp_path / str(scale): weight for scale, weight in weights.items()}
    ckpt.sync.convert(sources, tmp_path / "mean")
    found = ckpt.sync.load(tmp_path / "mean")
    mean = sum(scale * weight for scale, weight in weights.items())
    expected = sum(np.float32(w) * np.asarray(numbers(s)["w"]) for s, w in weights.items())
    np.testing.assert_allclose(found["w"], expected, rtol=1e-6)
    np.testing.assert_allclose(found["small"], mean)
    # What is no real number is that of the largest weight.
    assert (int(found["count"]), found["n"]) == (3, 3)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert found["w"].dtype == jnp.float32
    # Merged into safetensors at once, and again, since nothing of the sources was changed.
    arrays = Safetensors(names=str)
    ckpt.sync.convert(sources, tmp_path / "w.safetensors", format=arrays, at="w")
    assert load_file(tmp_path / "w.safetensors")["w"].tobytes() == np.asarray(found["w"]).tobytes()


def test_leaves_are_merged_by_name_in_whatever_order_they_are(tmp_path: Path) -> None:
    tensors = {"b": np.full(4, 2, np.float32), "a": np.full(4, 10, np.float32)}
    save_file(dict(reversed(tensors.items())), tmp_path / "1.safetensors")
    (tmp_path / "2").mkdir()
    listed = {}
    for number, (name, each) in enumerate(tensors.items()):
        save_file({name: each}, tmp_path / "2" / f"{number}.safetensors")
        listed[name] = f"{number}.safetensors"
    index = tmp_path / "2" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    ckpt.sync.save(tmp_path / "3", OrderedDict(b=jnp.full(4, 2.0), a=jnp.full(4, 10.0)))
    sources = {tmp_path / name: 0.5 for name in ("1.safetensors", "2")}
    ckpt.sync.convert(sources, tmp_path / "mean")
    found = ckpt.sync.load(tmp_path / "mean")
    assert (found["a"].tolist(), found["b"].tolist()) == ([10] * 4, [2] * 4)
    both = {tmp_path / "3": 0.5, tmp_path / "1.safetensors": 0.5}
    ckpt.sync.convert(both, tmp_path / "other")
    found = ckpt.sync.load(tmp_path / "other")
    assert (found["a"].tolist(), found["b"].tolist()) == ([10] * 4, [2] * 4)


def test_half_precision_is_added_up_in_single_precision(tmp_path: Path) -> None:
    """1 + 2^-8 is no bfloat16, and three of its halves added one by one would lose it."""
    values = [1.0, 1.0078125, 1.0, 1.0078125]
    for number, value in enumerate(values):
        ckpt.sync.save(tmp_path / str(number), {"w": jnp.full(9, value, jnp.bfloat16)})
    ckpt.sync.convert({tmp_path / str(n): 0.25 for n in range(4)}, tmp_path / "mean")
    found = ckpt.sync.load(tmp_path / "mean")["w"]
    assert found.dtype == jnp.bfloat16
    expected = np.float32(sum(np.float32(v) * np.float32(0.25) for v in values))
    assert (np.asarray(found) == expected.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float16, jnp.float32])
def test_every_precision_is_merged_within_any_budget(dtype: Any, tmp_path: Path) -> None:
    """Of leaves that are larger than the budget, two at once."""
    for number in (1, 2):
        leaves = {name: jnp.full((12, 1 << 20), number, dtype) for name in "ab"}
        ckpt.sync.save(tmp_path / str(number), leaves)
    sources = {tmp_path / "1": 0.5, tmp_path / "2": 0.5}
    ckpt.sync.convert(sources, tmp_path / "mean", budget_bytes=16 * MIB)
    found = ckpt.sync.load(tmp_path / "mean")
    for name in "ab":
        assert found[name].dtype == dtype
        assert (np.asarray(found[name]).astype(np.float32) == 1.5).all()


def test_weights_that_do_not_add_up_are_said_and_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for scale in (1, 2):
        ckpt.sync.save(tmp_path / str(scale), {"w": jnp.full(3, float(scale))})
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.sync.convert({tmp_path / "1": 1.0, tmp_path / "2": 1.0}, tmp_path / "sum")
    assert "add up to 2, and not to 1" in caplog.text
    assert ckpt.sync.load(tmp_path / "sum")["w"].tolist() == [3.0] * 3


def test_trees_that_do_not_match_are_listed_leaf_by_leaf(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(3), "b": jnp.ones(2), "only": jnp.ones(1)})
    ckpt.sync.save(tmp_path / "b", {"w": jnp.ones(4), "b": jnp.ones(2, jnp.bfloat16), "n": 1})
    with pytest.raises(errors.TargetMismatchError) as told:
        ckpt.sync.convert({tmp_path / "a": 0.5, tmp_path / "b": 0.5}, tmp_path / "mean")
    for part in (
        "4 leaves differ",
        "default.w: float32[3] in",
        "float32[4] in",
        "default.n: nothing",
    ):
        assert part in str(told.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("weights", [{}, {"x": "half"}, {"x": float("nan")}])
def test_weights_are_numbers(weights: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="source"):
        ckpt.sync.convert(weights, tmp_path / "y")


@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_that_is_deleted_meanwhile_is_no_damaged_one(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        ckpt.sync.save(tmp_path / name, {"w": np.ones(1 << 20, np.float32)})
    read = EngineItemReader.read

    async def deleted(self: EngineItemReader, *args: Any) -> Any:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        return await read(self, *args)

    monkeypatch.setattr(EngineItemReader, "read", deleted)
    weights = {tmp_path / "a": 0.75, tmp_path / "b": 0.25}
    merge: Any = partial(ckpt.sync.convert, weights, tmp_path / "mean")
    if loads:
        merge = partial(ckpt.sync.merge, weights)
    with pytest.raises(errors.StepDeletedError, match="b was deleted while it was read"):
        merge()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.timeout(30)
def test_a_read_ends_also_if_the_save_around_it_has_failed(tmp_path: Path) -> None:
    """A thread that begins to read after that must not wait for ever."""
    ckpt.sync.save(tmp_path / "x", {"w": np.arange(1 << 20, dtype=np.float32)})
    found: list[Any] = []
    begun, failed = threading.Event(), threading.Event()

    async def main() -> None:
        storage, name = open_step_dir(tmp_path / "x")
        opened = await open_step(storage, name)
        assert opened is not None
        context = context_of(opened, make_engine(Staging(), ()))
        tree = (await checkpoint_items(context, 0))["default"].tree
        assert tree is not None
        [leaf] = tree.leaves

        def work() -> None:
            begun.set()
            failed.wait()
            found.append(leaf.whole())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_in_thread, work)
            while not begun.is_set():
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            failed.set()

    anyio.run(main)
    assert found[0][-1] == (1 << 20) - 1
