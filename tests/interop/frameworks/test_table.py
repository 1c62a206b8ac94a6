"""Forty trees of every kind that is saved in practice, and the classes that a process lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.trees import structure

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")

from flax import linen as nn  # noqa: E402
from flax import struct  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import abstract, by_jax, told, told_at_load  # noqa: E402
from tests.interop.frameworks.lent import Lent, Named, Struct  # noqa: E402

W = np.arange(6, dtype=np.float32).reshape(2, 3)
PARAMS = {"dense": {"kernel": jnp.asarray(W), "bias": jnp.zeros(3)}}


@struct.dataclass
class Model:
    w: Any
    name: str = struct.field(pytree_node=False)


class Module(eqx.Module):  # type: ignore[name-defined]
    w: jax.Array
    activation: Any
    size: int = eqx.field(static=True)


class Net(nnx.Module):  # type: ignore[name-defined]
    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def linen_state() -> TrainState:
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


TREES: dict[str, Callable[[], Any]] = {
    "dict with str keys": lambda: {"b": jnp.ones(2), "a": {"c": W}},
    "keys with / . and empty": lambda: {"a/b": W, "a.b": W, "": W, "a": {"b": W}},
    "int keys": lambda: {10: W, 2: W, -1: W},
    "tuple keys": lambda: {(1, "a"): W, (0, "b"): W},
    "OrderedDict": lambda: OrderedDict([("b", W), ("a", W)]),
    "list": lambda: [jnp.ones(1), W],
    "list of more than ten": lambda: [jnp.full(1, n) for n in range(12)],
    "tuple": lambda: (W, (jnp.ones(1), 2)),
    "namedtuple": lambda: Named(W, 3),
    "optax adam": lambda: optax.adam(1e-3).init(PARAMS),
    "optax chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)).init(PARAMS),
    "None inside": lambda: {"a": None, "b": [None, W]},
    "{} inside": lambda: {"a": {}, "b": W},
    "[] inside": lambda: {"a": [], "b": W},
    "() inside": lambda: {"a": (), "b": W},
    "{} alone": dict,
    "int": lambda: {"x": 7, "y": -1},
    "int beyond 32 bits": lambda: {"x": 2**40, "y": -(2**70)},
    "float": lambda: {"x": 0.1, "y": float("nan"), "z": -0.0},
    "bool": lambda: {"x": True, "y": False},
    "str": lambda: {"x": "text", "y": ""},
    "complex": lambda: {"x": 1 - 2j},
    "bytes": lambda: {"x": b"\0\xff"},
    "numpy array": lambda: {"x": W, "y": W.T, "z": np.arange(3)},
    "numpy scalar": lambda: {"x": np.float64(0.1), "y": np.int8(3), "z": np.bool_(True)},
    "0-d array": lambda: {"x": jnp.float32(2), "y": np.array(3), "z": jnp.asarray(1.5)},
    "array without elements": lambda: {"x": jnp.ones((0, 3)), "y": np.ones((2, 0))},
    "bfloat16": lambda: {"x": jnp.ones(3, jnp.bfloat16), "y": W.astype(ml_dtypes.bfloat16)},
    "bool array": lambda: {"x": jnp.array([True, False]), "y": W > 2},
    "complex64": lambda: {"x": jnp.ones(3, jnp.complex64) * 1j},
    "float8": lambda: {"x": jnp.ones(3, jnp.float8_e4m3fn), "y": jnp.ones(2, jnp.float8_e5m2)},
    "int4": lambda: {"x": jnp.arange(5).astype(jnp.int4), "y": jnp.arange(3).astype(jnp.uint4)},
    "threefry key": lambda: {"x": jax.random.key(0), "y": jax.random.split(jax.random.key(1), 3)},
    "rbg key": lambda: {"x": jax.random.key(0, impl="rbg")},
    "registered dataclass": lambda: {"x": Struct(W, "one"), "y": Struct(W, "two")},
    "flax.struct": lambda: Model(jnp.ones(2), "name"),
    "equinox module with a function": lambda: Module(jnp.ones(2), jax.nn.relu, 3),
    "linen TrainState": linen_state,
    "nnx State": lambda: nnx.state(Net(nnx.Rngs(0))),
    "nnx pure dict": lambda: nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)))),
}
# Code is not stored. Without a target these say so, and nothing else is lost.
WITH_FUNCTIONS = {"equinox module with a function", "linen TrainState"}


def exactly(wanted: Any, found: Any) -> bool:
    same = structure(wanted) == structure(found)
    return same and not differences(wanted, found)


def test_forty_trees_come_back_with_a_target_and_all_without_functions_without_one(
    tmp_path: Path,
) -> None:
    trees = {name: make() for name, make in TREES.items()}
    bare, onto, onto_shapes = [], [], []
    for number, (name, tree) in enumerate(trees.items()):
        path = tmp_path / str(number)
        ckpt.sync.save(path, tree)
        if name not in WITH_FUNCTIONS:
            with told() as messages:
                bare.append((name, exactly(tree, ckpt.sync.load(path)) and not messages))
        onto.append((name, exactly(by_jax(tree), ckpt.sync.load(path, like=tree))))
        found = ckpt.sync.load(path, like=abstract(tree))
        onto_shapes.append((name, exactly(by_jax(tree), found)))
    for what, results, count in (
        ("without a target", bare, 38),
        ("with a target", onto, 40),
        ("with the shapes of one", onto_shapes, 40),
    ):
        good = sum(ok for _, ok in results)
        bad = [name for name, ok in results if not ok]
        assert (good, len(results)) == (count, count), f"{what}: {good}/{count}, not {bad}"


def test_the_trees_with_functions_say_without_a_target_what_is_missing(tmp_path: Path) -> None:
    for number, name in enumerate(sorted(WITH_FUNCTIONS)):
        ckpt.sync.save(tmp_path / str(number), TREES[name]())
    with pytest.raises(ckpt.errors.TargetMismatchError, match="activation: stored the function"):
        ckpt.sync.load(tmp_path / "0")
    found, messages = told_at_load(tmp_path / "1")
    assert differences(linen_state().params, found["params"]) == []
    assert len(messages) == 1
    assert "(its apply_fn, tx could not be stored: pass like=)" in messages[0]


def test_a_process_without_the_classes_gets_records_and_one_warning_that_helps(
    tmp_path: Path,
) -> None:
    tree = {"named": Named(W, 1), "struct": Struct(2, "a kind"), "lent": Lent(3, 4, name="a name")}
    ckpt.sync.save(tmp_path / "lent", tree)
    # Of the script that saved: the one that loads has no such class, or one of that name.
    Absent = namedtuple("Absent", ["mean", "count"])
    Mine = namedtuple("Mine", ["mean", "count"])
    Absent.__module__ = Mine.__module__ = "__main__"
    ckpt.sync.save(tmp_path / "main", {"absent": Absent(1, 2), "mine": Mine(3, 4)})
    child = PROGRAMS / "load_unknown_classes.py"
    run = subprocess.run(
        [sys.executable, child, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    lent, main, known, again, renamed, main_known = lines
    records = {"named": "UnknownNode", "struct": "UnknownNode", "lent": "UnknownNode"}
    objects = {"named": "Named", "struct": "Struct", "lent": "Lent"}
    leaves = [3, 4, W.tolist(), 1, 2]
    hint = "(not imported here: import it, or pass it as PyTreeHandler(classes=[...]))"
    names = [f"tests.interop.frameworks.lent:{name}" for name in ("Lent", "Named", "Struct")]
    message = "; ".join(f"{name} {hint}" for name in names)
    assert lent == {
        "types": records,
        "leaves": leaves,
        "warnings": [f"restored as read-only ckpt.types.UnknownNode: {message}"],
    }
    assert known == again == {"types": objects, "leaves": leaves, "warnings": []}
    assert renamed == {"types": {**objects, "named": "Twin"}, "leaves": leaves, "warnings": []}
    assert main["types"] == {"absent": "UnknownNode", "mine": "Mine"}
    assert main["warnings"] == [
        f"restored as read-only ckpt.types.UnknownNode: __main__:Absent {hint}"
    ]
    assert main_known["types"] == {"absent": "Twin", "mine": "Mine"}
    assert main_known["warnings"] == []
    assert main["leaves"] == main_known["leaves"] == [1, 2, 3, 4]
