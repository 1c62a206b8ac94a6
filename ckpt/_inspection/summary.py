"""A summary of one checkpoint."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct

from ckpt._format.manifest_head import OWN_FORMAT, VIRTUAL
from ckpt._format.metrics import flat_metrics
from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.locations import Checkpoint
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._vitals.stored_signs import nonfinite_leaves, unequal_leaves


class ItemSummary(Struct, frozen=True):
    """An item of a checkpoint.

    Attributes:
        name: Name of the item.
        handler: The handler that wrote it.
        leaves: Number of its leaves.
        arrays: Number of the leaves that are arrays.
        nbytes: Logical bytes of its arrays, or bytes of the files of its handler.
    """

    name: str
    handler: str
    leaves: int
    arrays: int
    nbytes: int


class DroppedSummary(Struct, frozen=True):
    """An item that was taken out of a checkpoint.

    Attributes:
        name: Name of the item.
        dropped: Time at which it was taken out (UTC).
        policy: The policy that did not keep it; None if it was deleted by hand.
        stored_bytes: Bytes of its files.
    """

    name: str
    dropped: datetime
    policy: str | None
    stored_bytes: int


class CheckpointSummary(Struct, frozen=True):
    """A summary of a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        step: Its number; None for a one-shot checkpoint.
        writer: Versions of the libraries that wrote it.
        format: `ckpt` or the name of the format of another library.
        created: Time at which its save began (UTC), if known.
        committed: Time of its commit (UTC), if known.
        unnamed: True if it is one object that was saved without a name.
        items: Its items.
        nbytes: Logical bytes of all items.
        stored_bytes: Bytes of its files, including the manifest; None if another library wrote it.
        files: Number of its files; None if another library wrote it.
        shared_bytes: Bytes of the files that its save took over from the step before.
        process_count: Number of processes that wrote it.
        is_virtual: True if it has data files that lie elsewhere.
        sources: Locations of those files.
        metrics: Metrics by name; None for values that are not finite.
        metadata: User metadata.
        parent: Path of the checkpoint that the run began from, or None.
        statistics: Seconds that the save spent, by activity.
        nonfinite: Number of values that are NaN or infinite, by leaf path, for leaves that have
            any; None if the vital signs of an array are unknown.
        unequal: Leaves whose replicas were not equal.
        dropped: Items that were taken out of it after the save.
    """

    path: str
    step: int | None
    writer: dict[str, str]
    format: str
    created: datetime | None
    committed: datetime | None
    unnamed: bool
    items: list[ItemSummary]
    nbytes: int
    stored_bytes: int | None
    files: int | None
    shared_bytes: int
    process_count: int
    is_virtual: bool
    sources: list[str]
    metrics: dict[str, float | None]
    metadata: Any
    parent: str | None
    statistics: dict[str, float]
    nonfinite: dict[str, int] | None
    unequal: list[str]
    dropped: list[DroppedSummary] = []


def summarize(checkpoint: Checkpoint) -> CheckpointSummary:
    """Return the summary of a checkpoint."""
    manifest = checkpoint.opened.manifest
    # If another library wrote the checkpoint, not all of its files are known.
    is_own = manifest.format == OWN_FORMAT
    items = [
        ItemSummary(
            name,
            item.handler,
            len(item.leaves),
            sum(item.leaves.forms[int(form)].kind in ARRAY_KINDS for form in item.leaves.form),
            item.nbytes,
        )
        for name, item in manifest.items.items()
    ]
    return CheckpointSummary(
        path=checkpoint.location,
        step=manifest.step,
        writer=dict(manifest.writer),
        format=manifest.format,
        created=time_of(manifest.created_ns),
        committed=time_of(manifest.committed_ns),
        unnamed=manifest.unnamed,
        items=items,
        nbytes=sum(each.nbytes for each in items),
        stored_bytes=checkpoint.opened.stored_bytes,
        files=len(manifest.files) + 1 if is_own else None,
        shared_bytes=sum(each.size for each in manifest.files.values() if each.shared),
        process_count=manifest.process_count,
        is_virtual=VIRTUAL in manifest.requires,
        sources=sorted(each.location for each in manifest.sources.values()),
        metrics=finite(flat_metrics(manifest.metrics)),
        metadata=manifest.metadata,
        parent=None if manifest.parent is None else manifest.parent.path,
        statistics=dict(manifest.statistics),
        nonfinite=None if manifest.nonfinite_leaves is None else nonfinite_leaves(manifest),
        unequal=unequal_leaves(manifest),
        dropped=[
            DroppedSummary(each.item, each.dropped, each.policy, each.nbytes)
            for each in manifest.dropped
        ],
    )
