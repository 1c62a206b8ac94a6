"""The directory of a checkpoint of Orbax: its marks and its items. Pure.

Properties of steps of Orbax for lists, without opening the steps. A directory counts as a step of
Orbax if Orbax has finished it. On a disk it then has its final name; in a store, it has
`commit_success.txt`, or `_CHECKPOINT_METADATA` has the time of the commit. A step of this library
whose manifest is missing does not count.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from ckpt._format.manifest_head import digest
from ckpt._format.step_files import BEGUN, SUCCESS, UNFINISHED, UNNAMED, is_own_mark
from ckpt._interop.orbax.database import MANIFEST
from ckpt._interop.orbax.tree import TREE_FILE, may_be_packed
from ckpt._interop.orbax.zarr_arrays import V2_FILE, V3_FILE
from ckpt._runtime.futures import for_each
from ckpt.storage._base import HasDirectories, Storage

METRICS = "metrics"
# End of the name of the file that describes a random key of jax or numpy.
KEY_ABOUT = "_metadata/metadata"
# The msgpack file with the tree.
PACKED_FILE = "checkpoint"
# Name of the only leaf of an item that is an array.
ONE_LEAF = "checkpoint"
MOST_BYTES = 256 << 20
# A file that marks steps of this library for the newer interface of Orbax.
MARK_V1 = "orbax.checkpoint"
# Names of items for a state without a name, in the newer interface.
_UNNAMED_V1 = ("state", "pytree")
_TREE_HANDLERS = (".StandardCheckpointHandler", ".PyTreeCheckpointHandler", ".PyTreeHandler")
_ARRAY_HANDLER = "ArrayCheckpointHandler"
# Items of one file: its usual names, and the handlers that may have given it another name.
_PLAIN_FILES = {"json": ("metadata", "data.json"), "proto": ("proto.pbtxt",)}
_PLAIN_HANDLERS = {
    "json": (".JsonCheckpointHandler", ".JsonHandler"),
    "proto": (".ProtoCheckpointHandler", ".ProtoHandler"),
}
# Files that Orbax puts into every checkpoint, or into every item.
_MARKS = frozenset({BEGUN, SUCCESS, MARK_V1})

# Kinds of items that have arrays.
TREES = ("tree", "array", "key")
# Size of every file by path; None if it is not a regular file.
Sizes = Mapping[str, int | None]


class OrbaxItem(Struct, frozen=True):
    """An item and its place.

    Attributes:
        kind: `tree`, `array`, `key`, `json` or `proto`; `files` for an unknown kind.
        folder: Its directory, with `/` at the end; empty for the directory of the checkpoint.
        files: The files of an item without arrays, by path in the checkpoint; for a key, the file
            that describes it.
    """

    kind: str
    folder: str
    files: tuple[str, ...] = ()


def looks_like_ours(success: bytes | None, handlers: object, sizes: Sizes) -> bool:
    """Return True for a step of this library that was copied in part or lost its manifest."""
    if is_own_mark(success):
        return True
    names_a_path = success is not None and b"/" in success
    return not names_a_path and MARK_V1 in sizes and ".v1." not in str(handlers)


def unfinished(step_dir: str, sizes: Sizes) -> str | None:
    """Return a path that shows that a checkpoint was never finished, or None."""
    return next((path for path in (step_dir, *sizes) if UNFINISHED in path), None)


def items_of(sizes: Sizes, handlers: object) -> dict[str, OrbaxItem]:
    """Return the items of a checkpoint.

    Args:
        sizes: Its files.
        handlers: The handlers of its items, if the checkpoint records them.
    """
    if isinstance(handlers, str):
        return {UNNAMED: _item_in("", handlers, sizes)}
    whole = _tree_in("", "", sizes)
    if whole is not None:
        return {UNNAMED: whole}
    folders = {path.partition("/")[0] for path in sizes if "/" in path}
    named = handlers if isinstance(handlers, dict) else None
    found: dict[str, OrbaxItem] = {}
    for name in sorted({*folders, *map(str, named or ())} - {METRICS}):
        item = _item_in(f"{name}/", str((named or {}).get(name, "")), sizes)
        # Old versions recorded no handlers. A state without a name had no other items beside it,
        # and other folders there are files of the program, not of Orbax.
        is_orbax = UNNAMED not in folders if named is None else name in named
        if is_orbax or item.kind != "files":
            found[name] = item
    return found


def _item_in(folder: str, handler: str, sizes: Sizes) -> OrbaxItem:
    found = _tree_in(folder, handler, sizes)
    if found is not None:
        return found
    paths = tuple(
        path
        for path in sizes
        if path.startswith(folder) and path.removeprefix(folder) not in _MARKS
    )
    # A key is an item of two folders; the file in one of them describes the key.
    about = next((path for path in paths if path.endswith(KEY_ABOUT)), "")
    key = f"{about.removesuffix(KEY_ABOUT)}/"
    if about and _tree_in(key, "", sizes) is not None:
        return OrbaxItem("key", key, (about,))
    for kind, names in _PLAIN_FILES.items():
        likely = [folder + name for name in names if folder + name in paths]
        if handler.endswith(_PLAIN_HANDLERS[kind]):
            likely = likely or list(paths)
        elif paths != tuple(likely):
            continue
        if likely:
            return OrbaxItem(kind, folder, (likely[0],))
    return OrbaxItem("files", folder, paths)


def _tree_in(folder: str, handler: str, sizes: Sizes) -> OrbaxItem | None:
    """Return the tree or the array in a folder, or None if there is neither."""
    if folder + TREE_FILE in sizes:
        return OrbaxItem("array" if handler.endswith(_ARRAY_HANDLER) else "tree", folder)
    if folder + PACKED_FILE in sizes:
        return OrbaxItem("tree", folder)
    # For years, arrays had no description of their own. In a finished database, the files of single
    # processes are gone.
    if _is_array(folder, sizes) or (
        folder + MANIFEST in sizes and f"{folder}ocdbt.process_0/{MANIFEST}" not in sizes
    ):
        return OrbaxItem("array", folder)
    # The description of the tree is lost. The item is damaged, not of an unknown kind.
    return OrbaxItem("tree", folder) if handler.endswith(_TREE_HANDLERS) else None


def _is_array(folder: str, sizes: Sizes) -> bool:
    return any(f"{folder}{ONE_LEAF}/{file}" in sizes for file in (V2_FILE, V3_FILE))


def is_checkpoint(items: Mapping[str, OrbaxItem], sizes: Sizes) -> bool:
    """Return True if a directory with these items is a checkpoint of Orbax, finished or not.

    A directory that contains checkpoints, such as a root of named steps, is not one.
    """
    if BEGUN in sizes:
        return bool(items)
    folders = [item.folder for item in items.values() if item.folder]
    if any(folder + BEGUN in sizes for folder in folders):
        return False
    return any(it.kind == "tree" or _is_array(it.folder, sizes) for it in items.values())


def packed_files(items: Mapping[str, OrbaxItem], sizes: Sizes) -> list[str]:
    """Return the msgpack files of trees that have no other description."""
    folders = [item.folder for item in items.values() if item.kind == "tree"]
    return [folder + PACKED_FILE for folder in folders if folder + TREE_FILE not in sizes]


def is_unnamed(items: Mapping[str, OrbaxItem], handlers: object, sizes: Sizes) -> bool:
    """Return True if a checkpoint is one state that was saved without a name."""
    if len(items) != 1:
        return False
    is_v1 = MARK_V1 in sizes or ".v1." in str(handlers)
    return UNNAMED in items or (is_v1 and not items.keys().isdisjoint(_UNNAMED_V1))


_MOST_LISTED = 16
# Usual files are shorter; the rest of a longer one is read in a second request.
_HEAD_BYTES = 1 << 16
METRICS_FILE = f"{METRICS}/{METRICS}"


class OrbaxHead(Struct, frozen=True):
    """A step of Orbax or Flax, as an entry in a list of steps.

    Attributes:
        attempt: A text that changes when another checkpoint takes the place of this one.
        created_ns: Time at which its save began, in Unix nanoseconds; 0 if unknown.
        committed_ns: Time of its commit, in Unix nanoseconds; 0 if unknown.
        metrics: Its metrics, as they were passed.
    """

    attempt: str
    created_ns: int
    committed_ns: int
    metrics: Mapping[str, Any] | None
    library: str = "orbax"


class _About(Struct):
    """`_CHECKPOINT_METADATA`: its bytes and its content."""

    data: bytes
    document: Mapping[str, Any]


async def stamps_of(storage: Storage, names: Sequence[str]) -> list[Hashable | None]:
    """Return for each step directory a value that changes when Orbax finishes another step."""
    if isinstance(storage, HasDirectories):
        # Orbax gives a directory its final name when everything is in it.
        return [*await storage.stamps(names, ".")]
    success = await storage.stamps(names, SUCCESS)
    about = await storage.stamps(names, BEGUN)
    return [pair if any(pair) else None for pair in zip(success, about, strict=True)]


async def heads_of(storage: Storage, names: Sequence[str]) -> list[OrbaxHead | None]:
    """Return the head of each step directory; None if Orbax has not finished it."""
    read = partial(storage.read_each, names, limit=MOST_BYTES, head=_HEAD_BYTES)
    abouts = await read(BEGUN, parse=_parse_about)
    successes = await read(SUCCESS, parse=lambda data, _: data)
    metrics = await read(METRICS_FILE, parse=lambda data, _: _parse(data))
    heads: dict[str, OrbaxHead | None] = {}
    unclear: dict[str, tuple[bytes | None, _About | None, Any]] = {}
    for name, about, success, values in zip(names, abouts, successes, metrics, strict=True):
        if is_own_mark(success) or (
            not isinstance(storage, HasDirectories) and success is None and not _is_committed(about)
        ):
            heads[name] = None
        elif about is not None and success is not None and b"/" in success:
            heads[name] = head_of(about.data, about.document, values)
        else:
            # Orbax wrote such steps years ago. They are rare, and listing all their files decides.
            unclear[name] = success, about, values

    async def look(name: str) -> None:
        success, about, values = unclear[name]
        sizes = await storage.files(name)
        head = _head_of_files(name, sizes, success, about, values)
        if head is not None and about is None and not await has_own_trees(storage, name, sizes):
            head = None
        heads[name] = head

    await for_each(look, unclear, _MOST_LISTED)
    return [heads[name] for name in names]


async def begun_ns(storage: Storage, step_dir: str) -> int:
    """Return the time at which Orbax began a step, in Unix nanoseconds; 0 if unknown."""
    data = await storage.read(step_dir, BEGUN, MOST_BYTES)
    about = None if data is None else _parse_about(data, len(data))
    return 0 if about is None else _time(about.document, "init_timestamp_nsecs")


def _head_of_files(
    name: str, sizes: Sizes, success: bytes | None, about: _About | None, values: Any
) -> OrbaxHead | None:
    document = {} if about is None else about.document
    handlers = document.get("item_handlers")
    items = items_of(sizes, handlers)
    if not is_checkpoint(items, sizes) or unfinished(name, sizes) is not None:
        return None
    if looks_like_ours(success, handlers, sizes) or (about is None and BEGUN in sizes):
        return None
    return head_of(identity_of_files(sizes) if about is None else about.data, document, values)


async def has_own_trees(storage: Storage, name: str, sizes: Sizes) -> bool:
    """Return True if all files named like Orbax's msgpack files begin like them."""
    items = items_of(sizes, None)
    for path in packed_files(items, sizes):
        head = bytearray(1)
        if not sizes[path]:
            return False
        await storage.read_block(name, path, 0, memoryview(head))
        if not may_be_packed(bytes(head)):
            return False
    return True


def identity_of_files(sizes: Sizes) -> bytes:
    """Return bytes that identify a checkpoint without `_CHECKPOINT_METADATA`."""
    return json.dumps(sorted((path, size or 0) for path, size in sizes.items())).encode()


def head_of(identity: bytes, document: Mapping[str, Any], metrics: Any) -> OrbaxHead:
    """Return the head of a step.

    Args:
        identity: Bytes that identify the step.
        document: Content of `_CHECKPOINT_METADATA`.
        metrics: The content of the item of metrics, or None.
    """
    found: dict[str, Any] = {}
    for some in (document.get("metrics"), metrics):
        found |= some if isinstance(some, dict) else {}
    return OrbaxHead(
        digest(identity),
        _time(document, "init_timestamp_nsecs"),
        _time(document, "commit_timestamp_nsecs"),
        found if found or isinstance(metrics, dict) else None,
    )


def _is_committed(about: _About | None) -> bool:
    return about is not None and _time(about.document, "commit_timestamp_nsecs") > 0


def _parse_about(data: bytes, size: int) -> _About | None:
    document = _parse(data) if len(data) == size else None
    return _About(data, document) if isinstance(document, dict) else None


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _time(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
