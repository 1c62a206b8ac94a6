"""One process of a job that restores what a single process saved: `restore_in_job.py ROOT WHAT...`.

Arrays are compared shard by shard with what `values` makes; nothing is ever compared across
processes, so that each can run alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import restore_items
from ckpt._format.manifest import decode, encode
from ckpt._settings import Staging
from ckpt._steps.restore_arguments import wanted_items
from ckpt._steps.restore_options import RestoreOptions
from ckpt._steps.service import make_engine
from ckpt.storage._manifests import read_manifest
from ckpt.storage._resolve import open_step_dir
from tests.support.real_jobs import at, tell

root = Path(sys.argv[1])
devices = jax.devices()
index, count = jax.process_index(), jax.process_count()
names = json.loads((root / "dtypes.json").read_text())


def values(name: str) -> np.ndarray[Any, Any]:
    """What is stored under a name; written by the test with the same rule."""
    shape, dtype = names[name]
    flat = np.arange(int(np.prod(shape))) % 251 + len(name)
    return flat.astype(dtype).reshape(shape)


def wrong(name: str, array: Any, wanted: Any = None) -> str | None:
    """Return what is wrong with the parts of an array that this process has, or None."""
    whole = values(name) if wanted is None else wanted
    data = jax.random.key_data(array) if name == "keys" else array
    if tuple(data.shape) != whole.shape:
        return f"{name}: shape {data.shape}"
    for shard in data.addressable_shards:
        found = np.asarray(shard.data)
        if found.dtype != data.dtype or not (found == whole[shard.index]).all():
            return f"{name}: {shard.index} is wrong"
    return None


def mesh(*shape: int, order: int = 1) -> Mesh:
    return Mesh(np.array(devices[::order]).reshape(shape), ("x", "y")[: len(shape)])


def like(name: str, sharding: Any, dtype: Any = None) -> Any:
    shape, stored = names[name]
    if name == "keys":
        kind = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4)).dtype
        return jax.ShapeDtypeStruct(shape[:-1], kind, sharding=sharding)
    return jax.ShapeDtypeStruct(tuple(shape), dtype or stored, sharding=sharding)


def targets() -> dict[str, Any]:
    """Restore onto every kind of target over all processes."""
    line, back = mesh(len(devices)), mesh(len(devices), order=-1)
    tiles = mesh(count, len(devices) // count)
    across = mesh(len(devices) // count, count)
    first = [device for device in devices if device.process_index == 0]
    kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else None
    wanted = {
        "rows": NamedSharding(line, P("x")),
        "columns": NamedSharding(back, P(None, "x")),
        "tiles": NamedSharding(across, P("x", "y")),
        "partly": NamedSharding(tiles, P("y")),
        "everywhere": NamedSharding(line, P()),
        "small": NamedSharding(tiles, P("y", "x")),
        "scalar": NamedSharding(line, P()),
        "keys": NamedSharding(across, P("x")),
        "host": NamedSharding(line, P("x"), memory_kind=kind),
        "empty": NamedSharding(line, P("x")),
        "of the first": NamedSharding(Mesh(np.array(first), ("x",)), P("x")),
        "small of the first": SingleDeviceSharding(first[-1]),
    }
    target: dict[str, Any] = {name: like(name, sharding) for name, sharding in wanted.items()}
    target["cast"] = like("cast", wanted["rows"], jnp.bfloat16)
    alone = {"sharding": wanted["scalar"]}
    target["counter"] = jax.ShapeDtypeStruct((), jnp.int32, **alone)
    target["weak"] = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True, **alone)
    target["numpy"] = np.empty(*names["numpy"])
    target["left out"] = ...
    timed: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        timed.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = ckpt.sync.load(root / "x", target)
    programs = [event for event in timed if "backend_compile" in event]
    problems = [wrong(name, found[name]) for name in wanted]
    problems.append(wrong("cast", found["cast"]))
    problems += [
        f"{name}: {found[name].sharding}"
        for name in wanted
        if name != "keys" and found[name].sharding != wanted[name]
    ]
    checks = {
        "cast": found["cast"].dtype == jnp.bfloat16,
        "counter": int(found["counter"].addressable_data(0)) == 7,
        "weak": (float(found["weak"].addressable_data(0)), found["weak"].weak_type) == (2.5, True),
        "numpy": bool((found["numpy"] == values("numpy")).all()),
        "left out": found["left out"] is ...,
        "key": bool(jnp.issubdtype(found["keys"].dtype, jax.dtypes.prng_key)),
    }
    # Parts of several stored arrays.
    surgery = ckpt.Adapt(
        select=["rows", "tiles"],
        transforms=[ckpt.surgery.concatenate(["rows", "tiles"], to="both", axis=1)],
    )
    rows, columns = names["rows"][0]
    shape = (rows, 2 * columns)
    both = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(across, P("x", "y")))
    joined = ckpt.sync.load(root / "x", {"both": both}, adapt=surgery)["both"]
    # Branches of several checkpoints.
    sources: dict[str, Any] = {"a.rows": ckpt.Source(root / "x", "rows"), "tiles": root / "x"}
    places = {"a": {"rows": target["rows"]}, "tiles": target["tiles"]}
    several: Any = ckpt.sync.load(sources, places)
    problems.append(wrong("rows", several["a"]["rows"]))
    problems.append(wrong("tiles", several["tiles"]))
    side_by_side = np.concatenate([values("rows"), values("tiles")], 1)
    problems.append(wrong("both", joined, side_by_side))
    # All processes run this one, and jax finds the arrays to be what they say.
    total = jax.jit(lambda tree: sum(leaf.astype(jnp.float32).sum() for leaf in tree))(
        [found[name] for name in ("rows", "tiles", "everywhere", "small")]
    )
    return {
        "problems": [problem for problem in problems if problem],
        "checks": {name: bool(is_right) for name, is_right in checks.items()},
        "programs": programs,
        "total": float(total.addressable_data(0)),
        "warnings": taken_warnings(),
    }


def taken_warnings() -> list[str]:
    taken = list(warnings)
    warnings.clear()
    return taken


async def restored(target: Any) -> tuple[Any, list[Any]]:
    """Restore a few leaves as one process alone does, and tell what it did."""
    events: list[Any] = []
    engine = make_engine(Staging(), (), [events.append])
    storage, step_dir = open_step_dir(root / "x", follow=True)
    manifest = await read_manifest(storage, step_dir)
    options = RestoreOptions(like=target, adapt=ckpt.Adapt(extra="ignore"))
    wanted = wanted_items(manifest, options)
    restore = RestoreContext(storage, step_dir, manifest, engine, engine.observers, index, count)
    found = await restore_items(restore, wanted)
    return found["default"], events


def shares() -> dict[str, Any]:
    """Tell how many bytes of each array this process reads, and that it waits for no other."""
    line, square = mesh(len(devices)), mesh(2, len(devices) // 2)
    layouts = {
        "rows": NamedSharding(line, P("x")),
        "columns": NamedSharding(line, P(None, "x")),
        "tiles": NamedSharding(square, P("x", "y")),
        "partly": NamedSharding(square, P("y")),
        "everywhere": NamedSharding(line, P()),
    }
    read: dict[str, int] = {}
    if index == 0:
        at("others have read")
    for name, sharding in layouts.items():
        found, events = asyncio.run(restored({name: like(name, sharding)}))
        assert wrong(name, found[name]) is None
        read[name] = sum(event.nbytes for event in events if event.phase == "read")
    if index > 0:
        at("has read")
    return read


def places(sharding: Any) -> list[str]:
    """Return the devices as process and place in it: `1.0`."""
    found = sorted(sharding.device_set, key=lambda device: device.id)
    return [
        f"{device.process_index}.{jax.local_devices(device.process_index).index(device)}"
        for device in found
    ]


def untold() -> dict[str, Any]:
    """Restore without a target what was saved on devices of this job, as its ids are."""
    mine = root / f"copy-{count}-{index}"
    shutil.copytree(root / "y", mine)
    manifest = decode((mine / "ckpt.json").read_bytes(), where="")
    entry = manifest.items["default"]
    shardings = [
        replace(each, device_ids=[devices[number].id for number in each.device_ids])
        for each in entry.shardings
    ]
    items = {"default": replace(entry, shardings=shardings)}
    (mine / "ckpt.json").write_bytes(encode(replace(manifest, items=items)))
    found = ckpt.sync.load(mine)
    return {
        "problems": [problem for name in found if (problem := wrong(name, found[name]))],
        "devices": {name: places(array.sharding) for name, array in found.items()},
        "specs": {name: [*getattr(a.sharding, "spec", ())] for name, a in found.items()},
        "committed": {name: array.committed for name, array in found.items()},
        "warnings": taken_warnings(),
    }


class Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


warnings: list[str] = []
logging.getLogger("ckpt").addHandler(Handler(logging.WARNING))
phases = {"targets": targets, "shares": shares, "untold": untold}
tell({what: phases[what]() for what in sys.argv[2:]})
