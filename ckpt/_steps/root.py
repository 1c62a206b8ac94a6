"""`Root`: one root below its saves: its steps, the policy on new saves, and its deletions."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import check_step
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import EventRecorder, Observer
from ckpt._format.manifest_head import ReplacedSave
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import OpenMode, Timeouts
from ckpt._steps.index import MissingRoot, StepIndex
from ckpt._steps.pins import forget_expired
from ckpt._steps.removal.retention import Retention
from ckpt._steps.step_choice import PreviousSteps
from ckpt.errors import CheckpointError, CorruptCheckpointError, ReadOnlyError, StorageError
from ckpt.keep._deletion import Deletion
from ckpt.keep._keep_policies import KeepRules
from ckpt.save_when._save_policies import SaveContext, SavePolicyLike, refusal_of
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._manifests import note_branch

if TYPE_CHECKING:
    from ckpt._job.solo import Processes
    from ckpt._steps.run_hooks import RunHooks

logger = logging.getLogger("ckpt")

_NOTE = "metadata/_ROOT_METADATA"
# The note of older versions of Orbax, with the values alone, which Orbax reads if the other is
# missing.
_OLD_NOTE = "metadata/metadata"
_MAX_BYTES = 16 << 20
# Number of times that another writer may change the note between a look and a write.
_TRIES = 10


async def write_root_metadata(storage: Storage, metadata: Mapping[str, Any]) -> None:
    """Write the metadata of a root if it has none yet; existing metadata stay.

    If the existing note may not be read, or holds no metadata, a warning says so: no step needs it.

    Raises:
        StorageError: The note cannot be read for another reason, or cannot be written.
    """
    if not metadata:
        return
    for _ in range(_TRIES):
        try:
            document = await _read(storage)
        except (CorruptCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in (errno.EACCES, errno.EPERM):
                raise
            logger.warning("the metadata of the root was not changed: %s", error)
            return
        found = None if document is None else document["custom_metadata"]
        if found:
            _say_left_out(storage, found, metadata)
            return
        # Orbax keeps other fields in the document.
        whole = (document or {"internal_metadata": {}}) | {"custom_metadata": dict(metadata)}
        data = json.dumps(whole).encode()
        if await storage.put_note(_NOTE, data, replace=document is not None):
            return
        # Another writer was faster; look at its note.
    logger.warning("%s/%s comes and goes; it was not written", storage.location, _NOTE)


def _say_left_out(storage: Storage, found: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Warn of metadata that differ from those that the root has."""
    both = found.keys() | metadata.keys()
    differing = [str(key) for key in both if found.get(key, ...) != metadata.get(key, ...)]
    if differing:
        logger.warning(
            "%s keeps the metadata it was given first; what differs now is left out: %s",
            storage.location,
            ", ".join(sorted(differing))[:200],
        )


async def read_root_metadata(storage: Storage) -> dict[str, Any] | None:
    """Return the metadata of the root; empty if there are none, None if no note was written.

    Raises:
        StorageError: The note cannot be read.
        CorruptCheckpointError: The note is not root metadata.
    """
    document = await _read(storage)
    return None if document is None else document["custom_metadata"] or {}


async def _read(storage: Storage) -> dict[str, Any] | None:
    """Return the whole document; its `custom_metadata` is a dict or None."""
    for note in (_NOTE, _OLD_NOTE):
        data = await storage.read("", note, _MAX_BYTES)
        if data is None:
            continue
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            found = json.loads(data)
            document: dict[str, Any] = found if note == _NOTE else {"custom_metadata": found}
            if isinstance(document["custom_metadata"], dict | None):
                return document
        raise CorruptCheckpointError(
            f"{storage.location}/{note} is not root metadata: expected a JSON object, in "
            f"{_NOTE} with an object custom_metadata. Remove the file to have it written anew; no "
            "step needs it"
        )
    return None


# The largest number of left-behind steps that are named: each takes 20 bytes in the list of steps.
_MOST_BEHIND = 4096
_BEGUN = "%s: left out, since Orbax has not finished it: %s. 'ckpt gc --orbax' removes old ones"


class RootOptions(Struct, frozen=True):
    """How a manager uses a root: its arguments, checked.

    Attributes:
        names: Naming of the step directories.
        timeouts: Time limits.
        mode: How the root is opened.
        missing: What a root that is not there is.
        save_when: The save policy; None saves every step.
        keep: The keep policy; None keeps all.
        deletion: How steps are deleted, if that was said.
        metadata: Metadata to keep with the root, or None.
        log_level: Level of the line about each save, and each deletion.
    """

    names: StepNames
    timeouts: Timeouts
    mode: OpenMode = "a"
    missing: MissingRoot = "error"
    save_when: SavePolicyLike | None = None
    keep: KeepRules | None = None
    deletion: Deletion | None = None
    metadata: Mapping[str, Any] | None = None
    log_level: int = logging.INFO


