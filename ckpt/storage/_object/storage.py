"""Object stores as a `Storage`: S3, GCS, the memory of this process, or a store of others.

The modules beside this one do the work. docs/design/006-object-stores.md says why it is safe.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import anyio

from ckpt._format.manifest_head import FILE_NAME
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage._base import (
    UNKNOWN_SIZE,
    Attempt,
    AttemptEntry,
    FileStamp,
    StorageTraits,
    TrashEntry,
)
from ckpt.storage._object import attempts, leases, notes
from ckpt.storage._object import trash as trash_folder
from ckpt.storage._object.attempts import ObjectAttempt
from ckpt.storage._object.client import KeyValueStore, ObjectClient
from ckpt.storage._object.config import GCS, S3, Memory, StoreConfig
from ckpt.storage._object.connection import connect
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._object.leases import Sightings
from ckpt.storage._object.listing import GONE, StepListing, is_foreign, is_gone
from ckpt.storage._object.probe import probe
from ckpt.storage._object.removal import attempts_in, remove, remove_replaced, sweep
from ckpt.storage._object.server_copies import MemoryCopier, ServerSideCopies, open_copier
from ckpt.storage._store import CopiesObjects, Store, StoredObject, refuse_missing

logger = logging.getLogger("ckpt")

T = TypeVar("T")
# A large read is split into parts of this size, each with a stream of its own to hide latency.
_PART_BYTES = 8 << 20
# Number of files copied through this machine, and of manifests parsed, at once.
_COPIES, _PARSED = 4, 16


class ObjectStorage:
    """A root in an object store."""

    def __init__(
        self,
        place: StoreConfig | Store,
        timeouts: Timeouts,
        *,
        create: bool = True,
        open_store: Callable[[], tuple[KeyValueStore, KeyValueStore]] | None = None,
    ) -> None:
        """Use a place.

        Args:
            place: The place, or the objects of a store of others.
            timeouts: Durations of leases.
            create: True lets `prepare` accept a place where there is nothing yet.
            open_store: Opens another store instead of the one that `place` names; see
                `ObjectClient`.
        """
        self.config = place if isinstance(place, S3 | GCS | Memory) else None
        self._endpoint, self._heeds_conditions = "", False
        open_copies: Callable[[], CopiesObjects] | None = None
        if isinstance(place, S3 | GCS | Memory):
            connection = connect(place)
            self._endpoint = connection.endpoint
            client = ObjectClient(
                connection.location,
                connection.endpoint,
                open_store or connection.open,
                place.request_timeout,
                place.concurrency,
                0 if isinstance(place, Memory) else place.retries,
            )
            self._keys: Store = client
            if isinstance(place, Memory):
                self._heeds_conditions = True
                open_copies = partial(MemoryCopier, client)
            else:
                self._heeds_conditions = place.single_writer
                if place.server_side_copies:
                    open_copies = partial(open_copier, place, connection, client)
        else:
            self._keys = place
            open_copies = (lambda: place) if isinstance(place, CopiesObjects) else None
        self._timeouts = timeouts
        self._create = create
        self._lists = StepListing(self._keys)
        self._sightings = Sightings()
        self._server_copies = ServerSideCopies(self._keys, open_copies)
        self._copies: anyio.Semaphore | None = None
        self._answered = False

    @property
    def location(self) -> str:
        return self._keys.location

    @property
    def traits(self) -> StorageTraits:
        limits, shares = self._keys.limits, self._server_copies.are_possible
        # Sending an object begins only when all of it is copied and hashed, so objects are small.
        # A copy is a request, and a large state has thousands of objects.
        return StorageTraits(
            self._timeouts.lease,
            limits.largest_bytes,
            limits.usual_bytes,
            shares,
            shares_at_once=False,
        )

    async def prepare(self) -> None:
        if not self._create:
            await self._refuse_emptiness()
        if not self._heeds_conditions:
            await probe(self._keys)
            self._heeds_conditions = True

    async def _refuse_emptiness(self) -> None:
        if not await self._keys.list(""):
            raise StorageError(
                f"cannot list the directory {self.location}: it does not exist, and may not be "
                "made here (mode='r+')",
                errno=errno.ENOENT,
            )
        self._create = True

    async def step_dirs(self) -> list[str]:
        if not self._create:
            await self._refuse_emptiness()
        return await self._lists.step_dirs()

    async def exists(self, step_dir: str) -> bool:
        if await self._stamp(step_dir, FILE_NAME) is not None:
            return True
        # A name that Orbax has used is not free.
        return await is_foreign(self._keys, step_dir)

    async def files(self, step_dir: str) -> dict[str, int | None]:
        return dict.fromkeys(await self._keys.list(f"{step_dir}/"), UNKNOWN_SIZE)

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        found = await self._keys.get(self._key(step_dir, path))
        if found is None or (path == FILE_NAME and is_gone(found.data)):
            if not self._answered:
                # Reading from a missing bucket finds nothing; listing it says why.
                await refuse_missing(self._keys)
                self._answered = True
            return None
        self._answered = True
        if len(found.data) > limit:
            raise CorruptCheckpointError(
                f"{self.location}/{step_dir}/{path}: it has {len(found.data)} bytes, "
                f"more than {limit}"
            )
        return found.data

    async def read_tail(self, step_dir: str, path: str, most: int) -> tuple[bytes, int] | None:
        found = await self._keys.get(self._key(step_dir, path), -most)
        if found is None:
            return None
        return found.data, UNKNOWN_SIZE if len(found.data) == most else len(found.data)

    async def stamps(self, step_dirs: Sequence[str], path: str) -> list[FileStamp | None]:
        found: dict[str, FileStamp | None] = {}

        async def look(step_dir: str) -> None:
            found[step_dir] = await self._stamp(step_dir, path)

        await for_each(look, step_dirs)
        return [found[step_dir] for step_dir in step_dirs]

    async def _stamp(self, step_dir: str, path: str) -> FileStamp | None:
        first = await self._keys.get(self._key(step_dir, path), 0, 1)
        if first is None or (path == FILE_NAME and GONE.startswith(first.data or b"-")):
            return None
        return FileStamp(first.generation.hex())

    async def read_each(
        self,
        step_dirs: Sequence[str],
        path: str,
        limit: int,
        head: int,
        parse: Callable[[bytes, int], T | None],
    ) -> list[T | None]:
        found: dict[str, T | None] = dict.fromkeys(step_dirs)
        parsers = anyio.Semaphore(_PARSED)

        async def look(step_dir: str) -> None:
            async with parsers:
                data = await self._keys.get(self._key(step_dir, path))
                if data is not None and len(data.data) <= limit:
                    found[step_dir] = await run_in_thread(parse, data.data, len(data.data))

        await for_each(look, step_dirs)
        return [found[step_dir] for step_dir in step_dirs]

    async def cut_files(self, expected: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        # Looking would take a request for every file of every step.
        return {}

    async def begin(self, step_dir: str) -> Attempt:
        token = uuid.uuid4().hex
        record = await leases.make(self._keys, step_dir, token, self._timeouts.lease, "writing")
        if record is None:
            await refuse_missing(self._keys)
            raise StorageError(f"{self.location}/{step_dir}: the store did not create a new object")
        return ObjectAttempt(step_dir, token, record)

    async def join(self, step_dir: str, attempt: str) -> Attempt:
        if await self._keys.get(leases.record_key(step_dir, attempt)) is None:
            await refuse_missing(self._keys)
            endpoint = f" at {self._endpoint}" if self._endpoint else ""
            raise StorageError(
                f"{self.location}/{step_dir}{endpoint}: the attempt that process 0 has begun does "
                "not exist here. Do all processes use the same store, endpoint and credentials? "
                "memory:// is for one process"
            )
        return ObjectAttempt(step_dir, attempt, None)

    async def renew(self, attempt: Attempt) -> None:
        record = _own_attempt(attempt).record
        if record is not None and not await record.renew(self._keys):
            raise leases.lost(f"{self.location}/{attempt.step_dir}")

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        # The manifest makes a step visible, so it is kept for `publish`.
        if path == FILE_NAME:
            _own_attempt(attempt).manifest = data
        else:
            await self.write_block(attempt, path, data)

    async def write_block(self, attempt: Attempt, path: str, data: bytes | memoryview) -> None:
        own = _own_attempt(attempt)
        most = self._keys.limits.largest_bytes
        if len(data) > most:
            raise StorageError(
                f"{self.location}/{own.step_dir}: {path!r:.200} has {len(data)} bytes, and object "
                f"stores accept at most {most} at once. Split it, or save it to a "
                "file system",
                errno=errno.EFBIG,
            )
        try:
            await self._keys.put(self._key(own.step_dir, own.id, path), data)
        except RequestFailed as error:
            own.abandoned = own.abandoned or error.is_under_way
            raise

    async def link(self, attempt: Attempt, path: str, folder: str = "") -> None:
        # The object is copied through this machine, so the number of copies is limited.
        self._copies = self._copies or anyio.Semaphore(_COPIES)
        async with self._copies:
            place = f"{attempt.step_dir}/{folder}" if folder else attempt.step_dir
            found = await self._keys.get(self._key(place, path))
            if found is None:
                raise CorruptCheckpointError(
                    f"{self.location}/{place}/{path}: it does not exist. The step was damaged "
                    "after it was committed"
                )
            await self.write_block(attempt, path, found.data)

    async def share(
        self, attempt: Attempt, step_dir: str, files: Mapping[str, int]
    ) -> Sequence[str]:
        return await self._server_copies.share(_own_attempt(attempt), step_dir, files)

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        key = self._key(step_dir, path)

        async def fill(start: int) -> None:
            part, first = target[start : start + _PART_BYTES], offset + start
            try:
                found = await self._keys.get(key, first, first + len(part))
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                found = None
            if found is None or len(found.data) != len(part):
                raise CorruptCheckpointError(
                    f"{self.location}/{key}: it does not exist, or is shorter than "
                    f"{offset + len(target)} bytes. It was damaged after it was written; take "
                    "another checkpoint"
                )
            await run_in_thread(_copy, part, found.data)

        if 0 < len(target) <= _PART_BYTES:
            await fill(0)
        else:
            await for_each(fill, range(0, len(target), _PART_BYTES))
        if then is not None:
            await run_in_thread(then)

    async def publish(
        self,
        attempt: Attempt,
        *,
        overwrite: bool,
        replacing: str | None = None,
        files: Mapping[str, int] | None = None,
    ) -> None:
        # Shielded, so that the outcome in the store is known here.
        with anyio.CancelScope(shield=True):
            own = _own_attempt(attempt)
            replaced = await attempts.publish(
                self._keys, own, overwrite=overwrite, replacing=replacing
            )
            await self._clean_up(own, replaced)

    async def _clean_up(self, own: ObjectAttempt, replaced: StoredObject | None) -> None:
        """Remove the data that a committed attempt has replaced, and then its record."""
        record, own.record = own.record, None
        try:
            if replaced is not None and not is_gone(replaced.data):
                await remove_replaced(self._keys, own.step_dir, replaced, self._timeouts.lease)
            # The record goes last: it shows a cleaner that something may be left to do.
            if record is not None:
                await self._keys.delete(record.key)
        except StorageError as error:
            logger.warning("data of a replaced step at %s was left: %s", self.location, error)

    async def discard(
        self, attempt: Attempt, *, joined: bool = False, keep_files: bool = False
    ) -> None:
        own = _own_attempt(attempt)
        own.abandoned = own.abandoned or joined
        try:
            await attempts.discard(self._keys, own)
        except StorageError as error:
            logger.warning("an attempt could not be removed, and is left to a later run: %s", error)

    async def remove(self, step_dir: str, *, attempt: str | None = None) -> bool:
        with anyio.CancelScope(shield=True):
            removed = await remove(self._keys, step_dir, attempt, self._timeouts.lease)
        return removed

    async def move(self, step_dir: str, trash: str, *, listed: bool = True) -> str | None:
        # There is one trash, whatever its name, and nothing has to be made for it.
        with anyio.CancelScope(shield=True):
            moved = await trash_folder.move(self._keys, step_dir, self._timeouts.lease)
        return None if moved is None else f"{self.location}/{moved}"

    async def trashed(self, trash: str) -> list[TrashEntry]:
        return await trash_folder.entries(self._keys)

    async def undelete(self, trash: str, name: str, step_dir: str) -> None:
        with anyio.CancelScope(shield=True):
            await trash_folder.undelete(self._keys, name, step_dir, self._timeouts.lease)

    async def purge(self, trash: str, name: str) -> None:
        with anyio.CancelScope(shield=True):
            await trash_folder.purge(self._keys, name, self._timeouts.lease)

    async def attempts(self) -> list[AttemptEntry]:
        return await attempts_in(self._keys, self._sightings)

    async def sweep(self) -> list[str]:
        return await sweep(self._keys, self._sightings, self._timeouts.lease)

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        return await notes.put(self._keys, name, data, replace=replace)

    async def notes(self, folder: str) -> dict[str, float]:
        return await notes.ages(self._keys, folder, self._sightings)

    async def touch_note(self, name: str) -> bool:
        return await notes.touch(self._keys, name)

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        return await notes.drop(self._keys, name)

    def _key(self, *names: str) -> str:
        """Return the key of a file.

        Raises:
            CorruptCheckpointError: The path, which comes from a manifest, would lead elsewhere.
        """
        key = "/".join(names).removeprefix("/")
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise CorruptCheckpointError(f"{self.location}: {key!r:.200} is not a valid path")
        return key


def _copy(target: memoryview, data: bytes) -> None:
    target[:] = data


def _own_attempt(attempt: Attempt) -> ObjectAttempt:
    assert isinstance(attempt, ObjectAttempt)
    return attempt
