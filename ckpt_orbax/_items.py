"""Items between the arguments of Orbax and the calls of `ckpt`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt
from ckpt_orbax import args as args_lib
from ckpt_orbax.handlers import ItemHandlers
from ckpt_orbax.metadata import TreeMetadata
from ckpt_orbax.transform_utils import renames_of
from ckpt_orbax.tree import leaf_path, serialize_tree, shaped
from ckpt_orbax.type_handlers import NO_LAYOUTS, ArrayRestoreArgs, RestoreArgs, SaveArgs

_TREES_TO_SAVE = (args_lib.StandardSave, args_lib.PyTreeSave, args_lib.ArraySave)
_NUMBERS = (bool, int, float)
_AS_THEY_ARE = (args_lib.ProtoSave, args_lib.NumpyRandomKeySave)


class JsonItem:
    """A value that is saved as JSON, though a dict could be a tree, too."""

    def __init__(self, value: Any) -> None:
        self.value = value


class JsonItemHandler(ckpt.handlers.JsonHandler):
    """The JSON handler of `ckpt`, for items that are known to be JSON."""

    def accepts(self, item: Any) -> bool:
        return isinstance(item, JsonItem)

    async def stage(self, item: Any, writer: Any) -> Awaitable[Any]:
        return await super().stage(getattr(item, "value", item), writer)

    async def load(self, entry: Any, like: Any, adapt: Any, reader: Any) -> Any:
        return await super().load(entry, None, adapt, reader)


class HandledItem:
    """An item of a handler of the user's own, which writes and reads a directory."""

    def __init__(self, handler: Any, args: Any) -> None:
        self.handler, self.args = handler, args
        self.found: Any = None

    async def save(self, directory: Any) -> Awaitable[None]:
        path = await directory.await_creation()
        # The handler may write later what it has not copied, so it writes now.
        await asyncio.to_thread(self._call, self.handler.save, path)
        finalize = getattr(self.handler, "finalize", None)
        if finalize is not None:
            await asyncio.to_thread(finalize, path)
        return asyncio.sleep(0)

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.found = await asyncio.to_thread(self._call, self.handler.restore, directory)

        return read()

    def _call(self, method: Callable[..., Any], directory: Any) -> Any:
        if isinstance(self.args, args_lib.LegacyArgs):
            return method(directory, *self.args.args, **self.args.kwargs)
        return method(directory, args=self.args)


@dataclass
class Wanted:
    """What a restore asks of one item.

    Attributes:
        like: The target; None for the item as it was saved.
        adapt: Differences that are allowed.
        result: Makes what is returned of what was loaded.
    """

    like: Any = None
    adapt: ckpt.Adapt | None = None
    result: Callable[[Any], Any] = field(default=lambda found: found)


Stored = Callable[[], ckpt.StepMetadata]


def loaded_items(
    load: Callable[..., Any], stored: Stored, wanted: Mapping[str, Wanted]
) -> dict[str, Any]:
    """Return items by name.

    Args:
        load: Loads `items` with `adapt`, as a manager of `ckpt` does.
        stored: Returns what is stored.
        wanted: What is asked of each item.

    Raises:
        KeyError: There is no such item.
    """
    like = {name: each.like for name, each in wanted.items()}
    adapt = {name: each.adapt for name, each in wanted.items() if each.adapt is not None}
    try:
        found = load(items=like, adapt=adapt or None)
    except (ckpt.errors.TargetMismatchError, ckpt.errors.InvalidArgumentError):
        there = stored()
        for name, each in wanted.items():
            if name not in there.items:
                raise KeyError(
                    f"{there.info.path} has no item {name!r}: {list(there.items)}"
                ) from None
            # Orbax casts to what the target has, also where it is of another kind.
            known, leaves = each.adapt or ckpt.Adapt(), there.leaves.get(name, {})
            cast = casts(each.like, leaves, known.rename)
            adapt[name] = dataclasses.replace(known, cast=cast or None)
            like[name] = _with_stored_numbers(each.like, leaves)
        found = load(items=like, adapt=adapt)
        found = {n: jax.tree.map(_number, wanted[n].like, each) for n, each in found.items()}
    return {name: each.result(found[name]) for name, each in wanted.items()}


def _with_stored_numbers(like: Any, stored: Mapping[str, Any]) -> Any:
    """Return a target whose Python numbers are those that are stored."""

    def known(path: tuple[Any, ...], leaf: Any) -> Any:
        found = stored.get(leaf_path(path))
        kind = leaf if isinstance(leaf, type) else type(leaf)
        return found if kind in _NUMBERS and type(found) in _NUMBERS else leaf

    return jax.tree_util.tree_map_with_path(known, like)


