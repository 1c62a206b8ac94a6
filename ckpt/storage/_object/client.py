"""The client of an object store: reads, writes and lists objects, each request with a time limit.

TensorStore has no deadlines, so they are set here. The store may still carry out a request that
timed out. Late data is harmless, since its key is used only once, and for conditional writes `swap`
tells whether that may happen.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import anyio
import tensorstore as ts
from msgspec import Struct

from ckpt._runtime.futures import waker
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import located
from ckpt.storage._object.errors import RequestFailed, refused, timed_out

T = TypeVar("T")
# As many tasks as there can be requests at once. One for each object of a large step would take a
# gigabyte of memory for every 200,000 objects.
_MOST_TASKS = 1024
# The generation that TensorStore returns for a key that does not exist.
MISSING: bytes = ts.KvStore.open("memory://").result().read("-").result().stamp.generation
# Requests with data get a second more for each of these many bytes.
_SLOWEST_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
# No object written here is larger.
_LARGEST_BYTES = 1 << 30
# A list needs one request for every thousand keys, one after the other.
_LIST_FACTOR = 2
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


class KeyValueStore(Protocol):
    """The part of `tensorstore.KvStore` that is used; the futures are TensorStore's."""

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        """Begin to read."""

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        """Begin to write, or to delete if `value` is None."""

    def list(self, range: Any = None) -> Any:
        """Begin to list."""


class StoredObject(Struct, frozen=True):
    """An object: its bytes, or the first of them, and its generation, which every write changes."""

    data: bytes
    generation: bytes


