"""The libraries as an asyncio program uses them: nothing here blocks the event loop on purpose.

Orbax has no asynchronous interface for callers, so its calls go to a thread, as its users do it.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.managers import OrbaxPeer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PyTree = Any

NAMES = ("ckpt", "orbax")


class Saving(Protocol):
    """A save whose snapshot is taken."""

    async def committed(self) -> None:
        """Returns when the step is durable."""
        ...

    def wait_in_thread(self) -> None:
        """Returns when the step is durable, without the event loop."""
        ...


class AsyncPeer(Protocol):
    """A library at work in an event loop."""

    async def save(self, step: int, tree: PyTree) -> Saving:
        """Returns as soon as the caller may donate the buffers of `tree`."""
        ...

    async def restore(self, step: int, target: PyTree) -> PyTree:
        """Returns the saved tree."""
        ...

    async def delete(self, step: int) -> None:
        """Removes the step; never timed."""
        ...

    def place(self, step: int) -> Path:
        """Returns the folder of the step."""
        ...


@asynccontextmanager
async def opened(name: str, directory: Path) -> AsyncIterator[AsyncPeer]:
    """Gives a library at work in a new directory, and closes it."""
    directory.mkdir(parents=True)
    if name == "ckpt":
        async with importlib.import_module("ckpt").CheckpointManager(directory) as manager:
            yield _Ckpt(directory, manager)
        return
    peer = await asyncio.to_thread(OrbaxPeer, directory)
    try:
        yield _Orbax(peer)
    finally:
        await asyncio.to_thread(peer.close)


@dataclass(frozen=True, slots=True)
class _Ckpt:
    directory: Path
    manager: Any

    async def save(self, step: int, tree: PyTree) -> _CkptSaving:
        return _CkptSaving(await self.manager.save(step, tree))

    async def restore(self, step: int, target: PyTree) -> PyTree:
        return await self.manager.restore(step, like=target)

    async def delete(self, step: int) -> None:
        await self.manager.delete(step)

    def place(self, step: int) -> Path:
        return self.directory / str(step)


@dataclass(frozen=True, slots=True)
class _CkptSaving:
    commit: Any

    async def committed(self) -> None:
        await self.commit

    def wait_in_thread(self) -> None:
        self.commit.result()


@dataclass(frozen=True, slots=True)
class _Orbax:
    peer: OrbaxPeer

    async def save(self, step: int, tree: PyTree) -> _OrbaxSaving:
        return _OrbaxSaving((await asyncio.to_thread(self.peer.save_async, step, tree)).wait)

    async def restore(self, step: int, target: PyTree) -> PyTree:
        return await asyncio.to_thread(self.peer.restore, step, target)

    async def delete(self, step: int) -> None:
        await asyncio.to_thread(self.peer.delete, step)

    def place(self, step: int) -> Path:
        return self.peer.place(step)


@dataclass(frozen=True, slots=True)
class _OrbaxSaving:
    wait_in_thread: Callable[[], None]

    async def committed(self) -> None:
        await asyncio.to_thread(self.wait_in_thread)
