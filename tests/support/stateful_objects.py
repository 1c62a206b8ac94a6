"""Objects with a state of their own, as users write them."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

__all__ = ["Averages", "Config", "Counter", "Recording", "Reservoir"]


class Config(pydantic.BaseModel):
    """The configuration of a run."""

    name: str = "run"
    rate: float = 0.1
    layers: list[int] = [1, 2]
    where: Path = Path("data")
    seed: int | None = None


class Counter:
    """A state that is a dict of JSON values."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count, "seen": ["a", None]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Reservoir:
    """A state that is bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def get_state(self) -> bytes:
        return self.data

    def set_state(self, state: bytes) -> None:
        self.data = state


class Averages:
    """A state that is a tree with arrays, which share their memory with the object."""

    def __init__(self, value: float = 0.0) -> None:
        self.means = np.full((3, 2), value)
        self.steps = (int(value), 2)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = state["means"]
        self.steps = state["steps"]


class Recording:
    """Two phases, and files in directories."""

    def __init__(self, notes: dict[str, bytes] | None = None) -> None:
        self.notes = dict(notes or {})

    async def save(self, directory: Any) -> Awaitable[None]:
        notes = dict(self.notes)

        async def write() -> None:
            root = await directory.await_creation()
            for name, data in notes.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(data)

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        async def read() -> None:
            self.notes = {
                path.relative_to(directory).as_posix(): path.read_bytes()
                for path in sorted(directory.rglob("*"))
                if path.is_file()
            }

        return read()
