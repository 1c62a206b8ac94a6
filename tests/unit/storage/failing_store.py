"""Stores in memory that fail at one request, as networks do, or meet somebody else at one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorstore as ts

__all__ = ["KINDS", "FailingStore", "MeetingStore", "RefusingStore"]

# What becomes of the request: it is not carried out, or it is and nobody is told. Either with all
# later requests failing as well, as if the process had died or the network were gone, or alone.
# `hangs` is carried out only when the test says so.
# `lost and ...`: the next one fails as well, which is the look at what became of it. What is told
# may be the end of a second try, which curl makes by itself: refused, or without a connection.
BRIEF = {
    "lost and blind": "UNAVAILABLE: CURL error: it was cut",
    "lost and denied": "PERMISSION_DENIED: HTTP response code: 403",
    "lost and unheard": "UNAVAILABLE: CURL error Could not connect to server",
}
KINDS = ("refused", "lost", "gone", "lost and gone", *BRIEF, "hangs")


class MeetingStore:
    """Stands for a `tensorstore.KvStore`; something else happens right before one request."""

    def __init__(self, store: Any, at: int | None, meanwhile: Callable[[], None]) -> None:
        self.store = store
        self.at = at
        self.meanwhile = meanwhile
        self.count = 0

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        self._meet()
        return self.store.read(key, byte_range=byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        self._meet()
        return self.store.write(key, value, if_equal=if_equal)

    def list(self, range: Any = None) -> Any:
        self._meet()
        return self.store.list(range)

    def _meet(self) -> None:
        number, self.count = self.count, self.count + 1
        if number == self.at:
            other = threading.Thread(target=self.meanwhile)
            other.start()
            other.join()


class RefusingStore:
    """Stands for a `tensorstore.KvStore`; forbids to write a key from some time on."""

    def __init__(self, store: Any, key: str, at: int) -> None:
        self.store = store
        self.key = key
        self.at = at
        self.writes = 0

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        return self.store.read(key, byte_range=byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        self.writes += key == self.key
        if key == self.key and self.writes >= self.at:
            promise: ts.Promise
            future: ts.Future
            promise, future = ts.Promise.new()
            promise.set_exception(ValueError("PERMISSION_DENIED: HTTP response code: 403"))
            return future
        return self.store.write(key, value, if_equal=if_equal)

    def list(self, range: Any = None) -> Any:
        return self.store.list(range)


class FailingStore:
    """Stands for a `tensorstore.KvStore`; counts its requests from 0."""

    def __init__(self, store: Any, at: int | None = None, kind: str = "refused") -> None:
        self.store = store
        self.at = at
        self.kind = kind
        self.count = 0
        self.late: list[Callable[[], Any]] = []
        self.promises: list[Any] = []

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        return self._do(lambda: self.store.read(key, byte_range=byte_range))

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        return self._do(lambda: self.store.write(key, value, if_equal=if_equal))

    def list(self, range: Any = None) -> Any:
        return self._do(lambda: self.store.list(range))

    def let_go(self) -> None:
        """Carry out what hangs."""
        for do in self.late:
            do().result()
        self.late.clear()

    def _do(self, do: Callable[[], Any]) -> Any:
        number, self.count = self.count, self.count + 1
        if self.at is None or number < self.at:
            return do()
        first = number == self.at
        if not first and self.kind in ("refused", "lost", "hangs"):
            return do()
        if number > self.at + 1 and self.kind in BRIEF:
            return do()
        if first and self.kind.startswith("lost"):
            do().result()
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        if first and self.kind == "hangs":
            self.late.append(do)
            # Whoever waits for it must not be told that it was dropped.
            self.promises.append(promise)
        else:
            promise.set_exception(ValueError(BRIEF.get(self.kind, BRIEF["lost and blind"])))
        return future
