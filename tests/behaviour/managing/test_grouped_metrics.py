"""Metrics in groups: one name each for policies and people, their groups for Orbax."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._format.manifest_head import Metrics, flat_metrics, json_metrics, plain_metrics


def metrics_of(step: int) -> dict[str, Any]:
    return {
        "train": {"loss": jnp.float32(step), "by": {"task": {"a": 0.5}}},
        "eval": {"loss": abs(step - 2), "seen": math.nan},
        "plain": np.int64(step),
    }


FLAT_OF_1 = {"train/loss": 1.0, "train/by/task/a": 0.5, "eval/loss": 1.0, "plain": 1.0}


def save(root: Path, *steps: int, **options: Any) -> None:
    with ckpt.sync.CheckpointManager(root, **options) as mgr:
        for step in steps:
            mgr.save(step, {"w": jnp.ones(3)}, metrics=metrics_of(step))


def test_each_has_the_name_of_its_groups(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        found = mgr.metrics(1)
        assert math.isnan(found.pop("eval/seen"))
        assert found == FLAT_OF_1
        assert mgr.best_step("eval/loss", "min") == 2
        assert mgr.best_step(lambda m: m["train"]["loss"] + m["plain"], "max") == 3
        with pytest.raises(errors.InvalidArgumentError, match="there is 'eval/loss'"):
            mgr.best_step("loss", "min")
    for info in ckpt.sync.watch(tmp_path, until=3):
        assert info.metrics["plain"] == info.step


def test_policies_rank_by_that_name(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=ckpt.keep.Best(1, "eval/loss", "min"))
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        assert mgr.all_steps() == [2, 4]


def test_one_shot_checkpoints_have_them_too(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", {"w": 1}, metrics=metrics_of(1))
    found = ckpt.sync.metadata(tmp_path / "one").info.metrics
    assert {name: value for name, value in found.items() if name != "eval/seen"} == FLAT_OF_1


def test_orbax_finds_them_in_their_groups(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["eval"]["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.best_step() == 2
        assert manager.metrics(1)["train"]["by"] == {"task": {"a": 0.5}}


def test_those_of_orbax_have_names_here(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["eval"]["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2, 3):
            metrics = {"eval": {"loss": float(abs(step - 2))}, "note": "text"}
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics=metrics)
        manager.wait_until_finished()
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        assert mgr.metrics(1) == {"eval/loss": 1.0}
        assert mgr.best_step("eval/loss", "min") == 2


def test_texts_and_lists_are_kept_and_the_numbers_are_told(tmp_path: Path) -> None:
    given = {"split": "valid", "top": [0.5, math.inf, "x"], "eval": {"by": [[1], ["a"]]}, "loss": 2}
    ranks: Any = {"valid": 1.0, "test": 2.0}
    best = ckpt.keep.Best(1, lambda metrics: ranks[metrics["split"]], "max")
    with ckpt.sync.CheckpointManager(tmp_path, keep=best) as mgr:
        info = mgr.save(1, {"w": 1}, metrics=given | {"split": "test"}).result()
        assert info.metrics == mgr.metrics(1) == {"loss": 2.0}
        for step in (2, 3):
            mgr.save(step, {"w": 1}, metrics=given, durable=True)
        mgr.wait_until_finished()
        assert mgr.all_steps() == [1, 3]
        assert mgr.best_step() == 1
    manifest = ckpt.manifest.decode((tmp_path / "3/ckpt.json").read_bytes(), where="")
    assert manifest.metrics == given | {"top": [0.5, "inf", "x"]}
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.metrics(3) == given


def test_deleting_an_item_keeps_them(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, items={"a": {"w": 1}, "b": {"w": 2}}, metrics=metrics_of(1), durable=True)
        mgr.delete(1, item="b")
        assert mgr.metrics(1)["train/by/task/a"] == 0.5
    assert json.loads((tmp_path / "1/metrics/metrics").read_text())["eval"]["loss"] == 1.0


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"eval": {"loss": None}}, r"metrics\['eval/loss'\]=None: expected a number, a text"),
        ({"eval": {"loss": [1.0, {}]}}, r"metrics\['eval/loss'\]={}: expected a number, a text"),
        ({"x": [[[[1.0]]]]}, r"metrics\['x'\]=\[1.0\]: expected a number"),
        ({"a/b": 1, "a": {"b": 2}}, "two of them have the name 'a/b'"),
        ({1: 0.5, "1": 0.7}, "two of them have the name '1'"),
        ({"x": {1: {"b": 2}, "1": {"c": 3}}}, "two of them have the name 'x/1'"),
        ({"a": {"b": {"c": {"d": {"e": 1}}}}}, r"\['a/b/c/d'\].*more than 4 levels"),
    ],
)
def test_what_has_no_name_of_its_own_is_refused(metrics: Any, text: str, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with pytest.raises(errors.InvalidArgumentError, match=text):
            mgr.save(1, {"w": 1}, metrics=metrics).result()
        assert mgr.all_steps() == []


numbers = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4).filter(
    lambda text: text not in ("nan", "inf", "-inf")
)
rows = st.lists(numbers | texts, max_size=3)
values = numbers | texts | st.lists(numbers | texts | rows, max_size=3)
names = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=8)
nested = st.recursive(
    st.dictionaries(names, values, max_size=4),
    lambda inner: st.dictionaries(names, values | inner, max_size=4),
    max_leaves=12,
)


def depth(tree: Any) -> int:
    return 1 + max(map(depth, tree.values()), default=0) if isinstance(tree, dict) else 0


@given(nested.filter(lambda tree: depth(tree) <= 4))
def test_nothing_is_lost_on_the_way(tree: dict[str, Any]) -> None:
    plain = plain_metrics(tree)
    json.dumps(plain, allow_nan=False)
    assert json_metrics(plain) == tree

    def unflat(flat: dict[str, float]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in flat.items():
            *groups, last = name.split("/")
            within = found
            for group in groups:
                within = within.setdefault(group, {})
            within[last] = value
        return found

    def numbers_in(each: Any) -> Any:
        if not isinstance(each, dict):
            return each if isinstance(each, int | float) else {}
        inner = {name: numbers_in(value) for name, value in each.items()}
        return {name: value for name, value in inner.items() if value != {}}

    assert unflat(flat_metrics(plain)) == numbers_in(tree)
    # A list of steps and a whole manifest read it alike.
    assert msgspec.json.decode(msgspec.json.encode(plain), type=Metrics) == plain


def test_a_metric_that_was_donated_is_named(tmp_path: Path) -> None:
    loss = jnp.float32(1) + 1
    loss.delete()
    with (
        ckpt.sync.CheckpointManager(tmp_path) as mgr,
        pytest.raises(errors.InvalidArgumentError, match=r"metrics\['a/loss'\].*deleted"),
    ):
        mgr.save(1, {"w": 1}, metrics={"a": {"loss": loss}}, durable=True)


def test_what_the_caller_changes_afterwards_is_not_saved(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(8):
            groups: dict[str, Any] = {"train": {"loss": 1.0}, "all": [1.0]}
            with mgr.partial(step, metrics=groups) as part:
                groups["train"]["loss"] = 99.0
                groups["all"].append(99.0)
                part.save({"w": step})
            assert mgr.metrics(step) == {"train/loss": 1.0}
            content = (tmp_path / f"{step}/ckpt.json").read_bytes()
            assert ckpt.manifest.decode(content, where="").metrics == {
                "train": {"loss": 1.0},
                "all": [1.0],
            }
