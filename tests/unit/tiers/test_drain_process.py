"""A process that drains is small: it never imports jax, nor a store that it does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.drained_roots import assert_whole, cut, made
from tests.support.paths import ROOT

SCRIPT = """
import sys, anyio
from ckpt._tiers.drains.drain import missing
from ckpt._tiers.drains.drainer import DrainRoute, draining
from ckpt.storage._resolve import open_root

async def main():
    route = DrainRoute(open_root(sys.argv[1]), open_root(sys.argv[2]))
    async with draining(route, lambda each: print(each.step, each.outcome)) as drainer:
        for turn in range(2):
            for step in [3, 2, 1]:
                await drainer.request(step)
            assert await drainer.finish(60) == []
    assert await missing(route.source, route.target) == [1]

anyio.run(main)
print([name for name in ("jax", "tensorstore") if name in sys.modules])
"""


def test_draining_imports_no_jax(tmp_path: Path) -> None:
    """Whatever a drain meets: a step, one that was cut, one that is there, a damaged one."""
    near, far = Path(made(tmp_path / "near", 1, 2, 3)), tmp_path / "far"
    cut(near, far, 3, 3_000_000)
    for path in (near / "1").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(near), str(far)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    )
    *drains, imported = run.stdout.splitlines()
    assert drains == [
        "3 copied", "2 copied", "1 damaged", "3 there", "2 there", "1 damaged"
    ]  # fmt: skip
    assert imported == "[]"
    assert_whole(far, 2, 3)
