"""Leaf specs: the kind, dtype, shape and sharding of each leaf; the text form of Python scalars."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Struct

from ckpt._arguments import is_config
from ckpt._format.array_format import DTYPES, ArrayFormat
from ckpt._format.manifest import ShardingEntry
from ckpt._format.regions import Region, whole
from ckpt._tree.leaf_kinds import CALLABLE, scalar_array
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError

# Kinds of objects that may be at several places in a tree, and are stored once.
SHAREABLE = frozenset({"jax", "key", "numpy"})
_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_SCALAR_KINDS_OF: dict[type, str] = {
    **{kind: kind.__name__ for kind in (bool, int, float, complex, str, bytes)},
    np.str_: "numpy_str",
    np.bytes_: "numpy_bytes",
}
# Advice about arrays of dtypes that cannot be stored, by numpy's kind.
_HINTS = {
    "O": "; its elements are Python objects. Make a list of them, or an array of numbers",
    "M": "; store .astype('int64') of it",
    "m": "; store .astype('int64') of it",
    "U": "; make a list of str of it",
    "S": "; make a list of bytes of it",
    "V": "; store its fields as arrays of their own",
}

# A train state has fewer different leaves than this; a program that always saves new ones must not
# fill the memory.
_MOST_KNOWN = 100_000


class LeafSpec(Struct, frozen=True, gc=False):
    """The kind, dtype, shape and place of a leaf, without its values.

    Two trees whose specs and structure are equal are saved by the same plan.

    Attributes:
        kind: As in the manifest.
        dtype: Name of the logical dtype; for a Python scalar that of the array in which other
            readers find it, or None if it has none.
        shape: Global shape.
        sharding: Sharding of a `jax.Array`; None for everything else.
        committed: True if a `jax.Array` is bound to its devices; jax moves others freely.
        weak_type: True if a `jax.Array` is weakly typed.
        impl: Implementation of a typed PRNG key; dtype, shape and sharding are its key data's.
        same_as: Number of an earlier leaf that is the same array object.
        format: The format that the caller has chosen; None if there is none.
        cast_from: Dtype of the array itself, if it is stored with another one.
        placed: Stored sharding of an array that comes from a checkpoint and not from devices.
        chunk: Shape of its chunks in that checkpoint, if a chunk is always read whole.
        copies: Number of copies of a part of it that are in memory until the part is staged.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    sharding: jax.sharding.Sharding | None = None
    committed: bool = True
    weak_type: bool = False
    impl: str | None = None
    same_as: int | None = None
    format: ArrayFormat | None = None
    cast_from: str | None = None
    placed: ShardingEntry | None = None
    chunk: tuple[int, ...] | None = None
    copies: int = 0

    @property
    def nbytes(self) -> int:
        """Logical bytes of the whole array; 0 if there is none."""
        if self.dtype is None:
            return 0
        return _nbytes(self.shape, self.dtype)


# Cached: thousands of leaves have a few shapes.
@functools.lru_cache(maxsize=1024)
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(map(int, shape)) * DTYPES[dtype].itemsize


class CheckpointLeaf(Struct, frozen=True, eq=False):
    """A leaf of a checkpoint, as a leaf of a tree that is saved; arrays are read piece by piece.

    Attributes:
        read: Returns a region of the array as a numpy array. Called in worker threads.
        name: Name of a function, of which nothing else is stored.
    """

    spec: LeafSpec
    read: Callable[[Region], np.ndarray[Any, Any]]
    name: str = ""

    def whole(self) -> np.ndarray[Any, Any]:
        return self.read(whole(self.spec.shape))


