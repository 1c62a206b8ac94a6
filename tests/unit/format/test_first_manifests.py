"""Manifests that several threads read at once, before any was read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckpt._format.manifest import encode
from tests.support.paths import ROOT
from tests.unit.format.test_manifest import manifest

PROGRAM = """
import sys, threading
from ckpt._format.manifest import decode
from ckpt._format.manifest_head import peek

sys.setswitchinterval(1e-6)
data = open(sys.argv[1], "rb").read()
ready, read = threading.Barrier(8), []

def first():
    ready.wait()
    read.append((peek(data), decode(data, where="here")))

threads = [threading.Thread(target=first) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert len(read) == 8
"""


def test_several_threads_may_read_the_first_ones(tmp_path: Path) -> None:
    """The interpreter crashed in about every fifth such program."""
    path = tmp_path / "ckpt.json"
    path.write_bytes(encode(manifest()))
    command = [sys.executable, "-c", PROGRAM, str(path)]
    for _ in range(12):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
