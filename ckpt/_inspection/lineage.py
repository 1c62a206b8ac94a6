"""The lineage of a checkpoint: its run, the checkpoint that the run began from, and so on."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME, HEAD_BYTES, MAX_BYTES, Origin, origin_of
from ckpt._format.metrics import flat_metrics
from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.locations import Checkpoint, RunRoot, checkpoint_at, locate, step_path_of
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt.errors import CheckpointError, StorageError

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
