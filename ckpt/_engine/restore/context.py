"""The context that the items of one restore share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import Struct, field

from ckpt._engine.engine import Engine
from ckpt._engine.restore.step_files import OtherCopies, OwnFiles, StepFiles
from ckpt._events import EventRecorder, Observer
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import Manifest
from ckpt._plan.chunk_reads import CONCURRENT_REQUESTS
from ckpt._plan.targets import ArrayRead
from ckpt._settings import ArrayMemory
from ckpt.storage._base import Storage
from ckpt.storage._manifests import files_folder

if TYPE_CHECKING:
    from ckpt._job.shared_reads import Broadcast

# Most shared requests in progress; their sizes have to be the same in all processes.
SHARED_REQUESTS = 4


class RestoreContext(Struct, frozen=True):
    """The context that the items of one restore share.

    Attributes:
        storage: Storage of the root.
        step_dir: Directory of the step in it.
        manifest: Manifest of the step.
        engine: Engine with the handlers and the memory.
        observers: Receivers of the timed phases.
        process: Number of this process in its job.
        processes: Number of processes in the job.
        broadcast: State of the reads that processes share; None if each process reads all that it
            needs.
        slots: Semaphore that limits the requests in progress.
        moved: Bytes of array data that the reads of each item take from the storage.
        casts: The number of leaves and of values that became 0, by the two dtypes of a cast that
            loses precision.
        memory: Owner of the memory of arrays on CPU devices.
        external_files: The files of a step that another library wrote, or of a virtual step; None
            if all files are in the directory of the step.
        check: Check of the arrays on their devices, by the leaves of an item, the reads, and their
            results; None without one.
        copies: Other copies of the step, which replace damaged data; None without any.
        may_read: Awaited before the first array of an item is read; None if nothing delays the
            reads.
    """

    storage: Storage
    step_dir: str
    manifest: Manifest
    engine: Engine
    observers: tuple[Observer, ...]
    process: int = 0
    processes: int = 1
    broadcast: Broadcast | None = None
    slots: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(CONCURRENT_REQUESTS))
    moved: list[int] = field(default_factory=list)
    casts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    memory: ArrayMemory = "jax"
    external_files: StepFiles | None = None
    check: Callable[[LeafTable, Sequence[ArrayRead], Sequence[Any]], None] | None = None
    copies: OtherCopies | None = None
    may_read: Callable[[], Awaitable[None]] | None = None

    @property
    def files(self) -> StepFiles:
        return self.external_files or OwnFiles(self.storage, self.folder)

    @property
    def folder(self) -> str:
        """The folder of the files of the step, relative to the root."""
        return files_folder(self.step_dir, self.manifest)

    @property
    def recorder(self) -> EventRecorder:
        return EventRecorder("restore", self.manifest.step, self.observers)
