"""Models of others: adopted, loaded onto devices, converted and merged, beside the disk alone.

Every measurement is a new process. What is compared takes turns, and each round begins with the
other one. Disks are read and written past the page cache, as the library does it.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import struct
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.memory import Sampler
from benchmarks.rounds import cpu_devices, in_new_process, in_new_processes
from benchmarks.tables import size, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GIB, MIB = 1 << 30, 1 << 20
BUDGET = 256 * MIB
_DEVICES = 8
_PIECE = 16 * MIB


def sparse_model(folder: Path, files: int, nbytes: int) -> None:
    """Makes files of safetensors with headers alone; the disk has nothing of the tensors."""
    folder.mkdir()
    listed: dict[str, str] = {}
    each = nbytes // 20 // 8192 * 8192
    for number in range(files):
        head = {
            f"layers.{number}.{part}.weight": {
                "dtype": "BF16",
                "shape": [each // 2 // 4096, 4096],
                "data_offsets": [part * each, (part + 1) * each],
            }
            for part in range(20)
        }
        data = json.dumps(head).encode()
        file = folder / f"model-{number:05}.safetensors"
        with file.open("wb") as made:
            made.write(struct.pack("<Q", len(data)) + data)
            made.truncate(8 + len(data) + 20 * each)
        listed |= dict.fromkeys(head, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def adopt(folder: Path) -> dict[str, float]:
    """Returns how long it takes to adopt a model, and how many bytes are read."""
    import ckpt.sync

    target = folder.parent / "adopted"
    before, began = _bytes_read(), time.perf_counter()
    info = ckpt.sync.adopt(folder, target)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return {"seconds": seconds, "read": _bytes_read() - before, "nbytes": info.nbytes}


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def save_model(path: Path, arrays: int, side: int) -> None:
    """Writes a model in safetensors, which stays in the page cache."""
    from safetensors.numpy import save_file

    value = np.random.default_rng(0).standard_normal((side, side), np.float32)
    save_file(
        {f"layers.{number:03}.w": value + np.float32(number) for number in range(arrays)}, path
    )


def load(path: Path, how: str) -> dict[str, float]:
    """Returns how long it takes from the imports until a model is on all devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    began = time.perf_counter()
    if how == "ckpt":
        import ckpt.sync

        target = ckpt.sync.metadata(path).target(lambda leaf: rows)
        found = ckpt.sync.load(path, like=target)
    else:
        from safetensors.flax import load_file

        found = {name: jax.device_put(each, rows) for name, each in load_file(path).items()}
    jax.block_until_ready(found)
    return {"seconds": time.perf_counter() - began}


def save_steps(folder: Path, arrays: int, side: int) -> None:
    """Saves two steps with the same leaves."""
    import ckpt.sync

    value = np.random.default_rng(0).standard_normal((side, side), np.float32)
    with ckpt.sync.CheckpointManager(folder, staging=ckpt.Staging(BUDGET)) as mgr:
        for step in (1, 2):
            with mgr.partial(step) as part:
                for number in range(arrays):
                    part.save({f"w{number:03}": value + np.float32(number + step)})


def convert(folder: Path, how: str) -> dict[str, float]:
    """Returns how long a conversion takes, and how far memory grows."""
    import jax

    import ckpt.sync
    from ckpt._calls import conversion  # noqa: F401

    jax.devices()
    source: Any = folder / "1"
    if how == "merge":
        source = {folder / "1": 0.5, folder / "2": 0.5}
    target = folder / "converted"
    format: Any = "ckpt" if how == "merge" else how
    with Sampler() as sampler:
        before = sampler.start()["total"]
        began = time.perf_counter()
        ckpt.sync.convert(source, target, format=format, budget_bytes=BUDGET)
        seconds = time.perf_counter() - began
        grown = sampler.stop()["total"] - before
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return {"seconds": seconds, "grown": grown}


