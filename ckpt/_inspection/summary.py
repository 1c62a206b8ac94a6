"""One checkpoint in a few figures."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec import Struct

from ckpt._format.manifest_head import OWN_FORMAT, VIRTUAL
from ckpt._format.metrics import flat_metrics
from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.leaf_records import ARRAYS
from ckpt._inspection.places import Checkpoint
from ckpt._tree.ailing_leaves import nonfinite_leaves, unequal_leaves


class ItemSummary(Struct, frozen=True):
    """An item of a checkpoint.

    Attributes:
        name: Its name.
        handler: The handler that wrote it.
        leaves: How many leaves it has.
        arrays: How many of them are arrays.
        nbytes: Logical bytes of its arrays, or of the files that its handler keeps.
    """

    name: str
    handler: str
    leaves: int
    arrays: int
    nbytes: int


class DroppedSummary(Struct, frozen=True):
    """An item that was taken out of a checkpoint.

    Attributes:
        name: Its name.
        dropped: When that was (UTC).
        policy: The policy that did not keep it; None if it was deleted by hand.
        stored_bytes: Bytes of its files.
    """

    name: str
    dropped: datetime
    policy: str | None
    stored_bytes: int


class CheckpointSummary(Struct, frozen=True):
    """A checkpoint in a few figures.

    Attributes:
        path: Where it is.
        step: Its number; None for a one-shot checkpoint.
        writer: Versions of the libraries that wrote it.
        format: `ckpt` or the name of the format of another library.
        created: When its save began (UTC), if that is known.
        committed: When it was committed (UTC), if that is known.
        unnamed: Whether it is one object saved without a name.
        items: Its items.
        nbytes: Logical bytes of all items.
        stored_bytes: Bytes of its files, of the manifest, too; None of what another library wrote.
        files: How many files it has; None of what another library wrote.
        shared_bytes: Bytes of those that its save took over from the step before.
        process_count: How many processes wrote it.
        is_virtual: Whether data files of it lie elsewhere.
        sources: Those files.
        metrics: Metrics by name; those that are not finite are None.
        metadata: User metadata.
        parent: Path of the checkpoint that the run has begun from, or None.
        statistics: Where the time of the save went, in seconds.
        nonfinite: How many values of leaves are NaN or infinite, by leaf path, where there are
            some; None if the vital signs of an array are not known.
        unequal: The leaves whose replicas were not equal.
        dropped: Items that it was saved with, and that were taken out since.
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
    """Return a checkpoint in a few figures."""
    manifest = checkpoint.opened.manifest
    # Of what another library wrote, not all files are known.
    is_own = manifest.format == OWN_FORMAT
    items = [
        ItemSummary(
            name,
            item.handler,
            len(item.leaves),
            sum(item.leaves.forms[int(form)].kind in ARRAYS for form in item.leaves.form),
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
