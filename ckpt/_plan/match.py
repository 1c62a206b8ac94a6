"""Matching: a target is compared with a manifest, and all differences are reported at once."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry, ShardingEntry
from ckpt._format.places import Place, StoredPlace, place_of
from ckpt._plan.adapt import Adapt, SourceArrays, mismatch
from ckpt._plan.targets import (
    PYTHON_TYPES,
    ArrayRead,
    ArrayTarget,
    VirtualArray,
    array_problem,
    array_target,
    is_abstract,
    key_shape,
    python_target,
    resize,
    same_category,
    scalar_value,
    stored_text,
    wanted_text,
)
from ckpt._runtime.threads import caller
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, UNREADABLE, decode_scalar
from ckpt._tree.leaf_names import ROOT, near_miss
from ckpt._tree.leaf_specs import is_function, kind_of_type
from ckpt._tree.structure import Structure
from ckpt.errors import InvalidArgumentError

# Most hints at similar names, since finding one takes milliseconds.
_MOST_HINTS = 20

_Likeness = tuple[object, ...]


class Match(Struct):
    """The arrays to read, and the leaves that they are for.

    Attributes:
        values: The leaves of the result that are not read: scalars, kept and skipped leaves.
        reads: The arrays to read.
        places: Number of the read that gives a leaf, by number of the leaf.
        used: Stored leaf paths that are loaded.
        kept: Leaf paths of the target that keep the target's own value.
        moved: Losses of arrays that cannot get all of their stored place, by leaf path.
    """

    values: list[Any] = field(default_factory=list)
    reads: list[ArrayRead] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)

    def read(
        self, path: str, source: VirtualArray, target: ArrayTarget, shape: tuple[int, ...]
    ) -> int:
        """Read an array for the next leaf; return the number of the read."""
        fitted = source if shape == source.shape else resize(source, shape)
        stored = source.entry.dtype or ""
        number = len(self.reads)
        self.reads.append(ArrayRead(target, shape, stored, fitted.leaf, path, fitted.pieces))
        self.share(number)
        return number

    def place(self, path: str, target: ArrayTarget, value: np.ndarray[Any, Any]) -> None:
        """Place an array that is already known for the next leaf."""
        stored = value.dtype.name
        self.reads.append(ArrayRead(target, value.shape, stored, None, path, value=value))
        self.share(len(self.reads) - 1)

    def share(self, read: int) -> None:
        """Use the array of an earlier read for the next leaf."""
        self.places[len(self.values)] = read
        self.values.append(None)

    def leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """Return all leaves, including the arrays that were read."""
        found = list(self.values)
        for place, read in self.places.items():
            found[place] = arrays[read]
        return found


def match_as_saved(item: ItemEntry, stored: SourceArrays, adapt: Adapt) -> Match:
    """Match every leaf as it was saved; a leaf that is not selected is `...`.

    The leaves are those of the stored tree, or, if leaves were renamed or transformed, those of
    `stored.sources`.

    Raises:
        TargetMismatchError: A 64-bit jax array is stored, and this process has 64 bits switched
            off; or a function is stored.
    """
    work = _AsSaved(item, adapt)
    if stored.moved:
        for name, source in stored.sources.items():
            work.add(name, source)
    else:
        for name in unboxed_names(item.nodes, item.leaves.names):
            work.add(name, stored.sources.get(name))
    if work.problems:
        raise mismatch(work.problems, has_target=False)
    return work.match


class _AsSaved:
    """A single pass over arrays that are restored as they were saved."""

    def __init__(self, item: ItemEntry, adapt: Adapt) -> None:
        self.match = Match()
        self.problems: list[str] = []
        self._adapt = adapt
        self._places = _Places(item.shardings)
        # Cached: thousands of leaves are equal in everything that matters here.
        self._known: dict[_Likeness, tuple[ArrayTarget, str]] = {}
        # Reads of objects that stood at several places, and are to do so again; by leaf number.
        self._shared: dict[int, int] = {}

    def add(self, name: str, source: VirtualArray | None) -> None:
        match = self.match
        if source is None:
            match.values.append(...)
            return
        match.used.extend(source.used)
        entry = source.entry
        if entry.kind == CALLABLE:
            self.problems.append(
                f"{name}: stored {stored_text(source)}; of a function only the name is stored, so "
                "like= has to have the function in its place"
            )
        if entry.kind not in ARRAY_KINDS:
            match.values.append(None if entry.kind == CALLABLE else decode_scalar(entry))
            return
        target = self._target(name, source)
        known = None if source.leaf is None else self._shared.get(source.leaf)
        # Arrays that are cast by pattern may differ from place to place.
        if known is not None and match.reads[known].target == target:
            match.share(known)
            return
        read = match.read(name, source, target, source.shape)
        if source.leaf is not None:
            self._shared[source.leaf] = read

    def _target(self, name: str, source: VirtualArray) -> ArrayTarget:
        entry = source.entry
        cast = _cast_of(self._adapt, name, source)
        dtype = cast or DTYPES[entry.dtype or ""]
        placed = (entry.kind, entry.committed, entry.sharding)
        likeness = (*placed, dtype, entry.weak_type, entry.impl, source.shape)
        found = self._known.get(likeness)
        if found is None:
            place = self._places.of(entry, source.shape, as_saved=True)
            target = ArrayTarget(
                entry.kind, dtype, place.sharding, entry.weak_type, entry.impl, cast is not None
            )
            problem = array_problem(source, target, source.shape, casts=True)
            if problem is not None:
                self.problems.append(f"{name}: stored {stored_text(source)}, {problem}")
                return target
            found = self._known[likeness] = target, place.lost
        target, lost = found
        if lost:
            self.match.moved[name] = lost
        return target


def match_target(target: Structure, stored: SourceArrays, adapt: Adapt) -> Match:
    """Match a target with what is stored.

    Leaves are matched by their path, so containers may differ in kind (a dict for a namedtuple) as
    long as the paths agree; with or without the keys of boxes.

    Raises:
        TargetMismatchError: Leaves are missing, extra, or of another shape or kind; lists them all.
    """
    work = _ToTarget(stored, adapt)
    names = _stored_names(target, stored.sources)
    for name, leaf in zip(names, target.leaves, strict=True):
        work.add(name, leaf)
    if adapt.extra == "error":
        wanted = set(names)
        work.problems.extend(
            f"{name}: stored {stored_text(stored.sources[name])}, not in the target"
            for name in stored.sources
            if name not in wanted
            and not name.startswith(work.skipped)
            and stored.sources[name].entry.kind != CALLABLE
        )
    if work.problems:
        raise mismatch(work.problems)
    return work.match


def _stored_names(target: Structure, sources: Container[str]) -> Sequence[str]:
    """Return the stored names of the leaves of a target.

    A box adds no key to a name. Other libraries store its value in a dict of one key.
    """
    names = unboxed_names(target.nodes, target.names)
    if names is target.names:
        return names
    return [
        full if name not in sources and full in sources else name
        for name, full in zip(names, target.names, strict=True)
    ]


class _ToTarget:
    """A single pass over the leaves of a target."""

    def __init__(self, stored: SourceArrays, adapt: Adapt) -> None:
        self.match = Match()
        self.problems: list[str] = []
        # Prefixes of stored leaf paths that are skipped.
        self.skipped: tuple[str, ...] = ()
        self._stored = stored
        self._adapt = adapt
        self._is_adapted = adapt.cast is not None or adapt.resize is not None
        self._hints = 0
        # Cached: thousands of leaves are equal in everything that matters here, and matching one
        # takes 40 us.
        self._known: dict[_Likeness, tuple[ArrayTarget, str]] = {}
        self._shardings = _Shardings()
        self._places = _Places(stored.shardings)
        self._are_arrays: dict[type, bool] = {}
        # Reads of arrays that are at several places of the target, and are restored as one array.
        self._shared: dict[tuple[int, int], int] = {}

    def add(self, name: str, leaf: Any) -> None:
        is_array = self._is_array(leaf)
        if not is_array and isinstance(leaf, jax.core.Tracer):
            raise InvalidArgumentError(
                "like= has a traced value here: call restore() outside jit, grad and vmap",
                leaf=name,
            )
        source = self._stored.sources.get(name)
        if source is not None and source.entry.kind in ARRAY_KINDS and leaf is not ...:
            self._array(name, leaf, source, is_array)
        elif is_function(leaf) and (source is None or source.entry.kind == CALLABLE):
            # Code is not stored; the target has its own.
            self.match.values.append(leaf)
        elif source is None:
            self._absent(name, leaf)
        elif leaf is ...:
            self.match.values.append(...)
        elif source.entry.kind in UNREADABLE:
            decode_scalar(source.entry)
        # A type in the place of a leaf (`int`) asks for a scalar of its kind.
        elif kind_of_type(leaf if isinstance(leaf, type) else type(leaf)) == source.entry.kind:
            self.match.used.extend(source.used)
            self.match.values.append(decode_scalar(source.entry))
        else:
            self._scalar(name, leaf, source)

    def _scalar(self, name: str, leaf: Any, source: VirtualArray) -> None:
        """Match a stored Python scalar as an array without dimensions."""
        entry = source.entry
        found = array_target(leaf, entry) if entry.kind in PYTHON_TYPES else None
        target, shape = found or (None, ())
        problem: str | None = f"wanted {wanted_text(leaf)}"
        if target is not None and shape == ():
            value = scalar_value(decode_scalar(entry), target.dtype)
            if value is not None:
                stored = VirtualArray(replace(entry, dtype=value.dtype.name), (), None)
                # Without dimensions, the array has nothing to lose.
                target, _ = self._placed(target, entry, (), leaf)
                problem = array_problem(stored, target, (), casts=False)
                if problem is None:
                    self.match.used.extend(source.used)
                    self.match.place(name, target, value)
                    return
        self._differs(name, source, problem or "")

    def _absent(self, name: str, leaf: Any) -> None:
        below = "" if name == ROOT else f"{name}."
        known = (self._stored.sources, self._stored.unselected)
        if leaf is ... and (
            not below or any(each.startswith(below) for names in known for each in names)
        ):
            self.match.values.append(...)
            self.skipped = (*self.skipped, below)
        elif name in self._stored.unselected and (is_abstract(leaf) or leaf is ...):
            self.match.values.append(...)
        elif name in self._stored.unselected or self._adapt.missing == "keep":
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                self.problems.append(
                    f"{name}: the target is to keep its own array, which was donated or deleted; "
                    "put a new array or ... in its place"
                )
            self.match.values.append(leaf)
            self.match.kept.append(name)
        else:
            hint = ""
            if self._hints < _MOST_HINTS:
                self._hints += 1
                hint = near_miss(name, self._stored.sources)
            self.problems.append(f"{name}: not stored, wanted {wanted_text(leaf)}{hint}")
            self.match.values.append(None)

    def _is_array(self, leaf: Any) -> bool:
        """Return True if a leaf is a jax array; cached, since asking jax takes a microsecond."""
        kind = type(leaf)
        found = self._are_arrays.get(kind)
        if found is None:
            found = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            self._are_arrays[kind] = found
        return found

    def _array(self, name: str, leaf: Any, source: VirtualArray, is_array: bool) -> None:
        self.match.used.extend(source.used)
        likeness: _Likeness | None = None
        if not self._is_adapted:
            likeness = _likeness(leaf, source, self._shardings, is_array)
        known = self._known.get(likeness) if likeness is not None else None
        shape = source.shape
        if known is None:
            scalar = python_target(leaf, source)
            found = (scalar, ()) if scalar is not None else array_target(leaf, source.entry)
            if found is None:
                self._differs(name, source, f"wanted {wanted_text(leaf)}")
                return
            target, wanted = found
            if source.entry.kind == "key" and target.kind != "key":
                hint = "a typed key: make the target with jax.random.key"
                self._differs(name, source, f"wanted {wanted_text(leaf)}, which is not {hint}")
                return
            cast = _cast_of(self._adapt, name, source)
            if cast is not None:
                target = replace(target, dtype=cast, is_cast=True)
            fitted = self._shape(name, source, wanted)
            if fitted is None:
                self._differs(name, source, f"wanted shape {list(wanted)}")
                return
            shape = fitted
            target, lost = self._placed(target, source.entry, shape, leaf)
            problem = array_problem(source, target, shape, casts=cast is not None)
            if problem is not None:
                self._differs(name, source, problem)
                return
            known = target, lost
            if likeness is not None:
                self._known[likeness] = known
        target, lost = known
        if lost:
            self.match.moved[name] = lost
        if source.leaf is None or not is_array:
            self.match.read(name, source, target, shape)
            return
        same = (id(leaf), source.leaf)
        if same in self._shared:
            read = self.match.reads[self._shared[same]]
            if (read.target, read.shape) == (target, shape):
                self.match.share(self._shared[same])
                return
        self._shared[same] = self.match.read(name, source, target, shape)

    def _placed(
        self, target: ArrayTarget, entry: LeafEntry, shape: tuple[int, ...], leaf: Any
    ) -> tuple[ArrayTarget, str]:
        """Return a target with its place, and the parts of the stored place that it loses."""
        if target.kind not in ("jax", "key"):
            return target, ""
        is_free = not getattr(leaf, "committed", True)
        place = self._places.of(entry, shape, target.sharding, is_free=is_free)
        return replace(target, sharding=place.sharding), place.lost

    def _shape(
        self, name: str, source: VirtualArray, wanted: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Return the shape to read, for a PRNG key that of its data; None if it is not allowed."""
        entry = source.entry
        if entry.kind == "key":
            return source.shape if key_shape(entry) == wanted else None
        if wanted == source.shape:
            return wanted
        choice = self._adapt.resize_for(name)
        if choice is None or len(wanted) != len(source.shape):
            return None
        pairs = list(zip(wanted, source.shape, strict=True))
        cuts, pads = any(a < b for a, b in pairs), any(a > b for a, b in pairs)
        if (cuts and choice == "pad") or (pads and choice == "truncate"):
            return None
        return wanted

    def _differs(self, name: str, source: VirtualArray, problem: str) -> None:
        self.problems.append(f"{name}: stored {stored_text(source)}, {problem}")
        self.match.values.append(None)