def classify(leaf: Any, name: str, spanning: bool = False) -> LeafSpec:
    """Return the spec of a leaf.

    Args:
        leaf: A leaf of a tree about to be saved.
        name: Its stored name, for messages.
        spanning: True if arrays may be on devices of other processes, because those save as well.

    Raises:
        UnsupportedLeafError: The leaf is of a kind or dtype that cannot be stored, or an array
            whose buffer is gone (donated or deleted).
    """
    if isinstance(leaf, jax.Array):
        return _classify_jax(leaf, name, spanning)
    if isinstance(leaf, CheckpointLeaf):
        return leaf.spec
    kind = kind_of_type(type(leaf))
    if kind is None and isinstance(leaf, np.ndarray | np.generic):
        is_array = isinstance(leaf, np.ndarray)
        if is_array and type(leaf) not in (np.ndarray, np.memmap):
            raise UnsupportedLeafError(
                f"an array of the numpy subclass {type(leaf).__name__} cannot be stored; "
                "pass np.asarray(...) of it",
                leaf=name,
            )
        # np.generic holds datetime64 and void too; the dtype decides.
        dtype = _dtype_name(leaf.dtype, name)
        return LeafSpec("numpy" if is_array else "numpy_scalar", dtype, leaf.shape)
    if kind is not None:
        if kind in ("str", "numpy_str") and not _is_unicode(leaf):
            raise UnsupportedLeafError(
                "a string with lone surrogates cannot be stored; save it as bytes", leaf=name
            )
        array = scalar_array(kind, leaf)
        return LeafSpec(kind, None if array is None else array.dtype.name)
    if is_function(leaf):
        return LeafSpec(CALLABLE)
    raise UnsupportedLeafError(
        f"a leaf of type {type(leaf).__module__}.{type(leaf).__qualname__} cannot be stored; "
        "leaves are jax or numpy arrays, typed PRNG keys, numpy scalars, bool, int, float, "
        "complex, str or bytes. For objects of a class of yours, pass a LeafType to PyTreeHandler, "
        "make them items with a handler, or register the class with jax.tree_util"
        f"{_hint_at_state(leaf)}{_hint_at_config(leaf)}",
        leaf=name,
    )


def kind_of_type(kind: type) -> str | None:
    """Return the kind of leaves of this type if their value is in the manifest, or None."""
    return _SCALAR_KINDS_OF.get(kind)


def is_function(leaf: Any) -> bool:
    """Return True if a leaf is code without state, which a target can provide.

    Another callable object may have state, which must not be left out silently.
    """
    if isinstance(leaf, functools.partial):
        parts = (*leaf.args, *leaf.keywords.values())
        return is_function(leaf.func) and all(isinstance(each, _PLAIN) for each in parts)
    if isinstance(leaf, types.MethodType | type) or not callable(leaf):
        return False
    if isinstance(leaf, types.BuiltinFunctionType):
        # As a method it is bound to an object: `[].append`.
        return isinstance(leaf.__self__, types.ModuleType | type | None)
    made_by_jax = type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib")
    return made_by_jax or isinstance(leaf, types.FunctionType | np.ufunc)


class _Seen(Struct, frozen=True, gc=False):
    """The properties of an array; kept, so that the identities of these objects are not reused."""

    aval: Any
    sharding: Any
    spec: LeafSpec


class Classifier:
    """Classifies leaves, and remembers what it has seen.

    The spec of a jax array follows from its type, its abstract value and its sharding. A jitted
    step gives its arrays the same objects every time: looking them up costs 0.5 us. Other arrays
    have a sharding object each, and are looked up by value, for 2 us; classifying one takes 7 us.
    Equal leaves get the same spec object, so that comparing the specs of two saves is comparing
    identities.
    """

    def __init__(self, spanning: bool = False) -> None:
        """Start empty; see `classify` for `spanning`."""
        self._spanning = spanning
        # Keyed by identity, since hashing a sharding is slow. The garbage collector does not track
        # these objects: thousands of tracked ones would make it run.
        self._known: dict[tuple[int, int, bool, int], _Seen] = {}
        self._equal: dict[tuple[Any, Any, bool, type], LeafSpec] = {}
        self._specs: dict[LeafSpec, LeafSpec] = {}
        # Classes of concrete arrays: looking a class up is faster than `isinstance`.
        self._arrays: set[type] = set()

    def classify(self, leaf: Any, name: str) -> LeafSpec:
        """Return the spec of a leaf; see the function `classify`."""
        kind = type(leaf)
        if kind not in self._arrays:
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                return classify(leaf, name, self._spanning)
            self._arrays.add(kind)
        if leaf.is_deleted():
            return classify(leaf, name, self._spanning)
        aval, sharding = leaf.aval, leaf.sharding
        key = (id(aval), id(sharding), leaf.committed, id(kind))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._equal.clear()
                self._specs.clear()
            value = (aval, sharding, leaf.committed, kind)
            spec = self._equal.get(value)
            if spec is None:
                spec = classify(leaf, name, self._spanning)
                spec = self._equal[value] = self._specs.setdefault(spec, spec)
            known = self._known[key] = _Seen(aval, sharding, spec)
        return known.spec


