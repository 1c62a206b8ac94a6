"""The directory of a checkpoint of Orbax: its marks and its items. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._interop.orbax.database import MANIFEST
from ckpt._interop.orbax.tree import TREE_FILE
from ckpt._interop.orbax.zarr_arrays import V2_FILE, V3_FILE

STEP_FILE = "_CHECKPOINT_METADATA"
SUCCESS = "commit_success.txt"
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
_OWN_MARK = b"Checkpoint commit was successful to "
_UNFINISHED = ".orbax-checkpoint-tmp"
_DEFAULT = "default"
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
_MARKS = frozenset({STEP_FILE, SUCCESS, MARK_V1})

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


def is_own_mark(success: bytes | None) -> bool:
    """Return True if this library wrote a file `commit_success.txt`, with the name of a step.

    Orbax writes the path of the step. Any other content is from neither.
    """
    return success is not None and success.startswith(_OWN_MARK) and b"/" not in success


def looks_like_ours(success: bytes | None, handlers: object, sizes: Sizes) -> bool:
    """Return True for a step of this library that was copied in part or lost its manifest."""
    if is_own_mark(success):
        return True
    names_a_path = success is not None and b"/" in success
    return not names_a_path and MARK_V1 in sizes and ".v1." not in str(handlers)


def unfinished(step_dir: str, sizes: Sizes) -> str | None:
    """Return a path that shows that a checkpoint was never finished, or None."""
    return next((path for path in (step_dir, *sizes) if _UNFINISHED in path), None)


def items_of(sizes: Sizes, handlers: object) -> dict[str, OrbaxItem]:
    """Return the items of a checkpoint.

    Args:
        sizes: Its files.
        handlers: The handlers of its items, if the checkpoint records them.
    """
    if isinstance(handlers, str):
        return {_DEFAULT: _item_in("", handlers, sizes)}
    whole = _tree_in("", "", sizes)
    if whole is not None:
        return {_DEFAULT: whole}
    folders = {path.partition("/")[0] for path in sizes if "/" in path}
    named = handlers if isinstance(handlers, dict) else None
    found: dict[str, OrbaxItem] = {}
    for name in sorted({*folders, *map(str, named or ())} - {METRICS}):
        item = _item_in(f"{name}/", str((named or {}).get(name, "")), sizes)
        # Old versions recorded no handlers. A state without a name had no other items beside it,
        # and other folders there are files of the program, not of Orbax.
        is_orbax = _DEFAULT not in folders if named is None else name in named
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
    if STEP_FILE in sizes:
        return bool(items)
    folders = [item.folder for item in items.values() if item.folder]
    if any(folder + STEP_FILE in sizes for folder in folders):
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
    (name,) = items
    is_v1 = MARK_V1 in sizes or ".v1." in str(handlers)
    return name == _DEFAULT or (is_v1 and name in _UNNAMED_V1)
