"""Adapting: stored leaves are changed to fit a target that differs from them on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from msgspec import Struct

from ckpt._arguments import invalid, one_of
from ckpt._format.array_format import DTYPES, storable_dtype
from ckpt._format.manifest import ItemEntry, ShardingEntry
from ckpt._plan.targets import VirtualArray, same_category
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import PathRule, compile_pattern, compile_rule, fill_stars, suggestion
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, TargetMismatchError

# From leaf paths to their arrays; see `ckpt.surgery`.
Transform = Callable[[Mapping[str, VirtualArray]], Mapping[str, VirtualArray]]
Resize = Literal["pad", "truncate", "both"]
Missing = Literal["error", "keep"]
Extra = Literal["error", "ignore"]

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a restore for the leaves of one item.

    Attributes:
        item: Name of the item.
        used: Stored leaf paths that were loaded.
        unused: Stored leaf paths that were not loaded.
        kept: Leaf paths of the target that kept their own value, functions aside; with
            `missing="keep"` these may also be shapes, types and `...`.

    Example:
        ```python
        adapt = ckpt.Adapt(extra="ignore", report=lambda report: print(report.unused))
        found = await mgr.restore(like={"params": params}, adapt=adapt)
        ```
    """

    item: str
    used: tuple[str, ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adapt:
    """The differences that are allowed between a checkpoint and the target it is loaded into.

    Without it none is allowed: every leaf of one must be in the other. Leaf paths are written as in
    messages and `metadata()`, `params.layers.0.kernel`. In a pattern `*` stands for any text within
    one key and a key `**` for any number of keys; a pattern covers each path that it matches and
    everything below. A slash in a key may be written `/` or `%2F`, as it is shown. A pattern that
    covers no leaf is an error. If several patterns of a mapping cover a leaf, the first one counts.

    The attributes are applied in their order here.

    Attributes:
        select: Load only these stored leaves: a pattern, a function of the leaf path, or several.
            Target leaves elsewhere keep their own value; without a target there is `...`.
        rename: New paths of stored leaves, as `{pattern: new path}`, where the `*` of a pattern
            stand for those of its new path, or as a function of the leaf path.
        transforms: Functions from `ckpt.surgery`, taken in the order of the list. Without a target
            the tree is restored as nested dicts by leaf path if leaves were renamed or transformed.
        cast: `{pattern: dtype}` that arrays are cast to, also of another kind; or one dtype for all
            arrays of its kind. (Within one kind, as from float32 to bfloat16, the dtype of the
            target is enough.)
        resize: `pad` fills arrays smaller than the target's with zeros at the end of each axis,
            `truncate` cuts larger ones, `both` does either; or `{pattern: choice}`.
        missing: `error` if target leaves that are not stored are an error; `keep` if they keep
            their value, shape or `...`.
        extra: `error` if stored leaves that the target does not have are an error; `ignore` if they
            are ignored.
        report: Called with a `RestoreReport` for every item that was loaded.

    Raises:
        InvalidArgumentError: An attribute is invalid.

    Example:
        ```python
        adapt = ckpt.Adapt(rename={"params": "model"}, extra="ignore")
        found = await mgr.restore(like={"model": params}, adapt=adapt)
        ```
    """

    select: PathRule | None = None
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    transforms: Sequence[Transform] = ()
    cast: Any = None
    resize: Resize | Mapping[str, Resize] | None = None
    missing: Missing = "error"
    extra: Extra = "error"
    report: Callable[[RestoreReport], object] | None = None

    def __post_init__(self) -> None:
        """Check all that can be checked without a checkpoint."""
        one_of("missing", self.missing, get_args(Missing), of="Adapt")
        one_of("extra", self.extra, get_args(Extra), of="Adapt")
        if self.select is not None:
            _check_select(self.select)
        for name in ("rename", "cast", "resize"):
            rules = getattr(self, name)
            for pattern in rules if isinstance(rules, Mapping) else ():
                try:
                    compile_pattern(pattern)
                except InvalidArgumentError as error:
                    raise InvalidArgumentError(f"{name}: {error.message}") from error
        _check_rename(self.rename)
        for choice in _values(self.resize):
            one_of("resize", choice, get_args(Resize), of="Adapt")
        for dtype in _values(self.cast):
            dtype_of(dtype)
        given: object = self.transforms
        if not isinstance(given, Sequence) or not all(map(callable, given)):
            what = "a list, such as [ckpt.surgery.stack('layers.*', to='layers')]"
            raise invalid("transforms", given, what, of="Adapt")
        if self.report is not None and not callable(self.report):
            raise invalid("report", self.report, "a function", of="Adapt")

    def dtype_for(self, path: str) -> np.dtype[Any] | None:
        """Return the dtype that the array at `path` is cast to, or None."""
        found = _value_for(self.cast, path)
        return None if found is None else dtype_of(found)

    def resize_for(self, path: str) -> Resize | None:
        """Return the kind of resize allowed for the array at `path`, or None."""
        found: Resize | None = _value_for(self.resize, path)
        return found


class SourceArrays(Struct, frozen=True):
    """The arrays that an item can be restored from.

    Attributes:
        sources: The arrays by leaf path, in the order of the stored leaves.
        unselected: Stored leaf paths that were not selected.
        moved: True if paths differ from those of the stored tree.
        shardings: The stored shardings of the item, by number.
    """

    sources: Mapping[str, VirtualArray]
    unselected: frozenset[str]
    moved: bool
    shardings: Sequence[ShardingEntry]


def adapted(item: ItemEntry, adapt: Adapt) -> SourceArrays:
    """Return the arrays of an item: selected, renamed and transformed.

    Raises:
        TargetMismatchError: A pattern covers nothing, or two leaves get the same path.
        InvalidArgumentError: A transform cannot be applied to the stored arrays.
    """
    names = unboxed_names(item.nodes, item.leaves.names)
    numbers = {name: number for number, name in enumerate(names)}
    sources: Mapping[str, VirtualArray] = _AsStored(item, numbers)
    if len(sources) != len(item.leaves):
        raise CorruptCheckpointError("two leaves are stored at one place")
    unselected: frozenset[str] = frozenset()
    if adapt.select is not None:
        chosen = _selected(list(sources), adapt.select)
        unselected = frozenset(sources.keys() - chosen)
        numbers = {name: number for name, number in numbers.items() if name in chosen}
        sources = _AsStored(item, numbers)
    moved = adapt.rename is not None or bool(adapt.transforms)
    if adapt.rename is not None:
        sources = _renamed(sources, adapt.rename)
    for transform in adapt.transforms:
        sources = dict(transform(sources))
    for what, rules in (("cast", adapt.cast), ("resize", adapt.resize)):
        if isinstance(rules, Mapping):
            _deciding(what, rules, list(sources))
    if adapt.cast is not None and not isinstance(adapt.cast, Mapping):
        _check_cast(dtype_of(adapt.cast), sources)
    return SourceArrays(sources, unselected, moved, item.shardings)


class _AsStored(Mapping[str, VirtualArray]):
    """The leaves as they are stored, each made when it is looked up.

    Thousands of objects that stay alive would trigger full runs of Python's garbage collector.
    """

    def __init__(self, item: ItemEntry, numbers: Mapping[str, int]) -> None:
        self._leaves = list(item.leaves)
        self._numbers = numbers

    def __getitem__(self, path: str) -> VirtualArray:
        number = self._numbers[path]
        entry = self._leaves[number]
        return VirtualArray.of(entry, number if entry.same_as is None else entry.same_as, path)

    def get(self, path: str, default: Any = None) -> Any:
        # The method of `Mapping` catches an exception for each leaf that is looked up.
        return self[path] if path in self._numbers else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, path: object) -> bool:
        return path in self._numbers


