"""What every library under test can do, and the libraries themselves.

To add one: write a class with the methods of `Peer` and a line in `PEERS`. Each peer runs at its
defaults; a tuned variant is a peer of its own, with a name that says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.files import RawPeer, SafetensorsPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PyTree = Any


class Pending(Protocol):
    """A save on its way."""

    def done(self) -> bool:
        """Returns whether the save has ended, well or not."""
        ...

    def wait(self) -> None:
        """Returns when the save is durable, or raises what went wrong."""
        ...


class Peer(Protocol):
    """A checkpoint library at work in one directory of its own."""

    is_asynchronous: bool

    def save(self, step: int, tree: PyTree) -> None:
        """Returns when the step is as durable as the library ever promises."""
        ...

    def save_async(self, step: int, tree: PyTree) -> Pending:
        """Returns as soon as the caller may donate the buffers of `tree`."""
        ...

    def restore(self, step: int, like: PyTree) -> PyTree:
        """Returns the saved tree with the structure and the shardings of `like`."""
        ...

    def delete(self, step: int) -> None:
        """Removes the step; never timed."""
        ...

    def close(self) -> None:
        """Ends the library's own threads."""
        ...


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How to open a peer, which package and distribution it needs, what its save promises."""

    open: Callable[[Path], Peer]
    module: str | None
    distribution: str | None
    promise: str

    def missing(self) -> str | None:
        """Returns the name of the package that is not installed, or None."""
        if self.module is None:
            return None
        try:
            found = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # a parent of a dotted module
            found = False
        return None if found else self.distribution


class CkptPeer:
    """`ckpt.sync.CheckpointManager`, the face that plain loops use."""

    is_asynchronous = True

    def __init__(self, directory: Path) -> None:
        sync = importlib.import_module("ckpt.sync")
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(sync.CheckpointManager(directory))

    def save(self, step: int, tree: PyTree) -> None:
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: PyTree) -> Pending:
        commit = self._manager.save(step, tree)
        if not commit:
            raise RuntimeError(f"ckpt skipped the save of step {step}: {commit.skipped}")
        return _CkptPending(commit)

    def restore(self, step: int, like: PyTree) -> PyTree:
        return self._manager.restore(step, like=like)

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


class OrbaxPeer:
    """Orbax's v0 `CheckpointManager` with `StandardSave` and `StandardRestore`, asynchronous."""

    is_asynchronous = True

    def __init__(self, directory: Path) -> None:
        self._ocp = importlib.import_module("orbax.checkpoint")
        # Orbax logs several lines per save through absl; a terminal would be part of the timing.
        importlib.import_module("absl.logging").set_verbosity("error")
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = self._ocp.CheckpointManager(directory)

    def save(self, step: int, tree: PyTree) -> None:
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: PyTree) -> Pending:
        if not self._manager.save(step, args=self._ocp.args.StandardSave(tree)):
            raise RuntimeError(f"orbax skipped the save of step {step}")
        return _OrbaxPending(self._manager)

    def restore(self, step: int, like: PyTree) -> PyTree:
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(like))

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


PEERS: Mapping[str, PeerKind] = MappingProxyType(
    {
        "ckpt": PeerKind(
            CkptPeer,
            "ckpt.sync",
            "ckpt-jax",
            "every file and directory fsynced before it is acknowledged",
        ),
        "orbax": PeerKind(
            OrbaxPeer,
            "orbax.checkpoint",
            "orbax-checkpoint",
            "array data fsynced; metadata files and the final rename are not",
        ),
        "safetensors": PeerKind(
            SafetensorsPeer,
            "safetensors.flax",
            "safetensors",
            "file and directory fsynced here; not atomic, no checksums",
        ),
        "raw": PeerKind(
            RawPeer, None, None, "file and directory fsynced; no structure, one write stream"
        ),
    }
)
