"""What vital signs cost a save: without them, taken by the host, and taken by the devices.

    python -m benchmarks.vital_signs              # rewrites the table of the page
    python -m benchmarks.vital_signs --mib 64     # prints a table of a smaller state

The page is docs/how-to/verifying.md. The default devices are used; on accelerators a line
says how fast the kernels are, beside a reduction that only adds up.

Each case runs in new processes, in turn with the others, and its first saves are left out: they
touch memory for the first time, and compile.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.__main__ import default_dir
from benchmarks.machine import facts
from benchmarks.processes import in_new_process
from benchmarks.report import update_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["kernel_speed", "markdown", "measured"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "verifying.md"
LEAVES, FIRST, SAVES = 16, 2, 6
DTYPES = ("float32", "bfloat16")
# What the table says of each way, and the switch.
WAYS: Mapping[str, Any] = {"none": None, "host": "host", "devices": "device"}
_PASSES = 10


def measured(dtype: str, way: str, nbytes: int, place: Path) -> tuple[str, list[float]]:
    """Returns the devices, and the medians of blocked, durable and processor seconds."""
    import jax
    import jax.numpy as jnp

    import ckpt.sync

    shape = (nbytes // LEAVES // jnp.dtype(dtype).itemsize // 1024, 1024)
    keys = jax.random.split(jax.random.key(0), LEAVES)
    rows: list[tuple[float, float, float]] = []
    with ckpt.sync.CheckpointManager(
        ckpt.storage.Local(place, hard_links=False),
        keep=ckpt.keep.Latest(1),
        extensions=[ckpt.extensions.VitalSigns(WAYS[way])] if WAYS[way] else [],
    ) as mgr:
        for step in range(FIRST + SAVES):
            state = [jax.random.normal(key, shape, dtype) + step for key in keys]
            jax.block_until_ready(state)
            cpu, began = time.process_time(), time.perf_counter()
            commit = mgr.save(step, state)
            blocked = time.perf_counter() - began
            commit.result()
            durable = time.perf_counter() - began
            rows.append((blocked, durable, time.process_time() - cpu))
            mgr.wait_until_finished()
    kind = jax.devices()[0].device_kind
    return kind, [statistics.median(each) for each in zip(*rows[FIRST:], strict=True)]


def kernel_speed(dtype: str, nbytes: int) -> tuple[float, float] | None:
    """Returns bytes a second of the kernel and of a plain sum; None on CPUs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ckpt._vitals.extension.device_pass import KernelKey, Kernels

    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    shape = (nbytes // jnp.dtype(dtype).itemsize // 1024, 1024)
    array = jax.random.normal(jax.random.key(0), shape, dtype)
    kernels = Kernels()
    key = KernelKey((device,), shape, dtype, shape, ((0, 0),))
    kernels.compile(key)
    kernel = kernels.find(key)
    if kernel is None:
        return None
    plain = jax.jit(lambda x: jnp.sum(x, dtype=np.float32))
    found = []
    for function in (kernel, plain):
        jax.block_until_ready(function(array))
        began = time.perf_counter()
        for _ in range(_PASSES):
            last = function(array)
        jax.block_until_ready(last)
        found.append(nbytes * _PASSES / (time.perf_counter() - began))
    return found[0], found[1]


def markdown(
    runs: Mapping[tuple[str, str], Sequence[Sequence[float]]],
    speeds: Mapping[str, tuple[float, float] | None],
    nbytes: int,
    where: str,
) -> str:
    """Returns the table.

    Args:
        runs: By dtype and way the medians of every run.
        speeds: By dtype what `kernel_speed` gives.
        nbytes: The bytes of the state.
        where: The machine.
    """
    count = len(next(iter(runs.values())))
    what = f"{nbytes >> 20} MiB in {LEAVES} arrays"
    lines = [
        f"{what}; medians of {count} runs of {SAVES} saves; {where}.",
        "",
        "| dtype | taken by | blocked | durable | processor |",
        "|---|---|---:|---:|---:|",
    ]
    for (dtype, way), found in runs.items():
        times = [f"{1e3 * statistics.median(each):.0f} ms" for each in zip(*found, strict=True)]
        lines.append(f"| {dtype} | {way} | {' | '.join(times)} |")
    for dtype, speed in speeds.items():
        if speed is not None:
            kernel, plain = speed
            share = f"{kernel / plain:.0%} of what a plain sum does"
            lines += ["", f"The kernel reads {dtype} at {kernel / 1e9:.0f} GB/s, {share}."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, and rewrites the table of the page or prints it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mib", type=int, help="size of the state; the page has 512")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    nbytes = (chosen.mib or 512) << 20
    runs: dict[tuple[str, str], list[list[float]]] = {
        (dtype, way): [] for dtype in DTYPES for way in WAYS
    }
    kind = ""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=default_dir()) as top:
        machine = in_new_process(facts, Path(top))
        for _ in range(chosen.rounds):
            for dtype, way in runs:
                place = Path(top) / "run"
                kind, found = in_new_process(measured, dtype, way, nbytes, place)
                runs[dtype, way].append(found)
                shutil.rmtree(place)
        speeds = {dtype: in_new_process(kernel_speed, dtype, nbytes) for dtype in DTYPES}
    where = f"{machine['cores']} cores, {machine['file_system']}, arrays on {kind}"
    table = markdown(runs, speeds, nbytes, where)
    if chosen.mib:
        sys.stdout.write(table)
        return
    PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