class Root:
    """One root. Its coroutines run on the engine's loop.

    Attributes:
        storage: Storage of the root.
        options: How it is used.
        names: Naming of its step directories.
        index: Its committed steps.
        processes: The processes that use it.
        retention: Deletes its steps.
        hooks: What features do beside the saves.
        is_read_only: True if nothing may be written.
    """

    def __init__(
        self,
        storage: Storage,
        options: RootOptions,
        index: StepIndex,
        processes: Processes,
        retention: Retention,
        observers: tuple[Observer, ...],
        hooks: Sequence[RunHooks],
    ) -> None:
        """Put a root together from its parts; does no input or output."""
        self.storage = storage
        self.options = options
        self.names: StepNames = options.names
        self.index = index
        self.processes = processes
        self.retention = retention
        self.is_read_only: bool = options.mode == "r"
        self._observers = observers
        self.hooks = hooks
        self._opened = self._begun = False
        self._swept = 0.0

    def refuse_writing(self) -> None:
        """Raise if nothing may be written.

        Raises:
            ReadOnlyError: The manager was opened read-only.
        """
        if self.is_read_only:
            raise ReadOnlyError(f"{self.storage.location} was opened with mode='r'")

    async def open(self) -> None:
        """Create the root, and remove leftovers of dead writers; further calls do nothing."""
        if not self._opened:
            await self.processes.open(self._open)
            self._opened = True

    async def _open(self) -> None:
        await self.processes.begin(self._prepare)
        for each in self.hooks:
            await each.opening(self)

    async def _prepare(self) -> None:
        if not self.is_read_only:
            await self.storage.prepare()
            await self._sweep()
        # This call raises if there is no root and none is to be created.
        count, latest = await self.index.overview()
        where = redact(self.storage.location)
        if self.index.begun:
            logger.warning(_BEGUN, where, ", ".join(self.index.begun)[:200])
        if not count and not self.index.unreadable:
            from ckpt._steps.misplaced import say_misplaced

            await say_misplaced(self.storage, self.index, raises=self.options.mode == "r+")
        steps = f"1 step: {latest}" if count == 1 else f"{count} steps, the latest {latest}"
        logger.log(self.options.log_level, "%s: %s", where, steps if count else "no steps yet")

    async def begin(self) -> None:
        """Write the notes of the root; only the first save does.

        So a root of another library, or one that was only read, stays as it was.
        """
        if not self._begun:
            await self.processes.begin(self._write_notes)
            self._begun = True

    async def _write_notes(self) -> None:
        await write_root_metadata(self.storage, self.options.metadata or {})
        await self.retention.prepare()
        await self.retention.write_down()

    async def _sweep(self) -> None:
        """Remove leftovers of dead writers from the root."""
        self._swept = time.monotonic()
        removed = await self.storage.sweep()
        try:
            await forget_expired(self.storage)
        except StorageError as error:
            # In a shared root these files may belong to another user.
            logger.warning("pins that have run out were left: %s", error)
        if removed:
            logger.debug("removed %d attempts of dead writers: %s", len(removed), removed)

    async def refusal(self, step: int, context: SaveContext) -> str | None:
        """Return the reason why the save policy refuses `step`, or None."""
        if self.options.save_when is None:
            return None
        previous = PreviousSteps(self.index)
        # The policy runs in a thread, because it may be slow or look at earlier steps. It is
        # shielded, because it reads these steps on this loop, where a cancelled scope could read
        # nothing; and because a thread cannot be interrupted anyway.
        with anyio.CancelScope(shield=True):
            found = await run_in_thread(refusal_of, self.options.save_when, step, previous, context)
        return found

    async def has(self, step: int) -> bool:
        """Return True if there is a step that a save of the same number would not replace."""
        passed_over = self.index.passed_over.get(step)
        found = [await self.index.look(each) for each in await self.index.step_dirs_of(step)]
        return any(
            each is not None and (passed_over is None or each.attempt != passed_over.attempt)
            for each in found
        )

    async def other_step_dirs(self, step: int) -> list[str]:
        """Return the directories of `step` that do not have the name of a new save."""
        if isinstance(self.names, Standard):
            # Standard gives each step one name only, so there is nothing to look for.
            return []
        written = self.names.name(step)
        return [step_dir for step_dir in await self.index.step_dirs_of(step) if step_dir != written]

    async def branched(self, request: SaveRequest, restored: int | None) -> SaveRequest:
        """Return the request with the saves that give way to it, and those it leaves behind.

        Left behind are saves of greater steps, if the run went on from a smaller one. A program
        that has restored nothing, or this very step, is not known to go back.
        """
        step = check_step(request.step)
        replaced: list[ReplacedSave] = []
        for hooks in self.hooks:
            replaced += await hooks.before_publish(step, request.replaces_any)
        request = replace(request, replaces=replaced)
        # List the places only if greater steps were seen before, or saved.
        places = self.index, *self.index.places
        seen = max(*(each.greatest for each in places), self.retention.newest or 0)
        if restored is None or not restored < step < seen:
            return request
        saves = {each.created_ns: each.step for each in await self.index.everywhere()}
        behind = [each for each in sorted(saves, key=lambda it: -saves[it]) if saves[each] > step]
        await note_branch(self.storage, behind)
        return replace(request, left_behind=behind[:_MOST_BEHIND])

    async def preserve(self, saved: int) -> None:
        """Delete what the policy does not keep; a failure is logged, since the save has succeeded.

        From time to time this also removes leftovers of vanished writers on other machines, once
        their leases have run out.
        """
        try:
            going = await self.processes.deletion_plan(saved, self.retention)
            if time.monotonic() - self._swept > self.storage.traits.lease_seconds:
                await self._sweep()
            with EventRecorder("save", saved, self._observers).phase("preserve"):
                await self.retention.preserve(going)
        except Exception as error:
            text = "steps that are no longer kept could not be deleted: %s"
            logger.warning(text, error, exc_info=not isinstance(error, CheckpointError))