class Swap(Struct, frozen=True):
    """The result of a conditional write.

    Attributes:
        generation: The generation of the object that was written; None if the condition did not
            hold.
        doubtful: Whether an answer was lost. Then, if `generation` is None, the object may have
            been written and replaced since.
        abandoned: Whether a request is still in flight, and may be carried out later.
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
            location: The place, for messages.
            endpoint: URL of the store, for messages; empty for the usual one.
            open_store: Returns the store twice: one that retries failed requests, and one that does
                not, for conditional writes. Called once, in a thread.
            seconds: How long a request may take.
            concurrency: How many requests may be in flight.
            retries: How often a conditional write is retried that did not reach the store.
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
        # Whether curl may keep an open connection.
        self._has_connected = False

    async def get(self, key: str) -> StoredObject | None:
        """Return an object, or None if it does not exist. Large objects have more time."""
        return await self._read("read", key, None)

    async def first(self, key: str) -> StoredObject | None:
        """Return the first byte of an object, or None if it does not exist. This is cheap."""
        try:
            return await self._read("look at", key, slice(0, 1))
        except RequestFailed as error:
            # It is empty. This library never writes empty objects.
            if error.status == "OUT_OF_RANGE":
                return StoredObject(b"", b"")
            raise

    async def tail(self, key: str, most: int) -> StoredObject | None:
        """Return the last bytes of an object, or None if it does not exist."""
        try:
            return await self._read("read", key, slice(-most, None), likely_bytes=most)
        except RequestFailed as error:
            # It is shorter.
            if error.status != "OUT_OF_RANGE":
                raise
        return await self.get(key)

    async def fill(self, key: str, start: int, target: memoryview) -> bool:
        """Fill `target` with the bytes of an object from `start` on; False if it has fewer.

        Raises:
            StorageError: The store failed.
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

        await run_in_thread(copy)
        return True

    async def _read(
        self,
        what: str,
        key: str,
        part: slice | None,
        seconds: float | None = None,
        likely_bytes: int = 0,
    ) -> StoredObject | None:
        nbytes = likely_bytes if part is None or part.stop is None else part.stop - part.start
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
            # `value` copies it out of TensorStore's memory.
            data = await run_in_thread(lambda: result.value)
        else:
            data = result.value
        return StoredObject(data, result.stamp.generation)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object that has no other writer."""
        # TensorStore accepts only bytes, and copies them.
        await self._request(
            "write", key, lambda store: store.write(key, bytes(data)), len(data), in_thread=True
        )

    async def delete(self, key: str) -> None:
        """Remove an object, if it exists."""
        await self._request("remove", key, lambda store: store.write(key, None))

    async def delete_if(self, key: str, generation: bytes) -> bool:
        """Remove an object unless it has been written since; False if it has, or is gone.

        Failures are retried within the time limit of a request. The result is also False if the
        answer to a removal was lost.
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
            # TensorStore takes some refusals of GCS (401, 403) for an empty list. A read fails.
            await self.first(f"{prefix}.ckpt-none")
        return sorted(key[len(start) :].decode(errors="surrogateescape") for key in found)

    async def refuse_missing(self) -> None:
        """Raise if the bucket does not exist, which reads and conditional writes do not report.

        Raises:
            StorageError: It does not exist, or the store failed.
        """
        await self.list(".ckpt-none/")

    async def swap(self, key: str, data: bytes, expected: bytes) -> Swap:
        """Write an object if its generation is the expected one, `MISSING` for a new one.

        `data` must differ from everything that was ever written there. If the answer is lost, the
        object is read back, and written again if it is unchanged.

        Raises:
            RequestFailed: Certainly nothing was written.
            StorageError: It is unknown whether it was written.
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
            # Curl sends a request again if the connection it had kept breaks, and only the last
            # answer arrives. So our own write may be what is in the way, and one that was refused
            # may have been done before. Only reading the object shows it.
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
        """Return the result of one request; wait for it within its limit, even if cancelled."""
        where = self.where(key)
        async with self.slot():
            with anyio.CancelScope(shield=True):
                store = (await self._stores())[careful]
                if in_thread:
                    # Copying holds the GIL, so several at once would only use more memory.
                    self._copying = self._copying or anyio.Lock()
                    async with self._copying:
                        future = await run_in_thread(begin, store)
                else:
                    future = begin(store)
                limit = (seconds or self.seconds) + more_seconds(nbytes)
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
        """Return how much longer a whole object may take; 0 if it is small, or on no answer.

        Its size can only be found by reading single bytes at growing offsets.
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

    def where(self, key: str) -> str:
        """Return where an object is, for messages."""
        return f"{self.location}/{key}{self._at}"

    async def _stores(self) -> tuple[KeyValueStore, KeyValueStore]:
        if self._opened is not None:
            return self._opened
        return await run_in_thread(self._open)

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
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the places for requests."""
        if self._slots is None:
            self._slots = anyio.Semaphore(self._concurrency)
        async with self._slots:
            yield


async def _settled(future: Any, seconds: float) -> bool:
    """Wait until a future of TensorStore is done; False if that takes longer."""
    if future.done():
        return True
    event = anyio.Event()
    wake = waker(event)
    future.add_done_callback(lambda _: wake())
    with anyio.move_on_after(seconds):
        await event.wait()
    return bool(future.done())


def more_seconds(nbytes: int) -> float:
    """Return how much more time than others a request has that moves so many bytes."""
    return nbytes / _SLOWEST_BYTES


def _pauses() -> Iterator[float]:
    return (
        min(_FIRST_PAUSE_SECONDS * 2**turn, _LONGEST_PAUSE_SECONDS) for turn in itertools.count()
    )


def _after(prefix: bytes) -> bytes:
    """Return the smallest key after all keys that begin with `prefix`."""
    # Prefixes end with a slash or a letter, so their last byte can be incremented.
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b""


async def each(act: Callable[[T], Coroutine[Any, Any, object]], things: Iterable[T]) -> None:
    """Run `act` on each thing, many at once; the client bounds how many requests that makes."""
    left = iter(things)

    async def work(thing: T) -> None:
        await act(thing)
        for another in left:
            await act(another)

    with located():
        async with anyio.create_task_group() as tasks:
            for thing in itertools.islice(left, _MOST_TASKS):
                tasks.start_soon(work, thing)
