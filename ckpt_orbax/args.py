"""Arguments of saves and restores: what an item is, and how it is to come back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

ArgsClass = TypeVar("ArgsClass", bound=type)


@dataclasses.dataclass
class CheckpointArgs:
    """The base class of all arguments."""


class LegacyArgs(CheckpointArgs):
    """What a handler is called with whose arguments are not registered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs


@dataclasses.dataclass
class StandardSave(CheckpointArgs):
    """Saves a PyTree of arrays and Python values.

    Attributes:
        item: The tree.
        save_args: A tree of `SaveArgs`, of which `dtype` is applied.
        custom_metadata: Not kept for an item; `save(custom_metadata=)` is kept with the step.

    Example:
        ```python
        mngr.save(100, args=ocp.args.StandardSave(state))
        ```
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclasses.dataclass
class StandardRestore(CheckpointArgs):
    """Restores a PyTree onto a target.

    Attributes:
        item: The target: a tree of arrays or `jax.ShapeDtypeStruct`; `...` skips a leaf. None
            restores the tree as it was saved.
        strict: False pads arrays with zeros, or cuts them, where shapes differ.
        support_layout: Layouts of arrays on devices are not restored; True is refused.
        fallback_sharding: Without a target, place of arrays whose place is not stored.

    Example:
        ```python
        state = mngr.restore(100, args=ocp.args.StandardRestore(abstract_state))
        ```
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclasses.dataclass
class PyTreeSave(CheckpointArgs):
    """Saves a PyTree; see `StandardSave`.

    Example:
        ```python
        mngr.save(100, args=ocp.args.PyTreeSave(state))
        ```
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclasses.dataclass
class PyTreeRestore(CheckpointArgs):
    """Restores a PyTree onto a target, with a `RestoreArgs` for each leaf.

    Attributes:
        item: The target, as in `StandardRestore`.
        restore_args: A tree of `RestoreArgs`, of the structure of the target; without a target, of
            the structure to return.
        transforms: A tree of `Transform`, by the keys of the target: other names, and values that
            stay what they are in the target.
        transforms_default_to_original: True if leaves without a transform are those of their name.
        legacy_transform_fn: Refused.
        partial_restore: True to leave out stored leaves that the target does not have.

    Example:
        ```python
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract_state)
        args = ocp.args.PyTreeRestore(abstract_state, restore_args=restore_args)
        state = mngr.restore(100, args=args)
        ```
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Callable[..., Any] | None = None
    partial_restore: bool = False


@dataclasses.dataclass
class JsonSave(CheckpointArgs):
    """Saves a dict of JSON values.

    Example:
        ```python
        args = ocp.args.Composite(config=ocp.args.JsonSave({"lr": 0.1}))
        mngr.save(100, args=args)
        ```
    """

    item: Any


@dataclasses.dataclass
class JsonRestore(CheckpointArgs):
    """Restores JSON values; `item` is not needed.

    Example:
        ```python
        found = mngr.restore(100, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        ```
    """

    item: Any = None


@dataclasses.dataclass
class ArraySave(CheckpointArgs):
    """Saves one array; see `StandardSave`.

    Example:
        ```python
        mngr.save(100, args=ocp.args.Composite(mask=ocp.args.ArraySave(mask)))
        ```
    """

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore(CheckpointArgs):
    """Restores one array, onto a target or with one `RestoreArgs`.

    Example:
        ```python
        found = mngr.restore(100, args=ocp.args.Composite(mask=ocp.args.ArrayRestore()))
        ```
    """

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class ProtoSave(CheckpointArgs):
    """Saves a message of protocol buffers.

    Example:
        ```python
        mngr.save(100, args=ocp.args.Composite(vocabulary=ocp.args.ProtoSave(message)))
        ```
    """

    item: Any


@dataclasses.dataclass
class ProtoRestore(CheckpointArgs):
    """Restores a message of the class `item`.

    Example:
        ```python
        args = ocp.args.Composite(vocabulary=ocp.args.ProtoRestore(Vocabulary))
        found = mngr.restore(100, args=args)
        ```
    """

    item: Any


