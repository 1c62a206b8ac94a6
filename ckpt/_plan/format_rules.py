"""Format rules: the stored format of leaves, by leaf path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import invalid, shown
from ckpt._format.array_format import ArrayFormat, cast_refusal
from ckpt._format.dtypes import DTYPES, storable_dtype
from ckpt._tree.leaf_specs import LeafSpec
from ckpt._tree.patterns import Pattern, compile_pattern
from ckpt._tree.suggestions import near_miss
from ckpt.errors import CheckpointError, InvalidArgumentError, UnsupportedLeafError

# Formats by pattern of leaf paths, of which the first that covers a leaf counts; or a function of
# the leaf path and the shape and dtype of the array; or one format for all arrays, whose dtype
# applies to arrays of its kind.
Formats = (
    Mapping[str, ArrayFormat | str]
    | Callable[[str, jax.ShapeDtypeStruct], ArrayFormat | None]
    | ArrayFormat
    | str
)
# Without PRNG keys, whose dtype is fixed, and Python scalars, which have none.
_FORMATTED_KINDS = frozenset({"jax", "numpy", "numpy_scalar"})


class Formatted(Struct, frozen=True):
    """The leaves of an item with their formats.

    Attributes:
        specs: Spec of every leaf, including its format.
        paths: The leaf paths.
        used: Numbers of the patterns that were applied to an array.
    """

    specs: Sequence[LeafSpec]
    paths: Sequence[str]
    used: frozenset[int]


class FormatRules(Struct, frozen=True):
    """Checked formats: patterns in their order, or a function."""

    patterns: tuple[tuple[Pattern, ArrayFormat], ...]
    function: Callable[[str, jax.ShapeDtypeStruct], ArrayFormat | None] | None = None

    def find(self, path: str, spec: LeafSpec) -> tuple[ArrayFormat | None, int | None]:
        """Return the format of an array, and the number of the pattern that gives it."""
        if self.function is not None:
            struct = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                spec.shape, DTYPES[spec.dtype or ""], sharding=spec.sharding
            )
            found: object = self.function(path, struct)
            if found is not None and not isinstance(found, ArrayFormat):
                raise InvalidArgumentError(
                    f"formats returned {found!r:.60}: expected an ArrayFormat or None", leaf=path
                )
            return found, None
        for number, (pattern, array_format) in enumerate(self.patterns):
            if pattern.covers(path):
                return array_format, number
        return None, None

    def check_used(self, items: Iterable[Formatted]) -> None:
        """Check that every pattern was applied to an array of a save.

        Args:
            items: The items of the save.

        Raises:
            InvalidArgumentError: A pattern was not; the error gives the reason.
        """
        found = list(items)
        used = {number for item in found for number in item.used}
        for number, (pattern, _) in enumerate(self.patterns):
            if number not in used:
                raise InvalidArgumentError(self._why_unused(pattern, found))

    def _why_unused(self, pattern: Pattern, items: Sequence[Formatted]) -> str:
        what = f"formats: {pattern.text!r:.80}"
        covered = [
            (path, spec)
            for item in items
            for path, spec in zip(item.paths, item.specs, strict=True)
            if pattern.covers(path)
        ]
        arrays = [path for path, spec in covered if spec.kind in _FORMATTED_KINDS]
        if arrays:
            other = next(each for each, _ in self.patterns if each.covers(arrays[0]))
            return (
                f"{what} has no effect: {other.text!r:.80} comes before it and covers all its "
                "arrays. Put it first"
            )
        if covered:
            path, spec = covered[0]
            kind = "PRNG key" if spec.kind == "key" else f"leaf of kind {spec.kind}"
            return f"{what} covers no array: {path!r:.80} is a {kind}, which is stored as it is"
        paths = [path for item in items for path in item.paths]
        return f"{what} covers no leaf{near_miss(pattern.text, paths)}"

    def formatted(self, paths: Sequence[str], specs: Sequence[LeafSpec]) -> Formatted:
        """Return the leaves with their formats.

        One array at two places with different formats is stored twice.

        Args:
            paths: The leaf paths, without the keys of boxes.
            specs: Spec of every leaf.

        Raises:
            UnsupportedLeafError: A leaf cannot be stored in its format; names the first, notes the
                others.
        """
        used: set[int] = set()
        formatted: list[LeafSpec] = []
        problems: list[CheckpointError] = []
        # The leaves that hold one array in different formats, by the number of its first leaf.
        holders: dict[int, list[int]] = {}
        for number, (path, spec) in enumerate(zip(paths, specs, strict=True)):
            new = spec
            if spec.kind in _FORMATTED_KINDS:
                try:
                    found, pattern = self.find(path, spec)
                    if pattern is not None:
                        used.add(pattern)
                    if found is not None and not found.is_default:
                        new = _formatted(spec, found, path)
                except CheckpointError as error:
                    problems.append(error)
            new = replace(new, same_as=None) if spec.same_as is not None else new
            first = number if spec.same_as is None else spec.same_as
            others = holders.setdefault(first, [])
            same = next((other for other in others if formatted[other] == new), None)
            if same is None:
                others.append(number)
            formatted.append(new)
            if same is not None:
                # Set only now, since the comparison above ignores `same_as`.
                formatted[number] = replace(new, same_as=same)
        if problems:
            for other in problems[1:20]:
                problems[0].add_note(f"also: {other}")
            raise problems[0]
        return Formatted(formatted, paths, frozenset(used))


def compile_formats(formats: Formats | None) -> FormatRules | None:
    """Return the rules of `formats`, or None if there are none.

    Raises:
        InvalidArgumentError: The formats are invalid.
    """
    given: object = formats
    if given is None:
        return None
    if isinstance(given, Mapping):
        rules = tuple(
            (compile_pattern(text), _format_of(text, each)) for text, each in given.items()
        )
        return FormatRules(rules) if rules else None
    if (found := _format(given)) is not None:
        return FormatRules((), partial(_within_kind, found))
    if callable(given):
        return FormatRules((), given)
    what = "a dtype, an ArrayFormat, {pattern of leaf paths: ArrayFormat} or a function"
    raise invalid("formats", given, what)


def _format_of(pattern: object, given: object) -> ArrayFormat:
    found = _format(given)
    if found is None:
        what = "an ArrayFormat, or a dtype such as 'bfloat16'"
        raise invalid(f"formats[{shown(pattern)}]", given, what)
    return found


def _format(given: object) -> ArrayFormat | None:
    """Return a format; a dtype alone stands for a cast. None for other objects."""
    if isinstance(given, ArrayFormat):
        return given
    dtype = None if given is None else storable_dtype(given)
    return None if dtype is None else ArrayFormat(dtype=dtype.name)


def _within_kind(found: ArrayFormat, path: str, leaf: jax.ShapeDtypeStruct) -> ArrayFormat:
    """Return a format for all arrays, without its dtype if the array is of another kind."""
    if found.dtype is None or cast_refusal(leaf.dtype.name, found.dtype) is None:
        return found
    return dataclasses.replace(found, dtype=None)


def _formatted(spec: LeafSpec, array_format: ArrayFormat, path: str) -> LeafSpec:
    rank = len(spec.shape)
    wrong = [axis for axis in array_format.split_axes or () if not -rank <= axis < rank]
    if wrong:
        raise UnsupportedLeafError(
            f"formats: split_axes={array_format.split_axes}, but the array has {rank} dimensions. "
            "Put a pattern for such arrays before this one, ArrayFormat() for none",
            leaf=path,
        )
    dtype, source = array_format.dtype, spec.dtype
    if dtype is None or dtype == source or source is None:
        return replace(spec, format=array_format)
    reason = cast_refusal(source, dtype)
    if reason is not None:
        raise UnsupportedLeafError(
            f"formats: {reason}. Cast it yourself, or put a pattern for such arrays before this "
            "one, ArrayFormat() to store them as they are",
            leaf=path,
        )
    return replace(spec, dtype=dtype, cast_from=source, format=array_format, weak_type=False)
