"""Signs of life: what each process says of itself, and who has said nothing for too long."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from typing import Literal

import anyio

from ckpt.coordination._base import KeyValues
from ckpt.errors import CoordinationError, CoordinationTimeoutError

__all__ = [
    "Signs",
    "Stage",
    "hello",
    "introduce",
    "missing_text",
    "silence",
    "who",
]

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
    """Return the error of whoever has waited for `missing` in vain."""
    error = CoordinationTimeoutError(
        f"{label} {_STAGES[stage]} (stage {stage!r}), and heard nothing for {seconds:g} s: "
        f"{names}. Where a process was killed or stopped, restart the whole job; "
        "where one does not take part, let all processes do the same; where one is only slow, "
        "raise Timeouts(coordination=...)"
    )
    error.missing = tuple(missing)
    return error
