"""The steps of a root as records: age, size, metrics and origin, and what keeps them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.manifest_head import (
    FILE_NAME,
    HEAD_BYTES,
    MAX_BYTES,
    OWN_FORMAT,
    Origin,
    flat_metrics,
    origin_of,
)
from ckpt._inspection.json_values import age_of, finite, time_of
from ckpt._inspection.locations import Checkpoint, RunRoot, checkpoint_at, doubled_steps
from ckpt._inspection.usage import StorageUsage, UsageKey, usage_of
from ckpt._proof.run_notes import CONTRACT_NOTE
from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt._steps.pins import Pin, pins
from ckpt._steps.removal.deletion_plan import DeletionPlan
from ckpt._steps.removal.recorded_policy import read_recorded_policy
from ckpt.errors import CheckpointError, StorageError
from ckpt.keep._questions import notes_in
from ckpt.storage._resolve import local_path

logger = logging.getLogger("ckpt")

_STATES = {True: "saving", False: "dead", None: "silent"}


class ListedStep(Struct, frozen=True):
    """A committed step, or a checkpoint by itself.

    Attributes:
        step: Its number; None for a checkpoint by itself.
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
        versions: Versions of the libraries that wrote it; empty if they were not asked for.
        process_count: Number of processes that wrote it; None if it was not asked for.
        contract: The contract of its run; None if there is none, or if it was not asked for.
    """

    step: int | None
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
    versions: dict[str, str] = {}
    process_count: int | None = None
    contract: Any = None


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


class Ancestor(Struct, frozen=True):
    """A checkpoint that a run has begun from.

    Attributes:
        path: Path that the checkpoint had.
        step: Its number; None for a one-shot checkpoint.
        committed: Time of its commit (UTC); None if unknown.
        reason: Reason why it is not at the path, or cannot be read; empty if it is there.
    """

    path: str
    step: int | None
    committed: datetime | None
    reason: str


class RootListing(Struct, frozen=True):
    """The contents of a root: steps, attempts and unreadable directories; or one checkpoint.

    Attributes:
        root: Path of the root, or of the checkpoint.
        steps: Its committed steps, ascending.
        unreadable: Directories with names of steps that are not readable steps.
        attempts: Steps that are being saved, and leftovers of dead writers.
        keeps: The policy of the run in a few words, as its last manager noted it; None if there is
            no note.
        stored_bytes: Bytes of the files of all steps. On a disk, a file that several of them share
            counts once.
        ancestors: The checkpoint that the run began from, then the ancestor of that one, and so on;
            None if they were not asked for.
        usage: The bytes by a key; None if they were not asked for.
    """

    root: str
    steps: list[ListedStep]
    unreadable: list[UnreadableEntry]
    attempts: list[ListedAttempt]
    keeps: str | None
    stored_bytes: int = 0
    ancestors: list[Ancestor] | None = None
    usage: StorageUsage | None = None


async def list_steps(
    place: RunRoot | Checkpoint, by: UsageKey | None = None, *, origins: bool = False
) -> RootListing:
    """Return the contents of a root, or of a checkpoint.

    Args:
        place: The root or the checkpoint.
        by: Key of the bytes to add up, or None.
        origins: True to read which libraries wrote the steps, and what the run began from. A parent
            that cannot be read ends the chain.

    Raises:
        CorruptCheckpointError: A step whose origin was asked for is damaged.
        StorageError: The root cannot be read.
    """
    ancestors: list[Ancestor] = []
    usage = None if by is None else await usage_of(place, by)
    if isinstance(place, Checkpoint):
        listing = RootListing(place.location, [await _list_opened(place)], [], [], None)
        nbytes = place.opened.stored_bytes or 0 if usage is None else usage.nbytes
        ancestors = await _ancestors(place) if origins else []
    else:
        listing = await list_root(place, origins=origins)
        nbytes = await _bytes_of(place, listing) if usage is None else usage.nbytes
        if origins and listing.steps:
            latest = Checkpoint(place.storage, await place.index.found(None))
            ancestors = await _ancestors(latest)
    return replace(
        listing, stored_bytes=nbytes, ancestors=ancestors if origins else None, usage=usage
    )


class RootLister:
    """Lists one root again and again; its bytes are counted when its steps have changed."""

    def __init__(self, root: RunRoot) -> None:
        self._root = root
        self._counted: tuple[list[object], int] = ([], 0)

    async def read(self) -> RootListing:
        """Return the contents of the root as they are now.

        Raises:
            CheckpointError: As in `list_steps`.
        """
        listing = await list_root(self._root)
        steps: list[object] = [(each.name, each.committed) for each in listing.steps]
        if steps != self._counted[0]:
            self._counted = steps, await _bytes_of(self._root, listing)
        return replace(listing, stored_bytes=self._counted[1])


async def _bytes_of(root: RunRoot, listing: RootListing) -> int:
    """Return the bytes of all steps; on a disk, every file is looked at and counts once."""
    if local_path(root.location) is None:
        return sum(each.stored_bytes or 0 for each in listing.steps)
    return (await usage_of(root, "step", unfinished=False)).nbytes


async def list_root(root: RunRoot, *, origins: bool = False) -> RootListing:
    """Return the contents of a root, without its bytes and ancestors.

    Raises:
        CheckpointError: As in `list_steps`.
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
    written = await _origins(root, found.values()) if origins else {}
    return RootListing(
        root.location,
        [
            _list_step(each, pinned.get(each.step, ()), going, written.get(each.step_dir))
            for each in found.values()
        ],
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
    step: IndexedStep, pinned: Sequence[Pin], going: DeletionPlan | None, origin: Origin | None
) -> ListedStep:
    return ListedStep(
        step.step,
        step.step_dir,
        time_of(step.committed_ns),
        age_of(step.committed_ns),
        step.stored_bytes,
        finite(step.metrics or {}),
        sorted(each.name for each in pinned),
        step.library or "ckpt",
        None if going is None else step.step in going.steps,
        step.notes.nonfinite_leaves,
        step.notes.unequal_leaves,
        [] if going is None else sorted(going.losing().get(step.step, ())),
        [each.item for each in step.dropped],
        {} if origin is None else dict(origin.writer),
        None if origin is None else origin.process_count,
        None if origin is None else origin.extensions.get(CONTRACT_NOTE),
    )


