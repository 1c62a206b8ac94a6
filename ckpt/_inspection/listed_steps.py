"""The steps of a root as records: how old and large they are, and what keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.places import RunRoot, doubled_steps
from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep
from ckpt._steps.pins import Pin, pins
from ckpt._steps.removal.noted_policy import noted_policy
from ckpt._steps.removal.superfluous import Superfluous

logger = logging.getLogger("ckpt")

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
        goes_next: Whether the run deletes it after its next commit, unless that is a better one;
            None if it is not known what the run keeps.
        nonfinite_leaves: How many leaves have NaN or infinite values; None if that is not known.
        unequal_leaves: How many leaves had replicas that were not equal.
        drops_next: The items that the run takes out of it then.
        dropped: The items that were taken out of it.
    """

    step: int
    name: str
    committed: datetime | None
    age_seconds: float | None
    stored_bytes: int | None
    metrics: dict[str, float | None]
    pins: list[str]
    writer: str
    goes_next: bool | None
    nonfinite_leaves: int | None
    unequal_leaves: int
    drops_next: list[str] = []
    dropped: list[str] = []


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
        keeps: What the run keeps, in a few words, as its last manager wrote it down; None if
            nothing is written down.
    """

    root: str
    steps: list[ListedStep]
    unreadable: list[UnreadableEntry]
    attempts: list[ListedAttempt]
    keeps: str | None


async def list_root(root: RunRoot) -> RootListing:
    """Return what is in a root.

    Raises:
        StorageError: It cannot be read.
    """
    found = await root.index.refresh()
    for step, (kept, *others) in (await doubled_steps(root)).items():
        logger.warning(
            "%s: several steps have the number %d: %s; the list has one of them",
            redact(root.location),
            step,
            ", ".join([kept, *others]),
        )
    pinned = await pins(root.storage)
    going, keeps = await _going(root, found)
    now = time.time()
    return RootListing(
        root.location,
        [_listed(each, pinned.get(each.step, ()), going, now) for each in found.values()],
        [UnreadableEntry(each.step, each.kind, each.reason) for each in root.index.unreadable],
        await _attempts(root),
        keeps,
    )


async def _going(
    root: RunRoot, found: Mapping[int, IndexedStep]
) -> tuple[Superfluous | None, str | None]:
    """Return what a run deletes next and what it keeps; None for what is not known."""
    noted = await noted_policy(root.storage)
    if noted is None or noted.policy is None or noted.deletion is None:
        return None, None if noted is None else noted.text or None
    # Only here: the lists of most roots need no policies.
    from ckpt._inspection.retention.preservation import next_to_go, text_of

    return await next_to_go(root, noted.policy, noted.deletion, found), text_of(noted.policy)


async def _attempts(root: RunRoot) -> list[ListedAttempt]:
    found = []
    for each in await root.storage.attempts():
        # Notes are written as attempts, too.
        step = root.names.step(each.step_dir) if each.step_dir else None
        if step is not None and not each.is_removal:
            state = _STATES[each.is_live]
            found.append(ListedAttempt(step, state, each.age_seconds, each.nbytes, each.owner))
    return sorted(found, key=lambda each: each.step)


def _listed(
    step: IndexedStep, pinned: tuple[Pin, ...], going: Superfluous | None, now: float
) -> ListedStep:
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
        None if going is None else step.step in going.steps,
        step.nonfinite_leaves,
        step.unequal_leaves,
        [] if going is None else sorted(going.losing().get(step.step, ())),
        [each.item for each in step.dropped],
    )
