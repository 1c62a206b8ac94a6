"""Tensors: the arrays of a checkpoint by name, for formats that hold only arrays."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._format.dtypes import DTYPES
from ckpt._format.regions import Region, chunk_grid, chunk_region
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.item_leaves import branch_of
from ckpt._tree.leaf_kinds import CALLABLE
from ckpt._tree.leaf_names import unescape_key
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt._tree.suggestions import suggestion
from ckpt.errors import WHOLE_ITEM, InvalidArgumentError, UnsupportedLeafError

logger = logging.getLogger("ckpt")

# Bytes that are read and written at once, unless the chunks of the checkpoint are larger.
PIECE_BYTES = 8 << 20
_SHOWN = 20


class ExportedArray(Struct, frozen=True, eq=False):
    """An array to export.

    Attributes:
        path: Its leaf path, as messages write it.
        keys: The keys of the path.
        leaf: The array.
    """

    path: str
    keys: tuple[str, ...]
    leaf: CheckpointLeaf

    @property
    def spec(self) -> LeafSpec:
        """Spec of the array."""
        return self.leaf.spec


def tensors_of(
    items: Mapping[str, CheckpointItem],
    unnamed: bool,
    at: str | None,
    problem: Callable[[LeafSpec], str | None],
) -> list[ExportedArray]:
    """Return the arrays of a checkpoint, or of one branch of it.

    Args:
        items: Its items. If there are several, keys begin with the name of the item.
        unnamed: True if the only item has no name.
        at: The branch; None for everything.
        problem: Returns the reason why the format cannot hold a leaf, or None.

    Raises:
        InvalidArgumentError: There is no such branch.
        UnsupportedLeafError: The format cannot hold some leaves; lists them.
    """
    only, branch = (None, "") if at is None else branch_of(at, list(items), unnamed=unnamed)
    found: list[ExportedArray] = []
    problems: list[str] = []
    functions: list[str] = []
    paths: list[str] = []
    for name, item in items.items():
        if only not in (None, name):
            continue
        top = () if unnamed or only is not None else (name,)
        if item.tree is None:
            problems.append(f"{name}: it is not a tree of arrays")
            continue
        names = unboxed_names(item.tree.nodes, item.tree.names)
        for path, leaf in zip(names, item.tree.leaves, strict=True):
            full = ".".join(top if path == WHOLE_ITEM else (*top, path))
            paths.append(full)
            rest = _below(full, branch)
            if rest is None:
                continue
            if not isinstance(leaf, CheckpointLeaf):
                problems.append(f"{full}: it is a Python {type(leaf).__name__}")
                continue
            if leaf.spec.kind == CALLABLE:
                functions.append(full)
                continue
            why = problem(leaf.spec)
            if why is not None:
                problems.append(f"{full}: {why}")
            keys = tuple(unescape_key(key) for key in rest.split(".") if rest)
            found.append(ExportedArray(rest or full, keys, leaf))
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        advice = " Name a branch without them (at='params')" if at is None else ""
        raise UnsupportedLeafError(
            f"{len(problems)} leaves cannot be in this format, so nothing was written.{advice}\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
        )
    if not found:
        if at is not None:
            hint = suggestion(branch, paths)
            raise InvalidArgumentError(f"at={at!r:.120}: there is no array below it{hint}")
        raise InvalidArgumentError("there is no array in the checkpoint, so nothing was written")
    if functions:
        logger.warning(
            "%d functions among the leaves (%s, ...) are left out", len(functions), functions[0]
        )
    return found


def _below(path: str, at: str) -> str | None:
    """Return the rest of a path below a branch, or None if the path is elsewhere."""
    if not at:
        return path
    if path == at:
        return path.rpartition(".")[2]
    return path[len(at) + 1 :] if path.startswith(f"{at}.") else None


def pieces_of(spec: LeafSpec) -> Iterator[Region]:
    """Yield the regions in which an array is read; together they cover the array."""
    if 0 in spec.shape:
        return
    chunk = spec.chunk or _rows(spec)
    for place in itertools.product(*map(range, chunk_grid(spec.shape, chunk))):
        yield chunk_region(place, chunk, spec.shape)


def _rows(spec: LeafSpec) -> tuple[int, ...]:
    """Return the shape of a box of about `PIECE_BYTES` that is contiguous in the array."""
    left = max(PIECE_BYTES // DTYPES[spec.dtype or ""].itemsize, 1)
    box = list(spec.shape)
    for axis, length in enumerate(spec.shape):
        inner = math.prod(spec.shape[axis + 1 :])
        if inner <= left:
            box[axis] = min(length, max(left // inner, 1))
            break
        box[axis] = 1
    return tuple(box)
