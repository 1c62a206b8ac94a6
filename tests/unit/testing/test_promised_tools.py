"""The tools of `ckpt.testing`, each by what its description promises."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.support.faults as faults
from ckpt._format.array_format import DTYPES
from ckpt.testing import strategies
from tests.support.faults import Crash, Fail, FaultyFiles, FileOperation, Short, Wait

FEW = settings(
    max_examples=5, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def operation(name: str, **more: Any) -> FileOperation:
    return FileOperation(name, "x", **more)


def effects(plan: faults.Plan, *names: str) -> list[object]:
    return [plan(operation(name)) for name in names]


def test_plans_choose_operations() -> None:
    is_write = faults.named("write")
    full = Fail(errno.ENOSPC)
    names = ("open", "write", "write", "write", "fsync")
    assert effects(faults.at(2, full), *names) == [None, full, None, None, None]
    assert effects(faults.at(2, full, is_write), *names) == [None, None, full, None, None]
    assert effects(faults.since(4, full), *names) == [None, None, None, full, full]
    assert effects(faults.since(2, full, is_write), *names) == [None, None, full, full, None]
    assert effects(faults.every(2, full), *names) == [None, full, None, full, None]
    assert effects(faults.every(2, full, is_write), *names) == [None, None, full, None, None]
    both = faults.first_of(faults.at(2, full), faults.since(2, Crash()))
    assert effects(both, "open", "open", "open") == [None, full, Crash()]
    assert [faults.refused_by(errno.ENOSPC)(operation(name)) for name in ("write", "stat")] == [
        *(True, False),
    ]


def test_effects_say_what_they_do() -> None:
    assert (Fail(errno.ENOSPC).errno, str(Fail(errno.ENOSPC))) == (errno.ENOSPC, "ENOSPC")
    assert [Short(3).limit(asked) for asked in (1, 2, 9)] == [1, 2, 3]
    assert [Short().limit(asked) for asked in (1, 2, 9)] == [1, 1, 4]
    gate = threading.Event()
    wait = Wait(gate, then=Fail(errno.EIO), seconds=0.001)
    assert wait.then == Fail(errno.EIO)
    with pytest.raises(RuntimeError, match="gate"):
        wait.pass_through()
    gate.set()
    wait.pass_through()


def test_kinds_of_operations() -> None:
    assert {"write", "writev", "pwrite", "pwritev"} == faults.WRITES
    assert {"fsync", "fdatasync"} == faults.SYNCS
    assert faults.WRITES | {"rename", "mkdir", "unlink", "ftruncate"} <= faults.CHANGES
    assert not faults.CHANGES & (faults.SYNCS | {"stat", "read", "open"})


def test_operations_are_recorded(tmp_path: Path) -> None:
    plan: faults.Plan = faults.at(1, Fail(errno.ENOSPC), faults.named("mkdir"))
    with FaultyFiles(tmp_path, plan, sync=False) as files:
        fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, b"abc", 4)
        os.pread(fd, 7, 2)
        os.close(fd)
        with pytest.raises(OSError, match="No space left"):
            os.mkdir(tmp_path / "d")
    opened, written, read, made = files.operations
    assert [each.name for each in files.operations] == ["open", "pwrite", "pread", "mkdir"]
    assert [each.number for each in files.operations] == [1, 2, 3, 4]
    assert [each.path for each in files.operations] == ["a", "a", "a", "d"]
    assert (written.fd, written.offset, written.data) == (fd, 4, b"abc")
    assert (read.fd, read.offset, read.nbytes, opened.fd) == (fd, 2, 7, None)
    assert (made.effect, opened.effect) == (Fail(errno.ENOSPC), None)
    times = [time for each in files.operations for time in (each.began, each.ended or 0)]
    assert times == sorted(set(times))


def test_places_below_the_directory(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path / "in")
    assert files.locate(tmp_path / "in" / "a" / "b") == "a/b"
    assert files.locate(tmp_path / "in") == "."
    assert files.locate(tmp_path / "elsewhere") is None
    (tmp_path / "in").mkdir()
    fd = os.open(tmp_path / "in", os.O_RDONLY)
    assert files.locate("a", dir_fd=fd) == "a"
    os.close(fd)


def test_an_operation_is_carried_out_as_the_plan_says(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def call(limit: int | None) -> str:
        asked.append(limit)
        return "done"

    files = FaultyFiles(tmp_path, faults.at(2, Short(3)), sync=False)
    assert files.perform(operation("read", nbytes=9), call, "unsynced") == "done"
    assert files.perform(operation("read", nbytes=9), call, "unsynced") == "done"
    assert asked == [None, 3]
    assert files.perform(operation("fsync"), call, "unsynced") == "unsynced"
    assert asked == [None, 3]


def drawn(strategy: st.SearchStrategy[Any], check: Callable[[Any], object]) -> list[Any]:
    """Draw a few values, and check each."""
    found: list[Any] = []

    @FEW
    @given(strategy)
    def draw(value: Any) -> None:
        check(value)
        found.append(value)

    draw()
    return found


def is_in(values: object) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        assert value in values  # type: ignore[operator]

    return check


def test_strategies_of_arrays() -> None:
    def is_small(shape: Any) -> None:
        assert len(shape) <= 2
        assert all(side <= 3 for side in shape)

    def is_int8(array: Any) -> None:
        assert (array.dtype, array.shape) == (np.int8, (2, 3))

    def is_on_devices(array: Any) -> None:
        assert isinstance(array, jax.Array)
        assert array.shape == (8, 3)

    def fits(sharding: Any) -> None:
        assert isinstance(sharding, jax.sharding.Sharding)
        sharding.shard_shape((8, 24))

    def is_key(key: Any) -> None:
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)

    drawn(strategies.dtypes(), is_in(DTYPES.values()))
    assert any(drawn(strategies.shapes(max_rank=2, max_side=3), is_small))
    drawn(strategies.arrays(dtype=np.dtype("int8"), shape=(2, 3)), is_int8)
    drawn(strategies.jax_arrays(shape=(8, 3)), is_on_devices)
    drawn(strategies.shardings((8, 24)), fits)
    drawn(strategies.prng_keys(), is_key)


def test_strategies_of_trees() -> None:
    def is_text(key: Any) -> None:
        assert isinstance(key, str)

    def has_only_texts(tree: Any) -> None:
        assert all(isinstance(leaf, str) for leaf in jax.tree.leaves(tree))

    def needs_no_device(leaf: Any) -> None:
        assert not isinstance(leaf, jax.Array)
        assert len(jax.tree.leaves([leaf])) == 1

    assert len(set(drawn(strategies.string_keys(), is_text))) > 1
    drawn(strategies.leaves(), needs_no_device)
    trees = drawn(strategies.trees(leaf=st.just("x"), max_leaves=5), has_only_texts)
    assert any(jax.tree.leaves(tree) for tree in trees)
    sizes = [
        max(len(jax.tree.leaves(each)) for each in drawn(strategies.states(max_leaves=n), id))
        for n in (1, 30)
    ]
    assert sizes[0] < sizes[1]


def test_nodes_of_the_strategies() -> None:
    pair = strategies.Pair(1, 2)
    assert (pair.first, pair.second) == (1, 2)
    box = strategies.Box(3, "params")
    ((key, child),), tag = box.tree_flatten_with_keys()
    assert (str(key), child, tag) == (".value", 3, "params")
    again = strategies.Box.tree_unflatten("params", [3])
    assert (again.value, again.tag, again) == (3, "params", box)
    module = strategies.Module(kernel=1, inner=2, name="m", settings=(3,))
    doubled = jax.tree.map(lambda each: 2 * each, module)
    assert (doubled.kernel, doubled.inner) == (2, 4)
    assert (doubled.name, doubled.settings) == ("m", (3,))
