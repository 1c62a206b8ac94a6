"""One process of a job that saves and restores: `save_in_job.py WHAT ROOT [ARGS...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt._vitals.extension import device_pass, signs_of_saves
from ckpt._vitals.signs import box_signs
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import OwnDisks
from ckpt.errors import CheckpointError
from tests.support.real_jobs import tell

what, root = sys.argv[1], Path(sys.argv[2])
index, count = jax.process_index(), jax.process_count()
devices = np.array(jax.devices())
line = Mesh(devices, ("x",))
grid = Mesh(devices.reshape(count, -1), ("x", "y"))


def whole(name: str, shape: tuple[int, ...], dtype: Any, step: int) -> np.ndarray[Any, Any]:
    flat = np.arange(int(np.prod(shape)), dtype=np.int64) * 7 + len(name) + step
    return (flat % 239).astype(dtype).reshape(shape)


CHANGED = ("rows", "numpy")
LEAVES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "rows": ((64, 512), np.float32, NamedSharding(line, P("x"))),
    "large rows": ((512, 1024), np.float32, NamedSharding(line, P("x"))),
    "columns": ((512, 1024), np.float32, NamedSharding(line, P(None, "x"))),
    "tiles": ((512, 1024), np.float32, NamedSharding(grid, P("x", "y"))),
    "replicas": ((512, 2048), np.float32, NamedSharding(line, P())),
    "half": ((512, 1024), jnp.bfloat16, NamedSharding(grid, P("y"))),
    "small": ((16,), np.int32, NamedSharding(line, P("x"))),
    "scalar": ((), np.float32, NamedSharding(line, P())),
    "empty": ((8, 0), np.float32, NamedSharding(line, P())),
}


def state(step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (shape, dtype, sharding) in LEAVES.items():
        values = whole(name, shape, dtype, step)
        found[name] = jax.make_array_from_callback(shape, sharding, values.__getitem__)
    found["key"] = jax.jit(lambda: jax.random.key(step), out_shardings=NamedSharding(line, P()))()
    found["numpy"] = whole("numpy", (300, 7), np.int16, step)
    found["host"] = jnp.full((3,), step, jnp.int32)
    found["count"] = step
    found["nested"] = [{"name": "ckpt"}, None, (1.5, True)]
    return found


def wrong(
    found: dict[str, Any], step: int, changed: Sequence[str] = (), later: int = 0
) -> list[str]:
    """Return what of a restored state is not what was saved, as far as this process sees it.

    Leaves that `changed` are those of a `later` step.
    """
    problems = []
    for name, (shape, dtype, _) in LEAVES.items():
        values = whole(name, shape, dtype, later if name in changed else step)
        array = found[name]
        if array.shape != shape or array.dtype != dtype:
            problems.append(f"{name}: {array.dtype}{array.shape}")
        problems += [
            f"{name}: {shard.index}"
            for shard in array.addressable_shards
            if not np.array_equal(np.asarray(shard.data), values[shard.index])
        ]
    expected = state(step) | {name: state(later)[name] for name in changed}
    for name in ("numpy", "host", "count", "nested"):
        same = jax.tree.map(np.array_equal, found[name], expected[name])
        if not all(jax.tree.leaves(same)):
            problems.append(name)
    for one, other in zip(
        found["key"].addressable_shards, expected["key"].addressable_shards, strict=True
    ):
        data = [np.asarray(jax.random.key_data(each.data)) for each in (one, other)]
        if not np.array_equal(data[0], data[1]):
            problems.append("key")
    return problems


def of_integers(*box: Any) -> Any:
    """Take the signs of a box, but not of what devices should have looked at."""
    assert box[3].kind == "i", f"the host takes the signs of {box[3]}{box[2]}"
    return box_signs(*box)


def roundtrip() -> None:
    """Save steps, with all a manager may be asked, and restore.

    With modes of vital signs, `ROOT MODE...`, do so for each, below ROOT, with step 3 alone.
    """
    for mode in sys.argv[3:]:
        roundtrip_at(root / mode, mode, (3,))
    if not sys.argv[3:]:
        roundtrip_at(root, "auto", (1, 2, 3))


def roundtrip_at(root: Path, mode: Any, numbers: tuple[int, ...]) -> None:
    if mode == "device":
        # The shards of these arrays are small.
        device_pass._LEAST_BYTES = 1
        vars(signs_of_saves)["box_signs"] = of_integers
    with ckpt.sync.CheckpointManager(
        root,
        keep=ckpt.keep.Latest(2),
        custom_metadata={"run": "one"},
        extensions=[ckpt.extensions.VitalSigns(mode)],
    ) as mgr:
        for step in numbers:
            info = mgr.save(step, state(step), metrics={"loss": 1.0 / step}).result(60)
            assert info is not None
            assert info.step == step
        mgr.wait_until_finished()
        steps = mgr.all_steps() if index == 0 else [2, 3]
        problems = wrong(mgr.restore(like=state(0)), 3)
        if 2 in numbers:
            problems += wrong(mgr.restore(2), 2)
    assert info is not None
    tell({"steps": steps, "problems": problems, "info": [info.nbytes, list(info.items)]})


def shared() -> None:
    """Save steps that have most of their arrays in common: the same ones, then equal ones."""
    kept, problems = state(0), []
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in (1, 2, 3):
            if step == 3:
                kept = state(0)
            changed = {name: state(step)[name] for name in CHANGED}
            mgr.save(step, kept | changed).result(60)
        for step in (1, 2, 3):
            problems += wrong(mgr.restore(step, like=state(0)), 0, CHANGED, step)
    tell({"problems": problems})


def apart() -> None:
    """Save and restore where every process has a disk of its own."""
    job = OwnDisks(JaxDistributed())
    kind = sys.argv[3]
    own = root / f"disk {index}"
    told: dict[str, Any] = {}
    timeouts = ckpt.Timeouts(coordination=10.0)
    with ckpt.sync.CheckpointManager(
        own, coordinator=job, timeouts=timeouts, extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        if kind == "save":
            for step in (1, 2, 3):
                mgr.save(step, state(step), metrics={"loss": 1.0}).result(60)
            mgr.delete(1)
        try:
            told["problems"] = wrong(mgr.restore(like=state(0)), int(sys.argv[4]))
        except CheckpointError as error:
            told["error"] = f"{type(error).__name__}: {error}"
        told["steps"] = mgr.all_steps()
        told["ok"] = [mgr.verify(step).ok for step in told["steps"]]
    tell(told)


def drifting_apart() -> None:
    """Save such arrays where every process has a disk of its own."""
    drifting(root / str(index), OwnDisks(JaxDistributed()))


def drifting(place: Path = root, job: OwnDisks | None = None) -> None:
    """Save arrays that the processes should have alike, and some do not.

    Each argument is a step, and names the processes that have others in it: `1,2`, or `none`.
    """
    good = whole("good", (768, 1024), np.float32, 1)
    with ckpt.sync.CheckpointManager(
        place, coordinator=job, extensions=[ckpt.extensions.VitalSigns("device")]
    ) as mgr:
        for step, which in enumerate(sys.argv[3:], 1):
            bad = good + (str(index) in which.split(","))
            state = {
                name: jax.make_array_from_callback(good.shape, sharding, values.__getitem__)
                for name, sharding, values in (
                    ("good", NamedSharding(line, P()), good),
                    ("bad", NamedSharding(line, P()), bad),
                    # Each process has a part of it, once.
                    ("own", NamedSharding(line, P("x")), bad),
                )
            }
            info = mgr.save(step, state).result(60)
            assert info is not None
            is_asked = index == 0 or job is not None
            tell({"unequal": info.unequal_leaves, "ok": mgr.verify(step).ok if is_asked else None})


def elsewhere() -> None:
    """Save an array of which the last process has no part."""
    values = whole("elsewhere", (512, 1024), np.float32, 1)
    sharding = NamedSharding(Mesh(devices[:-1], ("x",)), P("x"))
    array = jax.make_array_from_callback(
        values.shape, sharding, values.__getitem__, dtype=values.dtype
    )
    with ckpt.sync.CheckpointManager(root, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(1, {"elsewhere": array}).result(60)
    tell("saved")


def restored() -> None:
    """Restore what a job of another size has saved."""
    step = int(sys.argv[3])
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        problems = wrong(mgr.restore(like=state(0)), step)
        report = mgr.verify()
    tell({"problems": problems, "ok": report.ok, "damage": list(map(str, report.problems))})


def refused() -> None:
    """Do what all processes must do alike, and do not; `ROOT KIND...`, each below ROOT."""
    tree = state(1)
    for kind in sys.argv[3:]:
        # Each waits in vain from now on, where it does.
        multihost_utils.sync_global_devices(kind)
        try:
            save_unlike(kind, root / kind, dict(tree))
            tell({})
        except CheckpointError as error:
            tell({"kind": type(error).__name__, "text": str(error)})


def save_unlike(kind: str, root: Path, tree: dict[str, Any]) -> None:
    where = root / f"{index}" if kind == "root" else root
    timeouts = ckpt.Timeouts(coordination=3.0)
    with ckpt.sync.CheckpointManager(where, timeouts=timeouts) as mgr:
        step = 1
        if kind == "step" and index == 1:
            step = 2
        if kind == "structure" and index == 1:
            tree["more"] = 1
        if kind == "shape" and index == 1:
            tree["numpy"] = tree["numpy"][1:]
        if kind == "value" and index == 1:
            tree["count"] = 7
        if kind == "items":
            items = {"model": tree} | ({"more": {"a": 1}} if index == 1 else {})
            mgr.save(step, items=items).result(60)
        else:
            mgr.save(step, tree).result(60)


{
    "roundtrip": roundtrip,
    "shared": shared,
    "restored": restored,
    "apart": apart,
    "refused": refused,
    "drifting": drifting,
    "drifting_apart": drifting_apart,
    "elsewhere": elsewhere,
}[what]()
