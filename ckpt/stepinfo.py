"""What `metadata()` returns: everything about a step but its array bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt.commit import StepInfo
from ckpt.layout.leaves import ARRAY_KINDS, DTYPES, decode_scalar
from ckpt.layout.records import check_leaves
from ckpt.layout.structure import rebuild
from ckpt.manifest import ItemEntry, Manifest, ShardingEntry

__all__ = ["LeafInfo", "StepMetadata", "describe_step", "step_info"]


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """An array leaf as it is stored. Can stand as a leaf of `like=`.

    Attributes:
        name: Its leaf path, as messages write it.
        kind: `jax`, `numpy` or `numpy_scalar`.
        shape: Global shape.
        dtype: Dtype.
        chunks: Shape of one stored chunk.
        saved_sharding: How a jax array lay on the devices when it was saved.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    saved_sharding: ShardingEntry | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Logical bytes of the whole array."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step without its arrays.

    Attributes:
        info: Step, time stamps, sizes, metrics and user metadata.
        items: The tree of every item by name: `LeafInfo` for arrays, the values themselves for
            Python scalars.
        unnamed: Whether the step holds one object saved without a name.
        writer: Versions of the libraries that wrote it.
    """

    info: StepInfo
    items: Mapping[str, Any]
    unnamed: bool
    writer: Mapping[str, str]

    @property
    def tree(self) -> Any:
        """The tree of the one unnamed object, or the dict of all items by name."""
        return next(iter(self.items.values())) if self.unnamed else dict(self.items)


def step_info(manifest: Manifest, path: str) -> StepInfo:
    """Return the summary of a committed step that lies at `path`."""
    metrics = manifest.metrics
    return StepInfo(
        step=manifest.step,
        path=path,
        nbytes=sum(item.nbytes for item in manifest.items.values()),
        items=tuple(manifest.items),
        metrics=None if metrics is None else {k: float(v) for k, v in metrics.items()},
        metadata=manifest.metadata,
        created=StepInfo.time_of(manifest.created_ns),
        committed=StepInfo.time_of(manifest.committed_ns),
    )


def describe_step(manifest: Manifest, path: str) -> StepMetadata:
    """Return the metadata of a committed step; needs no devices.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself.
    """
    return StepMetadata(
        info=step_info(manifest, path),
        items=MappingProxyType({name: _item_tree(e) for name, e in manifest.items.items()}),
        unnamed=manifest.unnamed,
        writer=MappingProxyType(manifest.writer),
    )


def _item_tree(item: ItemEntry) -> Any:
    check_leaves(item)
    leaves = [
        LeafInfo(
            leaf.name,
            leaf.kind,
            tuple(leaf.shape),
            DTYPES[leaf.dtype or ""],
            tuple(leaf.chunks),
            None if leaf.sharding is None else item.shardings[leaf.sharding],
        )
        if leaf.kind in ARRAY_KINDS
        else decode_scalar(leaf)
        for leaf in item.leaves
    ]
    return rebuild(item.nodes, leaves)[0]
