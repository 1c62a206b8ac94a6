"""What the items of one restore share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from msgspec import Struct, field

from ckpt._engine.engine import Engine
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._engine.restore.step_files import OtherCopies, OwnFiles, StepFiles
from ckpt._events import EventRecorder, Observer
from ckpt._format.manifest import Manifest
from ckpt._plan.chunk_reads import CONCURRENT_REQUESTS
from ckpt._settings import ArrayMemory
from ckpt.storage._base import Storage
from ckpt.storage._manifests import lies_in

# Shared requests in progress, of which the sizes have to be the same in all processes.
SHARED_REQUESTS = 4


class RestoreContext(Struct, frozen=True):
    """What the items of one restore share.

    Attributes:
        storage: Where the step is.
        step_dir: Its directory there.
        manifest: Its manifest.
        engine: Handlers, and memory.
        observers: Receive the timed phases.
        process: Number of this process in its job.
        processes: How many processes the job has.
        broadcast: How they share what they read; None where each reads what it needs.
        slots: Taken by every request in progress.
        moved: Bytes of array data that the reads of each item take from the storage.
        casts: By the dtypes of a cast that loses precision, how many leaves and values that are 0.
        memory: Whose memory the arrays have on CPU devices.
        foreign: The files of a step that another library wrote, or of a virtual one; None where all
            are in the directory of the step.
        checks_devices: Whether what has arrived on devices is compared with the vital signs.
        copies: Other copies of the step, for what is damaged in this one; None without any.
        may_read: Awaited before the first array of an item is read; None where nothing holds it up.
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
    foreign: StepFiles | None = None
    checks_devices: bool = False
    copies: OtherCopies | None = None
    may_read: Callable[[], Awaitable[None]] | None = None

    @property
    def files(self) -> StepFiles:
        """The files of the step."""
        return self.foreign or OwnFiles(self.storage, self.folder)

    @property
    def folder(self) -> str:
        """Where the files of the step are."""
        return lies_in(self.step_dir, self.manifest)

    @property
    def recorder(self) -> EventRecorder:
        """Takes the timed phases."""
        return EventRecorder("restore", self.manifest.step, self.observers)
