"""A checkpoint of Orbax, opened: its items as a manifest of this library, over Orbax's files."""

from __future__ import annotations

import errno
import logging

from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import FileEntry
from ckpt._interop.foreign import ForeignCheckpoint, ForeignFiles
from ckpt._interop.orbax.item import OrbaxItemReader, json_file, parse_json
from ckpt._interop.orbax.layout import (
    MOST_BYTES,
    STEP_FILE,
    SUCCESS,
    Sizes,
    is_checkpoint,
    is_unnamed,
    items_of,
    names_a_path,
    unfinished,
)
from ckpt._interop.orbax.listing import (
    METRICS_FILE,
    OrbaxHead,
    has_own_trees,
    head_of,
    identity_of_files,
    looks_like_ours,
)
from ckpt._redaction import redact
from ckpt.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# What a manifest is of that describes a checkpoint of Orbax.
FORMAT = "orbax"


async def open_orbax(
    storage: Storage, step_dir: str, step: int | None = None
) -> ForeignCheckpoint | None:
    """Return the checkpoint of Orbax in a step directory; None if there is none.

    Args:
        storage: The root.
        step_dir: The directory.
        step: Its step, or None for a checkpoint by itself.

    Raises:
        NotACheckpointError: Orbax began it and never finished it.
        CorruptCheckpointError: It is damaged; names the item.
        UnsupportedFormatError: It has arrays that are not read.
        StorageError: The store refused.
    """
    where = f"{storage.location}/{step_dir}"
    try:
        sizes = await storage.files(step_dir)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    data = await storage.read(step_dir, STEP_FILE, MOST_BYTES) if STEP_FILE in sizes else None
    about = {} if data is None else parse_json(data, f"{where}/{STEP_FILE}")
    if not isinstance(about, dict):
        raise CorruptCheckpointError(f"{where}/{STEP_FILE} is damaged: expected an object")
    handlers = about.get("item_handlers")
    items, left_out = items_of(sizes, handlers)
    if not is_checkpoint(items, sizes):
        if (mark := unfinished(step_dir, sizes)) is not None:
            raise _never_finished(where, mark)
        return None
    success = await storage.read(step_dir, SUCCESS, MOST_BYTES) if SUCCESS in sizes else None
    if looks_like_ours(handlers, sizes) or (success is not None and not names_a_path(success)):
        # This library's, whose manifest is missing: without it damage would not be noticed.
        return None
    if data is None and not await has_own_trees(storage, step_dir, sizes):
        return None
    metrics = await json_file(storage, step_dir, METRICS_FILE, sizes)
    head = head_of(data or identity_of_files(sizes), about, metrics)
    _refuse_unfinished(where, step_dir, sizes, head, storage.keeps_others)
    if left_out:
        logger.warning(
            "%s: %s cannot be read and %s left out: Orbax wrote them with handlers that are not "
            "known here",
            redact(where),
            ", ".join(f"the item {name!r}" for name in left_out),
            "is" if len(left_out) == 1 else "are",
        )
    entries: dict[str, ItemEntry] = {}
    kept: dict[str, bytes] = {}
    listed: dict[str, FileEntry] = {}
    for name, item in items.items():
        with located(item=name, step=step):
            if item.kind == "json":
                data = await storage.read(step_dir, item.folder + item.file, MOST_BYTES) or b""
                entries[name] = ItemEntry("json", nbytes=len(data), data={"model": None})
                kept[f"{name}/metadata"] = data
                listed[f"{name}/metadata"] = FileEntry(len(data), digest(data))
            else:
                reader = OrbaxItemReader(storage, step_dir, item, sizes)
                try:
                    entries[name], inline = await reader.entry()
                except (UnsupportedFormatError, BaseExceptionGroup) as error:
                    reason = _unsupported(error)
                    if reason is None or len(items) == 1:
                        raise
                    logger.warning("%s: the item %r is left out: %s", redact(where), name, reason)
                    continue
                if entries[name].data_files:
                    kept[f"{name}/{entries[name].data_files[0]}"] = inline
    if not entries:
        raise UnsupportedFormatError(f"{where} has no item that can be read here")
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
        files=listed,
        metrics=None if head.metrics is None else dict(head.metrics),
        metadata=about.get("custom_metadata") or None,
    )
    folders = {name: item.folder for name, item in items.items()}
    return ForeignCheckpoint(manifest, ForeignFiles(storage, step_dir, folders, kept))


def _unsupported(error: BaseException) -> BaseException | None:
    """Return what is not read of an item, or None if anything else is wrong with it."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    unknown, others = error.split(UnsupportedFormatError)
    return None if unknown is None or others is not None else unknown.exceptions[0]


def _refuse_unfinished(
    where: str, step_dir: str, sizes: Sizes, head: OrbaxHead, is_store: bool
) -> None:
    mark = unfinished(step_dir, sizes)
    if mark is None and is_store and SUCCESS not in sizes and not head.committed_ns:
        mark = f"no {SUCCESS}"
    if mark is not None:
        raise _never_finished(where, mark)


def _never_finished(where: str, mark: str) -> NotACheckpointError:
    return NotACheckpointError(
        f"{where} is a checkpoint that Orbax never finished ({mark:.120}): take another step"
    )
