"""Peers that write one file per step: safetensors, and plain bytes.

Neither has an asynchronous save; `save_async` saves and gives back a save that is done.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks.trees import JaxTrees

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PyTree = Any


class Saved:
    """The pending save of a peer that has no asynchronous one."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SafetensorsPeer(JaxTrees):
    """`safetensors.flax`: one file, then fsync of the file and its directory."""

    is_asynchronous = False

    def __init__(self, directory: Path) -> None:
        self._safetensors = importlib.import_module("safetensors.flax")
        self._directory = directory

    def place(self, step: int) -> Path:
        return self._directory / f"{step}.safetensors"

    def save(self, step: int, tree: PyTree) -> None:
        leaves, _ = jax.tree.flatten_with_path(tree)
        tensors = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        self._safetensors.save_file(tensors, self.place(step))
        fsync(self.place(step))
        fsync(self._directory)

    def save_async(self, step: int, tree: PyTree) -> Saved:
        self.save(step, tree)
        return Saved()

    def restore(self, step: int, target: PyTree) -> PyTree:
        tensors = self._safetensors.load_file(self.place(step))
        return jax.tree.map_with_path(
            lambda path, leaf: jax.device_put(
                tensors[jax.tree_util.keystr(path)], getattr(leaf, "sharding", None)
            ),
            target,
        )

    def delete(self, step: int) -> None:
        self.place(step).unlink()

    def close(self) -> None:
        return None


class RawPeer(JaxTrees):
    """All bytes in one file, no structure: what one stream of the disk gives.

    It reads into one buffer that it keeps, then copies to the devices, because memory touched
    for the first time is slow and this peer shows the path, not the page faults.
    """

    is_asynchronous = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buffer = np.empty(0, np.uint8)

    def save(self, step: int, tree: PyTree) -> None:
        hosts = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        write_all(self.place(step), [host.reshape(-1).view(np.uint8) for host in hosts])
        fsync(self._directory)

    def save_async(self, step: int, tree: PyTree) -> Saved:
        self.save(step, tree)
        return Saved()

    def restore(self, step: int, target: PyTree) -> PyTree:
        path = self.place(step)
        size = path.stat().st_size
        if self._buffer.size < size:
            self._buffer = np.empty(size, np.uint8)
        read_all(path, self._buffer.data[:size])
        leaves, structure = jax.tree.flatten(target)
        views = split(self._buffer, leaves)
        placed = jax.device_put(views, [leaf.sharding for leaf in leaves], may_alias=False)
        return jax.tree.unflatten(structure, jax.block_until_ready(placed))

    def place(self, step: int) -> Path:
        return self._directory / str(step)

    def delete(self, step: int) -> None:
        self.place(step).unlink()

    def close(self) -> None:
        self._buffer = np.empty(0, np.uint8)


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
