"""Exact comparison of two trees: containers, keys, their order, leaf types and bits."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["differences"]


def differences(expected: Any, found: Any, *, shared: bool = False) -> list[str]:
    """Return one line for every place where two trees differ; none if they are the same.

    The comparison is stricter than `==`: the kinds of containers and leaves, the types of keys and
    their order in dicts, dtypes, and every bit of an array count. Thus `-0.0` is not `0.0`, and `1`
    is not `True`. For nodes of registered classes, the data beside the children must be equal, too.
    Python NaNs count as equal to each other.

    Example:
        ```python
        assert differences(saved, await ckpt.load(path)) == []
        ```

    Args:
        expected: The expected tree.
        found: The tree to compare with it.
        shared: True to require that arrays which are one object at several places are one object in
            both trees. A checkpoint preserves that without a target; with a target, the target
            decides.
    """
    lines = list(_compare(expected, found, "tree"))
    return lines if lines or not shared else list(_compare_shared(expected, found))


def _compare_shared(expected: Any, found: Any) -> Iterator[str]:
    """Compare which places share an array object, in trees that are equal otherwise."""
    first: dict[int, tuple[int, str]] = {}
    other: dict[int, int] = {}
    pairs, _ = jax.tree_util.tree_flatten_with_path(expected)
    for number, ((path, mine), theirs) in enumerate(
        zip(pairs, jax.tree.leaves(found), strict=True)
    ):
        if not isinstance(mine, jax.Array | np.ndarray):
            continue
        where = "tree" + jax.tree_util.keystr(path)
        place, name = first.setdefault(id(mine), (number, where))
        their_place = other.setdefault(id(theirs), number)
        if place != their_place:
            what = f"the array at {name}" if place != number else "an array of its own"
            yield f"{where}: expected {what}, found another one"


def _compare(expected: Any, found: Any, where: str) -> Iterator[str]:
    if isinstance(expected, jax.Array):
        yield from _compare_jax(expected, found, where)
    elif type(expected) is not type(found):
        yield f"{where}: expected {_type_of(expected)}, found {_type_of(found)}"
    elif isinstance(expected, np.ndarray | np.generic):
        yield from _compare_arrays(expected, found, where)
    elif type(expected) in (dict, OrderedDict, defaultdict):
        yield from _compare_mappings(expected, found, where)
    elif isinstance(expected, list | tuple):
        yield from _compare_children(expected, found, range(len(expected)), where)
    elif not jax.tree_util.all_leaves([expected]) and expected is not None:
        yield from _compare_nodes(expected, found, where)
    elif not _same_scalar(expected, found):
        yield f"{where}: expected {_short(expected)}, found {_short(found)}"


def _compare_mappings(
    expected: Mapping[Any, Any], found: Mapping[Any, Any], where: str
) -> Iterator[str]:
    factory = getattr(expected, "default_factory", None)
    if factory is not getattr(found, "default_factory", None):
        yield f"{where}: expected the default factory {factory!r}"
    keys, found_keys = list(expected), list(found)
    if len(keys) != len(found_keys) or not all(map(_same_key, keys, found_keys)):
        yield f"{where}: expected the keys {_short(keys)}, found {_short(found_keys)}"
    else:
        yield from _compare_children(list(expected.values()), list(found.values()), keys, where)


def _compare_children(
    expected: Sequence[Any], found: Sequence[Any], keys: Sequence[Any], where: str
) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"{where}: expected {len(expected)} children, found {len(found)}"
        return
    for key, child, other in zip(keys, expected, found, strict=True):
        yield from _compare(child, other, f"{where}[{_short(key)}]")


def _compare_nodes(expected: Any, found: Any, where: str) -> Iterator[str]:
    """Compare two nodes of one registered class: their static data and their children."""
    beside: Any
    other: Any
    (mine, beside), (theirs, other) = (
        jax.tree_util.tree_flatten_with_path(each, is_leaf=lambda part, each=each: part is not each)
        for each in (expected, found)
    )
    try:
        same = bool(beside == other)
    except Exception:
        # Static data that cannot be compared, such as an array; its class may raise any error.
        same = repr(beside) == repr(other)
    if not same:
        yield f"{where}: expected {beside!s:.200}, found {other!s:.200}"
        return
    keys = [jax.tree_util.keystr(path, simple=True) for path, _ in mine]
    children, others = ([child for _, child in each] for each in (mine, theirs))
    yield from _compare_children(children, others, keys, where)


def _compare_arrays(expected: Any, found: Any, where: str) -> Iterator[str]:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        yield (
            f"{where}: expected {expected.dtype}{list(expected.shape)}, "
            f"found {found.dtype}{list(found.shape)}"
        )
    elif _bytes(expected) != _bytes(found):
        yield f"{where}: expected {_short(expected)}, found {_short(found)}"


def _bytes(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _compare_jax(expected: jax.Array, found: Any, where: str) -> Iterator[str]:
    if not isinstance(found, jax.Array):
        yield f"{where}: expected a jax.Array, found {_type_of(found)}"
        return
    yield from _compare_arrays(expected, found, where)
    for attribute in ("weak_type", "committed", *(("sharding",) if expected.committed else ())):
        wanted, got = (getattr(each, attribute, False) for each in (expected, found))
        if wanted != got:
            yield f"{where}: expected {attribute} {wanted}, found {got}"


def _same_scalar(expected: Any, found: Any) -> bool:
    if isinstance(expected, complex):
        return _same_scalar(expected.real, found.real) and _same_scalar(expected.imag, found.imag)
    if isinstance(expected, float):
        both_nan = expected != expected and found != found
        return both_nan or struct.pack("d", expected) == struct.pack("d", found)
    return bool(expected == found)


def _same_key(expected: Any, found: Any) -> bool:
    if type(expected) is not type(found):
        return False
    if isinstance(expected, tuple):
        return len(expected) == len(found) and all(map(_same_key, expected, found))
    return _same_scalar(expected, found)


def _type_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _short(value: Any) -> str:
    return f"{value!r:.60}"
