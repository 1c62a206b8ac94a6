"""The steps of a root as records: their age, size and metrics, and what keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.locations import RunRoot, doubled_steps
from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep
from ckpt._steps.pins import Pin, pins
from ckpt._steps.removal.deletion_plan import DeletionPlan
from ckpt._steps.removal.recorded_policy import read_recorded_policy

logger = logging.getLogger("ckpt")

_STATES = {True: "saving", False: "dead", None: "silent"}


class ListedStep(Struct, frozen=True):
    """A committed step.

    Attributes:
        step: Its number.
        name: Name of its directory.
        committed: Time of its commit (UTC); None if another library wrote it and does not record
            it.
        age_seconds: Time since the commit.
        stored_bytes: Bytes of its files; None if another library wrote it.
        metrics: Metrics by name; None for values that are not finite.
        pins: Names of its pins.
        writer: `ckpt` or `orbax`.
        goes_next: True if the run deletes it after its next commit, unless the new step is a better
            one; None if the policy of the run is unknown.
        nonfinite_leaves: Number of leaves with NaN or infinite values; None if unknown.
        unequal_leaves: Number of leaves whose replicas were not equal.
        drops_next: Items that the run takes out of it after its next commit.
        dropped: Items that were taken out of it.
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
    """A directory with the name of a step that cannot be read as one.

    Attributes:
        step: The step of its name.
        kind: `damaged`, `later` (of a later version), `forbidden`, `orbax` (not finished) or
            `other`.
        reason: Reason why it cannot be read.
    """

    step: int
    kind: str
    reason: str


class ListedAttempt(Struct, frozen=True):
    """A step that is being saved, or that a dead writer has not finished.

    Attributes:
        step: The step that it would become.
        state: `saving`, `dead`, or `silent`: its writer may be dead, which only watching it can
            tell.
        age_seconds: Time since it was begun; None if its writer does not record it.
        nbytes: Bytes written so far; None if counting them is not cheap.
        owner: Host and process of its writer.
    """

    step: int
    state: str
    age_seconds: float | None
    nbytes: int | None
    owner: str


class RootListing(Struct, frozen=True):
    """The contents of a root: steps, attempts and unreadable directories.

    Attributes:
        root: Path of the root.
        steps: Its committed steps, ascending.
        unreadable: Directories with names of steps that are not readable steps.
        attempts: Steps that are being saved, and leftovers of dead writers.
        keeps: The policy of the run in a few words, as its last manager noted it; None if there is
            no note.
    """

    root: str
    steps: list[ListedStep]
    unreadable: list[UnreadableEntry]
    attempts: list[ListedAttempt]
    keeps: str | None


async def list_root(root: RunRoot) -> RootListing:
    """Return the contents of a root.

    Raises:
        StorageError: The root cannot be read.
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
        [_list_step(each, pinned.get(each.step, ()), going, now) for each in found.values()],
        [UnreadableEntry(each.step, each.kind, each.reason) for each in root.index.unreadable],
        await _attempts(root),
        keeps,
    )


async def _going(
    root: RunRoot, found: Mapping[int, IndexedStep]
) -> tuple[DeletionPlan | None, str | None]:
    """Return the steps that the run deletes next and its policy as text; None where unknown."""
    noted = await read_recorded_policy(root.storage)
    if noted is None or noted.policy is None or noted.deletion is None:
        return None, None if noted is None else noted.text or None
    # Imported only here: most roots have no noted policy.
    from ckpt._inspection.retention.kept_steps import next_to_go, text_of

    return await next_to_go(root, noted.policy, noted.deletion, found), text_of(noted.policy)


async def _attempts(root: RunRoot) -> list[ListedAttempt]:
    found = []
    for each in await root.storage.attempts():
        # Notes are written as attempts, too, but they are not steps.
        step = root.names.step(each.step_dir) if each.step_dir else None
        if step is not None and not each.is_removal:
            state = _STATES[each.is_live]
            found.append(ListedAttempt(step, state, each.age_seconds, each.nbytes, each.owner))
    return sorted(found, key=lambda each: each.step)


def _list_step(
    step: IndexedStep, pinned: tuple[Pin, ...], going: DeletionPlan | None, now: float
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
        step.library or "ckpt",
        None if going is None else step.step in going.steps,
        step.notes.nonfinite_leaves,
        step.notes.unequal_leaves,
        [] if going is None else sorted(going.losing().get(step.step, ())),
        [each.item for each in step.dropped],
    )
