"""Target against manifest: what every leaf should come back as, or every difference at once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckpt.errors import TargetMismatchError
from ckpt.layout.leaves import ARRAY_KINDS, DTYPES
from ckpt.layout.shardings import rebuild_sharding
from ckpt.layout.structure import Structure
from ckpt.manifest import ItemEntry, LeafEntry

__all__ = ["ArrayTarget", "Match", "match_target", "targets_as_saved"]

_SHOWN = 200

_Likeness = tuple[type, Any, tuple[int, ...], int, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class ArrayTarget:
    """What an array leaf comes back as.

    Attributes:
        kind: `jax`, `numpy` or `numpy_scalar`.
        dtype: Dtype of the result.
        sharding: Where a jax array goes; None leaves it where jax puts new arrays, uncommitted.
    """

    kind: str
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A target that fits.

    Attributes:
        stored: For every target leaf the number of the stored leaf, or None where it is skipped.
        targets: For every stored leaf what it comes back as; None for Python scalars and for
            leaves that are not wanted.
    """

    stored: list[int | None]
    targets: list[ArrayTarget | None]


def targets_as_saved(item: ItemEntry) -> tuple[list[ArrayTarget | None], list[str]]:
    """Return targets that bring every array back as it was saved.

    Returns:
        The targets, and the names of the leaves whose sharding cannot be rebuilt on the devices of
        this process; those go where jax puts new arrays.

    Raises:
        TargetMismatchError: A 64-bit jax array is stored and this process has 64 bits switched off.
    """
    shardings = [rebuild_sharding(entry) for entry in item.shardings]
    targets: list[ArrayTarget | None] = []
    moved, problems = [], []
    known: dict[tuple[Any, ...], ArrayTarget] = {}
    for entry in item.leaves:
        if entry.kind not in ARRAY_KINDS:
            targets.append(None)
            continue
        likeness = (entry.kind, entry.committed, entry.dtype, entry.sharding, *entry.shape)
        if likeness in known:
            targets.append(known[likeness])
            continue
        bound = entry.sharding is not None and entry.committed
        sharding = shardings[entry.sharding or 0] if bound else None
        if bound and sharding is None:
            moved.append(entry.name)
        target = ArrayTarget(entry.kind, DTYPES[entry.dtype or ""], sharding)
        found = _array_problems(entry, target)
        problems.extend(found)
        targets.append(target)
        if not found and (sharding is not None or not bound):
            known[likeness] = target
    if problems:
        raise _mismatch(problems)
    return targets, moved


def match_target(item: ItemEntry, target: Structure) -> Match:
    """Hold a target against what is stored.

    Leaves are matched by their stored name, so containers may differ in kind (a dict for a
    namedtuple) as long as the leaf paths agree.

    Raises:
        TargetMismatchError: Lists every leaf that is missing, extra, or of another shape or kind.
    """
    numbers = {entry.name: number for number, entry in enumerate(item.leaves)}
    stored: list[int | None] = []
    targets: list[ArrayTarget | None] = [None] * len(item.leaves)
    problems: list[str] = []
    # Thousands of leaves are alike in all that matters here, and looking at one costs 8 us.
    known: dict[_Likeness, ArrayTarget] = {}
    for name, leaf in zip(target.names, target.leaves, strict=True):
        number = numbers.get(name)
        if number is None:
            problems.append(_missing(name, leaf, numbers))
            continue
        if leaf is ...:
            stored.append(None)
            continue
        stored.append(number)
        entry = item.leaves[number]
        likeness = _likeness(leaf, entry)
        if likeness is not None and likeness in known:
            targets[number] = known[likeness]
            continue
        array = _array_target(leaf, entry)
        if array is not None and entry.kind in ARRAY_KINDS:
            found = _shape_problems(entry, leaf.shape) or _array_problems(entry, array)
            problems.extend(found)
            targets[number] = array
            if likeness is not None and not found:
                known[likeness] = array
        elif array is not None or not _same_scalar(leaf, entry):
            problems.append(_differs(entry, _text_of(leaf)))
    wanted = set(target.names)
    problems.extend(
        f"{entry.name}: stored {_stored_text(entry)}, not in the target"
        for entry in item.leaves
        if entry.name not in wanted
    )
    if problems:
        raise _mismatch(problems)
    return Match(stored, targets)


