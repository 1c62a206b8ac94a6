"""The planned tree of a stored item: the plans with which its leaves were saved. Pure.

The plans follow from the manifest, except for the settings of a compression: the manifest has only
its name, and readers need no more. No device is used.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from ckpt._format.array_format import compression_of
from ckpt._format.leaf_table import LeafForm
from ckpt._format.manifest import ItemEntry
from ckpt._format.regions import Region, chunk_grid
from ckpt._format.zarr import zarr_metadata_bytes
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import PlannedTree
from ckpt._plan.leaf_entries import check_leaves
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, MOST_SHOWN, decode_scalar
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec, scalar_array


def planned_tree(entry: ItemEntry) -> PlannedTree:
    """Return the tree of an item with the plans of its leaves.

    Args:
        entry: The entry of the item in the manifest of any process that saved it; may lack chunks.

    Raises:
        CorruptCheckpointError: The entry contradicts itself.
    """
    check_leaves(entry)
    table = entry.leaves
    # Thousands of leaves have one of a few forms, so plans are made by form.
    arrays = {
        number: _array_plan(form, entry)
        for number, form in enumerate(table.forms)
        if form.kind in ARRAY_KINDS
    }
    leaves = []
    values: list[object] = []
    for number, (name, form) in enumerate(zip(table.names, table.form.tolist(), strict=True)):
        value = None
        if form in arrays:
            like = arrays[form]
        elif table.forms[form].kind == CALLABLE:
            like = _plan(LeafSpec(CALLABLE))
            value = CheckpointLeaf(like.spec, _nothing, str(table.values.get(number)))
        else:
            kind = table.forms[form].kind
            value = decode_scalar(table.bare(number))
            array = scalar_array(kind, value) if len(table.values) <= MOST_SHOWN else None
            like = _plan(LeafSpec(kind, None if array is None else array.dtype.name), packed=True)
        spec = like.spec
        if number in table.same_as:
            spec = replace(spec, same_as=table.same_as[number])
        leaves.append(replace(like, name=name, spec=spec))
        values.append(value)
    return PlannedTree(entry.nodes, leaves, values)


def _array_plan(form: LeafForm, entry: ItemEntry) -> LeafPlan:
    """Return the plan of all arrays of a form; it has no name."""
    spec = LeafSpec(
        form.kind,
        form.dtype,
        form.shape,
        None,
        form.committed,
        form.weak_type,
        form.impl,
        placed=None if form.sharding is None else entry.shardings[form.sharding],
    )
    return _plan(spec, form.chunks, packed=form.packed, codec=form.codec)


def _plan(
    spec: LeafSpec, chunk: tuple[int, ...] = (), *, packed: bool = False, codec: str | None = None
) -> LeafPlan:
    if spec.dtype is None:
        return LeafPlan("", spec, (), (), packed=False, metadata=None)
    compression = None if codec is None else compression_of(codec)
    document = zarr_metadata_bytes(spec.shape, chunk, spec.dtype, compression)
    return LeafPlan("", spec, chunk, chunk_grid(spec.shape, chunk), packed, document, compression)


def _nothing(region: Region) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    raise AssertionError("a function has no array")
