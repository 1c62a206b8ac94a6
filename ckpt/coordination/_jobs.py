"""Jobs that a process can be part of: alone, `jax.distributed`, or a job with private disks."""

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


def has_own_disks(coordinator: Coordinator) -> bool:
    """Return True if the processes of a job have roots of their own."""
    return bool(getattr(coordinator, "own_disks", False)) and coordinator.process_count > 1


def name_of_disks(coordinator: Coordinator) -> str:
    """Return the name of the root that a coordinator is for, one of several on private disks."""
    return str(getattr(coordinator, "name", ""))
