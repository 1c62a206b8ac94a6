"""A check of the leaf entries of a manifest before they are used. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt._format.array_format import CODECS, parse_dtype
from ckpt._format.leaf_table import Integers, LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry
from ckpt._format.regions import chunk_grid
from ckpt._tree.leaf_kinds import (
    ARRAY_KINDS,
    CALLABLE,
    SCALAR_KINDS,
    UNREAD,
    UNREADABLE,
    decode_scalar,
)
from ckpt._tree.leaf_names import MAX_DEPTH
from ckpt.errors import CorruptCheckpointError, located

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

# numpy's limit of dimensions; zarr and jax have no lower limit.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 48
_MAX_OFFSET = 1 << 62
# Most bytes of an encoded chunk beyond twice its decoded size.
_MOST_GROWTH = 1 << 16


def check_leaves(item: ItemEntry) -> None:
    """Check that the leaf entries and the tree of an item can be true, before they are used.

    Raises:
        CorruptCheckpointError: An entry contradicts itself.
    """
    table = item.leaves
    _check_depth(item)
    if len(set(table.names)) < len(table):
        twice = next(name for name, count in Counter(table.names).items() if count > 1)
        raise CorruptCheckpointError("two leaves are stored under one name", leaf=twice)
    for number, form in enumerate(table.forms):
        reason = _reason_against(form, len(item.shardings))
        if reason is not None:
            raise CorruptCheckpointError(reason, leaf=_first_of(table, table.form == number))
    codecs = np.array([form.codec is not None for form in table.forms] or [False])
    chunks = np.array([_most_bytes(form) for form in table.forms] or [0], np.float64)
    owners = np.repeat(np.arange(len(table)), np.diff(table.firsts))
    _check_chunks(item, codecs[table.form][owners], chunks[table.form][owners], owners)
    if table.extensions:
        from ckpt.extensions._readers import readers

        for each in readers(table.extensions).values():
            each.check(table)
    are_scalars = np.array([form.kind in SCALAR_KINDS for form in table.forms] or [False])
    for number in np.flatnonzero(are_scalars[table.form]).tolist():
        decode_scalar(table.bare(number))


def unread_items(items: Mapping[str, ItemEntry]) -> dict[str, str]:
    """Return the items of another library that cannot be read here, and the reasons."""
    return {name: str(item.data) for name, item in items.items() if item.handler == UNREAD}


def check_readable(items: Mapping[str, ItemEntry]) -> None:
    """Check that everything of some items can be read, before they are written anew.

    Raises:
        CheckpointError: A leaf, or an item, cannot be read; gives the reason.
    """
    for name, item in items.items():
        with located(item=name):
            if item.handler in UNREADABLE:
                raise UNREADABLE[item.handler](str(item.data))
            forms = item.leaves.forms
            for number, form in enumerate(item.leaves.form.tolist()):
                if forms[form].kind in UNREADABLE:
                    decode_scalar(item.leaves.bare(number))


def _check_depth(item: ItemEntry) -> None:
    """Refuse a tree that is deeper than any that can be saved, and than any real model."""
    depths = [0] * len(item.nodes)
    for number, node in enumerate(item.nodes):
        for child in node.children:
            # Children come after their parents; other faults in them are found later.
            if number < -child < len(depths):
                depths[-child] = depths[number] + 1
    name = max(item.leaves.names, key=len, default="")
    if max(depths, default=0) > MAX_DEPTH or name.count(".") >= MAX_DEPTH:
        raise CorruptCheckpointError(f"the stored tree is deeper than {MAX_DEPTH} levels")


def _check_chunks(item: ItemEntry, encoded: Flags, most: Floats, owners: Integers) -> None:
    """Check the places of all chunks.

    Args:
        item: The item.
        encoded: True for every chunk that is encoded.
        most: Most bytes of each chunk if it is encoded.
        owners: Number of the leaf of each chunk.
    """
    table = item.leaves
    offsets, files, lengths = table.offsets, table.files, table.lengths
    present = offsets >= 0
    right = (offsets >= -1) & (offsets <= _MAX_OFFSET)
    if len(files):
        right &= files < len(item.data_files)
    else:
        right &= ~present | bool(item.data_files)
    if len(lengths):
        right &= np.where(encoded & present, (lengths > 0) & (lengths <= most), lengths == 0)
    else:
        right &= ~(encoded & present)
    if not right.all():
        leaf = table[int(owners[int(np.argmin(right))])]
        raise CorruptCheckpointError(
            f"{len(leaf.digests)} chunks at {list(leaf.offsets[:8])} in the files "
            f"{list(leaf.files[:8])} of {len(item.data_files)}, codec {leaf.codec!r:.40} and "
            f"lengths {list(leaf.lengths[:8])} do not fit each other",
            leaf=leaf.name,
        )


def _first_of(table: LeafTable, chosen: Flags) -> str | None:
    found = np.flatnonzero(chosen)
    return table.names[int(found[0])] if len(found) else None


def _reason_against(form: LeafForm, shardings: int) -> str | None:
    """Return the reason why no leaf can have a form, or None."""
    if form.kind in SCALAR_KINDS or form.kind == CALLABLE or form.kind in UNREADABLE:
        return f"a leaf of the kind {form.kind} has chunks" if form.count else None
    if form.kind not in ARRAY_KINDS:
        return f"a leaf of the unknown kind {form.kind!r:.60}"
    is_key = form.kind == "key"
    if is_key != (form.impl is not None) or (is_key and not form.shape):
        return "a PRNG key needs an implementation and data of at least one dimension"
    if not _is_possible(form, parse_dtype(form.dtype).itemsize):
        return (
            f"shape {list(form.shape[:8])}, chunks {list(form.chunks[:8])} and {form.count} chunks "
            "do not fit each other"
        )
    if form.sharding is not None and not 0 <= form.sharding < shardings:
        return f"it is of sharding {form.sharding!s:.20}, and there are {shardings}"
    if form.codec is not None and (form.codec not in CODECS or form.packed):
        return f"codec {form.codec!r:.40} is unknown, or has no place for an array of one chunk"
    return None


def _is_possible(form: LeafForm, itemsize: int) -> bool:
    """Return True if shape, chunks and their number agree, and such an array can exist."""
    shape, chunk, count = form.shape, form.chunks, form.count
    return (
        len(shape) == len(chunk) <= _MAX_RANK
        and all(n <= _MAX_LENGTH for n in shape)
        and all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape, strict=True))
        and math.prod(max(n, 1) for n in shape) * itemsize <= _MAX_OFFSET
        and math.prod(chunk_grid(shape, chunk)) == count
        and (not form.packed or count <= 1)
    )


def _most_bytes(form: LeafForm) -> float:
    """Return the most bytes of an encoded chunk; this bounds a read of one chunk."""
    # The chunks of other forms were not checked, and may have any numbers.
    if form.codec is None or form.kind not in ARRAY_KINDS:
        return 0
    return float(_MOST_GROWTH + 2 * math.prod(form.chunks) * parse_dtype(form.dtype).itemsize)
