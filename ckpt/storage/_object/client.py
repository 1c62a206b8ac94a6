"""The objects below one place of a store, by key; every request is under a time limit.

TensorStore has no deadlines, so they are set here. A request whose time has run out may still be
carried out by the store: data that arrive late are harmless, since nobody else uses their keys, and
of conditional writes `swap` tells whether that is so.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import tensorstore as ts

from ckpt._runtime.futures import waker
from ckpt.storage._object.errors import RequestFailed, refused, timed_out

__all__ = ["MISSING", "KeyValueStore", "ObjectClient", "StoredObject", "Swap"]

# What TensorStore gives as the generation of a key that is not there.
MISSING: bytes = ts.KvStore.open("memory://").result().read("-").result().stamp.generation
# Requests that carry data get a second more for each of these many bytes.
_SLOWEST_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
# No object that is written here is larger.
_LARGEST_BYTES = 1 << 30
# A list takes a request for every thousand keys, one after the other.
_LIST_FACTOR = 2
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


class KeyValueStore(Protocol):
    """What is used of `tensorstore.KvStore`; the futures are TensorStore's."""

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        """Begin to read."""

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        """Begin to write, or to delete where `value` is None."""

    def list(self, range: Any = None) -> Any:
        """Begin to list."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its bytes, or the first of them, and what changes whenever it is written."""

    data: bytes
    generation: bytes


@dataclass(frozen=True, slots=True)
class Swap:
    """What came of a conditional write.

    Attributes:
        generation: That of the object now, if it is what was written; None if the condition did
            not hold.
        doubtful: Whether an answer was lost, so that it may have been written for a while and been
            replaced since, where `generation` is None.
        abandoned: Whether a request is still under way, and may be carried out later.
    """

    generation: bytes | None
    doubtful: bool = False
    abandoned: bool = False