def _number(like: Any, found: Any) -> Any:
    """Return what was found as a Python number of the kind of the target."""
    kind = like if isinstance(like, type) else type(like)
    return kind(found) if kind in _NUMBERS and type(found) in _NUMBERS else found


def by_name(args: Any) -> dict[Any, Any]:
    """Return the arguments of each item; the name of a single one is None."""
    return dict(args) if isinstance(args, args_lib.Composite) else {None: args}


def saved_items(args: Any, handlers: ItemHandlers) -> dict[str, Any]:
    """Return the arguments of a save of `ckpt`: a `state`, or `items` by name."""
    saved = {
        name: _saved_item(each, handlers.own(name, each)) for name, each in by_name(args).items()
    }
    return {"items": saved} if isinstance(args, args_lib.Composite) else {"state": saved[None]}


def _saved_item(args: Any, handler: Any) -> Any:
    """Return what `ckpt` saves for the arguments of an item."""
    if handler is None and isinstance(args, _TREES_TO_SAVE):
        return _cast(args.item, args.save_args)
    if handler is None and isinstance(args, _AS_THEY_ARE):
        return args.item
    if handler is None and isinstance(args, args_lib.JsonSave):
        # Keys that are numbers become texts, as in any JSON.
        return JsonItem(json.loads(json.dumps(args.item)))
    if handler is None:
        handler = args_lib.get_registered_handler_cls(args)()
    return HandledItem(handler, args)


def wanted_items(
    asked: Mapping[Any, Any], stored: Stored, handlers: ItemHandlers, *, named: bool
) -> dict[str, Wanted]:
    """Return what a restore asks of each item.

    Args:
        asked: The arguments of each item; None for an item as it was saved.
        stored: Returns what is stored, if it has to be known.
        handlers: The handlers of the user's own.
        named: False if they are for a single item.

    Raises:
        NotImplementedError: Something is asked for that is not supported.
    """
    return {
        name: _wanted_item(each, stored, name, handlers.own(name if named else None, each))
        for name, each in asked.items()
    }


def _wanted_item(args: Any, stored: Stored, name: str, handler: Any) -> Wanted:
    if handler is not None:
        return handled(HandledItem(handler, args))
    # What `jax.tree.map` makes of metadata is metadata, too.
    given = {} if args is None else vars(args)
    trees = {key: value.tree for key, value in given.items() if isinstance(value, TreeMetadata)}
    args = dataclasses.replace(args, **trees) if trees else args
    match args:
        case args_lib.JsonRestore() | args_lib.NumpyRandomKeyRestore():
            return Wanted()
        case None:
            is_tree = not isinstance(stored().items.get(name), ckpt.types.ItemInfo)
            return Wanted(result=serialize_tree) if is_tree else Wanted()
        case args_lib.StandardRestore():
            return _standard(args, stored, name)
        case args_lib.PyTreeRestore():
            return _tree(args, lambda: stored().leaves.get(name, {}))
        case args_lib.ArrayRestore():
            if args.restore_args is None:
                return Wanted(args.item)
            (one,) = stored().leaves[name].values()
            return Wanted(_leaf(args.restore_args, args.item, lambda: one))
        case args_lib.ProtoRestore():
            return Wanted(args.item)
        case _:
            return handled(HandledItem(args_lib.get_registered_handler_cls(args)(), args))


def handled(item: Any) -> Wanted:
    """Return how an item is restored that keeps what it loads in `found`."""
    return Wanted(item, result=lambda _: item.found)


def _standard(args: args_lib.StandardRestore, stored: Stored, name: str) -> Wanted:
    if args.support_layout:
        raise NotImplementedError(NO_LAYOUTS)
    if args.item is None:
        like = None
        if args.fallback_sharding is not None:
            like = jax.tree.map(partial(_placed, args.fallback_sharding), stored().items[name])
        return Wanted(like, result=serialize_tree)
    return Wanted(args.item, None if args.strict else ckpt.Adapt(resize="both"))


def _placed(sharding: Any, leaf: Any) -> Any:
    is_array = isinstance(leaf, ckpt.types.LeafInfo) and leaf.kind in ("jax", "key")
    return leaf.with_sharding(sharding) if is_array and leaf.saved_sharding is None else leaf


