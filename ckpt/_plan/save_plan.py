"""The save plan: from leaves to chunks to write batches, each with its place. Pure.

A plan depends only on the specs of the leaves, so one plan serves every save of a tree of the same
structure. The chunks of a write batch are staged together into one block of memory, and written as
one data file. Leaves of a few kilobytes are packed: the whole array is one chunk, gathered from its
shards. With several processes each has a plan of its own, with its part of the chunks. If each
writes all that it holds, owned chunks and copies go into different files, so that the parts of all
processes can be put together without reading them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import jax
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import invalid, shown
from ckpt._format.array_format import DTYPES, ArrayFormat, cast_refusal, storable_dtype
from ckpt._plan.chunking import LeafPlan, LeafPlanner, Limits, limits_of, whole_leaf_chunks
from ckpt._plan.write_batches import SECTOR, Chunk, WriteBatch, pack_chunks, to_encode
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import Pattern, compile_pattern, near_miss
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import CheckpointError, InvalidArgumentError, UnsupportedLeafError

if TYPE_CHECKING:
    from ckpt._format.manifest import Node
    from ckpt._job.division import Division, ProcessGroup

    TreeDivision: TypeAlias = "Undivided | Division"

# A chunk takes about 55 bytes of the manifest, a file 130; the manifest may have 256 MiB.
MOST_CHUNKS = 3_000_000


class SavePlan(Struct, frozen=True):
    """The plan of one item, as one process sees it.

    Attributes:
        leaves: A plan for every leaf, in tree order; the same on all processes.
        batches: The batches that this process writes, biggest first.
        nbytes: Logical bytes of all arrays, shared ones once; Python scalars do not count.
        group: The processes that save, or None for a single process.
        own: Numbers of the leaves that every process has for itself. In a shared place they are
            stored once, so they must be equal on all processes.
        limits: The largest batches and chunks.
        copies: The chunks of this process that another one owns: number of the leaf, and of the
            chunk in it.
    """

    leaves: tuple[LeafPlan, ...]
    batches: tuple[WriteBatch, ...]
    nbytes: int
    group: ProcessGroup | None = None
    own: tuple[int, ...] = ()
    limits: Limits = Limits(0, 0, 0)
    copies: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_encoded(self) -> bool:
        """True if the places of some chunks are known only once they are encoded."""
        return any(batch.encoded for batch in self.batches)

    def rest(
        self, done: Set[tuple[int, int]], separate: Sequence[Set[tuple[int, int]]] = ()
    ) -> SavePlan:
        """Return the plan of a save that leaves out some chunks.

        Args:
            done: The chunks that need not be written: number of the leaf, and of the chunk in it.
            separate: Sets of chunks, each of which gets batches of its own.
        """
        every = [chunk for batch in self.batches for chunk in batch.chunks]
        every.sort(key=lambda chunk: (chunk.leaf, chunk.number))
        group_of = {chunk: number for number, chunks in enumerate(separate) for chunk in chunks}
        groups: dict[tuple[int, bool], list[Chunk]] = {}
        for chunk in every:
            key = (chunk.leaf, chunk.number)
            if key not in done:
                groups.setdefault((group_of.get(key, -1), key in self.copies), []).append(chunk)
        batches = [
            each
            for _, group in sorted(groups.items())
            for each in _batches(self.leaves, group, self.limits)
        ]
        return replace(self, batches=_biggest_first(batches))


class Undivided(Struct, frozen=True):
    """A tree that one process saves alone: all of it.

    Attributes:
        group: The processes that save; None for a single process.
        count: Number of processes.
        spans: True if arrays may be spread over the devices of several processes.
        own: Numbers of the leaves that every process has for itself.
    """

    group: None = None
    count: int = 1
    spans: bool = False
    own: tuple[int, ...] = ()

    def leaves(
        self, names: Sequence[str], specs: Sequence[LeafSpec], planner: LeafPlanner
    ) -> list[LeafPlan]:
        """Return the plans of all leaves."""
        return [planner.plan(name, spec, None) for name, spec in zip(names, specs, strict=True)]

    def chunks(self, leaves: Sequence[LeafPlan]) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks that this process owns, and no copies of others."""
        stored = [number for number, leaf in enumerate(leaves) if leaf.has_chunks]
        return [chunk for n in stored for chunk in whole_leaf_chunks(n, leaves[n])], []

    def fingerprint(self, plan: SavePlan, nodes: Sequence[Node]) -> None:
        """Return None: no other process compares the tree."""


