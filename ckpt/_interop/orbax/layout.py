"""A checkpoint of Orbax as a directory: its marks, and which items it holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._interop.orbax.database import MANIFEST
from ckpt._interop.orbax.tree import TREE_FILE
from ckpt._interop.orbax.zarr_arrays import V2_FILE, V3_FILE

STEP_FILE = "_CHECKPOINT_METADATA"
SUCCESS = "commit_success.txt"
METRICS = "metrics"
KEY_FOLDER = "jax_random_key"
# The tree in a file of msgpack.
PACKED_FILE = "checkpoint"
# How Orbax calls the one leaf of an item that is an array.
ONE_LEAF = "checkpoint"
MOST_BYTES = 256 << 20
# A file with which this library marks its steps for the newer of Orbax's interfaces.
MARK_V1 = "orbax.checkpoint"
_UNFINISHED = ".orbax-checkpoint-tmp"
_DEFAULT = "default"
# Names of items that stand for a state without a name, in the newer interface.
_UNNAMED_V1 = ("state", "pytree")
_JSON_FILES = ("metadata", "data.json")
_ARRAY_HANDLER = "ArrayCheckpointHandler"

# The size of every file by path; None for what is not a regular file.
Sizes = Mapping[str, int | None]


class OrbaxItem(Struct, frozen=True):
    """An item, and where it is.

    Attributes:
        kind: `tree`, `array`, `key` or `json`.
        folder: Its directory, with `/` at the end; empty for that of the checkpoint.
        file: Of an item of JSON, its file.
    """

    kind: str
    folder: str
    file: str = ""


def names_a_path(success: bytes) -> bool:
    """Tell whether a file `commit_success.txt` is Orbax's, which writes the path of the step.

    This library writes the name of the step alone.
    """
    return b"/" in success


def unfinished(step_dir: str, sizes: Sizes) -> str | None:
    """Return what shows that a checkpoint was never finished, or None."""
    return next((path for path in (step_dir, *sizes) if _UNFINISHED in path), None)


def items_of(sizes: Sizes, handlers: object) -> tuple[dict[str, OrbaxItem], list[str]]:
    """Return the items of a checkpoint, and the names of those that are not known here.

    Args:
        sizes: Its files.
        handlers: What it says of the handlers of its items, if it does.
    """
    whole = _item_at("", str(handlers), sizes)
    if whole is None and isinstance(handlers, str):
        whole = _json_item("", sizes)
    if whole is not None or isinstance(handlers, str):
        return ({} if whole is None else {_DEFAULT: whole}), []
    named = handlers if isinstance(handlers, dict) else {}
    folders = {path.partition("/")[0] for path in sizes if "/" in path}
    found: dict[str, OrbaxItem] = {}
    left_out: list[str] = []
    for name in sorted({*folders, *map(str, named)} - {METRICS}):
        item = _item_in(name, str(named.get(name, "")), sizes)
        if item is not None and name in folders:
            found[name] = item
        elif item is not None or name in named:
            left_out.append(name)
    return found, left_out


def _item_in(name: str, handler: str, sizes: Sizes) -> OrbaxItem | None:
    """Return the item in a folder of a checkpoint, or None if it is of another kind."""
    folder = f"{name}/"
    found = _item_at(folder, handler, sizes)
    if found is None and _item_at(f"{folder}{KEY_FOLDER}/", "", sizes) is not None:
        return OrbaxItem("key", f"{folder}{KEY_FOLDER}/")
    return found or _json_item(folder, sizes)


def _item_at(folder: str, handler: str, sizes: Sizes) -> OrbaxItem | None:
    """Return the tree or the array in a folder, or None if there is neither."""
    if folder + TREE_FILE in sizes:
        return OrbaxItem("array" if handler.endswith(_ARRAY_HANDLER) else "tree", folder)
    if folder + PACKED_FILE in sizes:
        return OrbaxItem("tree", folder)
    # Arrays had no description of their own for years. In a database, none of a process is left.
    if _is_array(folder, sizes) or (
        folder + MANIFEST in sizes and f"{folder}ocdbt.process_0/{MANIFEST}" not in sizes
    ):
        return OrbaxItem("array", folder)
    return None


def _is_array(folder: str, sizes: Sizes) -> bool:
    return any(f"{folder}{ONE_LEAF}/{file}" in sizes for file in (V2_FILE, V3_FILE))


def _json_item(folder: str, sizes: Sizes) -> OrbaxItem | None:
    file = next((each for each in _JSON_FILES if folder + each in sizes), None)
    return None if file is None else OrbaxItem("json", folder, file)


def is_checkpoint(items: Mapping[str, OrbaxItem], sizes: Sizes) -> bool:
    """Tell whether a directory with these items is a checkpoint of Orbax, finished or not.

    One that has checkpoints in it, such as a root of steps with names, is none.
    """
    if STEP_FILE in sizes:
        return bool(items)
    folders = [item.folder for item in items.values() if item.folder]
    if any(folder + STEP_FILE in sizes for folder in folders):
        return False
    return any(it.kind == "tree" or _is_array(it.folder, sizes) for it in items.values())


def packed_files(items: Mapping[str, OrbaxItem], sizes: Sizes) -> list[str]:
    """Return the files of msgpack that are all there is of the trees of some items."""
    folders = [item.folder for item in items.values() if item.kind == "tree"]
    return [folder + PACKED_FILE for folder in folders if folder + TREE_FILE not in sizes]


def is_unnamed(items: Mapping[str, OrbaxItem], handlers: object, sizes: Sizes) -> bool:
    """Tell whether a checkpoint is one state that was saved without a name."""
    if len(items) != 1:
        return False
    (name,) = items
    is_v1 = MARK_V1 in sizes or ".v1." in str(handlers)
    return name == _DEFAULT or (is_v1 and name in _UNNAMED_V1)
