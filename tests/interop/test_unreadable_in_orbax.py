"""What cannot be read of a step of Orbax is named with the reason, and the rest is read."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
from ckpt import errors
from ckpt.sync import CheckpointManager

STEP = 7
TREE: dict[str, Any] = {
    "params": {"w": jnp.arange(4.0), "b": jnp.ones(2)},
    "name": "small",
    "count": 3,
}
Damage = Callable[[Path], None]


def in_zarray(**changes: Any) -> Damage:
    def damage(item: Path) -> None:
        file = item / "params.b" / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def in_value(**changes: Any) -> Damage:
    def damage(item: Path) -> None:
        shutil.rmtree(item / "params.b")
        about = json.loads((item / "_METADATA").read_text())
        about["tree_metadata"]["('params', 'b')"]["value_metadata"].update(changes)
        (item / "_METADATA").write_text(json.dumps(about))

    return damage


def without_texts(item: Path) -> None:
    (item / "_strings.json").unlink()


# Of each: the leaf that is lost, what the error is, and a part of the reason.
LEAVES: dict[str, tuple[Damage, str, type[errors.CheckpointError], str]] = {
    "a dtype": (in_zarray(dtype=">i2"), "params.b", errors.UnsupportedFormatError, "dtype '>i2'"),
    "a codec": (
        in_zarray(compressor={"id": "bz2"}),
        "params.b",
        errors.UnsupportedFormatError,
        "compressor 'bz2'",
    ),
    "a kind": (
        in_value(value_type="Embedding"),
        "params.b",
        errors.UnsupportedFormatError,
        "'Embedding'",
    ),
    "a shape": (
        in_zarray(shape=[2**40]),
        "params.b",
        errors.CorruptCheckpointError,
        "is said to have",
    ),
    "no array": (
        lambda item: shutil.rmtree(item / "params.b"),
        "params.b",
        errors.CorruptCheckpointError,
        "array is missing",
    ),
    "no text": (without_texts, "name", errors.CorruptCheckpointError, "_strings.json"),
}


@pytest.fixture(params=LEAVES)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, Any, str]:
    with ocp.CheckpointManager(
        tmp_path / "run", item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    ) as manager:
        manager.save(STEP, args=ocp.args.PyTreeSave(TREE))
        manager.wait_until_finished()
    path = tmp_path / "run" / str(STEP)
    damage, leaf, error, reason = LEAVES[request.param]
    damage(path / "default")
    return path, leaf, error, reason


def test_a_leaf_that_cannot_be_read_does_not_hide_the_others(
    damaged: tuple[Path, str, Any, str],
) -> None:
    path, leaf, _, reason = damaged
    lost = leaf.rpartition(".")[2]
    about = ckpt.sync.metadata(path)
    assert reason in about.unreadable[leaf]
    assert reason in str(about)
    assert about.tree["params"]["w"].shape == (4,)
    # What is known of the step is a target of all that can be read.
    found = ckpt.sync.load(path, like=about.target())
    target = jax.tree_util.tree_map_with_path(
        lambda keys, each: ... if keys[-1].key == lost else each, TREE
    )
    again = ckpt.sync.load(path, like=target)
    for tree in (found, again):
        assert np.array_equal(tree["params"]["w"], TREE["params"]["w"])
        assert tree["count"] == 3
        assert (tree["params"] | tree)[lost] is ...
    assert np.array_equal(ckpt.sync.load(path, at="params.w"), TREE["params"]["w"])
    narrow = {"params": {"w": TREE["params"]["w"]}, "count": 0}
    ckpt.sync.load(path, like=narrow, adapt=ckpt.Adapt(extra="ignore"))
    ckpt.sync.load(path, adapt=ckpt.Adapt(select="params.w"))


def test_a_leaf_that_cannot_be_read_is_an_error_where_it_is_wanted(
    damaged: tuple[Path, str, Any, str], tmp_path: Path
) -> None:
    path, leaf, error, reason = damaged
    with CheckpointManager(tmp_path / "run") as mgr:
        wanting: list[Callable[[], Any]] = [
            lambda: ckpt.sync.load(path),
            lambda: ckpt.sync.load(path, like=TREE),
            lambda: ckpt.sync.load(path, at=leaf),
            lambda: ckpt.sync.convert(path, tmp_path / "ours"),
            lambda: ckpt.sync.adopt(path, tmp_path / "ours"),
            lambda: mgr.resume(TREE),
        ]
        for call in wanting:
            with pytest.raises(error, match=reason) as caught:
                call()
            assert caught.value.leaf == leaf
    assert not (tmp_path / "ours").exists()


def test_a_damaged_leaf_makes_a_run_go_on_before_it(tmp_path: Path) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.CheckpointManager(tmp_path / "run", item_handlers=handler) as manager:
        for step in (STEP - 1, STEP):
            manager.save(step, args=ocp.args.PyTreeSave(TREE))
        manager.wait_until_finished()
    shutil.rmtree(tmp_path / "run" / str(STEP) / "default" / "params.b")
    with CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.resume(TREE, fallback=True)[0] == STEP


# -- items ----------------------------------------------------------------------------------------


def composite(root: Path) -> Path:
    with ocp.CheckpointManager(root) as manager:
        args = {
            "one": ocp.args.ArraySave(jnp.arange(3)),
            "tree": ocp.args.StandardSave(TREE["params"]),
            "words": ocp.args.JsonSave({"lr": 0.1}),
        }
        manager.save(STEP, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
    return root / str(STEP)


def not_merged(path: Path) -> None:
    (path / "tree" / "manifest.ocdbt").unlink()


def no_tree(path: Path) -> None:
    (path / "tree" / "_METADATA").write_text("{")


def in_codec(path: Path) -> None:
    file = path / "one" / "checkpoint" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"compressor": {"id": "bz2"}}))


def no_files(path: Path) -> None:
    shutil.rmtree(path / "words")


ITEMS: dict[str, tuple[Damage, str, type[errors.CheckpointError], str]] = {
    "no database": (not_merged, "tree", errors.CorruptCheckpointError, r"manifest\.ocdbt"),
    "no tree": (no_tree, "tree", errors.CorruptCheckpointError, "_METADATA is damaged"),
    "a codec": (in_codec, "one", errors.UnsupportedFormatError, "bz2"),
    "no files": (no_files, "words", errors.CorruptCheckpointError, "has no files"),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, kind: str) -> None:
    path = composite(tmp_path / "run")
    damage, lost, error, reason = ITEMS[kind]
    damage(path)
    names = {"one", "tree", "words"}
    found = ckpt.sync.load(path, items=names - {lost})
    assert set(found) == names - {lost}
    about = ckpt.sync.metadata(path)
    assert set(about.items) == names
    assert set(about.unreadable) == {lost}
    assert about.unreadable[lost] in str(about)
    with CheckpointManager(tmp_path / "run") as mgr:
        for wanted in ([lost], {lost: None}, {"one": None, lost: None}):
            with pytest.raises(error, match=reason) as caught:
                mgr.restore(items=wanted)
            assert (caught.value.step, caught.value.item) == (STEP, lost)


@pytest.mark.parametrize("kind", ITEMS)
def test_a_whole_step_is_read_without_what_is_of_no_known_kind(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage is an error: a run would go on without a part of its state."""
    path = composite(tmp_path / "run")
    damage, lost, error, reason = ITEMS[kind]
    damage(path)
    caplog.set_level(logging.WARNING, logger="ckpt")
    if error is errors.CorruptCheckpointError:
        with pytest.raises(error, match=reason):
            ckpt.sync.load(path)
        return
    assert set(ckpt.sync.load(path)) == {"one", "tree", "words"} - {lost}
    ckpt.sync.convert(path, tmp_path / "ours")
    ckpt.sync.adopt(path, tmp_path / "adopted")
    said = [each.getMessage() for each in caplog.records if each.name == "ckpt"]
    assert len(said) == 3
    assert all(repr(lost) in each and "bz2" in each for each in said)
    assert set(ckpt.sync.load(tmp_path / "ours")) == {"tree", "words"}


@pytest.mark.parametrize("rewrite", [ckpt.sync.convert, ckpt.sync.adopt])
def test_a_damaged_item_is_not_left_out_of_what_is_written_anew(
    tmp_path: Path, rewrite: Any
) -> None:
    path = composite(tmp_path / "run")
    no_tree(path)
    with pytest.raises(errors.CorruptCheckpointError, match="_METADATA is damaged") as caught:
        rewrite(path, tmp_path / "ours")
    assert caught.value.item == "tree"
    assert not (tmp_path / "ours").exists()
