"""A checkpoint of Orbax, opened: its items as a manifest of this library, over Orbax's files."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ckpt._engine.restore.step_files import StepFiles
from ckpt._format.digests import digest
from ckpt._format.item_file_names import is_item_name
from ckpt._format.manifest import FileEntry, ItemEntry, Manifest
from ckpt._interop.orbax.item import (
    KEY_FOLDER,
    MOST_BYTES,
    OrbaxItem,
    OrbaxItemReader,
    Sizes,
    json_file,
)
from ckpt._interop.orbax.tree import TREE_FILE
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
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
STEP_FILE = "_CHECKPOINT_METADATA"
SUCCESS = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_METRICS = "metrics"
_DEFAULT = "default"
# Names of items that stand for a state without a name, in either interface.
_UNNAMED_V1 = ("state", "pytree")
_JSON_FILES = ("metadata", "data.json")
_ARRAY_HANDLER = "ArrayCheckpointHandler"


class OrbaxStep(Struct, frozen=True):
    """A checkpoint of Orbax.

    Attributes:
        manifest: What it holds.
        files: Its files, under the names that they have in the manifest.
    """

    manifest: Manifest
    files: StepFiles


class OrbaxFiles(Struct, frozen=True):
    """The files of a checkpoint of Orbax, under the names of a manifest.

    Attributes:
        storage, step_dir: Where it is.
        folders: Of every item its directory there.
        kept: Files that are in memory.
    """

    storage: Storage
    step_dir: str
    folders: Mapping[str, str]
    kept: Mapping[str, bytes]

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; see `Storage.read`."""
        return self.kept.get(path)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`."""
        kept = self.kept.get(path)
        if kept is None:
            item, _, rest = path.partition("/")
            real = self.folders[item] + rest
            await self.storage.read_block(self.step_dir, real, offset, target, then)
            return
        target[:] = kept[offset : offset + len(target)]
        if then is not None:
            await run_in_thread(then)


def names_a_path(success: bytes) -> bool:
    """Tell whether a file `commit_success.txt` is Orbax's, which writes the path of the step.

    This library writes the name of the step alone.
    """
    return b"/" in success


async def open_orbax(storage: Storage, step_dir: str, step: int | None = None) -> OrbaxStep | None:
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
    about = await json_file(storage, step_dir, STEP_FILE, sizes) or {}
    if not isinstance(about, dict):
        raise CorruptCheckpointError(f"{where}/{STEP_FILE} is damaged: it is no object")
    handlers = about.get("item_handlers")
    items, left_out = _items_of(sizes, handlers)
    if not items or (
        STEP_FILE not in sizes and not any(each.kind == "tree" for each in items.values())
    ):
        return None
    success = await storage.read(step_dir, SUCCESS, MOST_BYTES) if SUCCESS in sizes else None
    if success is not None and not names_a_path(success):
        # This library's, whose manifest is missing: without it damage would not be noticed.
        return None
    _refuse_unfinished(where, step_dir, sizes, storage.keeps_others)
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
                except BaseExceptionGroup as group:
                    unknown, others = group.split(UnsupportedFormatError)
                    if unknown is None or others is not None or len(items) == 1:
                        raise
                    reason = unknown.exceptions[0]
                    logger.warning("%s: the item %r is left out: %s", redact(where), name, reason)
                    continue
                if entries[name].data_files:
                    kept[f"{name}/{entries[name].data_files[0]}"] = inline
    if not entries:
        raise UnsupportedFormatError(f"{where} has no item that can be read here")
    metrics = await json_file(storage, step_dir, f"{_METRICS}/{_METRICS}", sizes)
    manifest = Manifest(
        format=FORMAT,
        version=1,
        step=step,
        attempt=_identity(sizes, about),
        unnamed=_is_unnamed(items, handlers, sizes),
        items=entries,
        created_ns=_time(about, "init_timestamp_nsecs"),
        committed_ns=_time(about, "commit_timestamp_nsecs"),
        writer={},
        process_count=1,
        files=listed,
        metrics=_metrics(metrics),
        metadata=about.get("custom_metadata") or None,
    )
    folders = {name: item.folder for name, item in items.items()}
    return OrbaxStep(manifest, OrbaxFiles(storage, step_dir, folders, kept))


def _refuse_unfinished(where: str, step_dir: str, sizes: Sizes, is_store: bool) -> None:
    unfinished = next((path for path in (step_dir, *sizes) if _UNFINISHED in path), None)
    if unfinished is None and is_store and SUCCESS not in sizes:
        unfinished = f"no {SUCCESS}"
    if unfinished is not None:
        raise NotACheckpointError(
            f"{where} is a checkpoint that Orbax never finished ({unfinished:.120}): take another "
            "step"
        )


def _items_of(sizes: Sizes, handlers: object) -> tuple[dict[str, OrbaxItem], list[str]]:
    """Return the items of a checkpoint, and the names of those that are not known here."""
    if TREE_FILE in sizes:
        kind = "array" if str(handlers).endswith(_ARRAY_HANDLER) else "tree"
        return {_DEFAULT: OrbaxItem(kind, "")}, []
    if isinstance(handlers, str):
        file = next((each for each in _JSON_FILES if each in sizes), "")
        return ({_DEFAULT: OrbaxItem("json", "", file)} if file else {}), []
    named = handlers if isinstance(handlers, dict) else {}
    folders = {path.partition("/")[0] for path in sizes if "/" in path}
    found: dict[str, OrbaxItem] = {}
    left_out: list[str] = []
    for name in sorted({*folders, *map(str, named)} - {_METRICS}):
        item = _item_in(name, str(named.get(name, "")), sizes)
        if item is not None and is_item_name(name):
            found[name] = item
        elif item is not None or name in named:
            left_out.append(name)
    return found, left_out


def _item_in(name: str, handler: str, sizes: Sizes) -> OrbaxItem | None:
    """Return the item in a folder of a checkpoint, or None if it is of another kind."""
    if f"{name}/{TREE_FILE}" in sizes:
        return OrbaxItem("array" if handler.endswith(_ARRAY_HANDLER) else "tree", f"{name}/")
    if f"{name}/{KEY_FOLDER}/{TREE_FILE}" in sizes:
        return OrbaxItem("key", f"{name}/{KEY_FOLDER}/")
    for file in _JSON_FILES:
        if f"{name}/{file}" in sizes:
            return OrbaxItem("json", f"{name}/", file)
    return None


def _is_unnamed(items: Mapping[str, OrbaxItem], handlers: object, sizes: Sizes) -> bool:
    """Tell whether a checkpoint is one state that was saved without a name."""
    if len(items) != 1:
        return False
    (name,) = items
    is_v1 = "orbax.checkpoint" in sizes or ".v1." in str(handlers)
    return name == _DEFAULT or (is_v1 and name in _UNNAMED_V1)


def _identity(sizes: Sizes, about: object) -> str:
    """Return a text that changes when another checkpoint takes the place of this one."""
    document = [sorted((path, size or 0) for path, size in sizes.items()), str(about)]
    return digest(json.dumps(document).encode())


def _time(about: Mapping[str, Any], name: str) -> int:
    value = about.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _metrics(found: object) -> dict[str, Any] | None:
    if not isinstance(found, dict):
        return None
    return {
        str(name): value
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
