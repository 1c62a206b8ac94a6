"""`ckpt tree`: the leaves of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import anyio
import click
from msgspec import Struct

from ckpt._inspection.leaf_records import LeafRecord, leaf_records
from ckpt._inspection.locations import Checkpoint, checkpoint_at
from ckpt._tree.leaf_names import compile_pattern, near_miss
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import count_text, printable, show, table
from ckpt.errors import InvalidArgumentError


class _WholeItem(Struct, frozen=True):
    """An item that is not a tree, such as JSON of Orbax, or a tree without leaves."""

    name: str
    handler: str
    nbytes: int


class _Tree(Struct, frozen=True):
    """The leaves of a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        step: Its number, or None.
        leaves: The requested leaves.
        total: Number of all leaves.
        whole_items: Items without leaves; empty if only some leaves were requested.
    """

    path: str
    step: int | None
    leaves: list[LeafRecord]
    total: int
    whole_items: list[_WholeItem]


class _Figures(Struct, frozen=True):
    """A summary of the leaves of a checkpoint in one line."""

    path: str
    step: int | None
    leaves: int
    arrays: int
    nbytes: int
    stored_bytes: int
    dtypes: dict[str, int]


@click.command()
@options.path
@click.argument("pattern", required=False)
@click.option("--summary", is_flag=True, help="Print one line: numbers of leaves, bytes, dtypes.")
@options.as_json
def tree(path: str, pattern: str | None, summary: bool, as_json: bool) -> None:
    """List the leaves of a checkpoint: shapes, dtypes, shardings and bytes.

    With a PATTERN, such as 'params.**' or '*.kernel', only leaves whose path fits.
    """
    found = _filtered(anyio.run(checkpoint_at, path), pattern)
    if summary:
        show(_figures(found), _figures_view, as_json=as_json)
    else:
        show(found, _view, as_json=as_json)


def _filtered(checkpoint: Checkpoint, pattern: str | None) -> _Tree:
    manifest = checkpoint.opened.manifest
    leaves = list(leaf_records(manifest))
    chosen = leaves
    if pattern is not None:
        wanted = compile_pattern(pattern)
        chosen = [leaf for leaf in leaves if wanted.covers(leaf.path)]
        if not chosen:
            hint = near_miss(pattern, (leaf.path for leaf in leaves))
            raise InvalidArgumentError(
                f"{checkpoint.location} has no leaf that fits {pattern!r}{hint}"
            )
    whole = [
        _WholeItem(name, item.handler, item.nbytes)
        for name, item in manifest.items.items()
        if pattern is None and not len(item.leaves)
    ]
    return _Tree(checkpoint.location, manifest.step, chosen, len(leaves), whole)


def _view(found: _Tree) -> Iterator[str]:
    rows = [_cells(leaf) for leaf in found.leaves]
    rows += [_item_cells(each) for each in found.whole_items]
    yield from table(("leaf", "type", "size", "sharding"), rows, right=("size",))
    which = count_text(found.total, "leaf", "leaves")
    if len(found.leaves) != found.total:
        which = f"{len(found.leaves):,} of {which}"
    nbytes = sum(leaf.nbytes for leaf in found.leaves)
    nbytes += sum(item.nbytes for item in found.whole_items)
    yield click.style(f"{printable(found.path)}: {which}, {format_bytes(nbytes)}", dim=True)


def _cells(leaf: LeafRecord) -> tuple[str, str, str, str]:
    if not leaf.is_array:
        return leaf.name, leaf.kind, "", "" if leaf.value is None else f"= {leaf.value}"
    place = f"the array at {leaf.same_as}" if leaf.same_as else leaf.sharding
    size = format_bytes(leaf.nbytes)
    if leaf.codec is not None:
        place = "; ".join(filter(None, [place, f"{leaf.codec}: {format_bytes(leaf.stored_bytes)}"]))
    return leaf.name, leaf.type_text, size, place


def _item_cells(item: _WholeItem) -> tuple[str, str, str, str]:
    if item.handler == "pytree" and not item.nbytes:
        return item.name, "a tree without leaves", "", ""
    return item.name, f"an item ({item.handler})", format_bytes(item.nbytes), ""


def _figures(found: _Tree) -> _Figures:
    arrays = [leaf for leaf in found.leaves if leaf.is_array]
    dtypes: Counter[str] = Counter()
    for leaf in arrays:
        dtypes[leaf.dtype or ""] += leaf.nbytes
    return _Figures(
        found.path,
        found.step,
        len(found.leaves),
        len(arrays),
        sum(leaf.nbytes for leaf in arrays),
        sum(leaf.stored_bytes for leaf in arrays),
        dict(dtypes.most_common()),
    )


def _figures_view(found: _Figures) -> Iterator[str]:
    dtypes = ", ".join(f"{name} {format_bytes(size)}" for name, size in found.dtypes.items())
    parts = [
        count_text(found.leaves, "leaf", "leaves"),
        count_text(found.arrays, "array"),
        format_bytes(found.nbytes),
        *([dtypes] if dtypes else []),
    ]
    yield f"{printable(found.path)}: {', '.join(parts)}"
