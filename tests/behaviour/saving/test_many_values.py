"""Python values in a tree take about what they weigh."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt._tree.leaf_kinds import MOST_SHOWN
from tests.support.trees import structure


def stored_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_many_python_numbers_take_little_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each had an array for Orbax: 500 bytes and 70 microseconds."""
    many = MOST_SHOWN + 1
    tree = {
        "losses": [step / 7 for step in range(many)],
        "w": jnp.arange(6.0),
        "shared": np.arange(3),
        "activation": "relu",
    }
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in (0, 1):
            mgr.save(step, tree, durable=True)
        restored: list[Any] = [mgr.restore(1), mgr.restore(1, like=tree)]
    for each in restored:
        assert structure(each) == structure(tree)
        assert each["losses"] == tree["losses"]
        assert each["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert stored_bytes(tmp_path / "run" / "1") < 64 * many
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text for text in said if "Orbax cannot read the item" in text] == said
    assert len(said) == 1
    assert "more than 4096 Python values" in said[0]
    assert ckpt.sync.verify(tmp_path / "run" / "1").ok


def test_a_usual_number_of_values_is_shown_to_orbax(tmp_path: Path) -> None:
    tree = {"n": list(range(MOST_SHOWN))}
    ckpt.sync.save(tmp_path / "a", tree)
    assert ocp.load(tmp_path / "a", {"n": [0] * MOST_SHOWN}) == tree


def test_bytes_take_about_what_they_weigh(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    ckpt.sync.save(tmp_path / "a", {"data": data, "w": jnp.ones(3)})
    assert ckpt.sync.load(tmp_path / "a")["data"] == data
    # In base64: for this library, and for others, who look in two places.
    assert stored_bytes(tmp_path / "a") < 4.5 * len(data)