def disk(folder: Path, nbytes: int) -> dict[str, float]:
    """Returns how long the disk takes to write and to read so many bytes, each alone."""
    path, piece = folder / "disk", mmap.mmap(-1, _PIECE)
    piece[:] = os.urandom(MIB) * (_PIECE // MIB)
    found = {}
    for name, flags, move in (
        ("write", os.O_WRONLY | os.O_CREAT, os.pwritev),
        ("read", os.O_RDONLY, os.preadv),
    ):
        fd = os.open(path, flags | os.O_DIRECT)
        began = time.perf_counter()
        for start in range(0, max(nbytes // _PIECE, 1) * _PIECE, _PIECE):
            move(fd, [piece], start)
        os.fsync(fd)
        found[name] = time.perf_counter() - began
        os.close(fd)
    path.unlink()
    return found


def slices(folder: Path) -> dict[str, float]:
    """Returns how many bytes are read for rows of one array."""
    import ckpt.sync

    array = ckpt.sync.open_array(folder / "1", "w001")
    before = _bytes_read()
    assert array[5:7].any()
    return {"read": _bytes_read() - before, "whole": array.nbytes}


def foreign(place: Path, *, rounds: int = 5, smoke: bool = False) -> str:
    """Returns how fast models of others are read, converted and merged."""
    rows: list[tuple[str, str, str, str]] = []

    def row(work: str, measured: str, goal: str, is_met: bool) -> None:
        rows.append((work, measured, goal, "met" if is_met else "missed"))

    # Of all arrays of 32 MiB; tiny ones where it is only to be seen that it runs.
    side = 64 if smoke else 2896
    sparse_model(place / "sparse", 2 if smoke else 20, MIB if smoke else 5 * GIB)
    found = _medians({"adopt": partial(adopt, place / "sparse")}, rounds)["adopt"]
    row(
        f"adopt {size(int(found['nbytes']))} of safetensors (sparse files)",
        f"{found['seconds']:.2f} s, {size(int(found['read']))} read",
        "under 2 s, no byte of data",
        found["seconds"] < 2 and found["read"] < MIB,
    )

    path = place / "model.safetensors"
    in_new_process(save_model, path, 2 if smoke else 32, side)
    with cpu_devices(_DEVICES):
        both = _medians({how: partial(load, path, how) for how in ("ckpt", "peer")}, rounds)
    ours, theirs = both["ckpt"]["seconds"], both["peer"]["seconds"]
    row(
        f"load {path.stat().st_size / GIB:.1f} GiB of safetensors onto {_DEVICES} devices",
        f"{ours:.2f} s; `load_file` and `device_put` {theirs:.2f} s",
        "as fast",
        ours <= theirs,
    )
    path.unlink()

    folder, arrays = place / "run", 2 if smoke else 128
    in_new_process(save_steps, folder, arrays, side)
    nbytes = arrays * side * side * 4
    works = {how: f"convert to {how}" for how in ("ckpt", "safetensors", "zarr")}
    works["merge"] = "merge two checkpoints"
    calls = {how: partial(convert, folder, how) for how in works}
    by = _medians({**calls, "disk": partial(disk, place, nbytes)}, rounds)
    for how, work in works.items():
        # The disk alone reads everything, and then writes it.
        alone = by["disk"]["read"] * (2 if how == "merge" else 1) + by["disk"]["write"]
        share = alone / by[how]["seconds"]
        row(
            f"{work}, {nbytes / GIB:.1f} GiB each",
            f"{by[how]['seconds']:.1f} s; the disk alone {alone:.1f} s: {share:.2f}",
            "0.8",
            share >= 0.8,
        )
        grown = int(by[how]["grown"])
        row("", f"memory grows by {size(grown)}", "256 MiB", grown <= BUDGET)

    one = in_new_process(slices, folder)
    row(
        f"two rows of an array of {size(int(one['whole']))}",
        f"{size(int(one['read']))} read",
        "the chunks that they touch",
        one["read"] <= one["whole"] + MIB,
    )
    text = table(("work", "measured", "goal", ""), rows)
    return f"{text}\n\nMedians of {rounds} rounds, each in a new process."


def _medians(
    calls: Mapping[str, Callable[[], dict[str, float]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Returns the medians of what calls give, each in a process of its own, in turns."""
    return {
        name: {what: statistics.median(each[what] for each in found) for what in found[0]}
        for name, found in in_new_processes(calls, rounds).items()
    }
