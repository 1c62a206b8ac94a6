"""Consistency: contradictions in those parts of a manifest that a restore relies on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.verify.report import Problem
from ckpt._format.chunk_locations import misplaced_leaves
from ckpt._format.manifest import ItemEntry, Manifest, Node
from ckpt._format.manifest_head import FILE_NAME, OWN_DISKS, VIRTUAL, FileEntry
from ckpt._format.step_files.source_files import SourceFile
from ckpt._plan.leaf_entries import check_leaves
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.unflatten import unflatten
from ckpt.errors import CorruptCheckpointError

_DATABASE = "manifest.ocdbt"
# The limit of Linux for a whole path.
_LONGEST_PATH = 4096
_CUSTOM = frozenset({"custom", "namedtuple"})


class Contradictions(Struct, frozen=True):
    """The contradictions in a manifest.

    Attributes:
        problems: All contradictions, as problems of the manifest.
        leaves: The leaves whose chunk locations cannot be trusted, by item; an item is left out if
            none of its leaves can be trusted.
        unsafe: Paths of listed files that must not be followed.
    """

    problems: tuple[Problem, ...]
    leaves: Mapping[str, frozenset[int]]
    unsafe: frozenset[str]


def contradictions(manifest: Manifest) -> Contradictions:
    """Return the contradictions in a manifest; no code of a class named in it runs."""
    problems: list[Problem] = []
    leaves: dict[str, frozenset[int]] = {}
    unsafe = frozenset(path for path in manifest.files if not _is_below(path))
    problems.extend(
        Problem(FILE_NAME, None, None, f"it lists {path!r:.200}, which is not a file of a step")
        for path in sorted(unsafe)
    )
    listed: dict[str, FileEntry | SourceFile] = {**manifest.files, **manifest.sources}
    for name, item in manifest.items.items():
        try:
            check_leaves(item)
            wrong = misplaced_leaves(name, item, listed)
            names = unboxed_names(item.nodes, item.leaves.names)
        except CorruptCheckpointError as error:
            problems.append(Problem(FILE_NAME, name, error.leaf, error.message))
            continue
        leaves[name] = frozenset(wrong)
        problems.extend(
            Problem(FILE_NAME, name, names[number], message) for number, message in wrong.items()
        )
        problems.extend(_problems_of_item(name, item, manifest))
    return Contradictions(tuple(problems), leaves, unsafe)


def _problems_of_item(name: str, item: ItemEntry, manifest: Manifest) -> list[Problem]:
    found: list[Problem] = []
    try:
        if item.nodes or item.leaves:
            unflatten([_bare(node) for node in item.nodes], range(len(item.leaves)))
    except CorruptCheckpointError as error:
        found.append(Problem(FILE_NAME, name, error.leaf, error.message))
    if (
        any(leaf.digests for leaf in item.leaves)
        and not {OWN_DISKS, VIRTUAL} & set(manifest.requires)
        and f"{name}/{_DATABASE}" not in manifest.files
    ):
        message = f"it does not list {name}/{_DATABASE}, the database of the item's arrays"
        found.append(Problem(FILE_NAME, name, None, message))
    return found


def _bare(node: Node) -> Node:
    """Return a node without its class, so that no code of the class runs."""
    return replace(node, class_name="?") if node.kind in _CUSTOM else node


def _is_below(path: str) -> bool:
    """Return True if a path can belong to a file of the step, other than the manifest."""
    if len(path) > _LONGEST_PATH:
        return False
    names = path.split("/")
    return path != FILE_NAME and "\0" not in path and not {"", ".", ".."} & set(names)
