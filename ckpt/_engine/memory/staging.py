"""Staging: device memory is copied to host memory that the library owns, batch by batch.

All functions run in worker threads. Host copies are taken shard by shard, never of an array on
several devices: jax would keep such a copy alive on the array.

Contents of a staged batch: the digests of its chunks, and the records of extensions. The functions
run in worker threads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Struct

from ckpt._format.array_format import DTYPES
from ckpt._format.manifest_head import digest, new_digest
from ckpt._format.regions import Region
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.write_batches import Chunk, ChunkPart, WriteBatch
from ckpt._settings import StagingMode
from ckpt._tree.leaf_kinds import ARRAY_KINDS, scalar_array
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import NotesOfItem
    from ckpt._engine.memory.leaf_stacks import StackRow

# Source of the copy of a chunk: a leaf, or the object that a snapshot holds instead.
Source = Any
# The numbers of a leaf and of one of its shards.
Place = tuple[int, int]
logger = logging.getLogger("ckpt")
Array = np.ndarray[Any, Any]


def cast(array: Array, dtype: str) -> Array:
    """Return `array` as `dtype`, rounded to the nearest value, and ties to even.

    From float64 to dtypes narrower than float16, ml_dtypes goes through float32, so a value close
    to the middle of two neighbours may be rounded to the other one.
    """
    if array.dtype == DTYPES[dtype]:
        return array
    # Too large values become infinite, or NaN in dtypes without infinity, as with `astype`.
    with np.errstate(all="ignore"):
        return array.astype(DTYPES[dtype])


def cast_into(target: Array, source: Array) -> None:
    """Copy `source` into `target`, of another dtype, rounded as by `cast`, without a temporary."""
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def is_narrowed(source: str, target: str) -> bool:
    """Return True if elements of `target` take fewer bytes."""
    return DTYPES[target].itemsize < DTYPES[source].itemsize


_PINNED = "pinned_host"
_HOST_KINDS = (_PINNED, "unpinned_host")
# Dtypes that Python's buffer protocol knows: arrays on one CPU device export their memory so.
_EXPORTED = frozenset(
    {
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
# Small arrays are stacked if there are so many of one kind: with fewer, compiling would cost more
# than the first save gains. Programs copy these dtypes bit for bit, whether jax has 64 bits or not.
_LEAST_STACKED = 256
_STACKED_DTYPES = frozenset({"float32", "bfloat16", "float16", "int32", "uint32"})
# Several managers, each with threads of its own, may save one array.
_ASKING = threading.Lock()
# Dtypes narrower than a byte: jax packs several elements into one, and unpacks them for the host.
_UNPACKED = frozenset({"float4_e2m1fn", "int2", "int4", "uint2", "uint4"})


def wait_until_computed(leaves: Iterable[Any]) -> None:
    """Wait until every jax array among `leaves` is computed, and every moved shard has arrived.

    Raises:
        CheckpointError: The computation of an array failed.
    """
    try:
        wait: Any = jax.block_until_ready
        wait([each.array if isinstance(each, MovedShard) else each for each in leaves])
    except Exception as error:
        raise CheckpointError(f"computing the state to save failed: {error}") from error


class MovedShard(Struct, frozen=True):
    """A shard of an accelerator in page-locked memory of the library, or on its way there."""

    array: jax.Array

    def read(self, region: Region) -> Array:
        """Return the elements of a region; waits until they have arrived."""
        return np.asarray(self.array)[region.slices]


def movable_shards(
    batches: Iterable[WriteBatch],
    plans: Sequence[LeafPlan],
    leaves: Sequence[Any],
    mode: StagingMode,
) -> dict[Place, int]:
    """Return the shards that `snapshot` can hold in page-locked memory, with their bytes there.

    Such a shard is on an accelerator, and batches take all of it. If only a part of a shard is
    wanted, the device cuts it out when it is copied.
    """
    wanted: Counter[Place] = Counter()
    for batch in batches:
        if not batch.packed:
            for chunk in batch.chunks:
                wanted.update({(chunk.leaf, part.shard): part.source.size for part in chunk.parts})
    found = {}
    for (leaf, number), size in wanted.items():
        array = leaves[leaf]
        if mode == "device" or not isinstance(array, jax.Array) or _on_cpu(array):
            continue
        shard = _shard(array, number)
        if shard.size == size and shard.sharding.memory_kind not in _HOST_KINDS:
            found[leaf, number] = size * _moved_dtype(plans[leaf].spec).itemsize
    return found


def snapshot(
    batches: Iterable[WriteBatch],
    plans: Sequence[LeafPlan],
    leaves: Sequence[Any],
    mode: StagingMode,
    movable: Mapping[Place, int],
    room: int,
) -> dict[int, list[Source]]:
    """Hold sources from which batches can be copied later, whatever the caller does to its arrays.

    Args:
        batches: The batches of an item.
        plans: The plans of its leaves.
        leaves: Its leaves.
        mode: `view` holds views of the buffers of CPU arrays; `device` copies arrays within device
            memory.
        movable: The shards that may move to page-locked memory, with their bytes.
        room: Most bytes that may move.

    Returns:
        The sources of each batch, as `sources_of` gives them, by number of the batch. Batches that
        must be copied to the host before the caller goes on are left out: in the mode `copy` all
        that do not move, and those of packed leaves and of numpy arrays.
    """
    held: dict[Place, Source] = {}
    found: dict[int, list[Source]] = {}
    for number, batch in enumerate(batches):
        if batch.packed:
            continue
        parts = [(chunk.leaf, part.shard) for chunk in batch.chunks for part in chunk.parts]
        new = dict.fromkeys(place for place in parts if place not in held)
        moves = movable.keys() >= set(parts)
        if moves and sum(movable[place] for place in new) > room:
            continue
        if not moves and not all(_can_wait(leaves[leaf], mode) for leaf, _ in parts):
            continue
        for place in new:
            leaf, shard = place
            room -= movable.get(place, 0)
            spec = plans[leaf].spec if moves else None
            held[place] = _hold(_shard(leaves[leaf], shard), mode, spec)
            if moves and held[place] is None:
                room = 0
        sources = [held[place] for place in parts]
        if not any(source is None for source in sources):
            found[number] = sources
    return found


def moved_shards(held: Mapping[int, Sequence[Source]]) -> list[MovedShard]:
    """Return the shards that a snapshot holds in page-locked memory, each once."""
    every = {id(each): each for sources in held.values() for each in sources}
    return [each for each in every.values() if isinstance(each, MovedShard)]


def sources_of(batch: WriteBatch, leaves: Sequence[Any]) -> list[Source]:
    """Return the sources of a batch: a leaf for every part, or every packed leaf once."""
    if batch.packed:
        return [leaves[chunk.leaf] for chunk in batch.chunks]
    return [leaves[chunk.leaf] for chunk in batch.chunks for _ in chunk.parts]


def _hold(shard: jax.Array, mode: StagingMode, moves: LeafSpec | None) -> Source | None:
    """Return a view or a copy of a shard, valid once its array is the caller's again.

    `moves` is the leaf of a shard that is to move to page-locked memory, or None. The result is
    None if there is no room.
    """
    if moves is None and mode == "view":
        wait_until_computed([shard])
        return np.asarray(_unkept(shard))
    try:
        return jnp.copy(shard) if moves is None else MovedShard(_begin_move(shard, moves))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise CheckpointError(f"copying the state to save failed: {error}") from error
        # Without room the shard is copied to the host before the caller goes on.
        where = "on the device" if moves is None else "in page-locked memory"
        logger.debug("no room %s for a copy of %s%s", where, shard.dtype, shard.shape)
        return None


def _can_wait(leaf: Any, mode: StagingMode) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    return mode == "device" or (mode == "view" and _on_cpu(leaf))


def copies_on_host(batch: WriteBatch, plans: Sequence[LeafPlan], *, moved: bool = False) -> int:
    """Return the number of copies of the bytes in host memory while they go into a block.

    Arrays of accelerators pass through page-locked memory on their way, unless they have `moved`
    there.
    """
    # Thousands of leaves share a few specs.
    specs = {id(spec): spec for spec in [plans[chunk.leaf].spec for chunk in batch.chunks]}
    shardings = {id(spec.sharding): spec.sharding for spec in specs.values()}
    on_host = moved or all(each is None or _is_host(each) for each in shardings.values())
    # Each packed leaf is cast as a whole, in a copy; other leaves are cast part by part.
    cast = batch.packed and any(spec.cast_from for spec in specs.values())
    return 1 + (not on_host) + cast + max(spec.copies for spec in specs.values())


def copy_batch(
    batch: WriteBatch, plans: Sequence[LeafPlan], sources: Sequence[Source], memory: Array
) -> None:
    """Copy the chunks of `batch` into `memory`, each at its offset and zeros between them.

    Args:
        batch: The batch to copy.
        plans: The plans of all leaves of the item.
        sources: Sources of the copy; see `sources_of` and `snapshot`.
        memory: `[batch.nbytes] uint8`, owned by the library.
    """
    if batch.packed:
        _copy_packed(batch, plans, sources, memory)
        return
    end = 0
    parts = _on_host(batch, plans, sources)
    for chunk in batch.chunks:
        memory[end : chunk.offset] = 0
        end = chunk.offset + chunk.stored_nbytes
        plan = plans[chunk.leaf]
        target = memory[chunk.offset : end].view(DTYPES[plan.spec.dtype or ""]).reshape(plan.chunk)
        if chunk.nbytes < chunk.stored_nbytes:
            target.view(np.uint8)[...] = 0
        inside = target[tuple(slice(n) for n in chunk.region.shape)]
        for part in chunk.parts:
            _copy_bits(inside[part.target.slices], next(parts))
    memory[end:] = 0


def move_chunks(chunks: Sequence[Chunk], batch: WriteBatch, memory: Array) -> None:
    """Move staged chunks together, to their places in a smaller batch; gaps are filled with zeros.

    Args:
        chunks: The chunks, as they were staged, in order.
        batch: The batch of just these chunks.
        memory: `[n] uint8`, the memory of both the old and the new places.
    """
    end = 0
    for old, new in zip(chunks, batch.chunks, strict=True):
        memory[end : new.offset] = 0
        end = new.offset + new.stored_nbytes
        if old.offset != new.offset:
            memory[new.offset : end] = memory[old.offset : old.offset + old.stored_nbytes]
    memory[end : batch.nbytes] = 0


def host_bytes(leaf: Any) -> Array:
    """Return the bytes, in C order, of an array of this process alone; `[n] uint8`."""
    if isinstance(leaf, jax.Array):
        leaf = _gathered(leaf.shape, _begin_gather(leaf))
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def _on_host(
    batch: WriteBatch, plans: Sequence[LeafPlan], sources: Sequence[Source]
) -> Iterator[Array]:
    """Yield every part as a host array; all are transferred at the same time."""
    parts = [(plans[chunk.leaf].spec, part) for chunk in batch.chunks for part in chunk.parts]
    started = [
        _begin_transfer(_shard(source, part.shard), part, spec)
        for source, (spec, part) in zip(sources, parts, strict=True)
    ]
    started.reverse()
    while started:
        # Dropped one by one, so that page-locked memory is free again as soon as it has been
        # copied.
        yield np.asarray(started.pop())


def _begin_transfer(shard: Any, part: ChunkPart, spec: LeafSpec) -> Any:
    """Return a part of `shard` on its way to the host, or already there."""
    if isinstance(shard, CheckpointLeaf | MovedShard):
        return shard.read(part.source)
    if not isinstance(shard, jax.Array) or _on_cpu(shard):
        return np.asarray(_unkept(shard))[part.source.slices]
    if shard.sharding.memory_kind in _HOST_KINDS:
        # The data is on the host already; a slice would be computed on the device.
        return np.asarray(_apart(shard))[part.source.slices]
    if shard.shape != part.source.shape:
        # Sliced on the device, so that only the part takes memory on the host, not its shard.
        shard = jax.lax.dynamic_slice(shard, part.source.offset, part.source.shape)
    return _begin_move(shard, spec)


def _begin_move(shard: jax.Array, spec: LeafSpec) -> jax.Array:
    """Return a shard of an accelerator on its way to the host, in the dtype that moves."""
    dtype = _moved_dtype(spec)
    if shard.dtype != dtype:
        shard = jax.lax.convert_element_type(shard, dtype)
    return to_page_locked(shard)


def _moved_dtype(spec: LeafSpec) -> np.dtype[Any]:
    """Return the smaller of two dtypes: values that widen are cast on the host."""
    stored = spec.dtype or ""
    if spec.cast_from is None or is_narrowed(spec.cast_from, stored):
        return DTYPES[stored]
    return DTYPES[spec.cast_from]


def to_page_locked(array: jax.Array) -> jax.Array:
    """Return `array` on its way to page-locked host memory, if its device has such memory.

    Devices copy there by themselves, at the full speed of the bus; copies to other memory go
    through a small buffer.
    """
    (device,) = array.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if _PINNED not in kinds:
        array = _apart(array)
        array.copy_to_host_async()
        return array
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)
    moved: jax.Array = jax.device_put(array, place)
    return moved


def _shard(source: Source, number: int) -> Any:
    """Return a shard of a jax array; other sources are returned whole."""
    if isinstance(source, jax.Array) and not _is_single(source):
        return shards_of(source)[number].data
    return source


def shards_of(array: jax.Array) -> Sequence[jax.Shard]:
    """Return the shards of an array that are on devices of this process.

    jax builds this list at the first request. A thread that asks meanwhile gets an incomplete list
    (jaxlib 0.10 to 0.12), so one thread of this library asks at a time.
    """
    with _ASKING:
        return array.addressable_shards


def _is_single(array: jax.Array) -> bool:
    return len(array.devices()) == 1


def _copy_packed(
    batch: WriteBatch, plans: Sequence[LeafPlan], leaves: Sequence[Any], memory: Array
) -> None:
    raw, end = memory.data, 0
    for chunk, data in zip(batch.chunks, _packed_bytes(batch, plans, leaves), strict=True):
        start = chunk.offset
        if start > end:
            raw[end:start] = bytes(start - end)
        end = start + chunk.nbytes
        raw[start:end] = data
    memory[end:] = 0


def _packed_bytes(
    batch: WriteBatch, plans: Sequence[LeafPlan], leaves: Sequence[Any]
) -> Iterator[memoryview]:
    """Yield the bytes of every packed leaf, gathered from its shards."""
    specs = [plans[chunk.leaf].spec for chunk in batch.chunks]
    # Checked once for each sharding: thousands of leaves share a few.
    shardings = {id(spec.sharding): spec.sharding for spec in specs if spec.sharding is not None}
    viewable = {n for n, s in shardings.items() if _is_host(s) and len(s.device_set) == 1}
    moving = [
        number
        for number, spec in enumerate(specs)
        if spec.sharding is not None and id(spec.sharding) not in viewable
    ]
    # All transfers start before the first is waited for.
    rows = _stack_small(moving, specs, leaves) if moving else {}
    shards = {number: _begin_gather(leaves[number]) for number in moving if number not in rows}
    for number, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
        if number in rows:
            array = rows.pop(number).on_host()
        elif number in shards:
            array = _gathered(spec.shape, shards.pop(number))
        elif spec.sharding is not None and spec.cast_from is None and spec.dtype in _EXPORTED:
            # Takes half the time of a view by way of numpy.
            try:
                yield memoryview(leaf).cast("B")
                continue
            except (BufferError, TypeError, ValueError):
                # The array is empty, or not in C order.
                array = np.ascontiguousarray(leaf)
        elif isinstance(leaf, CheckpointLeaf):
            array = np.ascontiguousarray(leaf.whole())
        elif spec.kind in ARRAY_KINDS:
            # For an array on one CPU device this is a view, which jax does not cache.
            held = spec.cast_from or spec.dtype
            array = np.ascontiguousarray(_unkept(leaf) if held in _UNPACKED else leaf)
        else:
            scalar = scalar_array(spec.kind, leaf)
            assert scalar is not None
            array = scalar
        if spec.cast_from is not None:
            array = cast(array, spec.dtype or "")
        # In memory every byte but 0 is true; TensorStore stores 0 or 1.
        flat = array.reshape(-1).view(np.uint8)
        yield ((flat != 0).view(np.uint8) if spec.dtype == "bool" else flat).data


def _stack_small(
    moving: Iterable[int], specs: Sequence[LeafSpec], leaves: Sequence[Any]
) -> dict[int, StackRow]:
    """Stack the leaves of which there are many of one kind; return their rows by number."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for number in moving:
        spec = specs[number]
        alike[id(spec.sharding), spec.shape, spec.cast_from or spec.dtype].append(number)
    found: dict[int, StackRow] = {}
    for (_, _, dtype), numbers in alike.items():
        sharding = specs[numbers[0]].sharding
        assert sharding is not None
        if len(numbers) < _LEAST_STACKED or dtype not in _STACKED_DTYPES or _is_host(sharding):
            continue
        if sharding.is_fully_replicated and sharding.memory_kind not in _HOST_KINDS:
            # Imported only here: few states have so many.
            from ckpt._engine.memory.leaf_stacks import stack_rows

            arrays = [_shard(leaves[number], 0) for number in numbers]
            found |= zip(numbers, stack_rows(arrays, to_page_locked), strict=False)
    return found


