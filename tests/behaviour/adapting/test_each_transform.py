"""Each transform of `ckpt.surgery` does on the way what numpy does, with all that it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.surgery
import ckpt.sync

A = np.arange(24, dtype=np.float32).reshape(4, 6)
B = A + 100
STORED: dict[str, Any] = {"a": A, "b": B, "layers": {"0": A, "1": B}}
FIRST, REST = np.split(A, [2], axis=1)

# The transform, and what becomes of the leaves that it takes.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "stack": (
        lambda: ckpt.surgery.stack("layers.*", to="both", axis=1),
        {"both": np.stack([A, B], axis=1)},
    ),
    "unstack": (
        lambda: ckpt.surgery.unstack("a", to="parts.*", axis=1),
        {"parts": {str(n): A[:, n] for n in range(6)}},
    ),
    "concatenate": (
        lambda: ckpt.surgery.concatenate(["b", "a"], to="both", axis=1),
        {"both": np.concatenate([B, A], axis=1)},
    ),
    "split": (
        lambda: ckpt.surgery.split("a", to=["first", "rest"], axis=1, sizes=[2, 4]),
        {"first": FIRST, "rest": REST},
    ),
    "repeat": (lambda: ckpt.surgery.repeat("a", times=3, axis=1), {"a": np.repeat(A, 3, axis=1)}),
    "transpose": (lambda: ckpt.surgery.transpose("a", axes=[1, 0]), {"a": A.T}),
    "reshape": (lambda: ckpt.surgery.reshape("a", shape=[2, -1, 3]), {"a": A.reshape(2, 4, 3)}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapting") / "x"
    ckpt.sync.save(path, STORED)
    return path


@pytest.mark.parametrize("name", CASES)
def test_of_a_load(name: str, path: Path) -> None:
    made, wanted = CASES[name]
    transform = made()
    adapt = ckpt.Adapt(transforms=[transform])
    assert list(adapt.transforms) == [transform]
    found = ckpt.sync.load(path, adapt=adapt)
    for branch, leaves in wanted.items():
        if isinstance(leaves, dict):
            assert found[branch].keys() == leaves.keys()
            assert all(np.array_equal(found[branch][key], leaves[key]) for key in leaves)
        else:
            assert np.array_equal(found[branch], leaves)
    # The others are as they were saved.
    for other in {"a", "b"} - set(wanted) - {"both"}:
        if other in found:
            assert np.array_equal(found[other], STORED[other])


def test_rules_by_path() -> None:
    adapt = ckpt.Adapt(cast={"a": "float16"}, resize={"b": "pad"})
    assert [adapt.dtype_for(path) for path in ("a", "b")] == [np.dtype("float16"), None]
    assert [adapt.resize_for(path) for path in ("a", "b")] == [None, "pad"]
