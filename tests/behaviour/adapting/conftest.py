"""The checkpoint that the tests of `ckpt.Adapt` restore."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt
import ckpt.sync
from tests.behaviour.adapting.adapted_state import model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapt") / "x"
    ckpt.sync.save(path, model())
    return path
