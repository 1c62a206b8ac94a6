"""The libraries under test, each behind the class `Peer`, and the list of them.

To add one: write a subclass of `Peer` and a line in `PEERS`. Each peer runs at its defaults; a
tuned variant is a peer of its own, with a name that says so. Libraries are imported when a peer is
opened, since the first import is measured, too.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import warnings
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from benchmarks.workloads import PyTree, abstract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pending:
    """A save on its way.

    Attributes:
        done: Returns whether the save has ended, well or not.
        wait: Returns when the save is durable, or raises what went wrong.
    """

    done: Callable[[], bool] = lambda: True
    wait: Callable[[], Any] = lambda: None


class Peer:
    """A checkpoint library at work in one directory of its own.

    Trees are JAX arrays everywhere but in a peer of another framework, whose own kind of tree is
    made by `adopt` and `target` and turned back by `as_jax`; those three are never timed.

    Attributes:
        module: What is imported for it; None where nothing is.
        distribution: The package that has the module.
        promise: What is on disk when it calls a save done.
        is_asynchronous: Whether `save_async` returns before the step is durable.
        takes_sharded: Whether it saves arrays of several devices.
    """

    module: ClassVar[str | None] = None
    distribution: ClassVar[str | None] = None
    promise: ClassVar[str]
    is_asynchronous: ClassVar[bool] = True
    takes_sharded: ClassVar[bool] = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def adopt(self, tree: PyTree) -> PyTree:
        """Returns what the peer saves, without a copy."""
        return tree

    def target(self, tree: PyTree) -> PyTree:
        """Returns what the peer restores into: shapes, dtypes and shardings of `tree`."""
        return abstract(tree)

    def as_jax(self, restored: PyTree, like: PyTree) -> PyTree:
        """Returns a restored tree as JAX arrays in the structure of `like`."""
        return restored

    def save(self, step: int, tree: PyTree) -> None:
        """Returns when the step is as durable as the library ever promises."""
        self.save_async(step, tree).wait()

    def save_async(self, step: int, tree: PyTree) -> Pending:
        """Returns as soon as the caller may donate the buffers of `tree`."""
        raise NotImplementedError

    def restore(self, step: int, target: PyTree) -> PyTree:
        """Returns the saved tree in the form of `target`."""
        raise NotImplementedError

    def place(self, step: int) -> Path:
        """Returns the file or the folder of the step."""
        return self.directory / str(step)

    def delete(self, step: int) -> None:
        """Removes the step; never timed."""
        self.place(step).unlink()

    def close(self) -> None:
        """Ends the library's own threads."""


class CkptPeer(Peer):
    """`ckpt.sync.CheckpointManager`, the face that plain loops use."""

    module, distribution = "ckpt.sync", "ckpt-jax"
    promise = "every file and directory fsynced before it is acknowledged"

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int | None = None,
        io: str = "direct",
        mode: str = "auto",
    ) -> None:
        super().__init__(directory)
        sync = importlib.import_module("ckpt.sync")
        staging = importlib.import_module("ckpt").Staging(budget_bytes, mode)
        local = importlib.import_module("ckpt.storage").Local(directory, io=io)
        self._manager = sync.CheckpointManager(local, staging=staging).__enter__()
        self.delete = self._manager.delete

    def save_async(self, step: int, tree: PyTree) -> Pending:
        commit = self._manager.save(step, tree)
        if not commit:
            raise RuntimeError(f"ckpt skipped the save of step {step}: {commit.skipped}")
        return Pending(commit.done, commit.result)

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._manager.restore(step, like=target)

    def close(self) -> None:
        self._manager.__exit__(None, None, None)


class OrbaxPeer(Peer):
    """Orbax's v0 `CheckpointManager` with `StandardSave` and `StandardRestore`, asynchronous.

    Or another module with the same names, such as `ckpt_orbax`.
    """

    module, distribution = "orbax.checkpoint", "orbax-checkpoint"
    promise = "array data fsynced; metadata files and the final rename are not"

    def __init__(self, directory: Path, names: str = "orbax.checkpoint") -> None:
        super().__init__(directory)
        self._ocp = importlib.import_module(names)
        # Orbax logs several lines per save through absl; a terminal would be part of the timing.
        importlib.import_module("absl.logging").set_verbosity("error")
        self._manager = self._ocp.CheckpointManager(directory)
        self.delete, self.close = self._manager.delete, self._manager.close

    def save_async(self, step: int, tree: PyTree) -> Pending:
        if not self._manager.save(step, args=self._ocp.args.StandardSave(tree)):
            raise RuntimeError(f"orbax skipped the save of step {step}")
        return Pending(
            lambda: not self._manager.is_saving_in_progress(), self._manager.wait_until_finished
        )

    def restore(self, step: int, target: PyTree) -> PyTree:
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(target))