def _begin_gather(leaf: jax.Array) -> list[tuple[tuple[slice, ...], jax.Array]]:
    """Start moving every distinct shard to the host; return the shards with their places."""
    shards = _distinct_shards(leaf)
    if _on_cpu(leaf):
        return [(index, _unkept(shard)) for index, shard in shards]
    shards = [(index, _apart(shard)) for index, shard in shards]
    for _, shard in shards:
        shard.copy_to_host_async()
    return shards


def _distinct_shards(leaf: jax.Array) -> list[tuple[tuple[slice, ...], jax.Array]]:
    if leaf.is_fully_addressable:
        return [(shard.index, shard.data) for shard in shards_of(leaf) if not shard.replica_id]
    # The replicas with id 0 may be on devices of another process.
    found = {
        tuple((part.start, part.stop) for part in shard.index): (shard.index, shard.data)
        for shard in reversed(shards_of(leaf))
    }
    return list(found.values())


def _gathered(
    shape: tuple[int, ...], shards: Sequence[tuple[tuple[slice, ...], jax.Array]]
) -> Array:
    """Return the whole array in C order."""
    if len(shards) == 1 and shards[0][1].shape == shape:
        return np.ascontiguousarray(shards[0][1])
    whole = np.empty(shape, shards[0][1].dtype)
    for index, shard in shards:
        whole[index] = np.asarray(shard)
    return whole


