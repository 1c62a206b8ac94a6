"""Models of others: adopted, loaded onto devices, converted and merged, beside the disk alone.

    python -m benchmarks.foreign [--rounds N] [--dir DISK] [--page PAGE] [--smoke]

Every measurement is a new process. What is compared takes turns, and each round begins with the
other one. Disks are read and written past the page cache, as the library does it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import struct
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import figures
from benchmarks.processes import cpu_devices, in_new_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START, END = "<!-- foreign:start -->", "<!-- foreign:end -->"
GIB, MIB = 1 << 30, 1 << 20
BUDGET = 256 * MIB
_DEVICES = 8
_PIECE = 16 * MIB


class Sizes:
    """How large everything is."""

    def __init__(self, *, smoke: bool) -> None:
        """Use tiny sizes if it is only to be seen that it runs."""
        self.sparse_files = 2 if smoke else 20
        self.sparse_bytes = MIB if smoke else 5 * GIB
        self.model_arrays = 2 if smoke else 32
        self.stored_arrays = 2 if smoke else 128
        # Arrays of 32 MiB.
        self.side = 64 if smoke else 2896


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
    with Peak() as peak:
        began = time.perf_counter()
        if how == "ckpt":
            import ckpt.sync

            target = ckpt.sync.metadata(path).target(lambda leaf: rows)
            found = ckpt.sync.load(path, like=target)
        else:
            from safetensors.flax import load_file

            found = {name: jax.device_put(each, rows) for name, each in load_file(path).items()}
        jax.block_until_ready(found)
        seconds = time.perf_counter() - began
    nbytes = sum(each.nbytes for each in jax.tree.leaves(found))
    return {"seconds": seconds, "over": peak.grown - nbytes}


def save_steps(folder: Path, arrays: int, side: int) -> None:
    """Saves two steps with the same leaves."""
    import ckpt
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
    with Peak() as peak:
        began = time.perf_counter()
        done = ckpt.sync.convert(source, target, format=format, budget_bytes=BUDGET)
        seconds = time.perf_counter() - began
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    return {"seconds": seconds, "grown": peak.grown, "nbytes": done.nbytes}


def disk(folder: Path, nbytes: int) -> dict[str, float]:
    """Returns how long the disk takes to write and to read so many bytes, each alone."""
    path, piece = folder / "disk", mmap.mmap(-1, _PIECE)
    piece[:] = os.urandom(MIB) * (_PIECE // MIB)
    found = {}
    for name, flags in (("write", os.O_WRONLY | os.O_CREAT), ("read", os.O_RDONLY)):
        fd = os.open(path, flags | os.O_DIRECT)
        began = time.perf_counter()
        for start in range(0, max(nbytes // _PIECE, 1) * _PIECE, _PIECE):
            if name == "write":
                os.pwrite(fd, piece, start)
            else:
                os.preadv(fd, [piece], start)
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
    rows = array[5:7]
    return {"read": _bytes_read() - before, "nbytes": rows.nbytes, "whole": array.nbytes}


class Peak:
    """How far the memory of this process grows while the body runs."""

    def __enter__(self) -> Peak:
        self.grown = 0
        self._before = _resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.grown = max(self.grown, _resident() - self._before)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.grown = max(self.grown, _resident() - self._before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def measure(place: Path, rounds: int, *, smoke: bool) -> list[list[str]]:
    """Returns the rows of the table."""
    sizes = Sizes(smoke=smoke)
    rows = []

    sparse_model(place / "sparse", sizes.sparse_files, sizes.sparse_bytes)
    found = _medians({"adopt": partial(adopt, place / "sparse")}, rounds)["adopt"]
    rows.append(
        [
            f"adopt {figures.size(int(found['nbytes']))} of safetensors (sparse files)",
            f"{found['seconds']:.2f} s, {figures.size(int(found['read']))} read",
            "under 2 s, no byte of data",
            _met(found["seconds"] < 2 and found["read"] < MIB),
        ]
    )

    path = place / "model.safetensors"
    in_new_process(save_model, path, sizes.model_arrays, sizes.side)
    with cpu_devices(_DEVICES):
        both = _medians({how: partial(load, path, how) for how in ("ckpt", "peer")}, rounds)
    ours, theirs = both["ckpt"], both["peer"]
    rows.append(
        [
            f"load {_size(path.stat().st_size)} of safetensors onto {_DEVICES} devices",
            f"{ours['seconds']:.2f} s; `load_file` and `device_put` {theirs['seconds']:.2f} s",
            "as fast",
            _met(ours["seconds"] <= theirs["seconds"]),
        ]
    )
    path.unlink()

    folder = place / "run"
    in_new_process(save_steps, folder, sizes.stored_arrays, sizes.side)
    nbytes = sizes.stored_arrays * sizes.side * sizes.side * 4
    calls: dict[str, Callable[[], dict[str, float]]] = {
        how: partial(convert, folder, how) for how in ("ckpt", "safetensors", "zarr", "merge")
    }
    calls["disk"] = partial(disk, place, nbytes)
    by = _medians(calls, rounds)
    for how in ("ckpt", "safetensors", "zarr", "merge"):
        # The disk alone reads everything, and then writes it.
        alone = by["disk"]["read"] * (2 if how == "merge" else 1) + by["disk"]["write"]
        share = alone / by[how]["seconds"]
        what = "merge two checkpoints" if how == "merge" else f"convert to {how}"
        rows.append(
            [
                f"{what}, {_size(nbytes)} each",
                f"{by[how]['seconds']:.1f} s; the disk alone {alone:.1f} s: {share:.2f}",
                "0.8",
                _met(share >= 0.8),
            ]
        )
        grown = int(by[how]["grown"])
        rows.append(
            ["", f"memory grows by {figures.size(grown)}", "256 MiB", _met(grown <= BUDGET)]
        )

    one = in_new_process(slices, folder)
    rows.append(
        [
            f"two rows of an array of {figures.size(int(one['whole']))}",
            f"{figures.size(int(one['read']))} read",
            "the chunks that they touch",
            _met(one["read"] <= one["whole"] + MIB),
        ]
    )
    return rows


def _medians(
    calls: dict[str, Callable[[], dict[str, float]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Returns the medians of what calls give, each in a process of its own, in turns."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls) if turn % 2 else list(reversed(calls))
        for name in names:
            found = in_new_process(calls[name])
            samples[name].append(found)
            told = "  ".join(f"{what} {value:.4g}" for what, value in found.items())
            sys.stderr.write(f"{name}, round {turn + 1}/{rounds}: {told}\n")
    return {
        name: {what: statistics.median(each[what] for each in found) for what in found[0]}
        for name, found in samples.items()
    }


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk")
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory(prefix="foreign-", dir=chosen.dir) as place:
        rows = measure(Path(place), chosen.rounds, smoke=chosen.smoke)
    text = figures.table(("work", "measured", "goal", ""), rows)
    text += f"\n\nMedians of {chosen.rounds} rounds, each in a new process."
    sys.stdout.write(f"{text}\n")
    if chosen.page and not chosen.smoke:
        figures.write_between(chosen.page, START, END, text)
    if chosen.smoke:
        sys.stdout.write("\n**Smoke run: sizes are tiny, the figures mean nothing.**\n")


if __name__ == "__main__":
    main()