def _cast_of(adapt: Adapt, name: str, source: VirtualArray) -> Any:
    """Return the dtype that an array is cast to, or None.

    A single dtype for all arrays casts only arrays of its kind, so no step counters to bfloat16.
    """
    if adapt.cast is None or source.entry.kind == "key":
        return None
    dtype = adapt.dtype_for(name)
    if dtype is None or isinstance(adapt.cast, Mapping):
        return dtype
    return dtype if same_category(dtype, DTYPES[source.entry.dtype or ""]) else None


class _Places:
    """Places of arrays whose target names no place, or a place without devices."""

    def __init__(self, shardings: Sequence[ShardingEntry]) -> None:
        self._entries = shardings
        self._stored: dict[tuple[int, bool], StoredPlace] = {}
        self._mesh = caller().mesh

    def of(
        self,
        entry: LeafEntry,
        shape: tuple[int, ...],
        wanted: jax.sharding.Sharding | None = None,
        *,
        is_free: bool = False,
        as_saved: bool = False,
    ) -> Place:
        """Return the place of an array; see `place_of`. As saved, its own devices come first."""
        stored, number = None, entry.sharding
        if number is not None:
            key = number, not entry.committed
            stored = self._stored.get(key)
            if stored is None:
                stored = StoredPlace.of(self._entries[number], is_free=not entry.committed)
                self._stored[key] = stored
        is_known = as_saved and (stored is None or stored.sharding is not None)
        return place_of(shape, stored, wanted, None if is_known else self._mesh, is_free=is_free)


class _Shardings:
    """Numbers of shardings: equal shardings have the same number.

    Every jax array has a sharding object of its own, and comparing two of them takes longer than
    the rest of a likeness.
    """

    def __init__(self) -> None:
        # Looked up by identity first: the target keeps the shardings alive.
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[jax.sharding.Sharding | None, int] = {}

    def number(self, sharding: jax.sharding.Sharding | None) -> int:
        number = self._by_identity.get(id(sharding))
        if number is None:
            number = self._by_value.setdefault(sharding, len(self._by_value))
            self._by_identity[id(sharding)] = number
        return number


def _likeness(
    leaf: Any, source: VirtualArray, shardings: _Shardings, is_array: bool
) -> _Likeness | None:
    """Return a key that is equal only for pairs that match in the same way, or None."""
    wanted: _Likeness
    if is_array:
        # The abstract value has dtype, shape and weak type.
        wanted = (leaf.aval, leaf.committed)
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        wanted = (leaf.dtype, leaf.shape, leaf.weak_type, leaf.format)
    else:
        return None
    entry = source.entry
    stored = (entry.kind, entry.committed, entry.sharding, entry.dtype, entry.impl, source.shape)
    return (type(leaf), shardings.number(leaf.sharding), *wanted, *stored)
