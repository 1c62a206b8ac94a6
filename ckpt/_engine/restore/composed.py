"""Composed checkpoints: branches of several, and weighted means of their arrays.

Weighted reads: arrays that are the weighted mean of the arrays of several checkpoints. The arrays
are added up on their target devices, one group of arrays at a time. So beside the result, memory
never holds more than one group of each checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from ckpt._arguments import shown
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._format.array_format import parse_dtype
from ckpt._format.manifest import ItemEntry
from ckpt._format.per_process import pick
from ckpt._plan.targets import ArrayRead, wanted_text
from ckpt._plan.weighted_means import accumulator, is_averaged, numbers_in
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_names import suggestion
from ckpt._tree.leaf_specs import is_function
from ckpt._tree.structure import branch_at, describe
from ckpt.errors import InvalidArgumentError, TargetMismatchError, located
from ckpt.storage._manifests import while_read

T = TypeVar("T")
Array = np.ndarray[Any, Any]
# Most leaves that a message lists; `problems` has all of them.
_SHOWN = 200


class BranchedTarget:
    """A restore target with branches that are loaded from different checkpoints."""

    def __init__(self, like: Any) -> None:
        """Take the branches out of `like` one by one.

        Raises:
            InvalidArgumentError: `like` is a function.
        """
        if is_function(like):
            raise InvalidArgumentError(
                f"like= is the function {shown(like, 60)}: pass what it returns, or "
                "jax.eval_shape(function), which allocates nothing"
            )
        self._like = like
        self._structure = describe(like)
        self._names = unboxed_names(self._structure.nodes, self._structure.names)
        self._branches: dict[str, Any] = {}

    def branch(self, name: str) -> Any:
        """Return the branch at a leaf path, to be loaded.

        Raises:
            InvalidArgumentError: There is no such branch, or it is empty.
        """
        try:
            found = self._branches[name] = branch_at(self._like, name)
        except KeyError:
            raise InvalidArgumentError(
                f"the target like= has no such branch{suggestion(name, self._names)}"
            ) from None
        if found is None:
            raise InvalidArgumentError(
                "the target like= has None there, which has no leaves: leave the branch out"
            )
        return found

    def check_rest(self, *, keeps: bool) -> None:
        """Refuse leaves outside all branches that would have no source.

        Args:
            keeps: True if such leaves may keep their values.

        Raises:
            TargetMismatchError: There are such leaves; the error lists all of them.
        """
        problems = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            stays = keeps or leaf is ... or is_function(leaf)
            is_gone = isinstance(leaf, jax.Array) and keeps and leaf.is_deleted()
            if self._branch_of(name) is None and (is_gone or not stays):
                lost = ", and its array was donated or deleted" if is_gone else ""
                problems.append(f"{name}: below no branch{lost}, wanted {wanted_text(leaf)}")
        if problems:
            count = len(problems)
            listed = "\n  ".join(problems[:_SHOWN])
            more = f"\n  ... and {count - _SHOWN} more, in .problems" if count > _SHOWN else ""
            raise TargetMismatchError(
                f"{count} {'leaf' if count == 1 else 'leaves'} of the target are below none of the "
                f"branches {', '.join(self._branches)!s:.300}; no array was read. Name a "
                "checkpoint for them too; put ... in their place; or keep their values with "
                f"adapt=ckpt.Adapt(missing='keep').\n  {listed}{more}",
                problems=tuple(problems),
            )

    def _branch_of(self, name: str) -> str | None:
        above = itertools.accumulate(name.split("."), "{}.{}".format)
        return next((each for each in above if each in self._branches), None)

    def filled(self, found: Mapping[str, Any]) -> Any:
        """Return the target with the loaded branches in place."""
        loaded = {name: self._leaves_of(name, branch) for name, branch in found.items()}
        leaves = []
        for name, leaf in zip(self._names, self._structure.leaves, strict=True):
            branch = self._branch_of(name)
            leaves.append(leaf if branch is None else next(loaded[branch]))
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

    def _leaves_of(self, name: str, branch: Any) -> Iterator[Any]:
        # A handler may turn a leaf into a tree.
        structure: Any = jax.tree.structure(self._branches[name])
        return iter(structure.flatten_up_to(branch))


_GROUP_BYTES = 256 << 20
# Number of elements that are added at once on the host; they stay in the cache of a core.
_SLICE = 1 << 18


class WeightedReader:
    """An `ItemReader` for the weighted mean of items; all but the arrays comes from one of them."""

    def __init__(
        self, main: RestoreContext, every: Sequence[tuple[float, RestoreContext]], item: str
    ) -> None:
        """Average the item of `every` checkpoint; what is not averaged comes from `main`."""
        part = pick(main.manifest, item, main.process, main.processes)
        self._main = EngineItemReader(main, item, part)
        self._every = [_WeightedItem(part.entry, item, *each) for each in every]
        self.item = item
        self.process = main.process
        self.processes = main.processes

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await self._main.in_thread(function, *args)

    async def read_file(self, path: str) -> bytes:
        """Read a file of the main item."""
        return await self._main.read_file(path)

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        """Read arrays; see `ItemReader.read`."""
        summed = [n for n, read in enumerate(reads) if _is_summed(read)]
        others = sorted(set(range(len(reads))) - set(summed))
        single = await self._main.read(entry, [reads[n] for n in others])
        found = dict(zip(others, single, strict=True))
        for group in _groups(summed, reads):
            total: list[Any] | None = None
            for each in self._every:
                values = await each.read([reads[n] for n in group])
                total = await self.in_thread(_added, total, values, each.weight)
            assert total is not None
            made = await self.in_thread(_narrowed, total, [reads[n] for n in group])
            found.update(zip(group, made, strict=True))
        return [found[number] for number in range(len(reads))]


class _WeightedItem:
    """The item of one of the checkpoints."""

    def __init__(self, main: ItemEntry, item: str, weight: float, restore: RestoreContext) -> None:
        part = pick(restore.manifest, item, restore.process, restore.processes)
        self.weight = weight
        self._guarded = partial(while_read, restore.storage, restore.step_dir, restore.manifest)
        self._entry = part.entry
        self._reader = EngineItemReader(restore, item, part)
        self._numbers = numbers_in(part.entry, main)

    async def read(self, reads: Sequence[ArrayRead]) -> list[Any]:
        """Return the arrays that `reads` take from the main item, before their last cast.

        Raises:
            StepDeletedError: The checkpoint was deleted or replaced meanwhile.
        """
        own = [_read_of(read, self._numbers) for read in reads]
        async with self._guarded():
            with located():
                return await self._reader.read(self._entry, own)


def _is_summed(read: ArrayRead) -> bool:
    target = read.target
    return (
        read.value is None
        and target.kind != "key"
        and is_averaged("numpy", read.stored)
        and is_averaged("numpy", target.dtype.name)
    )


def _read_of(read: ArrayRead, numbers: Sequence[int]) -> ArrayRead:
    """Return a read of the main item as one of another item, in the dtype that is added up.

    On devices that is a wide dtype, and on the host the stored one.
    """
    dtype, target = parse_dtype(read.stored), read.target
    # Scalars are made from the sum at the end.
    kind = target.kind if target.kind in ("jax", "numpy") else "numpy"
    if kind == "jax":
        dtype = jax.dtypes.canonicalize_dtype(accumulator(dtype))
    return replace(
        read,
        target=replace(target, kind=kind, dtype=dtype, weak_type=False),
        leaf=None if read.leaf is None else numbers[read.leaf],
        pieces=tuple(replace(piece, leaf=numbers[piece.leaf]) for piece in read.pieces),
    )


def _groups(numbers: Sequence[int], reads: Sequence[ArrayRead]) -> list[list[int]]:
    groups: list[list[int]] = []
    left = 0
    for number in numbers:
        nbytes = 4 * int(np.prod(reads[number].shape, dtype=np.int64))
        if not groups or nbytes > left:
            groups.append([])
            left = _GROUP_BYTES
        groups[-1].append(number)
        left -= nbytes
    return groups


def _added(total: list[Any] | None, values: list[Any], weight: float) -> list[Any]:
    found: list[Any] = []
    for number, value in enumerate(values):
        before = None if total is None else total[number]
        if not isinstance(value, jax.Array):
            found.append(_added_on_host(value, before, weight))
        elif before is None:
            found.append(_on_shards(lambda part: _scaled(part, weight), value))
        else:
            found.append(_on_shards(lambda part, sum: _plus(part, sum, weight), value, before))
    return found


def _added_on_host(value: Array, before: Array | None, weight: float) -> Array:
    wide = accumulator(value.dtype)
    total: Array = np.empty(value.shape, wide) if before is None else before
    values, sums = value.reshape(-1), total.reshape(-1)
    # In slices, so that there is no second copy in the wider dtype.
    for start in range(0, len(values), _SLICE):
        part = slice(start, start + _SLICE)
        scaled = values[part].astype(wide, copy=False) * wide.type(weight)
        sums[part] = scaled if before is None else sums[part] + scaled
    return total


@jax.jit
def _scaled(value: Any, weight: Any) -> Any:
    return value * jnp.asarray(weight, value.dtype)


@partial(jax.jit, donate_argnums=1)
def _plus(value: Any, before: Any, weight: Any) -> Any:
    return before + value * jnp.asarray(weight, value.dtype)


def _on_shards(function: Callable[..., Any], first: jax.Array, *more: jax.Array) -> jax.Array:
    """Call a function with the parts on each device, so that no process waits for another."""
    parts = zip(*(each.addressable_shards for each in (first, *more)), strict=True)
    made: list[jax.Array] = [function(*(shard.data for shard in part)) for part in parts]
    if not first.committed:
        (array,) = made
        return array
    return jax.make_array_from_single_device_arrays(first.shape, first.sharding, made)


def _narrowed(total: list[Any], reads: Sequence[ArrayRead]) -> list[Any]:
    """Return sums in the form that the reads want."""
    return [_cast_to_target(value, read) for value, read in zip(total, reads, strict=True)]


def _cast_to_target(value: Any, read: ArrayRead) -> Any:
    target = read.target
    if target.kind == "jax":
        return _on_shards(lambda part: part.astype(target.dtype), value)
    made = value.astype(target.dtype, copy=False)
    return made if target.kind == "numpy" else made[()]
