"""What every library under test can do, and the list of them.

To add one: write a class with the methods of `Peer` and a line in `PEERS`. Each peer runs at its
defaults; a tuned variant is a peer of its own, with a name that says so.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.files import RawPeer, SafetensorsPeer
from benchmarks.managers import CkptPeer, OrbaxPeer
from benchmarks.torch_dcp import DcpPeer

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
    """A checkpoint library at work in one directory of its own.

    Trees are JAX arrays everywhere but in a peer of another framework, whose own kind of tree is
    made by `adopt` and `target` and turned back by `as_jax`; those three are never timed.
    """

    @property
    def is_asynchronous(self) -> bool:
        """Whether `save_async` returns before the step is durable."""
        ...

    def adopt(self, tree: PyTree) -> PyTree:
        """Returns what the peer saves, without a copy."""
        ...

    def target(self, tree: PyTree) -> PyTree:
        """Returns what the peer restores into: shapes, dtypes and shardings of `tree`."""
        ...

    def as_jax(self, restored: PyTree, like: PyTree) -> PyTree:
        """Returns a restored tree as JAX arrays in the structure of `like`."""
        ...

    def save(self, step: int, tree: PyTree) -> None:
        """Returns when the step is as durable as the library ever promises."""
        ...

    def save_async(self, step: int, tree: PyTree) -> Pending:
        """Returns as soon as the caller may donate the buffers of `tree`."""
        ...

    def restore(self, step: int, target: PyTree) -> PyTree:
        """Returns the saved tree in the form of `target`."""
        ...

    def place(self, step: int) -> Path:
        """Returns the file or the folder of the step."""
        ...

    def delete(self, step: int) -> None:
        """Removes the step; never timed."""
        ...

    def close(self) -> None:
        """Ends the library's own threads."""
        ...


@dataclass(frozen=True, slots=True)
class PeerKind:
    """How to open a peer, which package and distribution it needs, what its save promises.

    A variant of another peer takes part in the scenarios that it is there for, and in no others.
    """

    open: Callable[[Path], Peer]
    module: str | None
    distribution: str | None
    promise: str
    is_asynchronous: bool = False
    takes_sharded: bool = True
    scenarios: tuple[str, ...] | None = None

    def missing(self) -> str | None:
        """Returns the name of the package that is not installed, or None."""
        if self.module is None:
            return None
        try:
            found = importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # a parent of a dotted module
            found = False
        return None if found else self.distribution


PEERS: Mapping[str, PeerKind] = MappingProxyType(
    {
        "ckpt": PeerKind(
            CkptPeer,
            "ckpt.sync",
            "ckpt-jax",
            "every file and directory fsynced before it is acknowledged",
            is_asynchronous=True,
        ),
        "ckpt, io=tensorstore": PeerKind(
            partial(CkptPeer, io="tensorstore"),
            "ckpt.sync",
            "ckpt-jax",
            "every file and directory fsynced before it is acknowledged",
            is_asynchronous=True,
            scenarios=("large",),
        ),
        "ckpt, mode=device": PeerKind(
            partial(CkptPeer, mode="device"),
            "ckpt.sync",
            "ckpt-jax",
            "every file and directory fsynced before it is acknowledged",
            is_asynchronous=True,
            scenarios=("accelerator",),
        ),
        "orbax": PeerKind(
            OrbaxPeer,
            "orbax.checkpoint",
            "orbax-checkpoint",
            "array data fsynced; metadata files and the final rename are not",
            is_asynchronous=True,
        ),
        "dcp": PeerKind(
            DcpPeer,
            "torch",
            "torch",
            "files fsynced; the directory is not",
            is_asynchronous=True,
            takes_sharded=False,
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
