"""Jobs that a process can be part of: alone, `jax.distributed`, or a job with private disks."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from ckpt._arguments import invalid
from ckpt._runtime.jax_internals import job_size
from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jax_service import JaxDistributed


class MemoryKeyValues:
    """`KeyValues` in memory: for one process, and for tests of several without starting any.

    Example:
        ```python
        values = ckpt.coordination.MemoryKeyValues()
        await values.put("ready", b"yes")
        assert await values.wait("ready", seconds=1.0) == b"yes"
        ```
    """

    def __init__(self) -> None:
        """Begin without values."""
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._changed = anyio.Event()

    async def put(self, key: str, value: bytes) -> bool:
        """Set a value unless there is one; return True if it was set."""
        await anyio.lowlevel.checkpoint()
        if key in self._values:
            return False
        self._set(key, value)
        return True

    async def wait(self, key: str, seconds: float) -> bytes | None:
        """Return the value as soon as it is there, or None when `seconds` have gone by."""
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(max(seconds, 0)):
            while key not in self._values:
                await self._changed.wait()
        return self._values.get(key)

    async def list(self, folder: str) -> dict[str, bytes]:
        """Return the values below `folder`, by their names within it."""
        await anyio.lowlevel.checkpoint()
        start = f"{folder}/"
        return {
            key.removeprefix(start): value
            for key, value in self._values.items()
            if key.startswith(start)
        }

    async def add(self, key: str) -> int:
        """Increase a counter and return it."""
        await anyio.lowlevel.checkpoint()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    async def drop(self, folder: str) -> None:
        """Remove everything below `folder`."""
        await anyio.lowlevel.checkpoint()
        for each in (self._values, self._counts):
            for key in [key for key in each if key.startswith(f"{folder}/")]:
                del each[key]

    async def touch(self, key: str, value: bytes) -> None:
        """Set a value, or replace it."""
        await anyio.lowlevel.checkpoint()
        self._set(key, value)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = bytes(value)
        self._changed.set()
        self._changed = anyio.Event()


class SingleProcess:
    """This process is alone; nothing is shared.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, coordinator=ckpt.coordination.SingleProcess())
        ```
    """

    @property
    def process_index(self) -> int:
        """0."""
        return 0

    @property
    def process_count(self) -> int:
        """1."""
        return 1

    def key_values(self) -> KeyValues:
        """Return values that no other process sees."""
        return MemoryKeyValues()


class OwnDisks:
    """A job in which every process has a root of its own, and sees no other's.

    Private disks may be mounted at different paths, so paths do not say which roots belong
    together. A program that has several roots gives each a name.

    A process then stores the data of its own devices, and everything else (numpy arrays, Python
    scalars, items with files), too. A step counts if all processes have it. It can be restored if
    every process finds the data for its devices on its own disk, as it does with the same number of
    processes and the same shardings.

    Example:
        ```python
        job = ckpt.coordination.OwnDisks(ckpt.coordination.JaxDistributed())
        mgr = ckpt.CheckpointManager("own/disk", coordinator=job)
        ```
    """

    own_disks = True

    def __init__(self, job: Coordinator, name: str = "") -> None:
        """Take the processes of `job`.

        Args:
            job: The job, such as `ckpt.coordination.JaxDistributed()`.
            name: Name of the root, if there are several; the same on all processes.
        """
        self._job = job
        self.name = name

    @property
    def process_index(self) -> int:
        """Number of this process."""
        return self._job.process_index

    @property
    def process_count(self) -> int:
        """Number of processes."""
        return self._job.process_count

    def key_values(self) -> KeyValues:
        """Return the values that the processes share beside their disks."""
        return self._job.key_values()


def default_coordinator() -> Coordinator:
    """Return the job of `jax.distributed` if it has several processes, else this process alone.

    Raises:
        CoordinationError: There are several processes that cannot talk to each other:
            `jax.distributed` was not initialized, or this library does not know its version.

    Example:
        ```python
        job = ckpt.coordination.default_coordinator()
        print(job.process_index, job.process_count)
        ```
    """
    return JaxDistributed() if job_size() > 1 else SingleProcess()


def job_of(coordinator: Coordinator | None) -> Coordinator:
    """Return the checked `coordinator`, or that of `jax.distributed` if it is None.

    Raises:
        InvalidArgumentError: It is not one, or its numbers are none of a job.
    """
    if coordinator is None:
        return default_coordinator()
    given: object = coordinator
    # A class has the methods of its instances: refuse it by name.
    if isinstance(given, type) or not isinstance(given, Coordinator):
        what = (
            "a Coordinator such as ckpt.coordination.SingleProcess(), or None for the job of "
            "jax.distributed"
        )
        instead = f"; pass an instance, {given.__name__}(...)" if isinstance(given, type) else ""
        raise invalid("coordinator", given, what + instead)
    count: object = coordinator.process_count
    if type(count) is not int or count < 1:
        raise invalid("coordinator.process_count", count, "a whole number, 1 or more")
    index: object = coordinator.process_index
    if type(index) is not int or not 0 <= index < count:
        what = f"a whole number from 0 to {count - 1}, since its process_count is {count}"
        raise invalid("coordinator.process_index", index, what)
    shared: object = coordinator.key_values() if count > 1 else None
    if count > 1 and (isinstance(shared, type) or not isinstance(shared, KeyValues)):
        what = "an object with the methods of ckpt.coordination.KeyValues"
        raise invalid("coordinator.key_values()", shared, what)
    return coordinator


def has_own_disks(coordinator: Coordinator) -> bool:
    """Return True if the processes of a job have roots of their own."""
    return bool(getattr(coordinator, "own_disks", False)) and coordinator.process_count > 1


def name_of_disks(coordinator: Coordinator) -> str:
    """Return the name of the root that a coordinator is for, one of several on private disks."""
    return str(getattr(coordinator, "name", ""))