WHOLE = Undivided()


def plan_save(
    names: Sequence[str],
    specs: Sequence[LeafSpec],
    budget_bytes: int,
    division: TreeDivision = WHOLE,
    largest_file_bytes: int | None = None,
    usual_file_bytes: int | None = None,
) -> SavePlan:
    """Plan the save of leaves `specs` stored under `names`.

    Args:
        names: Stored name of every leaf.
        specs: Spec of every leaf.
        budget_bytes: The staging budget in bytes, the same on all processes; batches are kept to a
            quarter of it, so that staging and writing can overlap within it. (A single chunk that
            cannot be smaller may be larger.)
        division: The division of the tree among the processes that save together.
        largest_file_bytes: Most bytes of a data file.
        usual_file_bytes: Approximate best size of a data file; None for the best on a disk.

    Raises:
        UnsupportedLeafError: The name of a leaf is too long to be a key of a database, or the leaf
            is on devices of one other process only.
        InvalidArgumentError: The tree has more chunks than a manifest can hold, or an array is on
            processes that do not save.
    """
    if largest_file_bytes is not None and largest_file_bytes < SECTOR:
        raise InvalidArgumentError(
            f"largest_file_bytes={largest_file_bytes}: expected {SECTOR} or more"
        )
    stored = [spec for spec in specs if spec.kind in ARRAY_KINDS and spec.same_as is None]
    nbytes = sum(spec.nbytes for spec in stored)
    limits = limits_of(nbytes, budget_bytes, division.count, largest_file_bytes, usual_file_bytes)
    leaves = division.leaves(names, specs, LeafPlanner(limits))
    chunks = sum(math.prod(leaf.grid) for leaf in leaves)
    if chunks > MOST_CHUNKS:
        raise _too_many(chunks, leaves)
    found, copies = division.chunks(leaves)
    batches = _biggest_first([*_batches(leaves, found, limits), *_batches(leaves, copies, limits)])
    return SavePlan(
        tuple(leaves),
        batches,
        nbytes,
        division.group,
        tuple(division.own),
        limits,
        frozenset((chunk.leaf, chunk.number) for chunk in copies),
    )


def _batches(
    leaves: Sequence[LeafPlan], chunks: Iterable[Chunk], limits: Limits
) -> list[WriteBatch]:
    """Return batches of chunks; packed and encoded chunks have their own."""
    packed: list[Chunk] = []
    large: list[Chunk] = []
    encoded: list[Chunk] = []
    for chunk in chunks:
        leaf = leaves[chunk.leaf]
        kind = packed if leaf.packed else large if leaf.compression is None else encoded
        kind.append(chunk)
    return [
        *pack_chunks(packed, limits.batch, packed=True),
        *pack_chunks(large, limits.batch),
        *map(to_encode, pack_chunks(encoded, limits.encoded)),
    ]


def _biggest_first(batches: Sequence[WriteBatch]) -> tuple[WriteBatch, ...]:
    return tuple(sorted(batches, key=lambda batch: batch.nbytes, reverse=True))


def _too_many(chunks: int, leaves: Sequence[LeafPlan]) -> InvalidArgumentError:
    most = max(leaves, key=lambda leaf: math.prod(leaf.grid))
    return InvalidArgumentError(
        f"the tree has {chunks} chunks, of which {math.prod(most.grid)} are of this leaf; the "
        f"manifest of a step can hold {MOST_CHUNKS}. Every shard is a chunk of its own: spread the "
        "arrays over fewer devices and replicate them over the others, or stack small arrays",
        leaf=most.name,
    )


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
