"""Saving in parts, for the tests of it: trees, managers and their leftovers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import ckpt
import ckpt.sync

PATIENCE_S = 120
# Little enough that a part of a megabyte has several chunks and files, and does not fit.
STAGING = ckpt.Staging(budget_bytes=1 << 20)
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def plain(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **options)


def in_parts(mgr: ckpt.sync.CheckpointManager, step: int, *parts: Any) -> Any:
    """Save trees as parts of a step, or do what functions do with it."""
    with mgr.partial(step) as part:
        for each in parts:
            each(part) if callable(each) else part.save(each)
    return part


def fails(*_: Any) -> None:
    raise ZeroDivisionError


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) if root.exists() else set()


def on(backend: str, main: Callable[[], Any]) -> None:
    async def limited() -> None:
        with anyio.fail_after(PATIENCE_S):
            await main()

    anyio.run(limited, backend=backend)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    def add(into: dict[Any, Any], part: dict[Any, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                empty = copy.copy(value)
                empty.clear()
                add(into.setdefault(key, empty), value)
            else:
                into[key] = value

    whole: dict[str, Any] = type(parts[0])()
    for part in parts:
        add(whole, part)
    return whole
