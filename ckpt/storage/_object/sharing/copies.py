"""Server-side copies: a new step gets objects of the step before without uploading them.

Every step stays whole by itself, since a copy is an object of its own. Whatever goes wrong, the
caller writes the file instead: a copy saves work, and must not fail a save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import anyio

from ckpt._runtime.threads import run_in_thread
from ckpt.errors import StorageError
from ckpt.storage._object.attempts import ObjectAttempt
from ckpt.storage._object.client import ObjectClient, each
from ckpt.storage._object.errors import RequestFailed

logger = logging.getLogger("ckpt")

# A copy takes two requests, and a write takes one. A smaller object is written as quickly.
SMALLEST_BYTES = 1 << 20
# S3 copies no larger ones in one request.
LARGEST_BYTES = 5 << 30


class NoCopiesError(Exception):
    """Objects cannot be copied here; says why, and what to do, as sentences without a full stop."""


class Copier(Protocol):
    """Copies objects within one store."""

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        """Copy an object; return the size of the copy, or None if there is no such object.

        Args:
            source: Its key.
            target: Key of the copy.
            nbytes: The size that it should have, which larger ones get more time for.

        Raises:
            RequestFailed: The store failed, or refused it. It may still be carried out.
        """


class MemoryCopier:
    """Copies objects in the memory of this process."""

    def __init__(self, keys: ObjectClient) -> None:
        """Copy objects of `keys`."""
        self._keys = keys

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        """Copy an object; see `Copier`."""
        found = await self._keys.get(source)
        if found is None:
            return None
        await self._keys.put(target, found.data)
        return len(found.data)


class ServerSideCopies:
    """Copies files of step directories into attempts, as long as the store does so.

    Attributes:
        are_possible: Whether objects can be copied, as far as known.
    """

    def __init__(
        self, keys: ObjectClient, open_copier: Callable[[], Copier], *, are_wanted: bool
    ) -> None:
        """Copy objects of `keys`.

        Args:
            keys: The objects.
            open_copier: Returns what copies them; raises `NoCopiesError`. Called in a thread, once
                there is something to copy.
            are_wanted: Whether objects are to be copied at all.
        """
        self.are_possible = are_wanted
        self._keys = keys
        self._open_copier = open_copier
        self._copier: Copier | None = None
        self._opening: anyio.Lock | None = None
        # The attempt in which the store has last refused a copy, if none was made since.
        self._refused_in: str | None = None

    async def share(
        self, attempt: ObjectAttempt, place: str, files: Mapping[str, int]
    ) -> list[str]:
        """Copy files into an attempt; return the paths of those it has.

        Args:
            attempt: The attempt.
            place: The step directory, and the folder in it that has the files.
            files: Size in bytes of every file, by its path there. What is written as quickly, or is
                too large for a copy, stays out.
        """
        worth = {
            path: size for path, size in files.items() if SMALLEST_BYTES <= size <= LARGEST_BYTES
        }
        copier = await self._opened() if worth and not attempt.copies_failed else None
        if copier is None:
            return []
        shared: list[str] = []
        failures: list[RequestFailed] = []

        async def copy(path: str) -> None:
            # A store that fails would hold up the save at every file.
            if attempt.copies_failed or not self.are_possible:
                return
            try:
                if await self._is_copied(copier, attempt, f"{place}/{path}", path, worth[path]):
                    shared.append(path)
            except RequestFailed as error:
                # Of several that fail at the same time, one is told.
                if not attempt.copies_failed:
                    failures.append(error)
                attempt.copies_failed = True

        await each(copy, worth)
        if failures:
            self._tell(failures[0], attempt, len(worth) - len(shared), len(worth))
        elif shared:
            self._refused_in = None
        return shared

    async def _is_copied(
        self, copier: Copier, attempt: ObjectAttempt, source: str, path: str, nbytes: int
    ) -> bool:
        """Copy one file; tell whether the attempt has all of it now."""
        target, is_over = attempt.key(path), False
        try:
            found = await copier.copy(source, target, nbytes)
            is_over = True
        except RequestFailed as error:
            is_over = error.is_refusal
            raise
        finally:
            # The store may still carry it out, after a failure and a cancellation.
            attempt.abandoned = attempt.abandoned or not is_over
        if found is not None and found != nbytes:
            # It was cut, or changed. The attempt must not keep what its manifest does not have.
            await self._drop(target)
        return found == nbytes

    async def _drop(self, key: str) -> None:
        try:
            await self._keys.delete(key)
        except StorageError as error:
            logger.warning("a copy that is not whole is left at %s: %s", self._keys.location, error)

    async def _opened(self) -> Copier | None:
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            if self._copier is None and self.are_possible:
                try:
                    self._copier = await run_in_thread(self._open_copier)
                except NoCopiesError as error:
                    self._stop(str(error))
                except Exception as error:
                    # A broken installation must not fail a save.
                    self._stop(f"they cannot be copied ({type(error).__name__})")
        return self._copier if self.are_possible else None

    def _tell(self, error: RequestFailed, attempt: ObjectAttempt, count: int, total: int) -> None:
        before = self._refused_in
        if error.is_refusal:
            self._refused_in = attempt.id
            # One may come from a session that has expired, and is renewed.
            if before not in (None, attempt.id):
                self._stop(f"{error.message}. Pass server_side_copies=False to stop trying")
                return
        logger.warning(
            "%s: %d of %d unchanged files could not be copied, and are written instead: %s",
            self._keys.location,
            count,
            total,
            error,
        )

    def _stop(self, reason: str) -> None:
        """Copy nothing from now on, and say so once."""
        if self.are_possible:
            self.are_possible = False
            logger.warning(
                "%s: arrays that do not change are uploaded with every step: %s",
                self._keys.location,
                reason,
            )
