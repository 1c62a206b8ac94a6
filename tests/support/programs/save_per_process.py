"""One process of a job whose processes have iterators and generators of their own.

`save_per_process.py ROOT save` saves step 1, goes on, and restores what it saved; with
`save_apart` every process has a root of its own. `save_per_process.py ROOT restore` restores what
another job saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import OwnDisks
from tests.support.real_jobs import tell

root, what = Path(sys.argv[1]), sys.argv[2]
index, count = jax.process_index(), jax.process_count()
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
numbers = np.arange(96, dtype=np.float32).reshape(24, 4)


class Averages:
    """Its state is a tree with arrays."""

    def __init__(self, value: float) -> None:
        self.means = np.full((3, 2), value)

    def get_state(self) -> Any:
        return {"means": self.means, "last": jax.numpy.asarray(self.means[0])}

    def set_state(self, state: Any) -> None:
        self.means = state["means"] + 0 * np.asarray(state["last"])


class Progress:
    """A state that is the same in all processes."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def state_dict(self) -> Any:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


def data(process: int, processes: int) -> Any:
    """A stream of which every process has every so-manieth element."""
    stream = grain.MapDataset.range(1000).shuffle(seed=3)[process::processes]
    return iter(stream.to_iter_dataset())


def items(seed: int) -> dict[str, Any]:
    return {
        "model": {"w": jax.make_array_from_callback((24, 4), rows, lambda at: numbers[at])},
        "data": data(index, count),
        "random": np.random.default_rng(seed),
        "averages": Averages(float(seed)),
        "progress": Progress(7),
        "notes": f"of process {index}",
    }


def following(found: dict[str, Any]) -> list[Any]:
    """What everything gives next."""
    batches = [int(next(found["data"])) for _ in range(3)]
    return [*batches, float(found["random"].random()), found["averages"].means.tolist()]


def targets() -> dict[str, Any]:
    target = jax.ShapeDtypeStruct((24, 4), np.float32, sharding=rows)
    return items(99) | {"model": {"w": target}, "progress": Progress(0), "notes": None}


def is_right(array: Any) -> bool:
    return all(
        (np.asarray(shard.data) == numbers[shard.index]).all() for shard in array.addressable_shards
    )


def save_apart() -> None:
    save(root / str(index), coordinator=OwnDisks(JaxDistributed()))


def save(place: Path = root, **options: Any) -> None:
    saved = items(index)
    for _ in range(5 + index):
        next(saved["data"])
    saved["random"].random(index)
    with ckpt.sync.CheckpointManager(place, **options) as manager:
        commit = manager.save(1, items=saved)
        expected = following(saved)
        commit.result()
        found = manager.restore(1, items=targets())
    tell(
        {
            "expected": expected,
            "found": following(found),
            "model": is_right(found["model"]["w"]),
            "progress": found["progress"].seen,
            "notes": found["notes"],
        }
    )


def restore() -> None:
    found: dict[str, Any] = {}
    with ckpt.sync.CheckpointManager(root) as manager:
        for name in ("data", "random", "averages"):
            try:
                manager.restore(1, items={name: targets()[name]})
            except ckpt.errors.TargetMismatchError as error:
                found[name] = str(error)
        rest = {name: each for name, each in targets().items() if name not in found}
        others = manager.restore(1, items=rest)
    found["progress"] = others["progress"].seen
    found["model"] = is_right(others["model"]["w"])
    found["notes"] = others["notes"]
    tell(found)


{"save": save, "save_apart": save_apart, "restore": restore}[what]()