class DcpPeer(Peer):
    """PyTorch's `torch.distributed.checkpoint.async_save` and `load` in one process.

    DCP takes a flat dict of tensors. The tensors are views of the JAX arrays (through dlpack), made
    outside of what is timed. DCP loads in place, into tensors that exist already, as a torch
    program does: it need not allocate, which the peers that give back new JAX arrays have to.
    """

    module = distribution = "torch"
    promise = "files fsynced; the directory is not"
    takes_sharded = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._torch: Any = importlib.import_module("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            self._dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        # It says at every call that without a process group it takes itself for alone.
        warnings.filterwarnings("ignore", module="torch.distributed")

    def adopt(self, tree: PyTree) -> dict[str, Any]:
        return {name: self._torch.from_dlpack(leaf) for name, leaf in by_name(tree).items()}

    def target(self, tree: PyTree) -> dict[str, Any]:
        # Filled, so that no page of it is touched for the first time while the load is timed.
        return {name: self._torch.zeros_like(each) for name, each in self.adopt(tree).items()}

    def as_jax(self, restored: dict[str, Any], like: PyTree) -> PyTree:
        arrays = {name: jax.dlpack.from_dlpack(each) for name, each in restored.items()}
        return placed(arrays, like)

    def save_async(self, step: int, tree: dict[str, Any]) -> Pending:
        future = self._dcp.async_save(tree, checkpoint_id=self.place(step))
        return Pending(future.done, future.result)

    def restore(self, step: int, target: dict[str, Any]) -> dict[str, Any]:
        self._dcp.load(target, checkpoint_id=self.place(step))
        return target

    def delete(self, step: int) -> None:
        for file in self.place(step).iterdir():
            file.unlink()
        self.place(step).rmdir()


class SafetensorsPeer(Peer):
    """`safetensors.flax`: one file, then fsync of the file and its directory."""

    module, distribution = "safetensors.flax", "safetensors"
    promise = "file and directory fsynced here; not atomic, no checksums"
    is_asynchronous = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._safetensors = importlib.import_module("safetensors.flax")

    def place(self, step: int) -> Path:
        return self.directory / f"{step}.safetensors"

    def save_async(self, step: int, tree: PyTree) -> Pending:
        self._safetensors.save_file(by_name(tree), self.place(step))
        fsync(self.place(step))
        fsync(self.directory)
        return Pending()

    def restore(self, step: int, target: PyTree) -> PyTree:
        return placed(self._safetensors.load_file(self.place(step)), target)


class RawPeer(Peer):
    """All bytes in one file, no structure: what one stream of the disk gives.

    It reads into one buffer that it keeps, then copies to the devices, because memory touched
    for the first time is slow and this peer shows the path, not the page faults.
    """

    promise = "file and directory fsynced; no structure, one write stream"
    is_asynchronous = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._buffer = np.empty(0, np.uint8)

    def save_async(self, step: int, tree: PyTree) -> Pending:
        hosts = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        write_all(self.place(step), [host.reshape(-1).view(np.uint8) for host in hosts])
        fsync(self.directory)
        return Pending()

    def restore(self, step: int, target: PyTree) -> PyTree:
        path = self.place(step)
        size = path.stat().st_size
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        read_all(path, self._buffer.data[:size])
        leaves, structure = jax.tree.flatten(target)
        views = split(self._buffer, leaves)
        arrays = jax.device_put(views, [leaf.sharding for leaf in leaves], may_alias=False)
        return jax.tree.unflatten(structure, jax.block_until_ready(arrays))


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A library, the options that it is opened with, and the scenarios that it takes part in.

    A variant of another peer takes part in the scenarios that it is there for, and in no others.
    """

    peer: type[Peer]
    options: Mapping[str, Any] = field(default_factory=dict)
    scenarios: tuple[str, ...] | None = None

    def open(self, directory: Path) -> Peer:
        """Returns the library at work in a directory."""
        return self.peer(directory, **self.options)

    def missing(self) -> str | None:
        """Returns the name of the package that is not installed, or None."""
        top = (self.peer.module or "os").partition(".")[0]
        return None if importlib.util.find_spec(top) else self.peer.distribution


PEERS: Mapping[str, PeerKind] = MappingProxyType(
    {
        "ckpt": PeerKind(CkptPeer),
        "ckpt, io=tensorstore": PeerKind(CkptPeer, {"io": "tensorstore"}, ("large",)),
        "ckpt, mode=device": PeerKind(CkptPeer, {"mode": "device"}, ("accelerator",)),
        "ckpt_orbax": PeerKind(OrbaxPeer, {"names": "ckpt_orbax"}, ("large", "small")),
        "orbax": PeerKind(OrbaxPeer),
        "dcp": PeerKind(DcpPeer),
        "safetensors": PeerKind(SafetensorsPeer),
        "raw": PeerKind(RawPeer),
    }
)


@dataclass(frozen=True, slots=True)
class AsyncSave:
    """A save whose snapshot is taken.

    Attributes:
        committed: Gives what to await until the step is durable.
        wait_in_thread: Returns when the step is durable, without the event loop.
    """

    committed: Callable[[], Awaitable[Any]]
    wait_in_thread: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class AsyncPeer:
    """A library as an asyncio program uses it: nothing here blocks the event loop on purpose.

    Attributes:
        save: Returns as soon as the caller may donate the buffers of a tree.
        restore: Returns the saved tree of a step, like a target.
        delete: Removes a step; never timed.
        place: The folder of its steps.
    """

    save: Callable[[int, PyTree], Awaitable[AsyncSave]]
    restore: Callable[[int, PyTree], Awaitable[PyTree]]
    delete: Callable[[int], Awaitable[Any]]
    place: Path


@asynccontextmanager
async def opened_async(name: str, directory: Path) -> AsyncIterator[AsyncPeer]:
    """Gives ckpt or Orbax at work in a new directory, and closes it.

    Orbax has no asynchronous interface for callers, so its calls go to a thread, as its users do
    it.
    """
    directory.mkdir(parents=True)
    if name == "ckpt":
        async with importlib.import_module("ckpt").CheckpointManager(directory) as manager:

            async def save(step: int, tree: PyTree) -> AsyncSave:
                commit = await manager.save(step, tree)
                return AsyncSave(lambda: commit, commit.result)

            yield AsyncPeer(
                save,
                lambda step, target: manager.restore(step, like=target),
                manager.delete,
                directory,
            )
        return
    peer = await asyncio.to_thread(OrbaxPeer, directory)

    async def save_in_thread(step: int, tree: PyTree) -> AsyncSave:
        wait = (await asyncio.to_thread(peer.save_async, step, tree)).wait
        return AsyncSave(lambda: asyncio.to_thread(wait), wait)

    try:
        yield AsyncPeer(
            save_in_thread,
            lambda step, target: asyncio.to_thread(peer.restore, step, target),
            lambda step: asyncio.to_thread(peer.delete, step),
            directory,
        )
    finally:
        await asyncio.to_thread(peer.close)


def by_name(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def placed(arrays: Mapping[str, Any], like: PyTree) -> PyTree:
    """Returns arrays in the structure of `like`, and where its leaves are."""
    return jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            arrays[jax.tree_util.keystr(path)], getattr(leaf, "sharding", None)
        ),
        like,
    )


def split(buffer: np.ndarray, leaves: Iterable[Any]) -> list[np.ndarray]:
    """Returns views of `buffer`, one after another, in the shapes and dtypes of `leaves`."""
    views, offset = [], 0
    for leaf in leaves:
        end = offset + leaf.size * leaf.dtype.itemsize
        views.append(buffer[offset:end].view(leaf.dtype).reshape(leaf.shape))
        offset = end
    return views


def write_all(path: Path, buffers: Iterable[np.ndarray]) -> None:
    """Writes `uint8` buffers to a file, one after another, and fsyncs it."""
    with open(path, "wb", buffering=0) as file:
        # Linux takes at most 1,024 buffers and about 2 GiB in one writev, and may write less.
        rest = deque(buffer.data for buffer in buffers if buffer.nbytes)
        while rest:
            written = os.writev(file.fileno(), list(islice(rest, 1024)))
            while rest and written >= len(rest[0]):
                written -= len(rest.popleft())
            if written:
                rest[0] = rest[0][written:]
        os.fsync(file.fileno())


def read_all(path: Path, buffer: memoryview) -> None:
    """Fills `buffer` from a file.

    Raises:
        EOFError: The file is shorter.
    """
    with open(path, "rb", buffering=0) as file:
        while buffer:
            read = file.readinto(buffer)
            if not read:
                raise EOFError(f"{path.name} ended {len(buffer)} bytes early")
            buffer = buffer[read:]


def fsync(path: Path) -> None:
    """Makes a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
