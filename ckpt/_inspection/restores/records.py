"""What a restore would read, as records."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._inspection.restores.advice import LayoutAdvice, LeafReads


class FileShare(Struct, frozen=True):
    """How much of a data file a process reads.

    Attributes:
        path: The file, relative to the step.
        read: Bytes that are read of it.
        share: That over the size of the file; None if the size is not known.
    """

    path: str
    read: int
    share: float | None


class ProcessReads(Struct, frozen=True):
    """What one process reads.

    Attributes:
        process: Its number.
        devices: How many devices it has.
        held: Bytes of arrays on its devices and in its memory, replicas included.
        read: Bytes that it reads of data files.
        requests: In how many requests.
        files: Of how many files.
        most_of: The file of which it reads the largest share; None if it reads nothing.
        host_memory: Most bytes of host memory that the restore takes at one time (an estimate).
        host_arrays: How many of them are the arrays themselves; on accelerators only those of
            numpy.
    """

    process: int
    devices: int
    held: int
    read: int
    requests: int
    files: int
    most_of: FileShare | None
    host_memory: int
    host_arrays: int


class OtherItem(Struct, frozen=True):
    """An item without arrays. Its handler reads files of its own, which are not counted.

    Attributes:
        name: Its name.
        handler: Its handler.
        nbytes: Bytes of its files, as the handler has told them.
    """

    name: str
    handler: str
    nbytes: int


class RestoreExplanation(Struct, frozen=True):
    """What a restore would read.

    Attributes:
        path: Where the checkpoint is.
        step: Its number, or None.
        mesh: Sizes of the axes of the mesh to restore onto; None for a restore as saved.
        platform: Platform of the devices.
        arrays: How many arrays are restored.
        nbytes: Their bytes, each counted once.
        stored: Bytes of data files that any process reads, each counted once.
        read: Bytes that all processes read.
        requests: In how many requests.
        shared: Bytes that they would read if processes that hold the same shared their reads.
        budget: Budget of host memory of each process.
        concurrent: Requests in progress at one time in each process.
        processes: What each process reads.
        leaves: The arrays of which more is read than is needed, the worst first.
        advice: How they could be saved.
        others: Items without arrays.
        notes: What was assumed.
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