def _tree(args: args_lib.PyTreeRestore, leaves: Callable[[], Mapping[str, Any]]) -> Wanted:
    if args.legacy_transform_fn is not None:
        raise NotImplementedError(
            "legacy_transform_fn: restore what is stored, and compute with jax afterwards"
        )
    like, is_strict = args.item, True
    if args.restore_args is not None:
        flat = jax.tree_util.tree_leaves_with_path(args.restore_args, is_leaf=_is_restore_args)
        given = {leaf_path(path): each for path, each in flat}
        is_strict = all(getattr(each, "strict", True) for each in given.values())

        def asked(path: tuple[Any, ...], leaf: Any) -> Any:
            name = leaf_path(path)
            like = None if args.item is None else leaf
            return _leaf(given.get(name), like, lambda: leaves().get(name))

        tree = args.restore_args if like is None else like
        like = jax.tree_util.tree_map_with_path(asked, tree, is_leaf=_is_restore_args)
    elif like is not None:
        # Without more, leaves have the types and places that they were saved with.
        like = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if leaf is ... else leaves().get(leaf_path(path), leaf), like
        )
    if like is None:
        return Wanted(result=serialize_tree)
    if not (args.partial_restore or not is_strict or args.transforms is not None):
        return Wanted(like)
    renames: dict[str, str] = {}
    keeps = False
    if args.transforms is not None:
        is_default = args.transforms_default_to_original
        renames, keeps = renames_of(args.transforms, leaves(), keeps_others=not is_default)
    adapt = ckpt.Adapt(
        rename=renames or None,
        resize=None if is_strict else "both",
        extra="ignore" if args.partial_restore or args.transforms is not None else "error",
        missing="keep" if keeps else "error",
    )
    wanted = Wanted(like, adapt)
    if keeps and args.item is not None:
        wanted.result = partial(_with_own, args.item, like)
    return wanted


def _with_own(item: Any, like: Any, found: Any) -> Any:
    """Return what was found, with leaves of the item where those of the target were kept."""
    return jax.tree.map(lambda own, kept, leaf: own if leaf is kept else leaf, item, like, found)


def _is_restore_args(value: Any) -> bool:
    return isinstance(value, RestoreArgs)


def casts(like: Any, stored: Mapping[str, Any], renames: Any = None) -> dict[str, Any]:
    """Return the casts between kinds of dtypes that a target asks for, by leaf path."""
    wanted = {
        leaf_path(path): np.dtype(leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(like)
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array | np.ndarray)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    moved = {new: stored[old] for old, new in (renames or {}).items() if old in stored}
    stored = dict(stored) | moved
    return {
        path: dtype
        for path, dtype in wanted.items()
        if getattr(stored.get(path), "kind", None) in ("jax", "numpy", "numpy_scalar")
        and stored[path].dtype.kind != dtype.kind
    }


def _leaf(args: Any, like: Any, stored: Callable[[], Any]) -> Any:
    """Return a leaf of a target.

    Args:
        args: Its `RestoreArgs`.
        like: The leaf of the target that was given; None if there is none.
        stored: Returns what is stored of it; None if that is unknown.
    """
    if not isinstance(args, RestoreArgs) or like is ...:
        return args if like is None else like
    if args.restore_type in (int, float, str, bool):
        return args.restore_type
    sizes = [getattr(args, name, None) for name in ("global_shape", "shape")]
    shape = next((size for size in (*sizes, getattr(like, "shape", None)) if size is not None), ())
    dtype = args.dtype
    if None in (dtype, args.restore_type) or (like is None and not any(sizes)):
        there = stored()
        if there is None or (dtype is None and args.restore_type is None):
            return like if there is None else there
        dtype = getattr(there, "dtype", np.result_type(there)) if dtype is None else dtype
        shape = shape or np.shape(there)
    if not isinstance(args, ArrayRestoreArgs):
        # One value, which looks like an array of this shape and takes no memory.
        return np.broadcast_to(np.zeros((), dtype), shape)
    sharding = args.sharding
    if sharding is None and args.mesh is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    return shaped(tuple(shape), dtype, sharding=sharding)


def _cast(item: Any, save_args: Any) -> Any:
    """Return a tree whose arrays have the dtypes of their `SaveArgs`."""
    if save_args is None:
        return item

    def cast(given: Any, leaf: Any) -> Any:
        dtype = getattr(given, "dtype", None)
        return leaf if dtype is None or not hasattr(leaf, "astype") else leaf.astype(dtype)

    is_leaf = lambda value: isinstance(value, SaveArgs)  # noqa: E731
    return jax.tree.map(cast, save_args, item, is_leaf=is_leaf)
