"""Jobs a process can be part of: alone, that of `jax.distributed`, or one with private disks."""

from __future__ import annotations

from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jax_service import JaxDistributed, job_size
from ckpt.coordination._memory import MemoryKeyValues


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
    together. A program that has several gives each a name.

    A process then keeps what its own devices hold, and everything else (numpy arrays, Python
    scalars, items with files) as well. A step counts if all processes have it; it can be restored
    where every process finds what its devices need on its own disk, as it does with the same number
    of processes and the same shardings.

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
            job: Such as `ckpt.coordination.JaxDistributed()`.
            name: Which of several roots this is for; the same on all processes.
        """
        self._job = job
        self.name = name

    @property
    def process_index(self) -> int:
        """Which process this is."""
        return self._job.process_index

    @property
    def process_count(self) -> int:
        """How many processes there are."""
        return self._job.process_count

    def key_values(self) -> KeyValues:
        """Return what the processes share beside their disks."""
        return self._job.key_values()


def default_coordinator() -> Coordinator:
    """Return the job of `jax.distributed` where it has several processes, else that of this one.

    Raises:
        CoordinationError: There are several processes that cannot talk to each other:
            `jax.distributed` was not initialized, or is one of a version that this library does not
            know.

    Example:
        ```python
        job = ckpt.coordination.default_coordinator()
        print(job.process_index, job.process_count)
        ```
    """
    return JaxDistributed() if job_size() > 1 else SingleProcess()


def has_own_disks(coordinator: Coordinator) -> bool:
    """Tell whether the processes of a job have roots of their own."""
    return bool(getattr(coordinator, "own_disks", False)) and coordinator.process_count > 1


def name_of_disks(coordinator: Coordinator) -> str:
    """Return which of several roots on disks of their own a coordinator is for."""
    return str(getattr(coordinator, "name", ""))
