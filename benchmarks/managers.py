"""The two checkpoint managers for JAX: ckpt and Orbax, at their defaults."""

from __future__ import annotations

import importlib
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.trees import JaxTrees

if TYPE_CHECKING:
    from pathlib import Path

PyTree = Any


class CkptPeer(JaxTrees):
    """`ckpt.sync.CheckpointManager`, the face that plain loops use."""

    is_asynchronous = True

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int | None = None,
        io: str = "direct",
        mode: str = "auto",
    ) -> None:
        sync = importlib.import_module("ckpt.sync")
        settings = importlib.import_module("ckpt")
        storage = importlib.import_module("ckpt.storage")
        self._directory = directory
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            sync.CheckpointManager(
                storage.Local(directory, io=io), staging=settings.Staging(budget_bytes, mode)
            )
        )

    def save(self, step: int, tree: PyTree) -> None:
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: PyTree) -> _CkptPending:
        commit = self._manager.save(step, tree)
        if not commit:
            raise RuntimeError(f"ckpt skipped the save of step {step}: {commit.skipped}")
        return _CkptPending(commit)

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._manager.restore(step, like=target)

    def place(self, step: int) -> Path:
        return self._directory / str(step)

    def delete(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _CkptPending:
    commit: Any

    def done(self) -> bool:
        return bool(self.commit.done())

    def wait(self) -> None:
        self.commit.result()


class OrbaxPeer(JaxTrees):
    """Orbax's v0 `CheckpointManager` with `StandardSave` and `StandardRestore`, asynchronous."""

    is_asynchronous = True

    def __init__(self, directory: Path) -> None:
        self._ocp = importlib.import_module("orbax.checkpoint")
        # Orbax logs several lines per save through absl; a terminal would be part of the timing.
        importlib.import_module("absl.logging").set_verbosity("error")
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._directory = directory
        self._manager = self._ocp.CheckpointManager(directory)

    def save(self, step: int, tree: PyTree) -> None:
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: PyTree) -> _OrbaxPending:
        if not self._manager.save(step, args=self._ocp.args.StandardSave(tree)):
            raise RuntimeError(f"orbax skipped the save of step {step}")
        return _OrbaxPending(self._manager)

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(target))

    def place(self, step: int) -> Path:
        return self._directory / str(step)

    def delete(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()


@dataclass(frozen=True, slots=True)
class _OrbaxPending:
    manager: Any

    def done(self) -> bool:
        return not self.manager.is_saving_in_progress()

    def wait(self) -> None:
        self.manager.wait_until_finished()
