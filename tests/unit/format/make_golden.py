"""Write the golden checkpoints of the present writer, on purpose.

    python tests/unit/format/make_golden.py

Every byte of what it writes is committed below `golden/v1-data-files/`, and `test_golden.py` checks
that it stays readable, as it does for every earlier set. Those are never written again, and this
script refuses to: they stand for what is on the disks of users. A new format version, or another
way of writing an old one, gets a set of its own.
"""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import ckpt
from ckpt._plan import chunking

GOLDEN = Path(__file__).parent / "golden"
# Sets by name; the last is what this script writes.
SETS = ("v1-data-files",)
STEP = 5
METRICS = {"loss": 0.125, "steps per second": 3, "diverged": float("inf")}
METADATA = {"git": "0f5e", "tags": ["golden", None, True], "rate": 1e-4}

# The module is named, so that the classes are the same ones when this file runs as a script.
Moments = namedtuple("Moments", ["mean", "variance"], module="make_golden")
# A class that no later process has.
Forgotten = namedtuple("Forgotten", ["value"], module="a_module_that_is_gone")


@dataclass
class Settings:
    """A class registered with jax, known by its name only when it is loaded."""

    width: Any
    mask: Any


Settings.__module__ = "make_golden"
jax.tree_util.register_dataclass(Settings)

# Name and significant bits of every dtype of format version 1.
DTYPES = {
    "bool": 1,
    "int2": 2,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint2": 2,
    "uint4": 4,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
    "float4_e2m1fn": 4,
    "float8_e3m4": 8,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
}


def pattern(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Return an array whose bytes count up: the same on every machine, whatever the dtype."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.arange(int(np.prod(shape)) * kind.itemsize) % (1 << min(DTYPES[dtype], 8))
    return values.astype(np.uint8).view(kind).reshape(shape)


def mesh() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))


def placed(dtype: str, shape: tuple[int, ...], *spec: Any) -> jax.Array:
    return jax.device_put(pattern(dtype, *shape), NamedSharding(mesh(), PartitionSpec(*spec)))


def final_state() -> dict[str, Any]:
    """Return the tree of the one-shot checkpoint: a leaf and a container of every kind."""
    return {
        "device": {
            "both axes": placed("float32", (8, 4), "data", "model"),
            "one axis": placed("bfloat16", (16,), ("data", "model")),
            "partly replicated": placed("int8", (4, 3), "data"),
            "replicated": placed("bool", (5,)),
            "one device": jax.device_put(pattern("uint16", 2, 2), jax.devices()[3]),
            "uncommitted": jnp.asarray(pattern("float16", 3)),
            "uncommitted scalar": jnp.float32(1.5),
            "committed scalar": placed("int32", ()),
            "weakly typed": jnp.asarray(2.5),
            "without elements": jnp.zeros((0, 3)),
            # Larger than what is packed: a chunk for every shard.
            "large": placed("float32", (8, 8200), ("data", "model")),
        },
        "host": {name: pattern(name, 2, 3) for name in DTYPES}
        | {
            # Larger than what is packed, of a length that no small number divides: the second of
            # its two chunks reaches beyond the array.
            "ragged": pattern("uint8", 262_147),
            "without elements": np.zeros((2, 0), np.int16),
            "no dimension": np.array(7, np.int16),
            "scalar": np.float32(0.1),
            "Fortran order": np.asfortranarray(pattern("int32", 3, 2)),
        },
        "values": {
            "true": True,
            "int": -12,
            "big": 2**80 + 1,
            "float": 0.1,
            "nan": float("nan"),
            "minus zero": -0.0,
            "complex": complex(1, -0.0),
            "text": "Grüße\n\0",
            "bytes": bytes(range(256)),
        },
        "keys": {
            "": 1,
            "a.b": 2,
            "a": {"b": 3},
            "50%": 4,
            "x/y\\z": 5,
            "ключ": 6,
            "two words\t": 7,
            "numbers": {-1: 1, 0: 2, 7: 3},
            "floats": {0.5: 1, float("-inf"): 2},
            "flags": {False: 1, True: 2},
            "bytes": {b"\xff": 1},
            "tuples": {("a", 1): 1, ("a", 2): 2},
            "alike": OrderedDict([("1", 1), (1, 2)]),
        },
        "containers": {
            "list": [1, [2], []],
            "tuple": (1, (2,), ()),
            "ordered": OrderedDict([("z", 1), ("a", 2)]),
            "default": defaultdict(list, {"k": 1}),
            "moments": Moments(jnp.ones(2), [np.int8(3)]),
            "forgotten": Forgotten(11),
            "settings": Settings(width=256, mask=placed("bool", (4,), "data")),
            "nothing": None,
            "empty": {},
        },
    }


def step_items() -> dict[str, Any]:
    """Return the items of the manager's step."""
    return {
        "params": {"dense": {"kernel": placed("bfloat16", (4, 4), None, "model"), "bias": 0}},
        "opt": [Moments(placed("float32", (4,)), None), np.int64(3)],
        "seed": 42,
    }


def sharded_state() -> dict[str, Any]:
    """Return arrays that cannot be cut into equal chunks: shards and sides of prime length."""
    return {
        "crossing rows": placed("float32", (8 * 37, 13), ("data", "model")),
        "crossing columns": placed("int16", (4, 2 * 1201), "data", "model"),
        "crossing and replicated": placed("bfloat16", (2 * 1201,), "model"),
        "truth values": placed("bool", (8 * 1409,), ("data", "model")),
        "less than bytes": placed("int4", (4 * 1409,), "data"),
        "ragged columns": pattern("uint8", 3, 1201),
        "not ragged": placed("int32", (64, 64), "data"),
        "packed": placed("int8", (8, 2), "data"),
    }


def write(directory: Path) -> None:
    # The smallest budget makes several batches of little data, and so several data files.
    staging = ckpt.Staging(budget_bytes=1 << 20)
    ckpt.sync.save(
        directory / "final",
        final_state(),
        custom_metadata=METADATA,
        staging=staging,
        extensions=[ckpt.extensions.VitalSigns()],
    )
    with ckpt.sync.CheckpointManager(
        directory / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        mgr.save(STEP, items=step_items(), metrics=METRICS, custom_metadata=METADATA)
    # Any chunks and batches are valid; tiny ones keep what is committed small.
    limits = {"PACKED_BYTES": 64, "CHUNK_BYTES": 1024, "BATCH_BYTES": 8192}
    with mock.patch.multiple(chunking, **limits):  # type: ignore[call-overload]
        ckpt.sync.save(
            directory / "shards", sharded_state(), extensions=[ckpt.extensions.VitalSigns()]
        )


def main(name: str = SETS[-1]) -> None:
    if name != SETS[-1]:
        raise SystemExit(f"{name} stays as it is; only {SETS[-1]} is written")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    directory = GOLDEN / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