def _likeness(leaf: Any, entry: LeafEntry) -> _Likeness | None:
    """Return a key that is equal only for pairs that fit each other in the same way, or None."""
    if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
        return None
    stored = (entry.kind, entry.committed, entry.dtype, *entry.shape)
    # By identity: the target keeps its shardings alive, and hashing one is slow.
    return type(leaf), leaf.dtype, leaf.shape, id(leaf.sharding), stored


def _mismatch(problems: Sequence[str]) -> TargetMismatchError:
    count = len(problems)
    lines = "\n  ".join(problems[:_SHOWN])
    more = f"\n  ... and {count - _SHOWN} more, in .problems" if count > _SHOWN else ""
    return TargetMismatchError(
        f"the target differs from what is stored in {count} "
        f"{'leaf' if count == 1 else 'leaves'}; no array was read. Change the target; "
        f"put ... in place of a leaf to skip it.\n  {lines}{more}",
        problems=tuple(problems),
    )


def _missing(name: str, leaf: Any, stored: dict[str, int]) -> str:
    near = difflib.get_close_matches(name, stored, n=1) if len(stored) <= 10_000 else []
    hint = f" (is it {near[0]!r}?)" if near else ""
    return f"{name}: not stored, wanted {_text_of(leaf)}{hint}"


def _differs(entry: LeafEntry, wanted: str) -> str:
    return f"{entry.name}: stored {_stored_text(entry)}, wanted {wanted}"


def _array_target(leaf: Any, entry: LeafEntry) -> ArrayTarget | None:
    """Return what an array-like target leaf asks for, or None if it is not array-like."""
    if isinstance(leaf, np.ndarray):
        return ArrayTarget("numpy", leaf.dtype)
    if isinstance(leaf, np.generic):
        return ArrayTarget("numpy_scalar", leaf.dtype)
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return None
    kind = getattr(leaf, "kind", "jax")
    sharding = getattr(leaf, "sharding", None)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        # The dtype of typed PRNG keys is none of numpy's.
        return None
    if kind != "jax" or sharding is None:
        return ArrayTarget(kind, dtype)
    return ArrayTarget("jax", dtype, _placement(sharding, entry))


def _placement(sharding: jax.sharding.Sharding, entry: LeafEntry) -> jax.sharding.Sharding | None:
    """Return the sharding to restore to; None for an array that was free to move and may stay so.

    An uncommitted array (`jnp.zeros(3)`) has the sharding of the default device too, but committing
    it there would make jax refuse to combine it with arrays on other devices.
    """
    if entry.kind == "jax" and not entry.committed:
        free = jax.sharding.SingleDeviceSharding(_default_device())
        if sharding == free:
            return None
    return sharding


def _default_device() -> jax.Device:
    chosen = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]


def _shape_problems(entry: LeafEntry, shape: tuple[int, ...]) -> list[str]:
    if tuple(entry.shape) == tuple(shape):
        return []
    return [_differs(entry, f"shape {list(shape)}")]


def _array_problems(entry: LeafEntry, target: ArrayTarget) -> list[str]:
    stored = DTYPES[entry.dtype or ""]
    if target.dtype.name not in DTYPES or _category(stored) != _category(target.dtype):
        return [_differs(entry, f"dtype {target.dtype}, which is not of the same kind")]
    if target.kind != "jax":
        return []
    if jax.dtypes.canonicalize_dtype(target.dtype) != target.dtype:
        return [
            _differs(entry, f"{target.dtype} as a jax array, but jax_enable_x64 is off: jax would ")
            + "cut it to 32 bits. Switch it on, or ask for a 32-bit dtype or a numpy array"
        ]
    if target.sharding is not None:
        try:
            target.sharding.shard_shape(tuple(entry.shape))
        except Exception as error:
            # jax raises what its own code happens to raise: ValueError, IndexError, ...
            return [_differs(entry, f"a sharding that does not divide it ({error})")]
    return []


def _category(dtype: np.dtype[Any]) -> str:
    for kind in (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__
    return dtype.name


def _same_scalar(leaf: Any, entry: LeafEntry) -> bool:
    kind = leaf if isinstance(leaf, type) else type(leaf)
    return entry.kind not in ARRAY_KINDS and kind.__name__ == entry.kind


def _text_of(leaf: Any) -> str:
    if leaf is ...:
        return "to be skipped"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{getattr(dtype, 'name', dtype)}{list(shape)}"
    return leaf.__name__ if isinstance(leaf, type) else f"a {type(leaf).__name__}"


def _stored_text(entry: LeafEntry) -> str:
    if entry.kind in ARRAY_KINDS:
        return f"{entry.dtype}{entry.shape}"
    return f"a Python {entry.kind}"
