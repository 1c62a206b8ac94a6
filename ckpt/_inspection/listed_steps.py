"""The steps of a root as records: age, size, metrics and lineage, and what keeps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime

from msgspec import Struct

from ckpt._format.manifest_head import (
    FILE_NAME,
    HEAD_BYTES,
    MAX_BYTES,
    Origin,
    flat_metrics,
    origin_of,
)
from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.locations import (
    Checkpoint,
    RunRoot,
    checkpoint_at,
    doubled_steps,
    locate,
    step_path_of,
)
from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt._steps.pins import Pin, pins
from ckpt._steps.removal.deletion_plan import DeletionPlan
from ckpt._steps.removal.recorded_policy import read_recorded_policy
from ckpt.errors import CheckpointError, StorageError

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
    from ckpt._inspection.kept_steps import next_to_go, text_of

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


# Limits the chain: runs that begin from each other in a circle would have no end.
_MOST_PARENTS = 1000
# Origin of a checkpoint by Orbax, which does not record one.
_FOREIGN = Origin({}, 1)


class LoggedStep(Struct, frozen=True):
    """A checkpoint in the history of a run.

    Attributes:
        path: Path of the checkpoint.
        step: Its number; None for a one-shot checkpoint.
        committed: Time of its commit (UTC), if known.
        metrics: Metrics by name; None for values that are not finite.
        writer: Versions of the libraries that wrote it.
        process_count: Number of processes that wrote it.
    """

    path: str
    step: int | None
    committed: datetime | None
    metrics: dict[str, float | None]
    writer: dict[str, str]
    process_count: int


class Ancestor(Struct, frozen=True):
    """A checkpoint that a run has begun from.

    Attributes:
        path: Path that the checkpoint had.
        step: Its number; None for a one-shot checkpoint.
        found: The checkpoint at the path; None if it cannot be read, or if another one is there.
        reason: Reason why it was not found; empty if it was.
    """

    path: str
    step: int | None
    found: LoggedStep | None
    reason: str


class Lineage(Struct, frozen=True):
    """The history of a checkpoint.

    Attributes:
        path: Path of the checkpoint or root.
        ancestors: The checkpoint that the run began from, then the ancestor of that one, and so on.
        steps: The steps of the run up to the checkpoint, ascending.
    """

    path: str
    ancestors: list[Ancestor]
    steps: list[LoggedStep]


async def lineage_of(path: str) -> Lineage:
    """Return the history of a checkpoint; for a root, the history of its latest step.

    Deleted steps are missing from the steps of the run. A parent that cannot be read ends the
    chain.

    Raises:
        CheckpointError: There is no checkpoint, or it cannot be read.
    """
    found = await locate(path)
    checkpoint = found
    if isinstance(checkpoint, RunRoot):
        checkpoint = Checkpoint(checkpoint.storage, await checkpoint.index.found(None))
    step, place = checkpoint.opened.manifest.step, step_path_of(path)
    if isinstance(found, RunRoot):
        steps = await _steps_of(found)
    elif step is not None and place is not None and place.step == step:
        steps = [each for each in await _steps_of(place.root) if (each.step or 0) <= step]
    else:
        steps = [_logged(checkpoint)]
    return Lineage(found.location, await _ancestors(checkpoint), steps)


async def _steps_of(root: RunRoot) -> list[LoggedStep]:
    """Return the steps of a root, without decoding the items in their manifests."""
    found = list((await root.index.refresh()).values())
    own = [each.step_dir for each in found if not each.is_foreign]
    read = await root.storage.read_each(own, FILE_NAME, MAX_BYTES, HEAD_BYTES, origin_of)
    origins = dict(zip(own, read, strict=True))
    steps = []
    for each in found:
        origin = _FOREIGN if each.is_foreign else origins[each.step_dir]
        if origin is not None:
            steps.append(_indexed(root, each, origin))
            continue
        # The step was deleted meanwhile. If it is damaged or of a later version, opening it raises.
        opened = await open_step(root.storage, each.step_dir, each.step)
        if opened is not None:
            steps.append(_logged(Checkpoint(root.storage, opened)))
    return steps


def _indexed(root: RunRoot, step: IndexedStep, origin: Origin) -> LoggedStep:
    return LoggedStep(
        f"{root.location}/{step.step_dir}",
        step.step,
        time_of(step.committed_ns),
        finite(step.metrics or {}),
        origin.writer,
        origin.process_count,
    )


async def _ancestors(checkpoint: Checkpoint) -> list[Ancestor]:
    found: list[Ancestor] = []
    seen = {checkpoint.opened.manifest.attempt}
    here: Checkpoint | None = checkpoint
    while here is not None and len(found) < _MOST_PARENTS:
        parent = here.opened.manifest.parent
        if parent is None:
            break
        place, reason = here, ""
        here = None
        if not _is_near(parent.path, place.location):
            reason = "it is in another store; 'ckpt log' of its path looks at it"
            found.append(Ancestor(parent.path, parent.step, None, reason))
            break
        try:
            there = await checkpoint_at(parent.path)
            attempt = there.opened.manifest.attempt
            if attempt != parent.attempt:
                reason = "another checkpoint is there now"
            elif attempt in seen:
                reason = "it is one of its own descendants"
            else:
                here = there
                seen.add(attempt)
        except StorageError as error:
            reason = f"it cannot be reached: {error.message}"
        except CheckpointError as error:
            reason = f"it cannot be read: {error.message}"
        logged = None if here is None else _logged(here)
        found.append(Ancestor(parent.path, parent.step, logged, reason))
    return found


def _is_near(path: str, location: str) -> bool:
    """Return True if a path from a manifest is on a disk, or in the store of the manifest.

    A manifest must not make the user query an arbitrary store with credentials.
    """
    scheme, _, rest = path.partition("://")
    if not rest or scheme == "file":
        return True
    return location.startswith(f"{scheme}://{rest.partition('/')[0]}/")


def _logged(checkpoint: Checkpoint) -> LoggedStep:
    manifest = checkpoint.opened.manifest
    return LoggedStep(
        checkpoint.location,
        manifest.step,
        time_of(manifest.committed_ns),
        finite(flat_metrics(manifest.metrics)),
        dict(manifest.writer),
        manifest.process_count,
    )
