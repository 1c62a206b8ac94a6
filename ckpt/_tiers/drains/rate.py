"""A limit of bytes a second for a copier."""

from __future__ import annotations

import math

import anyio

from ckpt._arguments import shown
from ckpt._conversion.copies.step_copy import Pace, at_once
from ckpt.errors import InvalidArgumentError


class ByteRate:
    """A limit of bytes per second. Pure: the time is an argument.

    A piece may begin once all pieces promised before it are paid for. So in any time, the bytes of
    the pieces that begin exceed the rate by one piece at most.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        # The time at which all promised pieces are paid for.
        self._free = -math.inf

    def wait_for(self, nbytes: int, now: float) -> float:
        """Promise a piece; return the seconds until it may begin."""
        begins = max(self._free, now)
        self._free = begins + nbytes / self._rate
        return begins - now


def paced(bytes_per_second: float | None) -> Pace:
    """Return a pace with this many bytes per second; None sets no limit.

    Raises:
        InvalidArgumentError: The rate is not a number above 0.
    """
    if bytes_per_second is None:
        return at_once
    given: object = bytes_per_second
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 < bytes_per_second < math.inf:
        raise InvalidArgumentError(
            f"bytes per second {shown(given)}: expected a number above 0, or None for no limit"
        )
    rate = ByteRate(bytes_per_second)

    async def pace(nbytes: int) -> None:
        await anyio.sleep(rate.wait_for(nbytes, anyio.current_time()))

    return pace