def _check_cast(dtype: np.dtype[Any], sources: Mapping[str, VirtualArray]) -> None:
    """Refuse a dtype for all arrays of its kind if there is no such array."""
    found = {
        source.entry.dtype
        for source in sources.values()
        if source.entry.kind in ARRAY_KINDS and source.entry.kind != "key"
    }
    if not any(same_category(dtype, DTYPES[name]) for name in found if name in DTYPES):
        there = ", ".join(sorted(name for name in found if name)) or "no arrays"
        raise TargetMismatchError(
            f"cast={dtype.name!r} casts arrays of its own kind, and there are none: stored are "
            f"{there}. To cast arrays of another kind, name them: cast={{'**': {dtype.name!r}}}; "
            "no array was read"
        )


def _selected(names: Sequence[str], rule: PathRule) -> set[str]:
    chosen: set[str] = set()
    for text, covers in compile_rule(rule):
        chosen.update(_check_covers("select", text, covers, names))
    return chosen


def _check_covers(
    what: str, text: str, covers: Callable[[str], bool], names: Sequence[str]
) -> list[str]:
    found = [name for name in names if covers(name)]
    if not found:
        raise TargetMismatchError(
            f"{what}: {text!r:.80} covers none of the {len(names)} stored leaves"
            f"{suggestion(text, names)}; no array was read"
        )
    return found