async def _list_opened(checkpoint: Checkpoint) -> ListedStep:
    manifest = checkpoint.opened.manifest
    step = IndexedStep(
        0,
        checkpoint.opened.step_dir,
        manifest.attempt,
        manifest.created_ns,
        manifest.committed_ns,
        flat_metrics(manifest.metrics),
        stored_bytes=checkpoint.opened.stored_bytes,
        library="" if manifest.format == OWN_FORMAT else manifest.format,
        notes=notes_in(manifest),
        dropped=tuple(manifest.dropped),
    )
    origin = Origin(manifest.writer, manifest.process_count, manifest.extensions)
    if manifest.step is None:
        return replace(_list_step(step, (), None, origin), step=None)
    pinned = (await pins(checkpoint.storage)).get(manifest.step, ())
    return replace(_list_step(step, pinned, None, origin), step=manifest.step)


# Limits the chain: runs that begin from each other in a circle would have no end.
_MOST_PARENTS = 1000
# Origin of a checkpoint by Orbax, which does not record one.
_FOREIGN = Origin({}, 1)


async def _origins(root: RunRoot, steps: Collection[IndexedStep]) -> dict[str, Origin | None]:
    """Return the writers of steps, without decoding the items in their manifests."""
    own = [each for each in steps if not each.is_foreign]
    names = [each.step_dir for each in own]
    read = await root.storage.read_each(names, FILE_NAME, MAX_BYTES, HEAD_BYTES, origin_of)
    found: dict[str, Origin | None] = {each.step_dir: _FOREIGN for each in steps}
    for each, origin in zip(own, read, strict=True):
        found[each.step_dir] = origin
        # The step was deleted meanwhile. If it is damaged or of a later version, opening it raises.
        if origin is None and (opened := await open_step(root.storage, each.step_dir, each.step)):
            head = opened.manifest
            found[each.step_dir] = Origin(head.writer, head.process_count, head.extensions)
    return found


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
            reason = "it is in another store; 'ckpt ls --long' of its path looks at it"
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
        committed = None if here is None else time_of(here.opened.manifest.committed_ns)
        found.append(Ancestor(parent.path, parent.step, committed, reason))
    return found


def _is_near(path: str, location: str) -> bool:
    """Return True if a path from a manifest is on a disk, or in the store of the manifest.

    A manifest must not make the user query an arbitrary store with credentials.
    """
    scheme, _, rest = path.partition("://")
    if not rest or scheme == "file":
        return True
    return location.startswith(f"{scheme}://{rest.partition('/')[0]}/")