def _unkept(array: Any) -> Any:
    """Return an array that numpy can view without leaving a host copy on the caller's array.

    Numpy views the buffer itself for most dtypes; jax would keep the copy of dtypes that it
    unpacks.
    """
    if isinstance(array, jax.Array) and array.dtype.name in _UNPACKED:
        return _apart(array)
    return array


def _apart(array: jax.Array) -> jax.Array:
    """Return another array object over the same buffer.

    jax caches the host copy of an accelerator's array on the object that is converted. The only
    shard of an array is the array itself, so the caller's array would hold the copy as long as it
    lives.
    """
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _on_cpu(array: jax.Array) -> bool:
    return _is_host(array.sharding)


def _is_host(sharding: jax.sharding.Sharding) -> bool:
    """Return True if the devices of a sharding compute in host memory."""
    device: jax.Device = next(iter(sharding.device_set))
    return str(device.platform) == "cpu"


def _copy_bits(target: Array, source: Array) -> None:
    """Copy as plain integers, since numpy copies foreign dtypes slowly and holds the GIL.

    Values of another dtype are cast.
    """
    if target.dtype != source.dtype:
        cast_into(target, source)
        return
    if target.dtype == np.bool_:
        np.not_equal(source.view(np.uint8), 0, out=target)
        return
    bits = f"u{target.dtype.itemsize}" if target.dtype.itemsize <= 8 else target.dtype
    np.copyto(target.view(bits), source.view(bits))


