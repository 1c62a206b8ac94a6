"""Write the golden checkpoint of items and leaves of every kind, on purpose.

    python tests/unit/format/make_golden_items.py

What it writes is committed as `golden/v1-items/` and is never written again; see `make_golden.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt

GOLDEN = Path(__file__).parent / "golden" / "v1-items"
MODULE = "make_golden_items"


class Mode(enum.Enum):
    """Stands in static data and in keys."""

    TRAIN = 1


@dataclasses.dataclass
class Layer:
    """A registered dataclass with static fields."""

    kernel: Any
    mode: Mode = dataclasses.field(metadata={"static": True})
    width: tuple[int, ...] = dataclasses.field(metadata={"static": True})


class Box:
    """A class around a single value, with auxiliary data."""

    def __init__(self, value: Any, names: tuple[str | None, ...]) -> None:
        self.value, self.names = value, names


class Loader:
    """An object with a state."""

    def __init__(self, position: int) -> None:
        self.state: Any = {"position": position}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


# The module is named, so that the classes are the same ones when this file runs as a script.
for kind in (Mode, Layer, Box):
    kind.__module__ = MODULE
jax.tree_util.register_dataclass(Layer)
jax.tree_util.register_pytree_with_keys(
    Box,
    lambda box: ([(jax.tree_util.GetAttrKey("value"), box.value)], box.names),
    lambda names, children: Box(*children, names),  # type: ignore[call-arg]
)


def state() -> dict[str, Any]:
    """Return a tree of the kinds of nodes and leaves that the first sets do not have."""
    shared = jnp.arange(70_000, dtype=jnp.float32)
    return {
        "keys": {
            "threefry": jax.random.key(7),
            "rbg": jax.random.split(jax.random.key(8, impl="rbg"), (2, 3)),
        },
        "tied": [shared, {"again": shared}],
        "weak": jnp.asarray(1.5),
        "layer": Layer(jnp.ones((2, 3)), Mode.TRAIN, (3, 2)),
        "box": Box(jnp.zeros(4), ("data", None)),
        "odd": {(1, ("a", None)): 1, (2, ("b", 0.5)): b"\x00"},
        "long" * 500: {"x" * 2000: 3},
        "host": [np.str_("text"), np.bytes_(b"raw"), 2**100],
        "function": jax.nn.relu,
        "squeezed": np.zeros((300, 300), np.float32),
        "rounded": np.linspace(0, 1, 8, dtype=np.float32),
    }


def items() -> dict[str, Any]:
    """Return an item for every built-in handler that needs no other library."""
    return {
        "model": state(),
        "config": {"rate": 1e-4, "tags": ["a", None, True]},
        "notes": "sch\u00f6n",
        "blob": bytes(range(256)),
        "random": np.random.Generator(np.random.PCG64(3)),
        "loader": Loader(11),
    }


def main() -> None:
    """Write it; what is there already is never replaced."""
    if GOLDEN.exists():
        sys.exit(f"{GOLDEN} is on the disks of users: it stays as it is")
    formats = {
        "squeezed": ckpt.ArrayFormat(compression="zstd"),
        "rounded": ckpt.ArrayFormat(dtype="bfloat16"),
    }
    ckpt.sync.save(
        GOLDEN, items=items(), handlers={"config": ckpt.handlers.JsonHandler()}, formats=formats
    )


if __name__ == "__main__":
    sys.modules[MODULE] = sys.modules["__main__"]
    main()
