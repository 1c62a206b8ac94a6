"""Managers whose item "odd" fails or waits where a test tells it to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from tests.support.numbered_states import state_of
from tests.support.odd_items import Odd, OddHandler

SMALL = {"w": np.arange(8, dtype=np.float32)}
LARGE = state_of(0, large=1 << 19)
PATIENCE_S = 120


def fire(number: int = 0) -> ckpt.CheckpointError:
    return ckpt.CheckpointError(f"fire {number}")


def manager(root: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(root, handlers=[OddHandler()], **options)


def plain_manager(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[OddHandler()], **options)


def names(root: Path) -> set[str]:
    return set(os.listdir(root))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


async def reached(item: Odd) -> None:
    assert await asyncio.to_thread(item.reached.wait, PATIENCE_S)
