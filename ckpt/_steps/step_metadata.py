"""`StepMetadata`: everything about a step but its array bytes; the result of `metadata()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np

from ckpt._commit import StepInfo, step_info
from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry, JsonValue, Manifest, ShardingEntry
from ckpt._plan.leaf_entries import check_leaves
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, UNREADABLE, decode_scalar
from ckpt._tree.leaf_names import leaf_of_item
from ckpt._tree.leaf_specs import ShardingTree, spread
from ckpt._tree.structure import unflatten
from ckpt._tree.table import LeafRow, format_bytes, html_table, sharding_text, text_table
from ckpt.errors import CorruptCheckpointError, StepNotFoundError

logger = logging.getLogger("ckpt")

# After so many tries the list is taken as it is: a writer that deletes steps so often during the
# listing keeps no step long enough to be looked at.
_LIST_TRIES = 20

Sharding = jax.sharding.Sharding


_MOST_BITS = 200


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """An array leaf as it is stored. Can stand as a leaf of `like=`.

    Attributes:
        name: Leaf path, as messages write it.
        kind: `jax`, `key` (a typed PRNG key), `numpy` or `numpy_scalar`.
        shape: Global shape.
        dtype: Dtype; for a PRNG key, dtype of its data.
        chunks: Shape of one stored chunk.
        impl: Implementation of a PRNG key.
        weak_type: True if the array was weakly typed.
        same_as: Leaf path of an earlier leaf that was the same array object.
        saved_sharding: Sharding of a jax array when it was saved.
        sharding: Sharding for a restore; None leaves the array where jax puts new arrays.
        notes: What extensions have noted of its values when they were saved, by the name of the
            extension; functions of the extension read it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] = ()
    impl: str | None = None
    weak_type: bool = False
    same_as: str | None = None
    saved_sharding: ShardingEntry | None = None
    sharding: Sharding | None = None
    notes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def nbytes(self) -> int:
        """Logical bytes of the whole array."""
        stored = self.chunks if self.kind == "key" and self.chunks else self.shape
        size = int(np.prod(self.shape, dtype=object))
        if self.kind == "key":
            # The last axis of the data belongs to the key itself.
            size *= stored[-1]
        return size * self.dtype.itemsize

    def with_sharding(self, sharding: Sharding | None) -> LeafInfo:
        """Return the leaf as a target that is restored onto `sharding`.

        Example:
            ```python
            target = mgr.metadata(100).tree
            target["params"]["w"] = target["params"]["w"].with_sharding(sharding)
            state = mgr.restore(100, like=target)
            ```
        """
        return replace(self, sharding=sharding)

    def __repr__(self) -> str:
        place = sharding_text(self.saved_sharding)
        text = f"LeafInfo({self.name!r}, {_leaf_type(self)}"
        return f"{text}, saved on {place})" if place else f"{text})"


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """An item that is not a tree. As a target, it stands for the item as it was saved.

    Attributes:
        handler: Name of the handler that wrote it.
        nbytes: Bytes of its files.
        data: The handler's data in the manifest, such as the class of a model.
    """

    handler: str
    nbytes: int
    data: JsonValue


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step without its arrays. Its text is a table of its leaves.

    Attributes:
        info: Step, time stamps, sizes, metrics and user metadata.
        items: The tree of every item by name: `LeafInfo` for arrays, the values themselves for
            Python scalars, `...` for functions; an `ItemInfo` for an item that is not a tree.
        leaves: The same as flat dicts: by item name, its leaves by leaf path.
        unnamed: True if the step holds one object that was saved without a name.
        writer: Versions of the libraries that wrote it.
        unknown_classes: Classes whose nodes are a `UnknownNode` in the trees, each with the reason.
        unreadable: Leaves and items of another library's step that cannot be read, each with the
            reason. Keys are leaf paths; if items have names, as `model:params.w`. In the trees such
            a leaf is `...`, too.
        notes: What extensions say of the whole step, by their names.

    Example:
        ```python
        found = await mgr.metadata(100)
        print(found)
        w = found.tree["params"]["w"]
        print(w.shape, w.dtype)
        ```
    """

    info: StepInfo
    items: Mapping[str, Any]
    leaves: Mapping[str, Mapping[str, Any]] = field(repr=False)
    unnamed: bool
    writer: Mapping[str, str]
    unknown_classes: Mapping[str, str] = field(default_factory=dict, repr=False)
    unreadable: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def tree(self) -> Any:
        """The tree of the one unnamed object, or the dict of all items by name."""
        return next(iter(self.items.values())) if self.unnamed else dict(self.items)

    def target(self, shardings: ShardingTree | Callable[[LeafInfo], Sharding | None] = None) -> Any:
        """Return the tree as a target for `like=`, with shardings of today's devices.

        Args:
            shardings: The sharding of all arrays; a tree of shardings with the structure of this
                one, or of its upper part; or a function that gives each `LeafInfo` its own.

        Raises:
            InvalidArgumentError: The shardings do not fit the tree.

        Example:
            ```python
            target = mgr.metadata(100).target({"params": sharding, "opt_state": None})
            state = mgr.restore(100, like=target)
            ```
        """
        leaves, structure = jax.tree.flatten(self.tree)
        places: list[Sharding | None]
        if callable(shardings) and jax.tree_util.all_leaves([shardings]):
            places = [shardings(leaf) if _is_on_devices(leaf) else None for leaf in leaves]
        else:
            places = spread(shardings, self.tree)
        if self.unknown_classes:
            logger.warning(
                "the target has a read-only ckpt.types.UnknownNode for: %s",
                "; ".join(f"{name} ({why})" for name, why in sorted(self.unknown_classes.items())),
            )
        pairs = zip(leaves, places, strict=True)
        return jax.tree.unflatten(
            structure,
            [leaf.with_sharding(place) if _is_on_devices(leaf) else leaf for leaf, place in pairs],
        )

    def __str__(self) -> str:
        return text_table(self._title, self._rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self._title, self._rows)

    @property
    def _title(self) -> str:
        info = self.info
        count = sum(len(leaves) for leaves in self.leaves.values())
        name = info.path if info.step is None else f"step {info.step}"
        title = f"{name}: {count} {'leaf' if count == 1 else 'leaves'}, {format_bytes(info.nbytes)}"
        # Steps of other libraries may not record the time.
        if info.committed.timestamp():
            title += f", committed {info.committed:%Y-%m-%d %H:%M:%S} UTC"
        for key, value in info.metrics.items():
            title += f", {key:.60}={value:.6g}"
        if info.dropped:
            title += f", without {', '.join(each.item for each in info.dropped)}"
        if info.parent is not None:
            title += f", from {info.parent.path:.200}"
        if info.custom_metadata is not None:
            title += f", metadata {info.custom_metadata!r:.200}"
        return title

    @property
    def _rows(self) -> list[LeafRow]:
        rows = []
        for item, leaves in self.leaves.items():
            about = self.items[item]
            if isinstance(about, ItemInfo):
                text = self.unreadable.get(item) or f"{about.data!r:.60}"
                rows.append(LeafRow(item, about.handler, about.nbytes, text))
            for path, leaf in leaves.items():
                where = leaf_of_item("" if self.unnamed else item, path)
                reason = self.unreadable.get(where)
                if reason is not None:
                    rows.append(LeafRow(where, "cannot be read", None, reason))
                elif isinstance(leaf, LeafInfo):
                    place = sharding_text(leaf.saved_sharding)
                    if leaf.same_as is not None:
                        place = f"the array at {leaf.same_as:.80}"
                    rows.append(LeafRow(where, _leaf_type(leaf), leaf.nbytes, place + _mark(leaf)))
                else:
                    rows.append(LeafRow(where, _value_text(leaf), None, ""))
        return rows


def _mark(leaf: LeafInfo) -> str:
    """Return the remarks of extensions about a leaf; empty if there are none."""
    return "".join(f"  {each.remark}" for each in leaf.notes.values() if each.remark)


def _is_on_devices(leaf: Any) -> bool:
    return isinstance(leaf, LeafInfo) and leaf.kind in ("jax", "key")


def _value_text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        # Python refuses to write thousands of digits, and they would not help the reader.
        return f"an integer of {value.bit_length()} bits"
    return "a function" if value is ... else f"{value!r:.60}"


def _leaf_type(leaf: LeafInfo) -> str:
    if leaf.kind == "key":
        return f"key {leaf.impl:.40}{list(leaf.shape)}"
    host = "" if leaf.kind == "jax" else f" ({leaf.kind})"
    return f"{leaf.dtype.name}{list(leaf.shape)}{host}"


def describe_step(manifest: Manifest, path: str) -> StepMetadata:
    """Return the metadata of a committed step at `path`; needs no devices.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself.
    """
    trees: dict[str, Any] = {}
    flat: dict[str, Mapping[str, Any]] = {}
    unknown_classes: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for name, item in manifest.items.items():
        if not item.nodes and not item.leaves:
            trees[name] = ItemInfo(item.handler, item.nbytes, item.data)
            flat[name] = {}
            if item.handler in UNREADABLE:
                unreadable[name] = str(item.data)
            continue
        check_leaves(item)
        paths = unboxed_names(item.nodes, item.leaves.names)
        forms = item.leaves.forms
        for number, value in item.leaves.values.items():
            if forms[item.leaves.form[number]].kind in UNREADABLE:
                leaf = leaf_of_item("" if manifest.unnamed else name, paths[number])
                unreadable[leaf] = str(value)
        notes = _notes(item.leaves) if item.leaves.extensions else {}
        leaves = [
            _describe_leaf(paths, number, forms[form], item, notes)
            for number, form in enumerate(item.leaves.form.tolist())
        ]
        trees[name], reasons = unflatten(item.nodes, leaves)
        unknown_classes |= reasons
        flat[name] = dict(zip(paths, leaves, strict=True))
    return StepMetadata(
        info=step_info(manifest, path),
        items=trees,
        leaves=flat,
        unnamed=manifest.unnamed,
        writer=dict(manifest.writer),
        unknown_classes=unknown_classes,
        unreadable=unreadable,
        notes=manifest.extensions,
    )


def _notes(table: LeafTable) -> dict[str, Sequence[Any]]:
    from ckpt.extensions._readers import readers

    return {name: each.of_leaves(table) for name, each in readers(table.extensions).items()}


def _describe_leaf(
    paths: Sequence[str],
    number: int,
    form: LeafForm,
    item: ItemEntry,
    notes: Mapping[str, Sequence[Any]],
) -> Any:
    if form.kind == CALLABLE or form.kind in UNREADABLE:
        return ...
    if form.kind not in ARRAY_KINDS:
        return decode_scalar(item.leaves.bare(number))
    same_as = item.leaves.same_as.get(number)
    return LeafInfo(
        paths[number],
        form.kind,
        form.shape[:-1] if form.kind == "key" else form.shape,
        DTYPES[form.dtype or ""],
        form.chunks,
        form.impl,
        form.weak_type,
        None if same_as is None else paths[same_as],
        None if form.sharding is None else item.shardings[form.sharding],
        notes={name: each[number] for name, each in notes.items()},
    )


class ListsSteps(Protocol):
    """A reader of the steps of a root, or of all places of a run."""

    async def all_steps(self) -> list[int]:
        """Return the committed steps, ascending."""

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of a step, the latest if it is None."""


async def infos(reader: ListsSteps) -> list[StepInfo]:
    """Return the information about every committed step, ascending.

    If a step goes between the list and the look at it, the steps are listed again: a step that took
    its place must not be missing. A writer that is faster than all tries keeps no step anyway.
    """
    for _ in range(_LIST_TRIES):
        found, is_gone = [], False
        for step in await reader.all_steps():
            try:
                found.append((await reader.metadata(step)).info)
            except StepNotFoundError:
                is_gone = True
            except CorruptCheckpointError as error:
                logger.warning("step %d is left out of the list: %s", step, error)
        if not is_gone:
            break
    return found
