"""What is deleted, and how: off the save path, never what is pinned or of somebody else."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable

import anyio

from ckpt.engine.items import delete_item
from ckpt.errors import CorruptCheckpointError, StepNotFoundError, StepPinnedError, located
from ckpt.events import Observer, Recorder
from ckpt.history import saved_step
from ckpt.index import StepIndex
from ckpt.late_statistics import drop_late, keep_late, statistics_of
from ckpt.manifest import FILE_NAME, MAX_BYTES, Manifest, peek_files
from ckpt.pins import deletion_of, pins, refuse_pinned
from ckpt.policies import Deletion, PreservationPolicyLike, PreserveAll, steps_kept
from ckpt.steps import check_step
from ckpt.storage.base import Storage

__all__ = ["Retention"]

logger = logging.getLogger("ckpt")

_NAMED_FILES = 5


class Retention:
    """Deletes steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        policy: PreservationPolicyLike,
        deletion: Deletion,
        observers: tuple[Observer, ...],
        now_ns: Callable[[], int],
    ) -> None:
        """Keep the steps of `storage` that `policy` wants to have kept."""
        self._storage = storage
        self._index = index
        self._policy = policy
        self._concurrency = deletion.concurrency
        self._keeps_latest = deletion.keep_latest
        self._trash = None if deletion.trash is None else os.fspath(deletion.trash)
        self._observers = observers
        self._now_ns = now_ns

    async def prepare(self) -> None:
        """Make the trash folder, if there is to be one.

        Raises:
            StorageError: Steps could not be moved into it.
        """
        if self._trash is not None:
            await self._storage.prepare_trash(self._trash)

    async def preserve(self, saved: int) -> None:
        """Delete what the policy does not keep, several steps at a time.

        What was acknowledged just now stays, though older steps may be greater: after a run went
        back, its new steps are the ones it would resume from.

        Args:
            saved: The step that was committed just now.

        Raises:
            CheckpointError: Steps could not be deleted; all others were.
        """
        if isinstance(self._policy, PreserveAll):
            return
        found = await self._index.refresh()
        steps = [saved_step(each) for each in found.values()]
        kept = await anyio.to_thread.run_sync(steps_kept, self._policy, steps, self._now_ns() / 1e9)
        always = {saved, max(found)} if self._keeps_latest and found else {saved}
        going = [step for step in found if step not in kept and step not in always]
        if not going:
            return
        pinned = await pins(self._storage)
        limiter = anyio.CapacityLimiter(self._concurrency)
        errors: list[Exception] = []

        async def delete(step: int) -> None:
            async with limiter:
                try:
                    with located(step=step):
                        await self._delete(step, [found[step].entry])
                except StepPinnedError:
                    logger.debug("step %d is kept: it was pinned just now", step)
                except Exception as error:
                    # One that cannot be deleted is no reason to leave the others.
                    errors.append(error)

        async with anyio.create_task_group() as tasks:
            for step in going:
                if step not in pinned:
                    tasks.start_soon(delete, step)
        if errors:
            with located():
                raise ExceptionGroup("steps could not be deleted", errors)

    async def delete(self, step: int) -> None:
        """Delete a step, damaged ones too.

        Raises:
            StepNotFoundError: There is no such step.
            StepPinnedError: It is pinned.
        """
        with Recorder("delete", step, self._observers).failing(time.perf_counter_ns()):
            entries = await self._deletable(step)
        await self._delete(step, entries)

    async def delete_item(self, entry: str, manifest: Manifest, item: str) -> None:
        """Delete one item of a step; see `engine.items.delete_item`.

        Raises:
            InvalidArgumentError: There is no such item, or no other one.
            StepPinnedError: The step is pinned.
        """
        step = check_step(manifest.step)
        async with self._deletion(step):
            taken = await statistics_of(self._storage, entry, manifest)
            await self._spare_others(entry)
            left = await delete_item(self._storage, entry, manifest, item)
            if taken is not None:
                await keep_late(self._storage, entry, left.attempt, taken)
        logger.info("deleted the item %r of step %d", item, step)

    async def _deletable(self, step: int) -> list[str]:
        """Return the entries of a step that is to be deleted, all of them ours."""
        entries = await self._index.entries_of(step)
        # What is no directory is listed nowhere, and is not ours.
        listed = set(await self._storage.entries())
        if not entries:
            raise await self._index.not_found(step)
        if listed.isdisjoint(entries):
            raise StepNotFoundError(
                f"{self._storage.location}/{entries[0]} is a file or a link, not a step", step=step
            )
        for entry in entries:
            if FILE_NAME not in await self._storage.files(entry):
                raise StepNotFoundError(
                    f"{self._storage.location}/{entry} is not a checkpoint of this library, so it "
                    "is not deleted",
                    step=step,
                )
        return entries

    async def _delete(self, step: int, entries: Iterable[str]) -> None:
        began = time.perf_counter()
        trash = None
        async with self._deletion(step):
            for entry in entries:
                trash = await self._take_away(entry)
                await drop_late(self._storage, entry)
        where = "deleted" if trash is None else f"moved to {trash}:"
        logger.info("%s step %d in %.2f s", where, step, time.perf_counter() - began)

    @contextlib.asynccontextmanager
    async def _deletion(self, step: int) -> AsyncIterator[None]:
        """Keep readers from pinning a step while the body deletes it; report how that ended.

        Raises:
            StepPinnedError: It is pinned already.
        """
        recorder = Recorder("delete", step, self._observers)
        began_ns = time.perf_counter_ns()
        async with deletion_of(self._storage, step) as pinned:
            try:
                refuse_pinned(self._storage, step, pinned)
            except StepPinnedError as error:
                recorder.end(began_ns, "skipped", reason=error.message)
                raise
            with recorder.ending(began_ns):
                yield

    async def _take_away(self, entry: str) -> str | None:
        """Delete an entry, or move it to the trash; return its path there."""
        if self._trash is not None:
            return await self._storage.move(entry, self._trash)
        await self._spare_others(entry)
        await self._storage.remove(entry)
        return None

    async def _spare_others(self, entry: str) -> None:
        """Move out of an entry what the library did not write.

        Of a damaged entry nobody knows what that would be.
        """
        try:
            data = await self._storage.read(entry, FILE_NAME, MAX_BYTES)
        except CorruptCheckpointError:
            return
        known = None if data is None else await anyio.to_thread.run_sync(peek_files, data)
        if known is None:
            return
        found = await self._storage.files(entry)
        others = sorted(found.keys() - known)
        if others:
            folder = await self._storage.set_aside(entry, others)
            logger.warning(
                "%d files in %s/%s were not written by this library; they are in %s now: %s",
                len(others),
                self._storage.location,
                entry,
                folder,
                ", ".join(others[:_NAMED_FILES]),
            )
