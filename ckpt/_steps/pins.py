"""Pins: steps that must not be deleted, permanently or while they are read.

A pin is a note of the root, so all users of the root see it, on any store where every reader sees
earlier writes. An evaluator may pin a step at the moment at which a trainer deletes it. Each of
them first writes its intention and then looks for the other: the trainer writes a mark that the
step goes, the evaluator writes its pin. So at least one of them sees the other. A trainer that sees
a pin leaves the step; an evaluator that sees a mark waits until the mark is gone, and then checks
that the step is still there.

Marks, and pins of evaluators, are leases: a lease that was not renewed for as long as it says, by
the clock of the store, no longer counts. docs/how-to/watching.md tells the limits of this.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
from msgspec import Struct

from ckpt._arguments import shown
from ckpt._settings import LONGEST_LEASE_SECONDS
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepNotFoundError,
    StepPinnedError,
    StorageError,
)
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

T = TypeVar("T")

_FOLDER = ".ckpt-pins"
_PIN_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
_NOTE = re.compile(r"^(0|[1-9][0-9]{0,18})\.([A-Za-z0-9_][A-Za-z0-9_.-]{0,199})\Z")
_BRIEF = re.compile(r"^(lease|deleting)-([0-9]{1,9}\.[0-9]{3})-[0-9a-f]{32}\Z")
_MAX_BYTES = 4096
# A deletion takes a step away within milliseconds. A longer one is treated as one that succeeds, or
# whose process has died; the caller may look again later.
_LOOKS = 40
_PAUSE_SECONDS = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class Pin:
    """A reason why a step must not be deleted.

    Attributes:
        step: The step.
        name: Name of the pin.
        owner: Host and process that wrote it, for people.
        seconds: Time that the pin lasts without being renewed; None if it stays until it is
            unpinned.
    """

    step: int
    name: str
    owner: str
    seconds: float | None

    def __str__(self) -> str:
        return f"{self.name!r} of {self.owner}"


class PinLease(Struct, frozen=True):
    """A pin that must be renewed in time, and dropped at the end of its use."""

    storage: Storage
    step: int
    note: str

    async def renew(self) -> bool:
        """Restart the time of the lease; False if it had run out and a deletion has removed it."""
        return await self.storage.touch_note(self.note)

    async def drop(self) -> None:
        """Remove the lease, even when cancelled; a lease that cannot be removed runs out."""
        with anyio.CancelScope(shield=True):
            await _drop(self.storage, self.note)


class _PinNote(Struct, frozen=True):
    """A note of a pin or a mark; `seconds` is None for a pin that stays."""

    note: str
    step: int
    name: str
    is_mark: bool
    seconds: float | None
    age: float

    @property
    def is_live(self) -> bool:
        return self.seconds is None or self.age <= self.seconds


def check_pin_name(name: object) -> str:
    """Return `name` if it is a valid name of a pin.

    Raises:
        InvalidArgumentError: It is not.
    """
    usable = isinstance(name, str) and _PIN_NAME.match(name)
    if not isinstance(name, str) or not usable or name.startswith(("lease-", "deleting-")):
        raise InvalidArgumentError(
            f"pin name {shown(name)}: expected 1 to 100 letters, digits, '_', '-' or '.', not "
            "beginning with '.', '-', 'lease-' or 'deleting-'"
        )
    return name


async def pin(
    storage: Storage, step: int, name: str, is_committed: Callable[[], Awaitable[bool]]
) -> None:
    """Pin a step until it is unpinned, durably. Idempotent.

    Args:
        storage: The root.
        step: The step.
        name: Name of the pin.
        is_committed: Returns True if the step is there.

    Raises:
        InvalidArgumentError: The name is not valid for a pin.
        StepNotFoundError: There is no such step, or it is being deleted.
        StorageError: The pin could not be written.

    Cancellation: the step may have been pinned.
    """
    check_pin_name(name)

    async def look() -> bool | None:
        return await is_committed() or None

    # Pin under a lease: a pin that is given up then takes no step from other users.
    held = await hold(storage, step, look)
    if held is None:
        raise StepNotFoundError(
            f"there is no such step in {storage.location}, or it is being deleted, so it was not "
            "pinned",
            step=step,
        )
    try:
        await storage.put_note(_note(step, name), _owner(), replace=False)
    finally:
        await held[0].drop()


async def unpin(storage: Storage, step: int, name: str) -> bool:
    """Remove a pin, even of a missing step; return False if there is no pin of that name.

    Raises:
        InvalidArgumentError: The name is not valid for a pin.
        StorageError: The pin could not be removed.
    """
    return await storage.drop_note(_note(step, check_pin_name(name)))


async def pins(storage: Storage) -> Mapping[int, tuple[Pin, ...]]:
    """Return the pins of a root by step, ascending, without those that have run out."""
    return await _live_pins(storage, await _read_notes(storage))


async def hold(
    storage: Storage,
    step: int,
    look: Callable[[], Awaitable[T | None]],
    *,
    seconds: float | None = None,
) -> tuple[PinLease, T] | None:
    """Pin a step for a limited time.

    Args:
        storage: The root.
        step: The step.
        look: Returns what the caller wants to know about the step, or None if it is not there.
        seconds: Time that the lease lasts without being renewed; None for `lease_seconds` of the
            root.

    Returns:
        The lease, which must be renewed within that time, and the result of `look`; None if the
        step is not there or is being deleted.

    Raises:
        StorageError: The lease could not be written. Errors of `look` are raised, too.

    Cancellation: nothing stays pinned.
    """
    seconds = storage.traits.lease_seconds if seconds is None else seconds
    note = _note(step, f"lease-{_note_suffix(seconds)}")
    # The lease must not run out before anybody renews it.
    deadline = anyio.current_time() + seconds / 3
    found = None
    try:
        await storage.put_note(note, _owner(), replace=False, durable=False)
        # Deletions that begin from now on see the lease, so only the present marks endanger it.
        marks = await _marks_on(storage, step)
        for _ in range(_LOOKS):
            # `look` comes last: after the marks are gone, no deletion can take the step.
            found = await look()
            if anyio.current_time() > deadline:
                found = None
            if found is None or not marks:
                break
            found = None
            await anyio.sleep(_PAUSE_SECONDS)
            marks &= await _marks_on(storage, step)
    finally:
        if found is None:
            with anyio.CancelScope(shield=True):
                await _drop(storage, note)
    return None if found is None else (PinLease(storage, step, note), found)


@contextlib.asynccontextmanager
async def deletion_of(storage: Storage, step: int) -> AsyncIterator[tuple[Pin, ...]]:
    """Mark a step as being deleted while the body runs.

    The body gets the pins of the step. If there are none, it may delete the step: a reader that
    pins it from now on waits for the end of the body, and then checks that the step is still there.

    On a disk too full for the mark, a step is deleted without one, since the deletion makes room; a
    reader that pins the step at that moment may lose it.

    Raises:
        StorageError: The mark could not be written, or pins could not be read.
    """
    mark = _note(step, f"deleting-{_note_suffix(storage.traits.lease_seconds)}")
    try:
        try:
            await storage.put_note(mark, _owner(), replace=False, durable=False)
        except StorageError as error:
            if error.errno not in _FULL:
                raise
        found = [each for each in await _read_notes(storage, forget=True) if each.step == step]
        yield (await _live_pins(storage, found)).get(step, ())
    finally:
        with anyio.CancelScope(shield=True):
            await _drop(storage, mark)


def refuse_pinned(storage: Storage, step: int, pinned: Sequence[Pin]) -> None:
    """Raise if a step has pins.

    Raises:
        StepPinnedError: The step has pins; the error names them.
    """
    if pinned:
        brief = any(each.seconds is not None for each in pinned)
        raise StepPinnedError(
            f"{storage.location}: pinned by {', '.join(map(str, pinned))}. Unpin it first"
            + (", or wait until it has been read" if brief else ""),
            step=step,
        )


async def forget_expired(storage: Storage) -> list[int]:
    """Remove the leases and marks of a root that have run out; return their steps.

    Raises:
        StorageError: The notes cannot be listed.
    """
    found = await _read_notes(storage, forget=True)
    return sorted(each.step for each in found if not each.is_live)


async def has_leases(storage: Storage) -> bool:
    """Return True if a root has leases or marks that have not run out.

    Raises:
        StorageError: The notes cannot be listed.
    """
    found = await _read_notes(storage)
    return any(each.is_live and each.seconds is not None for each in found)


async def _marks_on(storage: Storage, step: int) -> set[str]:
    found = await _read_notes(storage)
    return {each.note for each in found if each.is_mark and each.is_live and each.step == step}


async def _read_notes(storage: Storage, *, forget: bool = False) -> list[_PinNote]:
    """Return all pins and marks of a root; `forget` removes those that have run out."""
    found = []
    for name, age in sorted((await storage.notes(_FOLDER)).items()):
        match = _NOTE.match(name)
        if match is None:
            continue
        brief = _BRIEF.match(match[2])
        # A lease or mark older than the longest lease was left behind.
        seconds = None if brief is None else min(float(brief[2]), LONGEST_LEASE_SECONDS)
        is_mark = brief is not None and brief[1] == "deleting"
        each = _PinNote(f"{_FOLDER}/{name}", int(match[1]), match[2], is_mark, seconds, age)
        if forget and not each.is_live:
            await _drop(storage, each.note)
        found.append(each)
    return found


async def _live_pins(storage: Storage, found: Sequence[_PinNote]) -> dict[int, tuple[Pin, ...]]:
    """Return the live pins in `found` by step, with their owners."""
    live: dict[int, tuple[Pin, ...]] = {}
    for each in sorted(found, key=lambda each: (each.step, each.name)):
        if each.is_live and not each.is_mark:
            owner = await _owner_of(storage, each.note)
            pin = Pin(each.step, each.name, owner, each.seconds)
            live[each.step] = (*live.get(each.step, ()), pin)
    return live


async def _owner_of(storage: Storage, note: str) -> str:
    with contextlib.suppress(CorruptCheckpointError, ValueError, RecursionError):
        content = json.loads(await storage.read("", note, _MAX_BYTES) or b"")
        if isinstance(content, dict) and isinstance(content.get("owner"), str):
            return f"{content['owner']:.200}"
    return "an unknown process"


async def _drop(storage: Storage, note: str) -> None:
    """Remove a lease or a mark; if that fails, it runs out by itself."""
    try:
        await storage.drop_note(note, durable=False)
    except StorageError as error:
        logger.warning("%s is left until it runs out: %s", note, error)


def _note(step: int, name: str) -> str:
    return f"{_FOLDER}/{step}.{name}"


def _note_suffix(seconds: float) -> str:
    # The time is in the name, so that a list of the folder shows which notes count.
    return f"{seconds:.3f}-{uuid.uuid4().hex}"


def _owner() -> bytes:
    return json.dumps({"owner": f"{platform.node()}, process {os.getpid()}"}).encode()
