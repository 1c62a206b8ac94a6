"""Server-side copies: a new step gets objects of the step before without uploading them.

Every step stays whole by itself, since a copy is an object of its own. Whatever goes wrong, the
caller writes the file instead: a copy saves work, and must not fail a save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import anyio

from ckpt._runtime.tasks import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import StorageError
from ckpt.storage._object.attempts import ObjectAttempt
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._store import CopiesObjects, Store

logger = logging.getLogger("ckpt")

# A copy takes two requests, and a write takes one. A smaller object is written as quickly.
SMALLEST_BYTES = 1 << 20
# Size of the largest object that S3 copies in one request.
LARGEST_BYTES = 5 << 30


class NoCopiesError(Exception):
    """Objects cannot be copied here. The text says why, and what to do, without a full stop."""


class MemoryCopier:
    def __init__(self, keys: Store) -> None:
        self._keys = keys

    async def copy(self, source: str, target: str, nbytes: int) -> int | None:
        found = await self._keys.get(source)
        if found is None:
            return None
        await self._keys.put(target, found.data)
        return len(found.data)


class ServerSideCopies:
    """Copies files of step directories into attempts, as long as the store does so.

    Attributes:
        are_possible: True if objects can be copied, as far as known.
    """

    def __init__(self, keys: Store, open_copier: Callable[[], CopiesObjects] | None) -> None:
        """Copy objects of `keys`.

        Args:
            keys: The objects.
            open_copier: Returns the copier; raises `NoCopiesError`. Called in a thread, once there
                is something to copy. None copies nothing.
        """
        self.are_possible = open_copier is not None
        self._keys = keys
        self._open_copier = open_copier
        self._copier: CopiesObjects | None = None
        self._opening: anyio.Lock | None = None
        # Attempt in which the store last refused a copy; None once a copy was made since.
        self._refused_in: str | None = None

    async def share(
        self, attempt: ObjectAttempt, place: str, files: Mapping[str, int]
    ) -> list[str]:
        """Copy files into an attempt; return the paths of the copied ones.

        Args:
            attempt: The attempt.
            place: The step directory, with its folder that has the files.
            files: Size in bytes of every file, by its path in `place`. Files that are written as
                quickly, or are too large for a copy, are left out.
        """
        worth = {
            path: size for path, size in files.items() if SMALLEST_BYTES <= size <= LARGEST_BYTES
        }
        copier = await self._opened() if worth and not attempt.copies_failed else None
        if copier is None:
            return []
        shared: list[str] = []
        failures: list[StorageError] = []

        async def copy(path: str) -> None:
            # A store that fails would hold up the save at every file.
            if attempt.copies_failed or not self.are_possible:
                return
            try:
                if await self._is_copied(copier, attempt, f"{place}/{path}", path, worth[path]):
                    shared.append(path)
            except StorageError as error:
                # If several copies fail at the same time, the first failure is reported.
                if not attempt.copies_failed:
                    failures.append(error)
                attempt.copies_failed = True

        await for_each(copy, worth)
        if failures:
            self._tell(failures[0], attempt, len(worth) - len(shared), len(worth))
        elif shared:
            self._refused_in = None
        return shared

    async def _is_copied(
        self, copier: CopiesObjects, attempt: ObjectAttempt, source: str, path: str, nbytes: int
    ) -> bool:
        """Copy one file; return True if the attempt has all of it now."""
        target, is_over = attempt.key(path), False
        try:
            found = await copier.copy(source, target, nbytes)
            is_over = True
        except StorageError as error:
            is_over = _is_refusal(error)
            raise
        finally:
            # After a failure or a cancellation, the store may still carry out the copy.
            attempt.abandoned = attempt.abandoned or not is_over
        if found is not None and found != nbytes:
            # The source was cut or changed. The attempt must not hold more than its manifest lists.
            await self._drop(target)
        return found == nbytes

    async def _drop(self, key: str) -> None:
        try:
            await self._keys.delete(key)
        except StorageError as error:
            logger.warning("a copy that is not whole is left at %s: %s", self._keys.location, error)

    async def _opened(self) -> CopiesObjects | None:
        self._opening = self._opening or anyio.Lock()
        async with self._opening:
            open_copier = self._open_copier
            if open_copier is not None and self._copier is None and self.are_possible:
                try:
                    self._copier = await run_in_thread(open_copier)
                except NoCopiesError as error:
                    self._stop(str(error))
                except Exception as error:
                    # A broken installation must not fail a save.
                    self._stop(f"they cannot be copied ({type(error).__name__})")
        return self._copier if self.are_possible else None

    def _tell(self, error: StorageError, attempt: ObjectAttempt, count: int, total: int) -> None:
        before = self._refused_in
        if _is_refusal(error):
            self._refused_in = attempt.id
            # A single refusal may come from a session that has expired and will be renewed.
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


def _is_refusal(error: StorageError) -> bool:
    return isinstance(error, RequestFailed) and error.is_refusal
