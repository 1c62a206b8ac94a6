"""PyTorch Distributed Checkpoint, where torch is installed: tensors of the same bytes.

DCP takes a flat dict of tensors. The tensors are views of the JAX arrays (through dlpack), made
outside of what is timed. DCP loads in place, into tensors that exist already, as a torch program
does: it need not allocate, which the peers that give back new JAX arrays have to.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from pathlib import Path

PyTree = Any


class DcpPeer:
    """`torch.distributed.checkpoint.async_save` and `load` in one process."""

    is_asynchronous = True

    def __init__(self, directory: Path) -> None:
        self._torch: Any = importlib.import_module("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        # It says at every call that without a process group it takes itself for alone.
        warnings.filterwarnings("ignore", module="torch.distributed")
        self._directory = directory

    def adopt(self, tree: PyTree) -> dict[str, Any]:
        return {
            jax.tree_util.keystr(path): self._torch.from_dlpack(leaf)
            for path, leaf in jax.tree.flatten_with_path(tree)[0]
        }

    def target(self, tree: PyTree) -> dict[str, Any]:
        # Filled, so that no page of it is touched for the first time while the load is timed.
        return {name: self._torch.zeros_like(each) for name, each in self.adopt(tree).items()}

    def as_jax(self, restored: dict[str, Any], like: PyTree) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf: jax.device_put(
                jax.dlpack.from_dlpack(restored[jax.tree_util.keystr(path)]), leaf.sharding
            ),
            like,
        )

    def save(self, step: int, tree: dict[str, Any]) -> None:
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: dict[str, Any]) -> _DcpPending:
        return _DcpPending(self._dcp.async_save(tree, checkpoint_id=self.place(step)))

    def restore(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        self._dcp.load(target, checkpoint_id=self.place(step))
        return target

    def place(self, step: int) -> Path:
        return self._directory / str(step)

    def delete(self, step: int) -> None:
        for file in self.place(step).iterdir():
            file.unlink()
        self.place(step).rmdir()

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _DcpPending:
    future: Any

    def done(self) -> bool:
        return bool(self.future.done())

    def wait(self) -> None:
        self.future.result()
