"""Promise: whatever changes from save to save, and whatever is deleted or replaced meanwhile, every
step that is there is exactly what was saved, and a whole checkpoint by itself."""

from __future__ import annotations

import functools
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import ckpt
import ckpt.sync
from ckpt.storage import Memory
from ckpt.storage._object import server_copies
from ckpt.storage._object.connection import connect
from tests.support.databases import in_database
from tests.support.trees import assert_same, sharded

# Large enough for batches of their own; others are packed.
SHAPES = {"large": (96, 1024), "other": (80, 1024), "mesh": (128, 1024)} | {
    f"small{n}": (50 + n,) for n in range(6)
}
NAMES = st.sampled_from(sorted(SHAPES))


@functools.cache
def numbers(name: str, version: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    seed = [len(name), sum(name.encode()), version]
    return np.random.default_rng(seed).standard_normal(SHAPES[name]).astype(np.float32)


def made(name: str, version: int) -> Any:
    values = numbers(name, version)
    return sharded(values, "data", "model") if name == "mesh" else jnp.array(values)


class Sequences(RuleBasedStateMachine):
    """A run whose arrays change or do not."""

    compressed = False

    @initialize()
    def begin(self) -> None:
        self.root: Any = self.new_root()
        # Whether a rule may have changed a step since all were looked at.
        self.is_changed = True
        self.versions = dict.fromkeys(SHAPES, 0)
        self.state = {name: self.made(name) for name in SHAPES}
        self.kept: dict[int, dict[str, Any]] = {}
        self.step = 0
        self.open()

    def new_root(self) -> Any:
        return Path(tempfile.mkdtemp())

    def made(self, name: str) -> Any:
        return made(name, self.versions[name])

    def open(self) -> None:
        self.is_changed = True
        formats = {"large": ckpt.ArrayFormat(compression="zstd")} if self.compressed else None
        # Small, so that a state has many files.
        staging = ckpt.Staging(budget_bytes=1 << 20)
        self.mgr = ckpt.sync.CheckpointManager(self.root, formats=formats, staging=staging)

    @rule(names=st.sets(NAMES, min_size=1, max_size=4))
    def change(self, names: set[str]) -> None:
        for name in names:
            self.versions[name] += 1
            self.state[name] = self.made(name)

    @rule(names=st.sets(NAMES, min_size=1))
    def make_again(self, names: set[str]) -> None:
        for name in names:
            self.state[name] = self.made(name)

    @rule(name=NAMES)
    def change_back(self, name: str) -> None:
        self.versions[name] = 0
        self.state[name] = self.made(name)

    @rule(count=st.integers(1, 3))
    def save(self, count: int) -> None:
        self.is_changed = True
        for _ in range(count):
            self.step += 1
            self.kept[self.step] = dict(self.state)
            self.mgr.save(self.step, dict(self.state))
        self.mgr.wait_until_finished()

    @rule(names=st.sets(NAMES, min_size=1, max_size=4), count=st.integers(2, 4))
    def train(self, names: set[str], count: int) -> None:
        """Save after every change of the same arrays."""
        for _ in range(count):
            self.change(names)
            self.save(1)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        self.is_changed = True
        step = data.draw(st.sampled_from(sorted(self.kept)))
        self.mgr.save(step, dict(self.state), if_exists="replace").result()
        self.kept[step] = dict(self.state)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.is_changed = True
        step = data.draw(st.sampled_from(sorted(self.kept)))
        self.mgr.delete(step)
        del self.kept[step]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def remove_by_hand(self, data: st.DataObject) -> None:
        self.is_changed = True
        step = data.draw(st.sampled_from(sorted(self.kept)))
        self.remove_files(step)
        self.mgr.reload()
        del self.kept[step]

    def remove_files(self, step: int) -> None:
        shutil.rmtree(self.root / str(step))

    def copy_files(self, step: int, target: Path) -> Path:
        """Copy a step and nothing else; return where its items are."""
        shutil.copytree(self.root / str(step), target)
        return target

    @rule()
    def open_again(self) -> None:
        self.mgr.close()
        self.open()

    @invariant()
    def every_step_is_what_was_saved(self) -> None:
        if not hasattr(self, "mgr") or not self.is_changed:
            return
        self.is_changed = False
        assert self.mgr.all_steps() == sorted(self.kept)
        for step, state in self.kept.items():
            assert self.mgr.verify(step).ok
            assert_same(self.mgr.restore(step), state)

    def teardown(self) -> None:
        if not hasattr(self, "mgr"):
            return
        self.mgr.close()
        for step, state in self.kept.items():
            with tempfile.TemporaryDirectory() as folder:
                # Without all others.
                alone = Path(folder, "alone")
                items = self.copy_files(step, alone)
                assert ckpt.sync.verify(alone).ok
                assert_same(ckpt.sync.load(alone), state)
                # As other readers find it, by the database.
                for name, array in state.items():
                    assert np.array_equal(in_database(items / "default", name), np.asarray(array))
        self.remove_root()

    def remove_root(self) -> None:
        shutil.rmtree(self.root)


class Compressed(Sequences):
    compressed = True


class InAStore(Sequences):
    def new_root(self) -> Any:
        return f"memory://{uuid.uuid4().hex}/run"

    def objects(self, step: int) -> dict[str, bytes]:
        store = connect(Memory(self.root)).open()[0]
        prefix = f"{step}/".encode()
        return {
            key.decode(): store.read(key).result().value
            for key in store.list().result()
            if key.startswith(prefix)
        }

    def remove_files(self, step: int) -> None:
        store = connect(Memory(self.root)).open()[0]
        for key in self.objects(step):
            store.write(key, None).result()

    def copy_files(self, step: int, target: Path) -> Path:
        for key, data in self.objects(step).items():
            path = target / key.partition("/")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        [attempt] = [path for path in target.iterdir() if path.is_dir()]
        return attempt

    def remove_root(self) -> None:
        for step in self.kept:
            self.remove_files(step)


SETTINGS = settings(max_examples=8, stateful_step_count=12, suppress_health_check=list(HealthCheck))


def test_steps_that_share_files_are_what_was_saved() -> None:
    run_state_machine_as_test(Sequences, settings=SETTINGS)


def test_compressed_ones_are_too() -> None:
    run_state_machine_as_test(Compressed, settings=SETTINGS)


def test_those_in_a_store_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_copies, "SMALLEST_BYTES", 1 << 18)
    run_state_machine_as_test(InAStore, settings=SETTINGS)
