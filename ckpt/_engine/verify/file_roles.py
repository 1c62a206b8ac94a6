"""The role of each file of an item, from its name and the manifest. Pure."""

from __future__ import annotations

from ckpt._format.manifest import ItemEntry

# The files of an item that only Orbax reads; see docs/reference/format.md.
_VIEW = frozenset({"_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0"})
_MARK = "commit_success.txt"
_DATABASE = "manifest.ocdbt"


def role_of(item: ItemEntry, path: str) -> str:
    """Return the role of the file `path` of an item: `data`, `database`, `view` or `handler`."""
    if path in item.data_files:
        return "data"
    if path == _DATABASE or (item.leaves and path.startswith("d/")):
        return "database"
    is_tree = bool(item.nodes or item.leaves)
    # In an item that is not a tree such a file is for Orbax, unless the handler reads it. Steps in
    # object stores have the mark in every item.
    described = path == _MARK or (path == "metadata" and item.handler != "json")
    return "view" if (is_tree and path in _VIEW) or described else "handler"
