"""An item whose save becomes durable when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Awaitable
from typing import Any

import anyio

from ckpt._format.manifest import ItemEntry
from ckpt.handlers._base import Deferred

__all__ = ["PATIENCE_S", "Gate", "GateHandler"]

PATIENCE_S = 120


class Gate:
    """An item whose save becomes durable only when the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        # Set when the save waits at the gate.
        self.reached = threading.Event()

    def open(self) -> None:
        self.opened.set()


class GateHandler:
    name = "gate"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Gate)

    async def stage(self, item: Gate, writer: Any) -> Awaitable[ItemEntry]:
        async def commit() -> ItemEntry:
            item.reached.set()
            opened = await anyio.to_thread.run_sync(
                item.opened.wait, PATIENCE_S, abandon_on_cancel=True
            )
            assert opened
            return ItemEntry(handler=self.name)

        return Deferred(commit)

    async def load(self, entry: Any, like: Any, adapt: Any, reader: Any) -> Any:
        return None
