"""A step with items of every kind, and what is asked of the reports about it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt import ArrayFormat, errors
from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._engine.verify.report import VerifyReport
from ckpt._format.manifest import Manifest, decode
from ckpt._steps.step_metadata import LeafInfo
from ckpt.storage._local.storage import LocalStorage
from tests.support.stateful_objects import Config, Recording


class Cell:
    """A box around one value: its key is no part of leaf paths."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_with_keys(
    Cell,
    lambda cell: ([(jax.tree_util.GetAttrKey("value"), cell.value)], None),
    lambda _, children: Cell(*children),
)


def model() -> dict[str, Any]:
    random = np.random.default_rng(0)
    tied = jnp.asarray(random.standard_normal(70_000, np.float32))
    return {
        "large": jnp.asarray(random.standard_normal((512, 512), np.float32)),
        "tied": [tied, {"again": tied}],
        # Neither length has a divisor, so chunks have padding between their rows.
        "padded": random.standard_normal((317, 331)).astype(np.float32),
        "squeezed": np.cumsum(random.standard_normal((300, 300), np.float32), axis=0),
        "small": [random.standard_normal(100) for _ in range(5)],
        "cell": Cell(random.standard_normal(10)),
        "key": jax.random.key(3),
        "n": 3,
    }


ITEMS = {
    "model": model(),
    "averages": {"mean": np.full((3, 2), 1.5), "steps": (1, 2)},
    "config": Config(),
    "notes": "ä text",
    "random": np.random.default_rng(1),
    "loader": Recording({"index.json": b"{}", "parts/one.bin": b"one" * 1000, "empty": b""}),
}
FORMATS = {
    "padded": ArrayFormat(chunk_bytes=1 << 16, split_axes=(1,)),
    "squeezed": ArrayFormat(chunk_bytes=1 << 16, compression="zstd"),
}
STEP = 7


def manifest_of(step: Path) -> Manifest:
    return decode((step / "ckpt.json").read_bytes(), where="x")


def files_of(step: Path) -> list[str]:
    """Every file of a step but the manifest."""
    found = (file.relative_to(step).as_posix() for file in step.rglob("*") if file.is_file())
    return sorted(set(found) - {"ckpt.json"})


def damaged(report: VerifyReport) -> set[str]:
    return {problem.file for problem in report.problems}


def hit(report: VerifyReport) -> set[tuple[str | None, str]]:
    """The leaves that a report names, with their items."""
    return {(each.item, each.leaf) for each in report.problems if each.leaf is not None}


def refused(root: Path, step: int | None = STEP) -> set[tuple[str | None, str]]:
    """The leaves that a restore cannot give, each asked for by itself: what `hit` should say."""
    found: set[tuple[str | None, str]] = set()
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        metadata = mgr.metadata(step)
        for item, leaves in metadata.leaves.items():
            for leaf, about in leaves.items():
                if not isinstance(about, LeafInfo):
                    continue
                try:
                    adapt = {item: ckpt.Adapt(select=[leaf])}
                    mgr.restore(step, items=[item], adapt=adapt)
                except (errors.CorruptCheckpointError, errors.StorageError):
                    found.add((item, leaf))
    return found


def flip(file: Path, byte: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if byte is None else byte] ^= 0x10
    file.write_bytes(data)


def places(step: Path, leaf: str) -> Iterator[tuple[Path, int]]:
    """The file and the first byte of every chunk of a leaf of the model."""
    item = manifest_of(step).items["model"]
    [entry] = [entry for entry in item.leaves if entry.name == leaf]
    for number, offset in enumerate(entry.offsets):
        yield step / "model" / item.data_files[entry.files[number] if entry.files else 0], offset


class Watched(LocalStorage):
    """A real store that counts what it is asked for, and can refuse it."""

    def __init__(self, root: Path, refuse: Callable[[str], bool] = lambda path: False) -> None:
        super().__init__(root, ckpt.Timeouts())
        self.calls: list[str] = []
        self.paths: set[str] = set()
        self.bytes_read = 0
        self.refuse = refuse

    def _note(self, call: str, path: str) -> None:
        self.calls.append(call)
        self.paths.add(path)
        if self.refuse(path):
            raise errors.StorageError(f"cannot read {path}: broken", errno=errno.EIO)

    async def files(self, step_dir: str) -> dict[str, int | None]:
        self._note("files", "")
        return await super().files(step_dir)

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        self._note("read", path)
        return await super().read(step_dir, path, limit)

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._note("read_block", path)
        self.bytes_read += len(target)
        await super().read_block(step_dir, path, offset, target, then)


def verified(storage: Watched, step_dir: str, *, deep: bool) -> VerifyReport:
    return anyio.run(verify_step_dir, storage, step_dir, None, deep, ())
