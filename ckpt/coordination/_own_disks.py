"""A job whose processes do not see one root: each keeps its part of a step on a disk of its own."""

from __future__ import annotations

from ckpt.coordination._base import Coordinator, KeyValues

__all__ = ["OwnDisks", "has_own_disks", "name_of_disks"]


class OwnDisks:
    """Says of a job that every process has a root of its own, and sees no other's.

    Roots on disks of their own may be called differently in each process, so nothing tells which of
    them belong together. Where a program has several, each gets a name.

    A process then keeps what its own devices hold, and everything else (numpy arrays, Python
    scalars, items with files) as well. A step counts if all processes have it; it can be restored
    where every process finds what its devices need on its own disk, as it does with the same number
    of processes and the same shardings.
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


def has_own_disks(coordinator: Coordinator) -> bool:
    """Tell whether the processes of a job have roots of their own."""
    return bool(getattr(coordinator, "own_disks", False)) and coordinator.process_count > 1


def name_of_disks(coordinator: Coordinator) -> str:
    """Return which of several roots on disks of their own a coordinator is for."""
    return str(getattr(coordinator, "name", ""))