def _hint_at_state(leaf: Any) -> str:
    """Return advice about an object that can be asked for its state, such as an iterator."""
    for names in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if all(callable(getattr(type(leaf), name, None)) for name in names):
            return (
                ". This one has a state: save it beside the tree, items={'model': ..., 'data': it}"
            )
    return ""


def _hint_at_config(leaf: Any) -> str:
    """Return advice about an object that is a configuration, as far as that can be seen."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return ". A configuration is saved as metadata=dataclasses.asdict(config), or as an item"
    if is_config(leaf):
        return ". A configuration is saved as metadata=config, or as an item"
    if isinstance(leaf, argparse.Namespace):
        return ". A configuration is saved as metadata=vars(arguments), or as an item"
    return ""


def _classify_jax(leaf: jax.Array, name: str, spanning: bool) -> LeafSpec:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeafError(
            "a traced value has no bytes to store; call save() outside jit, grad and vmap",
            leaf=name,
        )
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            "the array's buffer is gone: it was donated to a jitted function or deleted before "
            "save() was called. Save the function's output instead of its donated input.",
            leaf=name,
        )
    if not leaf.is_fully_addressable and not spanning:
        raise UnsupportedLeafError(
            "the array has shards on devices of other processes, and this process saves alone. "
            "Call save() on all processes of the job, with the coordinator of all of them; or save "
            "only arrays that are on its own devices",
            leaf=name,
        )
    if getattr(getattr(leaf.sharding, "spec", None), "unreduced", None):
        raise UnsupportedLeafError(
            "the array is a sum that was not computed yet (unreduced); reshard it first", leaf=name
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _classify_key(leaf, name)
    dtype = _dtype_name(leaf.dtype, name)
    return LeafSpec("jax", dtype, leaf.shape, leaf.sharding, leaf.committed, leaf.weak_type)


def _classify_key(leaf: jax.Array, name: str) -> LeafSpec:
    impl: object = jax.random.key_impl(leaf)
    if not isinstance(impl, str):
        raise UnsupportedLeafError(
            f"PRNG keys of the unregistered implementation {impl!r:.60} cannot be stored; save "
            "jax.random.key_data(key)",
            leaf=name,
        )
    data = jax.random.key_data(leaf)
    dtype = _dtype_name(data.dtype, name)
    return LeafSpec("key", dtype, data.shape, data.sharding, data.committed, impl=impl)


def _dtype_name(dtype: np.dtype[Any], name: str) -> str:
    text = dtype.name
    if DTYPES.get(text) != dtype:
        hint = _HINTS.get(dtype.kind, "")
        if text in DTYPES:
            hint = "; convert it to native byte order"
        raise UnsupportedLeafError(f"arrays of dtype {dtype} cannot be stored{hint}", leaf=name)
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# A sharding for all arrays, or a tree of shardings like theirs or like its upper part.
ShardingTree = Any


def spread(
    shardings: ShardingTree, tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[jax.sharding.Sharding | None]:
    """Return the sharding of every leaf of `tree`, in jax's order.

    Args:
        shardings: A sharding for all leaves, or a tree of shardings with the structure of `tree` or
            of its upper part: one sharding then is for a whole branch. None stands for no sharding.
        tree: The tree.
        is_leaf: As of `jax.tree.map`, for `tree`.

    Raises:
        InvalidArgumentError: The shardings do not fit the tree, or something else is among them.
    """

    def every(sharding: Any, branch: Any) -> Any:
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise InvalidArgumentError(
                f"shardings: expected a sharding, or a tree of shardings, not "
                f"{type(sharding).__name__}: {sharding!r:.80}"
            )
        return [sharding] * len(jax.tree.leaves(branch, is_leaf=is_leaf))

    try:
        parts = jax.tree.map(every, shardings, tree, is_leaf=_is_place)
    except (ValueError, TypeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            "shardings: the tree of shardings does not fit the tree of arrays: "
            f"{' '.join(str(error).split()):.300}"
        ) from error
    return [each for part in jax.tree.leaves(parts, is_leaf=_is_list) for each in part]


def _is_place(node: Any) -> bool:
    return node is None or isinstance(node, jax.sharding.Sharding)


def _is_list(node: Any) -> bool:
    return isinstance(node, list) and all(_is_place(each) for each in node)
