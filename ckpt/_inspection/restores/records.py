"""The reads of a restore, as records."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._inspection.restores.advice import LayoutAdvice, LeafReads


class FileShare(Struct, frozen=True):
    """The bytes of a data file that a process reads.

    Attributes:
        path: The file, relative to the step.
        read: Bytes that are read from it.
        share: `read` over the size of the file; None if the size is unknown.
    """

    path: str
    read: int
    share: float | None


class ProcessReads(Struct, frozen=True):
    """The reads of one process.

    Attributes:
        process: Its number.
        devices: Number of its devices.
        held: Bytes of arrays on its devices and in its memory, including replicas.
        read: Bytes that it reads from data files.
        requests: Number of its requests.
        files: Number of files that it reads.
        most_of: The file of which it reads the largest share; None if it reads nothing.
    """

    process: int
    devices: int
    held: int
    read: int
    requests: int
    files: int
    most_of: FileShare | None


class OtherItem(Struct, frozen=True):
    """An item without arrays. Its handler reads files of its own, which are not counted.

    Attributes:
        name: Name of the item.
        handler: Its handler.
        nbytes: Bytes of its files, as its handler reported them.
    """

    name: str
    handler: str
    nbytes: int


class RestoreExplanation(Struct, frozen=True):
    """The reads of a restore.

    Attributes:
        path: Path of the checkpoint.
        step: Its number, or None.
        mesh: Sizes of the axes of the mesh to restore onto; None for a restore as saved.
        platform: Platform on which most was saved.
        arrays: Number of arrays to restore.
        nbytes: Bytes of the arrays, each counted once.
        stored: Bytes of data files that any process reads, each counted once.
        read: Sum of the bytes that the processes read.
        requests: Sum of the requests of the processes.
        shared: Bytes read if processes that hold the same parts shared their reads.
        budget: Budget of host memory of each process.
        concurrent: Number of requests in progress at one time in each process.
        processes: The reads of each process.
        leaves: The arrays that are read beyond the need, the worst first.
        advice: Array formats that would save reads.
        others: Items without arrays.
        notes: Assumptions of the plan.
    """

    path: str
    step: int | None
    mesh: Mapping[str, int] | None
    platform: str
    arrays: int
    nbytes: int
    stored: int
    read: int
    requests: int
    shared: int
    budget: int
    concurrent: int
    processes: list[ProcessReads]
    leaves: list[LeafReads]
    advice: list[LayoutAdvice]
    others: list[OtherItem]
    notes: list[str]