@dataclasses.dataclass
class JaxRandomKeySave(ArraySave):
    """Saves a key of `jax.random`, typed or not.

    Example:
        ```python
        mngr.save(100, args=ocp.args.Composite(key=ocp.args.JaxRandomKeySave(key)))
        ```
    """


@dataclasses.dataclass
class JaxRandomKeyRestore(ArrayRestore):
    """Restores a key of `jax.random`.

    Example:
        ```python
        found = mngr.restore(100, args=ocp.args.Composite(key=ocp.args.JaxRandomKeyRestore()))
        ```
    """


@dataclasses.dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Saves what `numpy.random.get_state()` returns.

    Example:
        ```python
        state = np.random.get_state()
        mngr.save(100, args=ocp.args.Composite(rng=ocp.args.NumpyRandomKeySave(state)))
        ```
    """

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restores what `numpy.random.set_state()` takes.

    Example:
        ```python
        found = mngr.restore(100, args=ocp.args.Composite(rng=ocp.args.NumpyRandomKeyRestore()))
        ```
    """

    item: Any = None


class _NoItemError(AttributeError, KeyError):
    """There is no such item."""


class Composite(CheckpointArgs, Mapping[str, Any]):
    """The arguments, or what was restored, of several items by name. It is a mapping.

    Example:
        ```python
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave({"lr": 0.1})
        )
        mngr.save(100, args=args)
        found = mngr.restore(100)
        print(found.config, found["state"])
        ```
    """

    def __init__(self, **items: Any) -> None:
        object.__setattr__(self, "_items", dict(items))

    _items: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in vars(self).get("_items", {}):
            raise _NoItemError(f"there is no item {name!r}")
        return self._items[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(f"a Composite is not changed; make another one with {name!r}")

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            raise KeyError(f"there is no item {name!r}: {list(self._items)}")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items))

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"


# Classes of handlers by the arguments that they take, and the other way round.
_HANDLERS: dict[type, type] = {}
_ARGS: dict[type, dict[str, type]] = {}


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[ArgsClass], ArgsClass]:
    """Return a decorator for arguments that a handler of your own takes.

    Example:
        ```python
        @ocp.args.register_with_handler(MyHandler, for_save=True)
        @dataclasses.dataclass
        class MySave(ocp.args.CheckpointArgs):
            item: Any
        ```
    """

    def register(args_cls: ArgsClass) -> ArgsClass:
        if not issubclass(args_cls, CheckpointArgs):
            raise TypeError(f"{args_cls.__name__} is no subclass of CheckpointArgs")
        if not (for_save or for_restore):
            raise ValueError(f"{args_cls.__name__}: pass for_save=True or for_restore=True")
        _HANDLERS[args_cls] = handler_cls
        known = _ARGS.setdefault(handler_cls, {})
        known.update(dict.fromkeys(["save"] * for_save + ["restore"] * for_restore, args_cls))
        return args_cls

    return register


def get_registered_handler_cls(args: CheckpointArgs | type) -> type:
    """Return the class of handlers that takes these arguments.

    Raises:
        ValueError: There is none.

    Example:
        ```python
        ocp.args.get_registered_handler_cls(ocp.args.StandardSave)
        ```
    """
    kind = args if isinstance(args, type) else type(args)
    if kind not in _HANDLERS:
        raise ValueError(f"no handler takes {kind.__name__}: use register_with_handler")
    return _HANDLERS[kind]


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Return the arguments for saves and for restores that a handler takes.

    Raises:
        ValueError: There are none.

    Example:
        ```python
        save_args, restore_args = ocp.args.get_registered_args_cls(ocp.StandardCheckpointHandler)
        ```
    """
    known = _known(handler)
    if not has_registered_args(handler):
        raise ValueError(f"{handler} has no arguments: use register_with_handler")
    return known["save"], known["restore"]


def _known(handler: Any) -> Mapping[str, type]:
    kind = handler if isinstance(handler, type) else type(handler)
    return next((_ARGS[c] for c in kind.__mro__ if c in _ARGS), {})


def has_registered_args(handler: Any) -> bool:
    """Return True if a handler has arguments for saves and for restores.

    Example:
        ```python
        assert ocp.args.has_registered_args(ocp.JsonCheckpointHandler)
        ```
    """
    return _known(handler).keys() == {"save", "restore"}
