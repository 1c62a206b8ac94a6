"""Failures of peers: their errors on the way to the others, and the end of their signs of life.

Heartbeats: signs of life of processes, and which of them have been silent for too long. `Pulse`
gives the signs of this process in one operation, `Signs` notes when the others gave theirs, and
`beating` gives signs in phases that transfer no bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from ckpt import errors
from ckpt._redaction import redact
from ckpt.coordination._base import KeyValues
from ckpt.errors import (
    CheckpointError,
    CoordinationError,
    CoordinationTimeoutError,
    StorageError,
    TargetMismatchError,
    located,
)

if TYPE_CHECKING:
    from ckpt._job.agreement.operation import Operation

T = TypeVar("T")
# Types of errors that another process may name; nothing else is looked up.
_KINDS: dict[str, type[CheckpointError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CheckpointError)
}
_MOST_CHARACTERS = 20_000
_MOST_PROBLEMS = 100


def pack_error(error: BaseException, who: str) -> bytes:
    """Return `error`, met by the process that messages call `who`, as bytes for the others.

    Call it in an event loop. An error of another library becomes a `CheckpointError` that names its
    type. Secrets are taken out.
    """
    error = _one_of(error)
    if isinstance(error, anyio.get_cancelled_exc_class()):
        error = errors.CommitCancelledError("it was cancelled there")
    elif not isinstance(error, CheckpointError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    # The nearest class that the others know, in case a user derived the class.
    kind = next(each for each in type(error).__mro__ if _KINDS.get(each.__name__) is each)
    said = {
        "kind": kind.__name__,
        "who": who,
        # Redacted again, since the message may have been changed; and redacted before it is cut.
        "message": redact(str(error.message))[:_MOST_CHARACTERS],
        "step": error.step,
        "item": error.item,
        "leaf": error.leaf,
        "errno": getattr(error, "errno", None),
        "missing": list(getattr(error, "missing", ())),
        "problems": [redact(each) for each in getattr(error, "problems", ())[:_MOST_PROBLEMS]],
    }
    return json.dumps(said).encode()


def unpack_error(data: bytes) -> CheckpointError:
    """Return the error that another process met; its message names the process.

    Bytes that `pack_error` did not make become a `CoordinationError`.
    """
    try:
        said = json.loads(data)
        message = f"{_checked_text(said['who'])}: {_checked_text(said['message'])}"
        step, errno = (_checked_number(said[name]) for name in ("step", "errno"))
        item, leaf = (
            _checked_text(said[name]) if said[name] is not None else None
            for name in ("item", "leaf")
        )
        problems = tuple(map(_checked_text, said["problems"]))
        missing = tuple(
            number for each in said["missing"] if (number := _checked_number(each)) is not None
        )
        kind = _KINDS[said["kind"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return CoordinationError(
            f"another process failed, and how it says so is not understood ({data[:200]!r}); all "
            "processes of a job have to run the same version of this library"
        )
    if issubclass(kind, StorageError):
        return kind(message, errno=errno, step=step, item=item, leaf=leaf)
    if issubclass(kind, TargetMismatchError):
        return kind(message, problems=problems, step=step, item=item, leaf=leaf)
    error = kind(message, step=step, item=item, leaf=leaf)
    if isinstance(error, CoordinationTimeoutError):
        error.missing = missing
    return error


def _one_of(error: BaseException) -> BaseException:
    """Return the most telling error of a group: the first of this library, or else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_one_of(each) for each in error.exceptions]
    return next((each for each in found if isinstance(each, CheckpointError)), found[0])


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _checked_number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError
    return value


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


Stage = Literal["begin", "write", "publish"]

_MOST_NAMED = 20
# Longest delay of an error, in seconds, for naming the hosts in it.
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
    """Return a sign of life of this process, different for each `beat`."""
    return json.dumps([beat, socket.gethostname(), os.getpid(), doing]).encode()


def who(index: int, count: int, sign: bytes | None = None) -> str:
    """Return the name of a process for messages, with its host and pid if a sign of it is known."""
    text = f"process {index} of {count}"
    with contextlib.suppress(ValueError, TypeError):
        _, host, pid, doing = json.loads(sign or b"")
        text += f" (host {host}, pid {pid}" + f", which came to {doing} last" * bool(doing) + ")"
    return text


async def introduce(key_values: KeyValues, index: int, doing: str = "") -> None:
    """Publish the host of this process, and the operation that it is about to join.

    Messages can then name both for a process that never came to an operation.

    Raises:
        CoordinationError: The shared values cannot be reached.
    """
    await key_values.touch(f"{_PROCESSES}/{index}", hello(doing=doing))


async def _introductions(key_values: KeyValues, processes: Iterable[int]) -> dict[int, bytes]:
    """Return the introductions of `processes`, as far as they can be read."""
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
        """Make a pulse; no sign is given yet."""
        self._shared = shared
        self._index = index
        self._moved = 0
        self._shown = 0
        self._beat = 0
        self._beat_at = 0.0

    def advance(self, amount: int) -> None:
        """Note that so many bytes were moved; `show_moves` lets the others know."""
        self._moved += amount

    def is_due(self, seconds: float) -> bool:
        """Return True if the last sign was given at least `seconds` ago."""
        return anyio.current_time() - self._beat_at >= seconds

    async def show_moves(self) -> None:
        """Give a sign if bytes have moved since the last sign of this kind."""
        if self._moved != self._shown:
            self._shown = self._moved
            await self.show()

    async def show(self) -> None:
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
    """Show the others, while the body runs, that this process lives.

    Works without `Operation.watch`, as in shielded code; ends after ten times the time limit.

    Args:
        operation: The operation in which the others wait.
        advance: Called instead of the operation's own `advance`, if others wait for this process in
            further operations.
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
    """The time at which each awaited process was last heard of."""

    def __init__(self, processes: Iterable[int], now: float) -> None:
        """Begin to wait for `processes`."""
        self._last: dict[int, bytes] = {}
        self._heard = dict.fromkeys(processes, now)

    def see(self, index: int, sign: bytes, now: float) -> None:
        """Note a sign of a process; only a new sign counts."""
        if index in self._heard and self._last.get(index) != sign:
            self._last[index], self._heard[index] = sign, now

    def arrived(self, index: int) -> None:
        """Stop waiting for a process."""
        self._heard.pop(index, None)

    def silent(self, now: float, seconds: float) -> list[int]:
        """Return the processes without a new sign for `seconds`."""
        return sorted(index for index, heard in self._heard.items() if now - heard >= seconds)

    def patience(self, index: int, now: float, seconds: float) -> float:
        """Return how many seconds are left until a process has been silent for too long."""
        return max(self._heard.get(index, now) + seconds - now, 0.0)

    def last(self, index: int) -> bytes | None:
        """Return the last sign of a process, if there was one."""
        return self._last.get(index)


async def missing_text(missing: list[int], count: int, signs: Signs, values: KeyValues) -> str:
    """Return the missing processes as text: those gone silent, and those that never came."""
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