def _deciding(what: str, patterns: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Return the first pattern that covers each leaf; uncovered leaves are left out."""
    first: dict[str, str] = {}
    for text in patterns:
        covered = _check_covers(what, text, compile_pattern(text).covers, names)
        if all(name in first for name in covered):
            raise InvalidArgumentError(
                f"{what}: {text!r:.80} has no effect, since {first[covered[0]]!r:.80} comes "
                "before it and covers the same leaves. Put it first"
            )
        for name in covered:
            first.setdefault(name, text)
    return first


def _renamed(
    sources: Mapping[str, VirtualArray], rename: Mapping[str, str] | Callable[[str], str]
) -> dict[str, VirtualArray]:
    names = list(sources)
    if callable(rename):
        new = {name: _path(rename(name), name) for name in names}
    else:
        new = {name: name for name in names}
        for name, text in _deciding("rename", rename, names).items():
            stars, below = compile_pattern(text).split(name) or ((), "")
            new[name] = fill_stars(rename[text], stars, below)
    taken: dict[str, str] = {}
    for name in names:
        other = taken.setdefault(new[name], name)
        if other != name:
            raise TargetMismatchError(
                f"rename: {other!r:.80} and {name!r:.80} both become {new[name]!r:.80}; no array "
                "was read"
            )
    return {new[name]: source for name, source in sources.items()}


def _path(given: object, name: str) -> str:
    if not isinstance(given, str) or not given:
        raise InvalidArgumentError(
            f"rename: the function returned {given!r:.60} for {name!r:.80}: expected a leaf path"
        )
    return given


def mismatch(problems: Sequence[str], *, has_target: bool = True) -> TargetMismatchError:
    """Return one error that lists all differences, a line for every leaf."""
    count = len(problems)
    noun = "leaf" if count == 1 else "leaves"
    lines = "\n  ".join(problems[:_SHOWN])
    more = f"\n  ... and {count - _SHOWN} more, in .problems" if count > _SHOWN else ""
    what = (
        f"the target differs from what is stored in {count} {noun}; no array was read. Change the "
        "target; put ... in place of a leaf to skip it; or say what may differ with "
        "adapt=ckpt.Adapt(...)."
        if has_target
        else f"{count} {noun} cannot be restored without a target; no array was read. Pass like=, "
        "or leave them out with adapt=ckpt.Adapt(select=...)."
    )
    return TargetMismatchError(f"{what}\n  {lines}{more}", problems=tuple(problems))


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return a dtype that arrays can be cast to.

    Raises:
        InvalidArgumentError: The dtype cannot be stored.
    """
    found = storable_dtype(dtype)
    if found is None:
        raise invalid("cast", dtype, "a dtype that can be stored, such as 'bfloat16'", of="Adapt")
    return found


def _values(rules: Any) -> list[Any]:
    if rules is None:
        return []
    return list(rules.values()) if isinstance(rules, Mapping) else [rules]


def _value_for(rules: Any, path: str) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    for pattern, value in rules.items():
        if compile_pattern(pattern).covers(path):
            return value
    return None


def _check_select(rule: PathRule) -> None:
    try:
        parts = compile_rule(rule)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"select: {error.message}") from error
    if not parts:
        raise InvalidArgumentError("select=[]: expected at least one pattern")


def _check_rename(rename: object) -> None:
    paths = list(rename.values()) if isinstance(rename, Mapping) else []
    known = rename is None or callable(rename) or isinstance(rename, Mapping)
    wrong = next((path for path in paths if not isinstance(path, str)), None if known else rename)
    if wrong is not None or None in paths:
        what = "{'params.*': 'model.*'}, or a function from one leaf path to another"
        raise invalid("rename", wrong, what, of="Adapt")
    for pattern, path in rename.items() if isinstance(rename, Mapping) else ():
        stars = pattern.replace("**", "").count("*")
        if path.count("*") != stars:
            raise InvalidArgumentError(
                f"rename: {path!r:.80} has {path.count('*')} '*', where {pattern!r:.80} has {stars}"
            )
