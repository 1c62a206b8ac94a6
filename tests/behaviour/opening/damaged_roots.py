"""A root of a few steps, and ways to damage them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt.manifest import peek


def state(value: float) -> dict[str, Any]:
    """Return a state whose arrays are too large to be packed into the index."""
    return {"w": jnp.full(4096, float(value)), "step": jnp.int32(value)}


def make_root(root: Path, steps: tuple[int, ...] = (1, 2, 3)) -> Path:
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in steps:
            mgr.save(step, state(step), metrics={"loss": 1 / step})
    return root


def flip(file: Path, at: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 4
    file.write_bytes(bytes(data))


def flip_array(step_dir: Path) -> None:
    """Change a byte of an array, and nothing that says what is stored."""
    flip(max((step_dir / "default" / "d").iterdir(), key=lambda file: file.stat().st_size))


def flip_head(step_dir: Path) -> None:
    """Change a byte of what lists of steps are made of."""
    flip(step_dir / "ckpt.json", 0.1)
    assert peek((step_dir / "ckpt.json").read_bytes()) is None


def flip_rest(step_dir: Path, byte: int = 20) -> None:
    """Change a byte of the manifest that only those look at who read the step."""
    data = bytearray((step_dir / "ckpt.json").read_bytes())
    data[data.index(b',"head":"') + 60 + byte] ^= 4
    (step_dir / "ckpt.json").write_bytes(bytes(data))
    assert peek(bytes(data)) is not None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings so far, and forget them."""
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return found
