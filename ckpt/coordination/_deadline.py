"""The values of one operation, with a time limit on every request."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from ckpt.coordination._base import KeyValues
from ckpt.errors import CheckpointError, CoordinationError, CoordinationTimeoutError

T = TypeVar("T")


class DeadlineKeyValues:
    """Values below the name of an operation.

    Every request ends within the time limit, and raises errors of this library only:
    `CoordinationError`, and `CoordinationTimeoutError` if there is no answer.
    """

    def __init__(self, values: KeyValues, name: str, label: str, seconds: float) -> None:
        """Put a time limit on shared values.

        Args:
            values: The values that the processes share.
            name: Beginning of all keys.
            label: The process and its action, for messages.
            seconds: Time limit of an answer.
        """
        self._values = values
        self._name = name
        self._label = label
        self._seconds = seconds

    async def set_or_get(self, key: str, value: bytes) -> bytes | None:
        """Set a value and return None, or return the one that was there first."""
        full = f"{self._name}/{key}"
        if await self._ask(self._values.put(full, value)):
            return None
        return await self._ask(self._values.wait(full, 0))

    async def wait(self, key: str, seconds: float) -> bytes | None:
        """Return a value as soon as it is there, or None when `seconds` have gone by."""
        return await self._ask(self._values.wait(f"{self._name}/{key}", seconds), seconds)

    async def touch(self, key: str, value: bytes) -> None:
        """Set a value, or replace it."""
        await self._ask(self._values.touch(f"{self._name}/{key}", value))

    async def numbered(self, folder: str, count: int) -> dict[int, bytes]:
        """Return the values of a folder whose names are numbers below `count`."""
        found = await self._ask(self._values.list(f"{self._name}/{folder}"))
        return {
            int(name): data
            for name, data in found.items()
            if name.isdecimal() and int(name) < count
        }

    async def _ask(self, request: Awaitable[T], more_seconds: float = 0.0) -> T:
        try:
            with anyio.fail_after(self._seconds + more_seconds):
                return await request
        except CheckpointError:
            raise
        except TimeoutError as error:
            late = CoordinationTimeoutError(
                f"{self._label}: no answer for {self._seconds:g} s of what the processes share. "
                "jax.distributed keeps that in process 0, which may be stopped or cut off; if it "
                "is only slow, raise Timeouts(coordination=...)"
            )
            late.missing = (0,)
            raise late from error
        except Exception as error:
            raise CoordinationError(
                f"{self._label}: what the processes share has failed: {type(error).__name__}: "
                f"{error}"
            ) from error
