"""Time that jumps to the next moment at which something happens, and values that do not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import trio.testing

__all__ = ["LIMIT", "Silent", "in_made_up_time"]

T = TypeVar("T")
LIMIT = 60.0


def in_made_up_time(main: Callable[[], Awaitable[T]]) -> T:
    """Run on a clock that jumps to the next moment at which something happens."""
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def bounded() -> T:
        # What waits for ever must fail, and not hang the test.
        with anyio.fail_after(100 * LIMIT):
            return await main()

    return anyio.run(bounded, backend="trio", backend_options={"clock": clock})


class Silent:
    """Values that do not answer, or fail, when asked for some of the names."""

    def __init__(self, inner: Any, word: str, error: Exception | None = None) -> None:
        self._inner, self._word, self._error = inner, word, error

    def __getattr__(self, name: str) -> Any:
        async def request(key: str, *args: Any) -> Any:
            if self._word not in key:
                return await getattr(self._inner, name)(key, *args)
            if self._error is not None:
                raise self._error
            await anyio.sleep_forever()

        return request
