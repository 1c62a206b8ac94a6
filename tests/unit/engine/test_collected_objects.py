"""The garbage collector: saves and restores of many leaves give it few objects to look at.

A full collection holds all threads for as long as it takes to look at every object of the process.
The interpreter begins one when enough objects have come that it has to look at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ckpt.sync
from ckpt._engine.restore import placement
from ckpt._interop.orbax import sidecars
from ckpt._tree.leaf_specs import Classifier

LEAVES = 800


def looked_at() -> int:
    """Return how many containers the collector has to look at, besides those of others' classes."""
    gc.collect()
    return sum(type(each) in (list, tuple, dict) for each in gc.get_objects())


def arrays() -> dict[str, jax.Array]:
    return {
        f"leaf_{number}": jax.device_put(np.full(3, number, np.float32)) for number in range(LEAVES)
    }


def most_at(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, run: Callable[[], Any]
) -> int:
    """Return the most objects that there are more after calls of a function than before `run`."""
    real: Callable[..., Any] = getattr(where, name)
    found: list[int] = []

    def counted(*args: Any, **named: Any) -> Any:
        result = real(*args, **named)
        found.append(looked_at())
        return result

    monkeypatch.setattr(where, name, counted)
    before = looked_at()
    run()
    return max(found) - before


def test_a_restore_keeps_no_container_for_each_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, arrays()).result()
        mgr.restore()
        more = most_at(monkeypatch, placement, "make_arrays", mgr.restore)
    assert more < LEAVES / 2


def test_the_files_for_orbax_are_made_without_a_container_for_each_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = arrays()

    def save() -> None:
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            mgr.save(0, tree).result()

    # Called last, with all that was made of the leaves before.
    more = most_at(monkeypatch, sidecars, "_shardings", save)
    assert more < LEAVES * 2


def test_known_arrays_are_kept_without_a_container_for_each() -> None:
    tree = arrays()
    classifier = Classifier()
    before = looked_at()
    for name, leaf in tree.items():
        classifier.classify(leaf, name)
    assert looked_at() - before < LEAVES / 10
