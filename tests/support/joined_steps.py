"""Joined steps on a disk: parts are copied into one step directory, with what joins them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import ckpt
from ckpt._conversion.assembled_step import AssemblyTarget, assemble_step
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import PART_FILE
from ckpt._format.step_files import StepPart, decode_part

__all__ = ["join", "part_of"]


def part_of(step: Path) -> StepPart:
    """Return what a part says of itself."""
    return decode_part((step / PART_FILE).read_bytes(), str(step))


def join(steps: Sequence[Path], target: Path) -> Manifest:
    """Make one step directory of the parts of all processes, in their order."""
    parts = [part_of(step) for step in steps]
    first = ckpt.manifest.decode((steps[0] / "ckpt.json").read_bytes(), where=str(steps[0]))
    place = AssemblyTarget(target.name, "f" * 32)
    joined = assemble_step(first, [part.report for part in parts], place)
    files = dict(joined.files) | {"ckpt.json": joined.encoded}
    for path, data in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(data)
    for step, part in zip(steps, parts, strict=True):
        for path in part.files:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            assert not (target / path).exists()
            shutil.copyfile(step / path, target / path)
    return joined.manifest
