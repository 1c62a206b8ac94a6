"""`Rehearsal`: what a save will need is tried while a root is opened, before hours are run.

opening       the check begins, in a job on the engine's loop; what is wrong is an ERROR line
before_save   waits for the checks of all places, and raises what they have found, once
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from ckpt._redaction import redact
from ckpt._runtime.futures import settled
from ckpt._runtime.loop import Job
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.run_hooks import RunHooks
from ckpt._tree.table import format_bytes
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.keep._keep_policies import Latest
from ckpt.keep._ranking import Within
from ckpt.storage._local.config import translated
from ckpt.storage._local.storage import LocalStorage

if TYPE_CHECKING:
    from ckpt._engine.engine import Engine
    from ckpt._format.manifest import Manifest
    from ckpt._steps.root import Root
    from ckpt._steps.saves.queue import Run

logger = logging.getLogger("ckpt")

FOLDER = ".ckpt-rehearsal"
_MOST_BYTES = 1 << 10
_PATIENCE_SECONDS = 60.0
# What a save holds open at a time, with what jax and a data loader may come to hold meanwhile.
_FREE_FILES = 64


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Tries what a save will need, while the manager opens: a save that cannot work shows at once.

    Each process that may write makes a small file in each place of the run, with the credentials
    of the run, reads it, lists it and deletes it. Then it compares the size of the newest step with
    the space and the number of files that are left on disks, and with the steps that
    `keep=Latest(n)` or `keep=Within(...)` will keep. In an empty root it does so after the first
    step. Nothing is written with `mode="r"`, nor where a directory holds other things than steps.

    What is wrong is an ERROR line at once, and the first `save` raises it. Opening does not wait
    for the rehearsal; the first `save` does.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, extensions=[ckpt.extensions.Rehearsal()])
        ```
    """

    def _join(self, engine: Engine) -> None:
        hooks = RehearsalHooks()
        engine.hooks = (*engine.hooks, hooks.of)


class RehearsalHooks(RunHooks):
    """The rehearsals at all places of one run."""

    def __init__(self) -> None:
        self._checks: list[Job[list[StorageError]]] = []
        # Places whose newest step was not there yet.
        self._unsized: list[Root] = []

    def of(self, run: Run) -> RehearsalHooks:
        """Return itself, the hooks of each place of a run."""
        self._run = run
        return self

    async def opening(self, root: Root) -> None:
        if not root.is_read_only:
            self._checks.append(self._run.loop.submit(self._check, root))

    async def before_save(self, step: int) -> None:
        for check in tuple(self._checks):
            await settled(check.future)
        checks, self._checks = self._checks, []
        problems = [each for check in checks for each in check.future.result()]
        if not checks:
            # A save after the first one: its step tells how large the next ones are.
            unsized, self._unsized = self._unsized, []
            for root in unsized:
                problems += _said(await self._room(root))
        if problems:
            first, *others = problems
            first.others = tuple(others)
            for each in others:
                first.add_note(f"also failed: {each}")
            raise first

    async def _check(self, root: Root) -> list[StorageError]:
        where = redact(root.storage.location)
        problems = [StorageError(each, errno=errno.EMFILE) for each in _files_left()]
        try:
            if await _is_ours(root):
                await _try_out(root, where)
            else:
                logger.info("%s holds other things than steps, so nothing is tried there", where)
            problems += await self._room(root)
        except StorageError as error:
            problems.append(error)
        return _said(problems)

    async def _room(self, root: Root) -> list[StorageError]:
        """Return what is missing on a disk for the next steps, if there is a step to tell it."""
        if not isinstance(root.storage, LocalStorage):
            return []
        newest = None
        with contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError):
            newest = await root.index.open_latest()
        if newest is None:
            self._unsized.append(root)
            return []
        keep, present = root.options.keep, len(await root.index.refresh())
        coming = 1
        if isinstance(keep, Latest):
            coming = max(1, keep.n + 1 - present)
        elif isinstance(keep, Within):
            coming = max(1, keep.nbytes // max(newest.stored_bytes or 1, 1) + 1 - present)
        where = root.storage.location
        with translated("ask for the space of", where):
            left = await run_in_thread(os.statvfs, where)
        return [
            StorageError(f"{where}: {each}. Free some, or keep fewer steps", errno=errno.ENOSPC)
            for each in _missing(left, newest.manifest, coming)
        ]


def _said(problems: list[StorageError]) -> list[StorageError]:
    for each in problems:
        logger.error("%s", each.message)
    return problems


async def _is_ours(root: Root) -> bool:
    """Return True if a root is empty, or is a root of steps."""
    names = await root.storage.step_dirs()
    is_step = (each == "metadata" or root.names.step(each) is not None for each in names)
    return not names or any(is_step)


async def _try_out(root: Root, where: str) -> None:
    """Write, read, list and delete a small file.

    Raises:
        StorageError: One of these did not work; the message says which.
    """
    storage, name = root.storage, f"{FOLDER}/{uuid.uuid4().hex}"
    data = name.encode()
    async with _naming(where, "written"):
        await storage.put_note(name, data, replace=False)
    try:
        async with _naming(where, "read"):
            found = await storage.read("", name, _MOST_BYTES)
            if found != data:
                raise StorageError("it does not hold what was written")
        async with _naming(where, "listed"):
            if name.removeprefix(f"{FOLDER}/") not in await storage.notes(FOLDER):
                raise StorageError("the list does not have it")
    finally:
        with anyio.CancelScope(shield=True):
            async with _naming(where, "deleted"):
                await storage.drop_note(name)


@contextlib.asynccontextmanager
async def _naming(where: str, act: str) -> AsyncIterator[None]:
    """Name the act in errors of the body, and end it after a time."""
    try:
        with anyio.fail_after(_PATIENCE_SECONDS):
            yield
    except (CheckpointError, TimeoutError) as error:
        reason = f"no answer in {_PATIENCE_SECONDS:g} seconds"
        if isinstance(error, CheckpointError):
            reason = error.message
        raise StorageError(
            f"{where}: the rehearsal failed: a small file in {FOLDER} "
            f"could not be {act}: {reason}. Saves of this run would fail, too",
            errno=getattr(error, "errno", None),
        ) from error


def _missing(left: os.statvfs_result, manifest: Manifest, coming: int) -> Iterator[str]:
    """Yield what is missing on a disk for some steps like this one."""
    own = [each.size for each in manifest.files.values() if not each.shared]
    steps = "a step" if coming == 1 else f"{coming} steps, as many as will come,"
    like = f"like step {manifest.step} needs" if coming == 1 else f"like step {manifest.step} need"
    nbytes, free = coming * sum(own), left.f_bavail * left.f_frsize
    if free < nbytes:
        yield f"{format_bytes(free)} are left, and {steps} {like} {format_bytes(nbytes)}"
    # A file system without a fixed number of files says 0 of 0.
    files = coming * (len(own) + 1)
    if left.f_files and left.f_favail < files:
        yield f"{left.f_favail} more files can be made, and {steps} {like} {files}"


def _files_left() -> Iterator[str]:
    """Yield what is wrong with the number of files that this process may open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):
        used = len(os.listdir("/proc/self/fd"))
        if most != resource.RLIM_INFINITY and most - used < _FREE_FILES:
            yield (
                f"this process has {used} files open, and may have {most}: a save may need "
                f"{_FREE_FILES} more. Raise the limit (ulimit -n)"
            )
