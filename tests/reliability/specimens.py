"""Checkpoints of every kind, to be attacked, each with another one of its kind beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.paths import GOLDEN
from tests.support.trees import sharded

METRICS = {"loss": 0.25, "best": float("inf")}
METADATA = {"git": "0f5e", "tags": ["a", None, 1]}


@dataclass(frozen=True, slots=True)
class Specimen:
    """One checkpoint.

    Attributes:
        name: What it is called in messages.
        path: The checkpoint; a copy that may be damaged.
        other: Another checkpoint of its kind, or of a similar one.
        expected: What a load brings back.
        wanted: The items to load, where not everything can be loaded without a target.
    """

    name: str
    path: Path
    other: Path
    expected: Any
    wanted: tuple[str, ...] | None

    def load(self) -> Any:
        """What a default restore brings back now, as values that can be compared."""
        return comparable(ckpt.sync.load(self.path, items=self.wanted))

    def differences(self, found: Any) -> list[str]:
        """Where `found` is not what was saved."""
        return differences(self.expected, found)


def comparable(found: Any) -> Any:
    """The same with random generators as their states."""
    if type(found) is dict:
        return {key: comparable(value) for key, value in found.items()}
    if isinstance(found, np.random.Generator):
        return found.bit_generator.state
    return found


class Loader:
    """An object with a state."""

    def __init__(self, position: int) -> None:
        self.state: Any = {"position": position}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def plain(seed: int) -> dict[str, Any]:
    """Packed leaves, one of several chunks, values that are no arrays, one array twice."""
    random = np.random.default_rng(seed)
    small = {f"layer {n}": random.standard_normal(n, np.float32) for n in range(1, 9)}
    shared = jnp.asarray(random.standard_normal(40, np.float32))
    return {
        "small": small,
        "large": random.standard_normal((300, 400), np.float32),
        "device": jnp.asarray(random.standard_normal((64, 8), np.float32)),
        "tied": [shared, shared],
        "empty": np.zeros((0, 3), np.int8),
        "values": (seed, 0.5, "text", None, b"\0", True, 2**80),
    }


def squeezable(seed: int) -> dict[str, Any]:
    """Arrays that a codec makes smaller, in several chunks."""
    steps = np.random.default_rng(seed).integers(-3, 4, (100, 700))
    return {"walk": np.cumsum(steps, axis=1).astype(np.float32), "ids": np.arange(seed, 20_000)}


def on_a_mesh(seed: int) -> dict[str, Any]:
    """Arrays in shards, some of which share chunks."""
    values = np.random.default_rng(seed).standard_normal((64, 48), np.float32)
    return {
        "even": sharded(values, "data", "model"),
        "odd": sharded(values[:8, :9].copy(), "data"),
        "all": sharded(values[0].copy()),
    }


def items(seed: int) -> dict[str, Any]:
    """An item for every handler that needs no other library."""
    return {
        "model": {"w": jnp.arange(50.0) * seed, "n": seed},
        "config": {"rate": 0.1 * seed, "tags": ["a", None, True]},
        "notes": f"text {seed} schön",
        "blob": bytes(range(seed, 200)),
        "random": np.random.Generator(np.random.PCG64(seed)),
        "loader": Loader(seed),
    }


Save = Callable[[Path, int], object]


def save_items(path: Path, seed: int) -> None:
    ckpt.sync.save(path, items=items(seed), handlers={"config": ckpt.handlers.JsonHandler()})


def save_step(path: Path, seed: int) -> None:
    """A step of a manager, with metrics and metadata; `path` ends in its number."""
    with ckpt.sync.CheckpointManager(path.parent) as mgr:
        state = {"w": np.arange(900.0) * seed, "n": seed}
        mgr.save(int(path.name), state, metrics=METRICS, custom_metadata=METADATA).result()


def formatted(path: Path, seed: int, codec: Any) -> None:
    formats = {"**": ckpt.ArrayFormat(compression=codec, chunk_bytes=1 << 16)}
    ckpt.sync.save(path, squeezable(seed), formats=formats)


KINDS: dict[str, Save] = {
    "plain": lambda path, seed: ckpt.sync.save(path, plain(seed)),
    "chunks": lambda path, seed: formatted(path, seed, None),
    "zstd": lambda path, seed: formatted(path, seed, "zstd"),
    "blosc": lambda path, seed: formatted(path, seed, "blosc"),
    "sharded": lambda path, seed: ckpt.sync.save(path, on_a_mesh(seed)),
    "items": save_items,
    "step": save_step,
}
GOLDENS = {
    "v1-data-files/final": "v1-data-files/shards",
    "v1-data-files/run/5": "v1-data-files/final",
    "v1-data-files/shards": "v1-data-files/final",
    "v1-items": "v1-data-files/run/5",
}
# Of this one the item `model` holds a function, which only a target brings back.
WANTED = {"v1-items": ("config", "notes", "blob", "random", "loader")}


def specimens(directory: Path, *, golden: bool = True) -> Iterator[Specimen]:
    """Make one checkpoint of every kind below a directory, one after the other."""
    for name, save in KINDS.items():
        # Numbers, since one of them is a step.
        path, other = (directory / name / number for number in "12")
        save(path, 1)
        save(other, 2)
        yield Specimen(name, path, other, comparable(ckpt.sync.load(path)), None)
    for name, other_name in GOLDENS.items() if golden else ():
        path = Path(shutil.copytree(GOLDEN / name, directory / "golden" / name))
        wanted = WANTED.get(name)
        expected = comparable(ckpt.sync.load(path, items=wanted))
        yield Specimen(name, path, GOLDEN / other_name, expected, wanted)
