"""Bad input: a CheckpointError that names it, and nothing left behind."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.support.trees import assert_same, sharded


@pytest.fixture
def mgr(tmp_path: Path) -> Iterator[ckpt.sync.CheckpointManager]:
    with ckpt.sync.CheckpointManager(tmp_path / "root") as made:
        yield made
        assert made.all_steps() == []
        assert os.listdir(tmp_path / "root") == []


@pytest.mark.parametrize(
    "step", [-1, 1.5, "3", None, True, 10**19, 10**30, np.array([4]), float("nan"), [1]]
)
def test_a_step_that_is_none(mgr: ckpt.sync.CheckpointManager, step: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"whole number|at most 9{19}"):
        mgr.save(step, {"x": 1})
    with pytest.raises(errors.InvalidArgumentError, match=r"whole number|at most 9{19}"):
        mgr.delete(step)


def test_numpy_integers_are_steps(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(np.int64(3), {"x": 1}).result()
        assert mgr.all_steps() == [3]
        assert mgr.restore(jnp.int32(3)) == {"x": 1}


class Opaque:
    def method(self) -> None: ...


class Callable:
    """Looks like a function, and may hold anything."""

    def __call__(self) -> None: ...


UNSUPPORTED = {
    "object that can be called": Callable,
    "method": lambda: Opaque().method,
    "partial of an array": lambda: functools.partial(len, np.ones(2)),
    "object": Opaque,
    "object array": lambda: np.array([None, 1]),
    "string array": lambda: np.array(["a"]),
    "datetime": lambda: np.datetime64("2020-01-01"),
    "structured": lambda: np.zeros(2, [("a", int)]),
    "big endian": lambda: np.arange(3, dtype=">i4"),
    "matrix": lambda: np.ma.masked_array([1, 2], [True, False]),
    "set": lambda: {1, 2},
    "surrogate": lambda: "\ud800",
    "ellipsis": lambda: ...,
    "abstract": lambda: jax.ShapeDtypeStruct((3,), jnp.float32),
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_unsupported_leaf_is_named_by_path(mgr: ckpt.sync.CheckpointManager, make: Any) -> None:
    state = {"ok": np.zeros(3), "layers": [{"w": 1}, {"w": make()}]}
    with pytest.raises(errors.UnsupportedLeafError) as caught:
        mgr.save(4, state)
    assert caught.value.leaf == "layers.1.w"
    assert (caught.value.step, caught.value.item) == (4, "default")
    assert "layers.1.w" in str(caught.value)


def test_every_unsupported_leaf_is_told(mgr: ckpt.sync.CheckpointManager) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match="'a'") as caught:
        mgr.save(0, {"a": Opaque(), "b": Opaque()})
    assert any("'b'" in note for note in caught.value.__notes__)


def test_a_name_too_long_to_be_stored(mgr: ckpt.sync.CheckpointManager) -> None:
    """Keys are shortened, but many levels of long ones add up."""
    tree: Any = jnp.ones(3)
    for _ in range(130):
        tree = {"x" * 512: tree}
    with pytest.raises(errors.UnsupportedLeafError, match="66694 bytes") as caught:
        mgr.save(0, {"ok": 1, "deep": tree})
    assert len(str(caught.value)) < 2000


def test_very_long_keys_come_back(tmp_path: Path) -> None:
    state = {"x" * 65_525: jnp.arange(3), "y" * 100_000: "a value without an array"}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, state).result()
        assert_same(mgr.restore(0), state)
        assert_same(mgr.restore(0, like=state), state)


def test_a_traced_value(mgr: ckpt.sync.CheckpointManager) -> None:
    @jax.jit
    def step(x: Any) -> Any:
        with pytest.raises(errors.UnsupportedLeafError, match="outside jit"):
            mgr.save(0, {"x": x})
        return x

    step(jnp.ones(3))


@pytest.mark.parametrize("key", [range(3), Opaque(), print])
def test_a_key_that_cannot_be_stored(mgr: ckpt.sync.CheckpointManager, key: Any) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match="key") as caught:
        mgr.save(0, {"outer": {key: 1}})
    assert caught.value.leaf == "outer"


def test_a_tree_that_contains_itself(mgr: ckpt.sync.CheckpointManager) -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(errors.UnsupportedLeafError, match="contains itself"):
        mgr.save(0, tree)


NAMES = ["../up", "/abs", "", ".", "..", "a/b", "-x", ".hidden", "x" * 101, "ckpt.json", "metrics"]


@pytest.mark.parametrize("name", [*NAMES, 3, "a\0b", "ü"])
def test_an_item_name_that_could_leave_the_step(
    mgr: ckpt.sync.CheckpointManager, name: Any
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="item name"):
        mgr.save(0, items={name: {"x": 1}})


def test_arguments_that_contradict_each_other(mgr: ckpt.sync.CheckpointManager) -> None:
    contradictions: list[dict[str, Any]] = [
        {},
        {"state": 1, "items": {"a": 1}},
        {"items": {}},
        {"items": [1]},
    ]
    for arguments in contradictions:
        with pytest.raises(errors.InvalidArgumentError, match="items"):
            mgr.save(0, **arguments)
    with pytest.raises(errors.InvalidArgumentError, match="metrics"):
        mgr.save(0, {"x": 1}, metrics={"loss": None})
    with pytest.raises(errors.InvalidArgumentError, match="metrics"):
        mgr.save(0, {"x": 1}, metrics=[1])  # type: ignore[call-overload]
    for metadata in ({"a": Opaque()}, {"a": float("nan")}):
        with pytest.raises(errors.InvalidArgumentError, match="metadata"):
            mgr.save(0, {"x": 1}, custom_metadata=metadata)


@pytest.mark.parametrize("budget", [0, -1, 1000, 1.5e9, "1GB", True])
def test_a_budget_too_small_for_work(budget: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="1 MiB"):
        ckpt.Staging(budget_bytes=budget)


def test_a_shard_that_cannot_be_cut_evenly_is_saved_within_the_budget(tmp_path: Path) -> None:
    """A shard of prime length has no equal parts: its chunks cross into the next one."""
    prime = 300_007
    state = {"ok": jnp.ones(3), "odd": sharded(np.ones(8 * prime, np.float32), ("data", "model"))}
    for step, mode in enumerate(("copy", "view", "device")):
        staging = ckpt.Staging(1 << 20, mode=mode)  # type: ignore[arg-type]
        with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
            mgr.save(step, state).result()
            assert mgr._service.engine.arena.high_water <= 1 << 20
            assert_same(mgr.restore(step), state)


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="copy"):
        ckpt.Staging(mode="fast")  # type: ignore[arg-type]
    for n in (0, -1, 1.5, True):
        with pytest.raises(errors.InvalidArgumentError):
            ckpt.keep.Latest(n)  # type: ignore[arg-type]


# Roots.


@pytest.mark.parametrize("path", ["", "a\0b", 3, None, b"bytes", "s4://bucket/run", "ftp://b/r"])
def test_a_root_that_is_no_local_path(path: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="path="):
        ckpt.sync.CheckpointManager(path)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for root in (file, file / "below"):
        with pytest.raises(errors.StorageError, match="file") as caught:
            ckpt.sync.CheckpointManager(root).__enter__()
        assert caught.value.errno is not None
        manager = ckpt.sync.CheckpointManager(root)
        with pytest.raises(errors.StorageError, match="file"):
            manager.save(0, {"x": 1})
        manager.close()
    assert file.read_text() == "mine"


def test_a_root_that_cannot_be_written() -> None:
    with pytest.raises(errors.StorageError, match="/proc") as caught:
        ckpt.sync.save("/proc/nowhere/x", {"x": 1})
    assert isinstance(caught.value, OSError)
    assert caught.value.errno is not None


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    ckpt.sync.save((tmp_path / "a b").as_uri(), {"x": 1})
    assert ckpt.sync.load(tmp_path / "a b") == {"x": 1}
    assert ckpt.sync.load(str(tmp_path / "a b")) == {"x": 1}


def test_read_only_managers_write_nothing(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "none", mode="r") as mgr:
        assert mgr.latest_step() is None
        with pytest.raises(errors.ReadOnlyError):
            mgr.save(0, {"x": 1})
        with pytest.raises(errors.ReadOnlyError):
            mgr.delete(0)
    assert not (tmp_path / "none").exists()


# Existing steps.


def test_an_existing_step_is_left_as_it_is(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"x": 1}).result()
        with pytest.raises(errors.StepExistsError, match="if_exists='replace'"):
            mgr.save(1, {"x": 2})
        assert mgr.restore(1) == {"x": 1}
        mgr.save(1, {"x": 3}, if_exists="replace").result()
        assert mgr.restore(1) == {"x": 3}
        assert sorted(os.listdir(tmp_path)) == ["1"]


def test_what_the_library_did_not_write_is_never_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(errors.StepExistsError, match="not a checkpoint"):
            ckpt.sync.save(precious, {"x": 1}, if_exists="replace" if overwrite else "error")
    assert os.listdir(precious) == ["thesis.txt"]
    assert os.listdir(tmp_path) == ["home"]


# Targets.


def test_all_differences_are_in_one_message(tmp_path: Path) -> None:
    state = {
        "layers": [{"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, {"w": jnp.ones((8, 2))}],
        "step": 3,
        "name": "run",
        "odd": sharded(np.ones((6, 4)), None, "model"),
    }
    like = {
        "layers": [{"w": jnp.ones((4, 9)), "bias": jnp.ones(8)}, {"w": jnp.ones((8, 2), int)}],
        "step": 3.0,
        "name": jnp.ones(3),
        "odd": jax.ShapeDtypeStruct(
            (6, 4), jnp.float32, sharding=sharded(np.ones(8), "model").sharding
        ),
    }
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(5, state).result()
        with pytest.raises(errors.TargetMismatchError) as caught:
            mgr.restore(5, like=like)
    assert str(caught.value) == (
        "step 5, item 'default': the target differs from what is stored in 7 leaves; no array was "
        "read. Change the target; put ... in place of a leaf to skip it; or say what may differ "
        "with adapt=ckpt.Adapt(...).\n"
        "  layers.0.bias: not stored, wanted float32[8] (is it 'layers.0.b'?)\n"
        "  layers.0.w: stored float32[4, 8], wanted shape [4, 9]\n"
        "  layers.1.w: stored float32[8, 2], wanted dtype int32, which is not of the same kind\n"
        "  name: stored a Python str, wanted float32[3]\n"
        "  odd: stored float32[6, 4], wanted a sharding that does not divide it "
        f"({caught.value.problems[4].split('divide it (')[1]}\n"
        "  step: stored a Python int, wanted a Python float\n"
        "  layers.0.b: stored float32[8], not in the target"
    )
    assert len(caught.value.problems) == 7
    assert (caught.value.step, caught.value.item) == (5, "default")


def test_64_bit_arrays_are_never_cut_silently(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        ckpt.sync.save(tmp_path / "x", {"w": jnp.ones(3, jnp.float64)})
    with pytest.raises(errors.TargetMismatchError, match=r"w: .*jax_enable_x64"):
        ckpt.sync.load(tmp_path / "x")
    wanted = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert ckpt.sync.load(tmp_path / "x", like={"w": wanted})["w"].dtype == jnp.float32
    assert ckpt.sync.load(tmp_path / "x", like={"w": np.empty(3)})["w"].dtype == np.float64


# Paths that are no checkpoint.


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    for name in ("empty", "file", "other", "missing"):
        for call in (ckpt.sync.load, ckpt.sync.metadata):
            with pytest.raises(errors.NotACheckpointError, match=name):
                call(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "other"]


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with pytest.raises(errors.StepNotFoundError, match="no committed step"):
            mgr.restore()
        mgr.save(10, {"x": 1}).result()
        for call in (mgr.restore, mgr.metadata, mgr.delete):
            with pytest.raises(errors.StepNotFoundError, match="steps 10") as caught:
                call(11)
            assert caught.value.step == 11


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "symlink", "empty", "huge"])
def test_a_manifest_that_is_not_a_plain_file(tmp_path: Path, kind: str) -> None:
    step = tmp_path / "5"
    step.mkdir()
    path = step / "ckpt.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        (tmp_path / "target").write_text("{}")
        path.symlink_to(tmp_path / "target")
    elif kind == "empty":
        path.touch()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == []
        assert mgr.latest_step() is None
        with pytest.raises(errors.CheckpointError, match=r"ckpt\.json"):
            mgr.restore(5)


def test_a_renamed_step_is_not_a_step(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(5, {"x": 1}).result()
        os.rename(tmp_path / "5", tmp_path / "6")
        assert mgr.all_steps() == []
        with pytest.raises(errors.CorruptCheckpointError, match="holds step 5"):
            mgr.restore(6)
    # As a directory of its own it is still good.
    assert ckpt.sync.load(tmp_path / "6") == {"x": 1}


def test_stray_directories_are_not_steps(tmp_path: Path) -> None:
    for name in ("7", "007", "-3", "8.tmp", "9" * 30, "x"):
        (tmp_path / name).mkdir()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == []
        assert mgr.latest_step() is None
        mgr.save(3, {"x": 1}).result()
        assert mgr.all_steps() == [3]
        assert mgr.latest_step() == 3


# Arguments of a manager.


@pytest.mark.parametrize(
    "settings",
    [
        {"observers": print},
        {"observers": 5},
        {"observers": [5]},
        {"observers": [ckpt.observers.Trace]},
        {"timeouts": 5},
        {"staging": 5},
        {"trash": 5},
        {"mode": "w"},
        {"mode": 1},
    ],
    ids=str,
)
def test_an_argument_of_another_kind_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    for manager in (ckpt.CheckpointManager, ckpt.sync.CheckpointManager):
        with pytest.raises(errors.InvalidArgumentError, match=next(iter(settings))):
            manager(tmp_path / "root", **settings)
    assert not (tmp_path / "root").exists()


def test_a_policy_that_is_false_is_a_policy(tmp_path: Path) -> None:
    class Nothing:
        def __len__(self) -> int:
            return 0

        def keep(self, steps: Any, now: float) -> list[int]:
            return []

        def refusal(self, step: int, previous: Any, context: Any) -> str | None:
            return "never" if step == 3 else None

    with ckpt.sync.CheckpointManager(tmp_path, keep=Nothing(), save_when=Nothing()) as mgr:
        for step in range(4):
            mgr.save(step, {"n": step})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [2]
