"""Writes that curl sends again by itself: told is the end of the last try, done may be the first.

It does so when a connection breaks that it had kept. What is told then looks like a write that
never was: no connection, no TLS, no right to write, the condition does not hold.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import tensorstore as ts

from ckpt._settings import Timeouts
from ckpt.errors import StorageError
from ckpt.storage._object.client import ObjectClient
from ckpt.storage._object.config import S3, Memory
from ckpt.storage._object.connection import connect
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._object.listing import GONE
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import assert_whole, publish, write

MANIFEST = "5/ckpt.json"
REQUEST_S = 1.0
# Where nothing can be found out it is waited for that long.
SHORT_S = 0.15
PATIENCE_S = 120
NO_CONNECTION = "UNAVAILABLE: CURL error Could not connect to server"
NO_TLS = "UNAVAILABLE: CURL error SSL connect error: Recv failure"
NO_HOST = "UNAVAILABLE: CURL error Could not resolve hostname"
NO_ETAG = "NOT_FOUND: etag not found in response headers"
DENIED = "PERMISSION_DENIED: HTTP response code: 403"
EXPIRED = "INVALID_ARGUMENT: HTTP response code: 400 ExpiredToken"
SLOW_DOWN = "ABORTED: HTTP response code: 503 SlowDown"
TOLD = [NO_CONNECTION, NO_TLS, NO_HOST, NO_ETAG, DENIED, EXPIRED, SLOW_DOWN]
# The second try is answered: there is something already.
CONDITION = ""


class ResendingStore:
    """A store in memory, whose first write of the manifest is told to have ended so.

    Attributes:
        told: What is told; `CONDITION` is what the second try finds.
        blind: What the looks at the manifest after that end with, and how many of them.
        is_done: Whether the first try was carried out.
        spoilt: Whether that is over.
    """

    def __init__(self, told: str, blind: tuple[str, int] = ("", 0), *, is_done: bool) -> None:
        seconds = SHORT_S if blind[1] > 1 else REQUEST_S
        self.config = Memory(f"memory://{uuid.uuid4().hex}/run", request_timeout=seconds)
        self.raw = connect(self.config).open()[0]
        self.told = told
        self.blind, self.looks = blind
        self.is_done = is_done
        self.spoilt = False

    def opened(self) -> ObjectStorage:
        return ObjectStorage(self.config, Timeouts(), open_store=lambda: (self, self))

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        if key == MANIFEST and self.spoilt and self.looks:
            self.looks -= 1
            return failed(self.blind)
        return self.raw.read(key, byte_range=byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        if key != MANIFEST or (self.spoilt and not self.looks):
            return self.raw.write(key, value, if_equal=if_equal)
        if self.is_done and not self.spoilt:
            self.raw.write(key, value, if_equal=if_equal).result()
        self.spoilt = True
        if self.told == CONDITION:
            return self.raw.write(key, value, if_equal=if_equal)
        return failed(self.told)

    def list(self, range: Any = None) -> Any:
        return self.raw.list(range)


def failed(text: str) -> Any:
    promise: ts.Promise
    future: ts.Future
    promise, future = ts.Promise.new()
    promise.set_exception(ValueError(text))
    return future


async def committed(store: ResendingStore, *, overwrite: bool) -> StorageError | None:
    """Commit a step, and give it up where that fails; return how."""
    storage = store.opened()
    attempt = await write(storage, "5", "new")
    with anyio.fail_after(PATIENCE_S):
        try:
            await storage.publish(attempt, overwrite=overwrite)
        except StorageError as error:
            await storage.discard(attempt)
            return error
        return None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("told", [*TOLD, CONDITION])
def test_what_was_done_is_committed_whatever_is_told_of_it(told: str, overwrite: bool) -> None:
    async def main() -> None:
        store = ResendingStore(told, is_done=True)
        if overwrite:
            await publish(ObjectStorage(store.config, Timeouts()), "5", "old")
        assert await committed(store, overwrite=overwrite) is None
        await assert_whole(ObjectStorage(store.config, Timeouts()), "5", "new")

    anyio.run(main)


@pytest.mark.parametrize("looks", [1, 1 << 30])
@pytest.mark.parametrize("blind", [NO_CONNECTION, NO_TLS, EXPIRED, SLOW_DOWN])
@pytest.mark.parametrize("told", [NO_CONNECTION, NO_TLS, NO_ETAG, DENIED, SLOW_DOWN, CONDITION])
def test_what_cannot_be_looked_at_keeps_its_data(told: str, blind: str, looks: int) -> None:
    async def main() -> None:
        store = ResendingStore(told, (blind, looks), is_done=True)
        error = await committed(store, overwrite=False)
        if error is not None:
            assert "it is unknown whether" in str(error)
        assert error is not None or looks == 1
        await assert_whole(ObjectStorage(store.config, Timeouts()), "5", "new")

    anyio.run(main)


@pytest.mark.parametrize("told", [DENIED, EXPIRED, NO_ETAG])
def test_what_was_refused_and_is_not_there_is_taken_back(told: str) -> None:
    async def main() -> None:
        store = ResendingStore(told, is_done=False)
        error = await committed(store, overwrite=False)
        assert isinstance(error, RequestFailed)
        assert "known" not in str(error)
        assert store.raw.list().result() == []

    anyio.run(main)


@pytest.mark.parametrize(("seconds", "retries"), [(3600.0, 1), (0.5, 1000)])
def test_an_endpoint_that_was_never_there_is_told_at_once_and_for_sure(
    seconds: float, retries: int
) -> None:
    """Nothing can have been sent before where there never was a connection."""

    async def main() -> None:
        # Nobody listens on the first of all ports.
        config = S3("s3://bucket/run", endpoint="http://127.0.0.1:1", credentials="anonymous")
        open_store = connect(config).open
        keys = ObjectClient(config.url, "", open_store, seconds, 4, retries)
        with anyio.fail_after(PATIENCE_S), pytest.raises(RequestFailed) as caught:
            await keys.swap("x", b"data", None)
        assert "does not answer" in str(caught.value)
        assert "unknown" not in str(caught.value)

    anyio.run(main)


class LateStore:
    """A store in memory that carries out the first write of the manifest once it is let go."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.promises: list[Any] = []
        self.late: Callable[[], Any] | None = None
        self.looks = 0

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        self.looks += key == MANIFEST and self.late is not None
        # The first look is that of the write itself.
        if self.looks == 2 and self.late is not None:
            self.raw.write(MANIFEST, None).result()
            do, self.late = self.late, None
            do().result()
        return self.raw.read(key, byte_range=byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        if key != MANIFEST or self.promises:
            return self.raw.write(key, value, if_equal=if_equal)
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        # Whoever waits for it must not be told that it was dropped.
        self.promises.append(promise)
        self.late = lambda: self.raw.write(key, value, if_equal=if_equal)
        return future

    def list(self, range: Any = None) -> Any:
        return self.raw.list(range)


def test_a_write_that_comes_late_is_not_taken_for_somebody_elses() -> None:
    async def main() -> None:
        config = Memory(f"memory://{uuid.uuid4().hex}/run", request_timeout=REQUEST_S)
        raw = connect(config).open()[0]
        # It is in the way at first, and goes: then the write finds what it expects.
        raw.write(MANIFEST, GONE + b"of who knows whom").result()
        store = LateStore(raw)
        storage = ObjectStorage(config, Timeouts(), open_store=lambda: (store, store))
        attempt = await write(storage, "5", "new")
        await storage.publish(attempt, overwrite=False)
        assert store.promises, "no write was late"
        assert store.late is None, "no write was late"
        await assert_whole(ObjectStorage(config, Timeouts()), "5", "new", attempt)
        assert [key for key in raw.list().result() if b".ckpt-attempts" in key] == []

    anyio.run(main)
