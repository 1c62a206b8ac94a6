"""Heartbeats: signs of life that processes give each other, and who has been silent too long.

`Pulse` gives those of this process in one operation, `Signs` notes when the others gave theirs, and
`beating` gives them in phases that transfer no bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Literal

import anyio

from ckpt.coordination._base import KeyValues
from ckpt.coordination._deadline import DeadlineKeyValues
from ckpt.errors import CoordinationError, CoordinationTimeoutError, located

if TYPE_CHECKING:
    from ckpt.coordination._operation import Operation


Stage = Literal["begin", "write", "publish"]

_MOST_NAMED = 20
# How long an error may be held up so that it says on which hosts.
_NAMES_SECONDS = 0.5
_PROCESSES = "processes"
_STAGES: dict[Stage, str] = {
    "begin": "for the primary to begin",
    "write": "for every process to finish its part",
    "publish": "for the primary to publish",
}
# Beats within one time limit, and in all. There is a limit because a phase that takes ten times the
# time limit hangs, and the other processes have to notice that.
_BEATS = 8
_MOST_BEATS = 10 * _BEATS


def hello(beat: int = 0, doing: str = "") -> bytes:
    """Return a sign of life of this process, another one for each `beat`."""
    return json.dumps([beat, socket.gethostname(), os.getpid(), doing]).encode()


def who(index: int, count: int, sign: bytes | None = None) -> str:
    """Return how messages call a process, with its host and pid where a sign of it is known."""
    text = f"process {index} of {count}"
    with contextlib.suppress(ValueError, TypeError):
        _, host, pid, doing = json.loads(sign or b"")
        text += f" (host {host}, pid {pid}" + f", which came to {doing} last" * bool(doing) + ")"
    return text


async def introduce(key_values: KeyValues, index: int, doing: str = "") -> None:
    """Tell the others on which host this process runs, and what it is about to do with them.

    Messages can then say so of a process that never came to an operation.

    Raises:
        CoordinationError: What the processes share cannot be reached.
    """
    await key_values.touch(f"{_PROCESSES}/{index}", hello(doing=doing))


async def _introductions(key_values: KeyValues, processes: Iterable[int]) -> dict[int, bytes]:
    """Return what `processes` have said with `introduce`, as far as it can be had."""
    found: dict[int, bytes] = {}
    with contextlib.suppress(CoordinationError):
        for index in processes:
            sign = await key_values.wait(f"{_PROCESSES}/{index}", 0)
            if sign is not None:
                found[index] = sign
    return found


class Pulse:
    """Signs of life of this process in an operation and all parts of it: one counts for all."""

    def __init__(self, shared: DeadlineKeyValues, index: int) -> None:
        """Make it; no sign is given yet.

        Args:
            shared: The values of the operation.
            index: Which process this is.
        """
        self._shared = shared
        self._index = index
        self._moved = 0
        self._shown = 0
        self._beat = 0
        self._beat_at = 0.0

    def advance(self, amount: int) -> None:
        """Say that so many bytes were moved; `show_moves` lets the others know."""
        self._moved += amount

    def is_due(self, seconds: float) -> bool:
        """Tell whether the last sign was given as long ago."""
        return anyio.current_time() - self._beat_at >= seconds

    async def show_moves(self) -> None:
        """Give a sign if something has moved since the last one for which it had."""
        if self._moved != self._shown:
            self._shown = self._moved
            await self.show()

    async def show(self) -> None:
        """Give a sign."""
        self._beat += 1
        self._beat_at = anyio.current_time()
        await self._shared.touch(f"life/{self._index}", hello(self._beat))

    async def of_primary(self) -> bytes | None:
        """Return the last sign of the primary, or None."""
        return await self._shared.wait("life/0", 0)

    async def of_all(self, count: int) -> dict[int, bytes]:
        """Return the last sign of each of `count` processes that has given one."""
        return await self._shared.numbered("life", count)


@contextlib.asynccontextmanager
async def beating(
    operation: Operation, advance: Callable[[int], None] | None = None
) -> AsyncIterator[None]:
    """Let the others know, while the body runs, that this process lives.

    Works without `Operation.watch`, as in shielded code; ends after ten times the time limit.

    Args:
        operation: The operation in which the others wait.
        advance: Called instead of the operation's own `advance`, where this process is waited for
            in further operations.
    """
    with located():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_beat, operation, advance or operation.advance)
            yield
            tasks.cancel_scope.cancel()


async def _beat(operation: Operation, advance: Callable[[int], None]) -> None:
    for _ in range(_MOST_BEATS):
        await anyio.sleep(operation.seconds / _BEATS)
        advance(1)
        await operation.show_moves()


class Signs:
    """When each of the processes waited for was last heard of."""

    def __init__(self, processes: Iterable[int], now: float) -> None:
        """Begin to wait for `processes`."""
        self._last: dict[int, bytes] = {}
        self._heard = dict.fromkeys(processes, now)

    def see(self, index: int, sign: bytes, now: float) -> None:
        """Take note of what a process says; only what is new counts."""
        if index in self._heard and self._last.get(index) != sign:
            self._last[index], self._heard[index] = sign, now

    def arrived(self, index: int) -> None:
        """Wait no longer for a process."""
        self._heard.pop(index, None)

    def silent(self, now: float, seconds: float) -> list[int]:
        """Return those of whom nothing new was heard for `seconds`."""
        return sorted(index for index, heard in self._heard.items() if now - heard >= seconds)

    def patience(self, index: int, now: float, seconds: float) -> float:
        """Return how many seconds are left until a process has been silent for too long."""
        return max(self._heard.get(index, now) + seconds - now, 0.0)

    def last(self, index: int) -> bytes | None:
        """Return the last sign of a process, if there was one."""
        return self._last.get(index)


async def missing_text(missing: list[int], count: int, signs: Signs, values: KeyValues) -> str:
    """Return who is missing, in words: those who came and went quiet, and those who never came."""
    quiet = [index for index in missing if signs.last(index) is not None]
    absent = [index for index in missing if signs.last(index) is None]
    known: dict[int, bytes] = {}
    with anyio.move_on_after(_NAMES_SECONDS):
        known = await _introductions(values, absent[:_MOST_NAMED])
    parts = []
    for word, chosen in (("came to it, and has gone silent", quiet), ("never came to it", absent)):
        if chosen:
            names = [who(i, count, signs.last(i) or known.get(i)) for i in chosen[:_MOST_NAMED]]
            more = len(chosen) - len(names)
            names += [f"{more} more"] if more else []
            parts.append(f"{', '.join(names)} {word}")
    return "; ".join(parts)


def silence(
    label: str, names: str, missing: list[int], stage: Stage, seconds: float
) -> CoordinationTimeoutError:
    """Return the error of a process that has waited for `missing` for too long."""
    error = CoordinationTimeoutError(
        f"{label} {_STAGES[stage]} (stage {stage!r}), and heard nothing for {seconds:g} s: "
        f"{names}. Where a process was killed or stopped, restart the whole job; "
        "where one does not take part, let all processes do the same; where one is only slow, "
        "raise Timeouts(coordination=...)"
    )
    error.missing = tuple(missing)
    return error
