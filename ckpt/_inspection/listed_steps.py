"""The steps of a root as records: how old and large they are, and what keeps them."""

from __future__ import annotations

import time
from datetime import datetime

from msgspec import Struct

from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.places import RunRoot
from ckpt._steps.index import IndexedStep
from ckpt._steps.pins import Pin, pins

_STATES = {True: "saving", False: "dead", None: "silent"}


class ListedStep(Struct, frozen=True):
    """A committed step.

    Attributes:
        step: Its number.
        name: The name of its directory.
        committed: When it was committed (UTC); None if what another library wrote does not say.
        age_seconds: How long ago that was.
        stored_bytes: Bytes of its files; None of what another library wrote.
        metrics: Metrics by name; those that are not finite are None.
        pins: The names of its pins.
        writer: `ckpt` or `orbax`.
    """

    step: int
    name: str
    committed: datetime | None
    age_seconds: float | None
    stored_bytes: int | None
    metrics: dict[str, float | None]
    pins: list[str]
    writer: str


class UnreadableEntry(Struct, frozen=True):
    """A directory that is named like a step and cannot be read as one.

    Attributes:
        step: The step that it is named like.
        kind: `damaged`, `later` (of a later version), `forbidden`, `orbax` (not finished) or
            `other`.
        reason: Why it cannot be read.
    """

    step: int
    kind: str
    reason: str


class ListedAttempt(Struct, frozen=True):
    """A step that is being saved, or that a dead writer has not finished.

    Attributes:
        step: The step that it would become.
        state: `saving`, `dead`, or `silent`: its writer may be dead, which takes watching it.
        age_seconds: How long ago it was begun; None if its writer does not say.
        nbytes: Bytes written so far; None where counting them is not cheap.
        owner: Host and process of its writer.
    """

    step: int
    state: str
    age_seconds: float | None
    nbytes: int | None
    owner: str


class RootListing(Struct, frozen=True):
    """The steps of a root, and what else is in it.

    Attributes:
        root: Where it is.
        steps: Its committed steps, ascending.
        unreadable: What is named like a step and is none.
        attempts: Steps that are being saved, and what is left of dead writers.
    """

    root: str
    steps: list[ListedStep]
    unreadable: list[UnreadableEntry]
    attempts: list[ListedAttempt]


async def list_root(root: RunRoot) -> RootListing:
    """Return what is in a root.

    Raises:
        StorageError: It cannot be read.
    """
    found = await root.index.refresh()
    pinned = await pins(root.storage)
    now = time.time()
    return RootListing(
        root.location,
        [_listed(each, pinned.get(each.step, ()), now) for each in found.values()],
        [UnreadableEntry(each.step, each.kind, each.reason) for each in root.index.unreadable],
        await _attempts(root),
    )


async def _attempts(root: RunRoot) -> list[ListedAttempt]:
    found = []
    for each in await root.storage.attempts():
        # Notes are written as attempts, too.
        step = root.names.step(each.step_dir) if each.step_dir else None
        if step is not None and not each.is_removal:
            state = _STATES[each.is_live]
            found.append(ListedAttempt(step, state, each.age_seconds, each.nbytes, each.owner))
    return sorted(found, key=lambda each: each.step)


def _listed(step: IndexedStep, pinned: tuple[Pin, ...], now: float) -> ListedStep:
    committed = step.committed_ns / 1e9
    return ListedStep(
        step.step,
        step.step_dir,
        time_of(step.committed_ns),
        max(now - committed, 0.0) if committed else None,
        step.stored_bytes,
        finite(step.metrics or {}),
        sorted(each.name for each in pinned),
        "orbax" if step.is_foreign else "ckpt",
    )
