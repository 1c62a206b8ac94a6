"""A checkpoint of Orbax, opened: a manifest of this library over Orbax's files."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from ckpt._format.manifest import ItemEntry, JsonValue, Manifest
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.step_files import BEGUN, SUCCESS
from ckpt._interop.foreign import ForeignCheckpoint, ForeignFiles
from ckpt._interop.orbax.item import OrbaxItemReader, json_file, parse_json, plain_item
from ckpt._interop.orbax.layout import (
    METRICS_FILE,
    MOST_BYTES,
    TREES,
    OrbaxItem,
    Sizes,
    has_own_trees,
    head_of,
    identity_of_files,
    is_checkpoint,
    is_unnamed,
    items_of,
    looks_like_ours,
    unfinished,
)
from ckpt._tree.leaf_kinds import unreadable_kind
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import HasDirectories, Storage

logger = logging.getLogger("ckpt")

# Format of a manifest that describes a checkpoint of Orbax.
FORMAT = "orbax"


async def open_orbax(
    storage: Storage, step_dir: str, step: int | None = None
) -> ForeignCheckpoint | None:
    """Return the checkpoint of Orbax in a step directory; None if there is none.

    Args:
        storage: The root.
        step_dir: The directory.
        step: Its step, or None for a one-shot checkpoint.

    Raises:
        NotACheckpointError: Orbax began it and never finished it.
        CorruptCheckpointError: The checkpoint is damaged; names the item.
        UnsupportedFormatError: The checkpoint has unsupported arrays.
        StorageError: The store refused.
    """
    where = f"{storage.location}/{step_dir}"
    try:
        sizes = await storage.files(step_dir)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    data = await storage.read(step_dir, BEGUN, MOST_BYTES) if BEGUN in sizes else None
    about = {} if data is None else parse_json(data, f"{where}/{BEGUN}")
    if not isinstance(about, dict):
        raise CorruptCheckpointError(f"{where}/{BEGUN} is damaged: expected an object")
    handlers = about.get("item_handlers")
    items, mark = items_of(sizes, handlers), unfinished(step_dir, sizes)
    if not is_checkpoint(items, sizes):
        if mark is not None:
            raise _never_finished(where, mark)
        return None
    success = await storage.read(step_dir, SUCCESS, MOST_BYTES) if SUCCESS in sizes else None
    if looks_like_ours(success, handlers, sizes):
        # A step of this library without its manifest is not read: damage would not be noticed.
        return None
    if data is None and not await has_own_trees(storage, step_dir, sizes):
        return None
    metrics: JsonValue = None
    try:
        metrics = await json_file(storage, step_dir, METRICS_FILE, sizes)
    except CorruptCheckpointError as error:
        logger.warning("the metrics of a step are left out: %s", error)
    head = head_of(data or identity_of_files(sizes), about, metrics)
    if not isinstance(storage, HasDirectories) and SUCCESS not in sizes and not head.committed_ns:
        mark = mark or f"no {SUCCESS}"
    if mark is not None:
        raise _never_finished(where, mark)
    with located(step=step):
        entries, kept = await _read_items(storage, step_dir, items, sizes)
    manifest = Manifest(
        format=FORMAT,
        version=1,
        step=step,
        attempt=head.attempt,
        unnamed=is_unnamed(items, handlers, sizes),
        items=entries,
        created_ns=head.created_ns,
        committed_ns=head.committed_ns,
        writer={},
        process_count=1,
        files={
            path: FileEntry(len(data), digest(data))
            for path, data in kept.items()
            if not entries[path.partition("/")[0]].data_files
        },
        metrics=None if head.metrics is None else dict(head.metrics),
        metadata=about.get("custom_metadata") or None,
    )
    folders = {name: item.folder for name, item in items.items()}
    return ForeignCheckpoint(manifest, ForeignFiles(storage, step_dir, folders, kept))


async def _read_items(
    storage: Storage, step_dir: str, items: Mapping[str, OrbaxItem], sizes: Sizes
) -> tuple[dict[str, ItemEntry], dict[str, bytes]]:
    """Return the items, and their files in memory.

    Raises:
        CheckpointError: None of the items can be read; the error of the first one.
    """
    entries: dict[str, ItemEntry] = {}
    kept: dict[str, bytes] = {}
    failed: list[CheckpointError] = []
    for name, item in items.items():
        with located(item=name):
            try:
                if item.kind in TREES:
                    reader = OrbaxItemReader(storage, step_dir, item, sizes)
                    entries[name], files = await reader.entry()
                else:
                    entries[name], files = await plain_item(storage, step_dir, item, sizes)
            except (CorruptCheckpointError, UnsupportedFormatError) as error:
                entries[name] = ItemEntry(unreadable_kind(error), data=str(error))
                error.locate(item=name)
                failed.append(error)
            else:
                kept |= {f"{name}/{path}": data for path, data in files.items()}
    if len(failed) == len(items):
        raise failed[0]
    return entries, kept


def _never_finished(where: str, mark: str) -> NotACheckpointError:
    return NotACheckpointError(
        f"{where} is a checkpoint that Orbax never finished ({mark:.120}): take another step"
    )
