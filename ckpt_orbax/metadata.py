"""What is stored, without its arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import ckpt
from ckpt_orbax import args as args_lib
from ckpt_orbax import handlers
from ckpt_orbax.tree import leaf_path, serialize_tree

# Names of handlers of Orbax, by the handlers of `ckpt`.
_HANDLERS: dict[str, str] = {
    "pytree": handlers.StandardCheckpointHandler.typestr(),
    "json": handlers.JsonCheckpointHandler.typestr(),
}


@jax.tree_util.register_pytree_node_class
class TreeMetadata:
    """The tree of an item, with the shape, dtype and name of each leaf. It is a PyTree itself.

    Attributes:
        tree: The tree. A leaf of an array has `shape`, `dtype`, `name` and `saved_sharding`; a
            Python value stands for itself.
        custom_metadata: None.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.custom_metadata: Any = None

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Return the tree, for jax."""
        return (self.tree,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> TreeMetadata:
        """Return metadata of another tree, for jax."""
        return cls(*children)

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        # `keys`, `items`, `get` and whatever else the tree has.
        if name.startswith("__") or name == "tree":
            raise AttributeError(name)
        return getattr(self.tree, name)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree!r})"


@dataclasses.dataclass(eq=False)
class ScalarMetadata:
    """A Python number in a tree.

    Attributes:
        name: Its leaf path.
        directory: None.
        shape: Empty.
        sharding: None.
        dtype: The dtype that it has as an array.
        storage: None.
    """

    name: str
    directory: Any = None
    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScalarMetadata) and bool(self.dtype == other.dtype)


@dataclasses.dataclass
class StringMetadata:
    """A text in a tree.

    Attributes:
        name: Its leaf path.
        directory: None.
    """

    name: str
    directory: Any = None


@dataclasses.dataclass
class StepMetadata:
    """A step, or a checkpoint.

    Attributes:
        item_handlers: Names of the handlers of its items, or the one of a single item.
        item_metadata: A `TreeMetadata`, or a `Composite` of one for each item; None for an item
            that is not a tree.
        metrics: Its metrics.
        performance_metrics: Times of its save, in seconds.
        init_timestamp_nsecs: Begin of its save, in Unix nanoseconds.
        commit_timestamp_nsecs: Time of its commit, in Unix nanoseconds.
        custom_metadata: What was given as `custom_metadata`.
    """

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    performance_metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RootMetadata:
    """The metadata of a root.

    Attributes:
        internal_metadata: Empty.
        custom_metadata: What was given as `metadata` to the manager.
    """

    internal_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    custom_metadata: dict[str, Any] | None = None


def step_metadata(found: ckpt.StepMetadata, *, is_single: bool) -> StepMetadata:
    """Return what `ckpt` knows of a step, in the form of Orbax."""
    info = found.info
    trees = {
        name: None if isinstance(item, ckpt.types.ItemInfo) else TreeMetadata(_described(item))
        for name, item in found.items.items()
    }
    names = {
        name: _HANDLERS.get(getattr(item, "handler", "pytree"), "")
        for name, item in found.items.items()
    }
    one: Any = next(iter(trees.values()), None)
    if info.metrics:
        trees["metrics"] = None
    return StepMetadata(
        item_handlers=names,
        item_metadata=one if is_single else args_lib.Composite(**trees),
        metrics=nested_metrics(info.metrics),
        performance_metrics=dataclasses.asdict(info.statistics),
        init_timestamp_nsecs=int(info.created.timestamp() * 1e9),
        commit_timestamp_nsecs=int(info.committed.timestamp() * 1e9),
        custom_metadata=info.custom_metadata or {},
    )


def _described(tree: Any) -> Any:
    """Return a tree of dicts and lists in which values of Python are described like arrays."""

    def described(path: tuple[Any, ...], leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex):
            return ScalarMetadata(leaf_path(path), dtype=np.asarray(leaf).dtype)
        return StringMetadata(leaf_path(path)) if isinstance(leaf, str) else leaf

    return jax.tree_util.tree_map_with_path(described, serialize_tree(tree))


class _Metrics(dict[str, Any]):
    """Metrics in groups, which are also found by their whole names."""

    def __missing__(self, name: str) -> Any:
        group, slash, rest = name.partition("/")
        if not slash or group not in self:
            raise KeyError(name)
        return self[group][rest]


def nested_metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics in groups, where their names have slashes."""
    found = _Metrics()
    for name, value in metrics.items():
        *groups, last = name.split("/")
        place: dict[str, Any] = found
        for group in groups:
            place = place.setdefault(group, _Metrics())
        place[last] = value
    return found