class ObjectClient:
    """The objects below one place of a store. Its coroutines run on one event loop."""

    def __init__(
        self,
        location: str,
        endpoint: str,
        open_store: Callable[[], tuple[KeyValueStore, KeyValueStore]],
        seconds: float,
        concurrency: int,
        retries: int = 0,
    ) -> None:
        """Use the objects below `location`.

        Args:
            location: The place, as messages name it.
            endpoint: URL of the store, for messages; empty where it is the usual one.
            open_store: Gives the store twice: one that repeats what failed, and one that does not,
                for writes with a condition. Called once, in a thread.
            seconds: How long a request may take.
            concurrency: How many may be under way.
            retries: How often a write with a condition is repeated that did not reach the store.
        """
        self.location = location
        self.seconds = seconds
        self._at = f" at {endpoint}" if endpoint else ""
        self._open_store = open_store
        self._opening = threading.Lock()
        self._opened: tuple[KeyValueStore, KeyValueStore] | None = None
        self._concurrency = concurrency
        self._retries = retries
        self._slots: anyio.Semaphore | None = None
        self._copying: anyio.Lock | None = None
        # Whether there may be a connection that curl keeps.
        self._has_connected = False

    async def get(self, key: str) -> StoredObject | None:
        """Return an object, or None if it is not there; large ones have more time."""
        return await self._read("read", key, None)

    async def first(self, key: str) -> StoredObject | None:
        """Return the first byte of an object, or None if it is not there; cheap."""
        try:
            return await self._read("look at", key, slice(0, 1))
        except RequestFailed as error:
            # It has none: an empty object is never written here.
            if error.status == "OUT_OF_RANGE":
                return StoredObject(b"", b"")
            raise

    async def fill(self, key: str, start: int, target: memoryview) -> bool:
        """Fill `target` with what an object has from `start` on; False if it has less.

        Raises:
            StorageError: The store refused.
        """
        try:
            found = await self._read("read", key, slice(start, start + len(target)))
        except RequestFailed as error:
            if error.status in ("OUT_OF_RANGE", "NOT_FOUND"):
                return False
            raise
        if found is None or len(found.data) != len(target):
            return False

        def copy() -> None:
            target[:] = found.data

        await anyio.to_thread.run_sync(copy)
        return True

    async def _read(
        self,
        what: str,
        key: str,
        part: slice | None,
        seconds: float | None = None,
        likely_bytes: int = 0,
    ) -> StoredObject | None:
        nbytes = likely_bytes if part is None else part.stop - part.start
        result = await self._request(
            what,
            key,
            lambda store: store.read(key, byte_range=part),
            nbytes,
            seconds,
            is_whole=part is None,
        )
        if result.state != "value":
            return None
        if part is None or nbytes > _SMALL_BYTES:
            # It is copied out of TensorStore's memory here.
            data = await anyio.to_thread.run_sync(lambda: result.value)
        else:
            data = result.value
        return StoredObject(data, result.stamp.generation)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object that nobody else writes."""
        # TensorStore takes nothing but bytes, and copies them.
        await self._request(
            "write", key, lambda store: store.write(key, bytes(data)), len(data), in_thread=True
        )

    async def delete(self, key: str) -> None:
        """Remove an object, whether it is there or not."""
        await self._request("remove", key, lambda store: store.write(key, None))

    async def delete_if(self, key: str, generation: bytes) -> bool:
        """Remove an object that has not been written since; False if it has, or is gone.

        What fails is repeated within the time of a request. It is gone as well where an answer was
        lost.
        """
        deadline = anyio.current_time() + self.seconds
        pauses = _pauses()
        while True:
            try:
                stamp = await self._request(
                    "remove",
                    key,
                    lambda store: store.write(key, None, if_equal=generation),
                    seconds=max(deadline - anyio.current_time(), self.seconds / 4),
                    careful=True,
                )
            except RequestFailed as error:
                pause = next(pauses)
                if error.is_refusal or anyio.current_time() + pause > deadline:
                    raise
            else:
                return bool(stamp.generation)
            await anyio.sleep(pause)

    async def list(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted, without it."""
        start, end = prefix.encode(), _after(prefix.encode())
        keys_range = ts.KvStore.KeyRange(start, end)
        found = await self._request(
            "list the objects below",
            prefix,
            lambda store: store.list(keys_range),
            seconds=self.seconds * _LIST_FACTOR,
        )
        if not found and self.location.startswith("gs://"):
            # TensorStore takes some refusals of GCS (401, 403) for an empty list; a read tells.
            await self.first(f"{prefix}.ckpt-none")
        return sorted(key[len(start) :].decode(errors="surrogateescape") for key in found)

    async def refuse_missing(self) -> None:
        """Raise if there is no such bucket, which conditional writes and reads do not tell.

        Raises:
            StorageError: There is none, or the store refused.
        """
        await self.list(".ckpt-none/")

    async def swap(self, key: str, data: bytes, expected: bytes) -> Swap:
        """Write an object if its generation is the expected one, `MISSING` for a new one.

        `data` must be unlike everything that was ever written there. Where the answer is lost the
        object is read back, and written again if it is as before.

        Raises:
            RequestFailed: Surely nothing was written.
            StorageError: It is not known whether it was.
        """
        deadline = anyio.current_time() + self.seconds
        pauses = _pauses()
        doubtful = abandoned = False
        tries = 0
        while True:
            refusal: RequestFailed | None = None
            try:
                stamp = await self._request(
                    "write",
                    key,
                    lambda store: store.write(key, data, if_equal=expected),
                    len(data),
                    seconds=max(deadline - anyio.current_time(), self.seconds / 4),
                    careful=True,
                    in_thread=True,
                )
                if stamp.generation:
                    return Swap(stamp.generation)
            except RequestFailed as error:
                tries += 1
                no_more = tries > self._retries or anyio.current_time() > deadline
                if error.is_only and not doubtful:
                    if error.is_refusal or (no_more and not error.was_sent):
                        raise
                    if not error.was_sent:
                        await anyio.sleep(next(pauses))
                        continue
                failure = refusal = error
                doubtful = doubtful or not (error.is_refusal or error.is_vain)
                abandoned = abandoned or error.is_under_way
            # Curl sends a request again when the connection that it had kept breaks, and only the
            # last answer is told: it may be our own write that is in the way, and one that was
            # refused may have been done before. What is there tells.
            seconds = None if refusal is None else self.seconds / 4
            try:
                found = await self._read("read", key, None, seconds, len(data))
            except RequestFailed as error:
                is_seen = False
                if refusal is None:
                    failure, doubtful = error, True
                elif refusal.is_refusal and error.is_refusal:
                    raise refusal.unknown() from refusal
            else:
                is_seen = True
                if found is not None and found.data == data:
                    return Swap(found.generation)
                if refusal is None and not doubtful:
                    return Swap(None)
                if expected != (MISSING if found is None else found.generation):
                    return Swap(None, doubtful, abandoned)
                if refusal is not None and refusal.is_refusal and not doubtful:
                    raise refusal
            if anyio.current_time() > deadline:
                raise failure.final() if is_seen and not doubtful else failure.unknown()
            await anyio.sleep(next(pauses))

    async def _request(
        self,
        what: str,
        key: str,
        begin: Callable[[KeyValueStore], Any],
        nbytes: int = 0,
        seconds: float | None = None,
        *,
        careful: bool = False,
        in_thread: bool = False,
        is_whole: bool = False,
    ) -> Any:
        """Return the result of one request, waited for within its time, also when cancelled."""
        where = f"{self.location}/{key}{self._at}"
        async with self._slot():
            with anyio.CancelScope(shield=True):
                store = (await self._stores())[careful]
                if in_thread:
                    # Copying holds the interpreter: together they would only take more memory.
                    self._copying = self._copying or anyio.Lock()
                    async with self._copying:
                        future = await anyio.to_thread.run_sync(begin, store)
                else:
                    future = begin(store)
                limit = (seconds or self.seconds) + nbytes / _SLOWEST_BYTES
                ends = anyio.current_time() + limit
                if is_whole and not await _settled(future, limit / 2):
                    ends += await self._more_seconds(store, key, limit / 4)
                if not await _settled(future, ends - anyio.current_time()):
                    self._has_connected = True
                    raise timed_out(what, where, limit)
                try:
                    result = future.result()
                except Exception as error:
                    failed = refused(what, where, error, is_only=not self._has_connected)
                    self._has_connected = self._has_connected or failed.was_sent
                    raise failed from error
                self._has_connected = True
                return result

    async def _more_seconds(self, store: KeyValueStore, key: str, seconds: float) -> float:
        """Return how much longer a whole object may take; 0 if it is small, or nothing answers.

        Nothing tells its size but single bytes of it, further and further on.
        """
        nbytes = 0
        with anyio.move_on_after(seconds), contextlib.suppress(ValueError):
            while nbytes < _LARGEST_BYTES:
                place = max(nbytes, _SLOWEST_BYTES)
                future = store.read(key, byte_range=slice(place, place + 1))
                if not await _settled(future, seconds) or future.result().state != "value":
                    break
                nbytes = place * 2
        return nbytes / _SLOWEST_BYTES

    async def _stores(self) -> tuple[KeyValueStore, KeyValueStore]:
        if self._opened is not None:
            return self._opened
        return await anyio.to_thread.run_sync(self._open)

    def _open(self) -> tuple[KeyValueStore, KeyValueStore]:
        with self._opening:
            opened = self._opened
            if opened is None:
                try:
                    opened = self._opened = self._open_store()
                except ValueError as error:
                    raise refused("open", self.location + self._at, error) from error
            return opened

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            self._slots = anyio.Semaphore(self._concurrency)
        async with self._slots:
            yield


async def _settled(future: Any, seconds: float) -> bool:
    """Wait until a future of TensorStore is done; False where that takes longer."""
    if future.done():
        return True
    event = anyio.Event()
    wake = waker(event)
    future.add_done_callback(lambda _: wake())
    with anyio.move_on_after(seconds):
        await event.wait()
    return bool(future.done())


def _pauses() -> Iterator[float]:
    return (
        min(_FIRST_PAUSE_SECONDS * 2**turn, _LONGEST_PAUSE_SECONDS) for turn in itertools.count()
    )


def _after(prefix: bytes) -> bytes:
    """Return the least key after all that begin with `prefix`."""
    # Prefixes end with a slash or a letter, so no byte of them is the last one.
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b""