class BatchContents(Struct, frozen=True, eq=False):
    """The contents of a batch.

    Attributes:
        digests: Digest of the logical bytes of every chunk.
        records: `[chunks]`, the record of each chunk, by name of the extension.
    """

    digests: list[str]
    records: Mapping[str, Array] = {}

    def of_chunks(self, chosen: Sequence[int]) -> BatchContents:
        """Return the contents of some chunks, by their numbers in the batch."""
        records = {name: each[list(chosen)] for name, each in self.records.items()}
        return BatchContents([self.digests[at] for at in chosen], records)


NO_CONTENTS = BatchContents([])


def batch_contents(
    batch: WriteBatch,
    plans: Sequence[LeafPlan],
    memory: Array,
    extensions: Mapping[str, NotesOfItem],
) -> BatchContents:
    """Return the contents of a batch in `memory`, which is `[batch.nbytes] uint8`.

    `plans` are those of all leaves of the item; `extensions` note records, by name.
    """

    def bytes_of(chunk: Chunk) -> Array:
        return _logical(chunk, plans, memory)

    if not extensions:
        return BatchContents([digest(bytes_of(chunk).data) for chunk in batch.chunks])
    digesters = [new_digest() for _ in batch.chunks]
    # The first extension hands the bytes on while they are in the processor's cache.
    takes: Sequence[Callable[[memoryview], object]] = [each.update for each in digesters]
    records = {}
    for name, each in extensions.items():
        records[name] = each.records(batch, bytes_of, takes)
        takes = [len] * len(batch.chunks)
    return BatchContents([each.hexdigest() for each in digesters], records)


def _logical(chunk: Chunk, plans: Sequence[LeafPlan], memory: Array) -> Array:
    """Return the bytes of a chunk without its padding; `[n] uint8`."""
    stored = memory[chunk.offset : chunk.offset + chunk.stored_nbytes]
    if chunk.nbytes == chunk.stored_nbytes:
        return stored
    plan = plans[chunk.leaf]
    whole = stored.view(DTYPES[plan.spec.dtype or ""]).reshape(plan.chunk)
    inside = whole[tuple(slice(n) for n in chunk.region.shape)]
    return np.ascontiguousarray(inside).reshape(-1).view(np.uint8)
