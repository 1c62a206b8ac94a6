"""The client of an object store: reads, writes and lists objects, each request with a time limit.

TensorStore has no deadlines, so they are set here. The store may still carry out a request that
timed out. Late data is harmless, since its key is used only once. The result of `swap` says whether
a conditional write may still be carried out.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol, TypeVar

import anyio
import tensorstore as ts

from ckpt._runtime.futures import waker
from ckpt._runtime.threads import run_in_thread
from ckpt.storage._object.errors import RequestFailed, refused, timed_out
from ckpt.storage._store import StoredObject, StoreLimits, Swap

T = TypeVar("T")
# The generation that TensorStore returns for a key that does not exist.
_MISSING: bytes = ts.KvStore.open("memory://").result().read("-").result().stamp.generation
# Bytes for which a request gets one more second.
_SLOWEST_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16
# Size of the largest object written here.
_LARGEST_BYTES = 1 << 30
# A list gets more time: it needs one request for every thousand keys, one after the other.
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
            seconds: Time limit of a request.
            concurrency: Number of requests that may be in flight.
            retries: Number of retries of a conditional write that did not reach the store.
        """
        self.location = location
        self.seconds = seconds
        self.limits = StoreLimits(request_seconds=seconds)
        self._at = f" at {endpoint}" if endpoint else ""
        self._open_store = open_store
        self._opening = threading.Lock()
        self._opened: tuple[KeyValueStore, KeyValueStore] | None = None
        self._concurrency = concurrency
        self._retries = retries
        self._slots: anyio.Semaphore | None = None
        self._copying: anyio.Lock | None = None
        # True once curl may keep an open connection.
        self._has_connected = False

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> StoredObject | None:
        """See `Store.get`. Large objects have more time."""
        is_whole = not start and stop is None
        try:
            return await self._read(key, None if is_whole else slice(start, stop))
        except RequestFailed as error:
            if error.status != "OUT_OF_RANGE":
                raise
        # The object has no such byte. One that is shorter than the end that was asked for is all
        # end; of another one there is nothing, and this library writes no empty objects.
        return await self.get(key) if start < 0 else StoredObject(b"", b"")

    async def _read(
        self,
        key: str,
        part: slice | None,
        seconds: float | None = None,
        likely_bytes: int = 0,
    ) -> StoredObject | None:
        nbytes = likely_bytes if part is None else max((part.stop or 0) - part.start, 0)
        result = await self._request(
            "read",
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
            # TensorStore takes some refusals of GCS (401, 403) for an empty list, but not for a
            # read.
            await self.get(f"{prefix}.ckpt-none", 0, 1)
        return sorted(key[len(start) :].decode(errors="surrogateescape") for key in found)

    async def swap(self, key: str, data: bytes, generation: bytes | None) -> Swap:
        """See `Store.swap`.

        If the answer is lost, the object is read back, and written again if it is unchanged.

        Raises:
            RequestFailed: Certainly nothing was written.
            StorageError: It is unknown whether the object was written.
        """
        expected = _MISSING if generation is None else generation
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
            # answer arrives. So the condition may fail because of our own write, and a refused
            # write may have been done before. Only reading the object shows it.
            seconds = None if refusal is None else self.seconds / 4
            try:
                found = await self._read(key, None, seconds, len(data))
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
                if expected != (_MISSING if found is None else found.generation):
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
                opened = await run_in_thread(self._open) if self._opened is None else self._opened
                store = opened[careful]
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
        """Return how many seconds longer a whole object may take; 0 if it is small or unknown.

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
        return f"{self.location}/{key}{self._at}"

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
    """Return the extra seconds that a request gets for the bytes that it moves."""
    return nbytes / _SLOWEST_BYTES


def _pauses() -> Iterator[float]:
    return (
        min(_FIRST_PAUSE_SECONDS * 2**turn, _LONGEST_PAUSE_SECONDS) for turn in itertools.count()
    )


def _after(prefix: bytes) -> bytes:
    """Return the smallest key after all keys that begin with `prefix`."""
    # Prefixes end with a slash or a letter, so their last byte can be incremented.
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else b""
