"""Single bits flip, on devices, in host memory and on the disk: each is found, with its leaf."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
import ckpt.sync
from ckpt._engine.memory.arena import Block
from ckpt._engine.save import item_write
from ckpt._format.array_format import DTYPES
from ckpt._format.regions import chunk_grid
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.write_batches import WriteBatch
from ckpt._tree.leaf_specs import LeafSpec
from ckpt._vitals.extension import device_pass
from ckpt._vitals.extension.device_pass import KERNEL_DTYPES, Kernels, begin_pass
from ckpt._vitals.stored_signs import differing_replicas
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.extensions import VitalSigns
from tests.reliability.damage import Place, places_of
from tests.reliability.tally import Tally
from tests.support.damage import FlipBit, damaged

__all__ = ["passes", "replicas", "staged", "stored"]

# Into how many parts an array is cut, and how many devices hold each.
REPLICATED = ((1, 2), (1, 3), (1, 8), (2, 2), (2, 4), (4, 2))
ANY_LAYOUT = ((1, 1), (2, 1), (3, 1), (1, 2))
# A warning names as many leaves.
LEAVES = 5
# Attacks on one tree: its kernels are compiled once.
ATTACKS = 25
# A save has the devices look at shards of this size.
LARGE = 1 << 20
# Into how many chunks a shard is cut, where the campaign decides it.
MOST_CHUNKS = 64
# Flips near the end, where a loop may stop too early, are drawn this often, within so many bits.
AT_THE_END, LAST_BITS = 0.25, 64
STORED_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8")

Random = np.random.Generator
Host = np.ndarray[Any, Any]
# By the name of an array the devices of which a warning has to tell.
Named = dict[str, str]


def replicas(directory: Path, count: int, seed: int = 0) -> Tally:
    """Flip a bit in one of the replicas of arrays, and save them: the save names leaf and device.

    Args:
        directory: Where to save.
        count: How many bits to flip; several arrays of one save may have one each.
        seed: Of everything that is drawn.
    """
    random, total = np.random.default_rng(seed), Tally()
    while total.faults < count:
        good = {f"leaf {n}": _drawn(random, REPLICATED, LARGE) for n in range(LEAVES)}
        with tempfile.TemporaryDirectory(dir=directory) as root, _manager(root) as mgr:
            for step in range(ATTACKS):
                state, named = _with_flips(random, good, count - total.faults)
                with _warnings() as heard:
                    info = mgr.save(step, state).result()
                tree = mgr.metadata(step).tree
                found = [name for name, leaf in tree.items() if VitalSigns.unequal_on(leaf) == (0,)]
                losses = list(_misnamed(named, found, heard))
                if info.unequal_leaves != len(named):
                    losses.append(f"{info.unequal_leaves} leaves were counted, not {len(named)}")
                if not mgr.verify(step).ok:
                    losses.append("the vital signs are not those of the stored replica")
                total += Tally(1, len(named), [f"save {step}: {line}" for line in losses])
                if total.faults == count:
                    break
    return total


def passes(directory: Path, count: int, seed: int = 0) -> Tally:
    """The same without the rest of a save, so that arrays may be small, and cut into many chunks.

    Args:
        directory: Not used: nothing is written.
        count: How many bits to flip; several arrays of one pass may have one each.
        seed: Of everything that is drawn.
    """
    random, total = np.random.default_rng(seed), Tally()
    while total.faults < count:
        good = {f"leaf {n}": _drawn(random, REPLICATED, 1) for n in range(LEAVES)}
        plans = [_plan(random, name, array) for name, array in good.items()]
        kernels = Kernels()
        for _ in range(ATTACKS):
            state, named = _with_flips(random, good, count - total.faults)
            with mock.patch.object(device_pass, "_LEAST_BYTES", 0), _warnings() as heard:
                begun = begin_pass("device", plans, list(state.values()), (), kernels)
                assert begun is not None
                unequal = differing_replicas(begun.copies(0))
                begun.warn_of_unequal("default")
            found = [plans[number].name for number in unequal]
            total += Tally(1, len(named), list(_misnamed(named, found, heard)))
            if total.faults == count:
                break
    return total


def staged(directory: Path, count: int, seed: int = 0) -> Tally:
    """Flip bits of arrays on their way to the disk: `verify` names each by its fingerprint.

    They flip when the devices have taken the vital signs, and the digests are not yet taken.

    Args:
        directory: Where to save.
        count: How many bits to flip; several arrays of one save may have one each.
        seed: Of everything that is drawn.
    """
    random, total = np.random.default_rng(seed), Tally()
    while total.faults < count:
        likes = {f"leaf {n}": _drawn(random, ANY_LAYOUT, LARGE) for n in range(LEAVES)}
        # The host takes the signs of these, from what is staged.
        others = {name: _bits(random, (300, 7), DTYPES[name]) for name in STORED_DTYPES}
        with tempfile.TemporaryDirectory(dir=directory) as root, _manager(root) as mgr:
            for step in range(ATTACKS):
                state = {
                    name: jax.device_put(_bits(random, like.shape, like.dtype), like.sharding)
                    for name, like in likes.items()
                }
                names = _some(random, list(state), count - total.faults)
                with _flips_in_staging(random, names) as flipped:
                    mgr.save(step, state | others).result()
                report = _verified(Path(root, str(step)), step)
                found = sorted((each.file, each.item, each.leaf) for each in report.problems)
                wanted = [("ckpt.json", "default", name) for name in sorted(flipped)]
                losses = [] if found == wanted else [f"save {step}: {found}, not {wanted}"]
                total += Tally(1, len(flipped), losses)
                if total.faults == count:
                    break
    return total


def stored(directory: Path, count: int, seed: int = 0) -> Tally:
    """Flip bits of arrays in files: `verify` and a default restore name the leaf.

    Args:
        directory: Where to save.
        count: How many bits to flip, one after the other.
        seed: Of everything that is drawn.
    """
    random, total = np.random.default_rng(seed), Tally()
    # Chunks of 256 rows, none of which is padded.
    formats = {"chunks": ckpt.ArrayFormat(chunk_bytes=256 * 96 * 4)}
    while total.faults < count:
        path = directory / f"{total.runs}"
        state = {
            f"{name} {n}": _bits(random, _shape(random, 1), DTYPES[name])
            for name in STORED_DTYPES
            for n in range(3)
        }
        state["chunks"] = _bits(random, (1024, 96), DTYPES["float32"])
        ckpt.sync.save(path, state, formats=formats, extensions=[ckpt.extensions.VitalSigns()])
        places = places_of(path)
        assert len(places) == len(state) + 3
        for number in range(min(4 * ATTACKS, count - total.faults)):
            place = places[random.integers(len(places))]
            bit = 8 * place.start + _drawn_bit(random, 8 * (place.end - place.start))
            with damaged(path, FlipBit(place.file, bit)):
                losses = [f"{place}, {bit}: {line}" for line in _overlooked(path, number, place)]
            total += Tally(1, 1, losses)
    return total


def _manager(root: str) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(
        root, extensions=[ckpt.extensions.VitalSigns("device")], keep=ckpt.keep.Latest(1)
    )


# --- Arrays and flips -----------------------------------------------------------------------------


def _drawn(random: Random, layouts: Sequence[tuple[int, int]], least_bytes: int) -> jax.Array:
    """Return an array of any values in one of these layouts, with shards of so many bytes."""
    dtype = DTYPES[str(random.choice(sorted(KERNEL_DTYPES)))]
    parts, holders = layouts[int(random.integers(len(layouts)))]
    shape = list(_shape(random, -(-least_bytes // dtype.itemsize)))
    axis = int(random.integers(len(shape)))
    shape[axis] *= parts
    devices = np.array(jax.devices()[: parts * holders]).reshape(parts, holders)
    spec = PartitionSpec(*[None] * axis, "parts")
    sharding = NamedSharding(Mesh(devices, ("parts", "holders")), spec)
    return jax.device_put(_bits(random, tuple(shape), dtype), sharding)


def _shape(random: Random, least: int) -> tuple[int, ...]:
    """Return a shape of at least so many elements, and not many more."""
    short = random.integers(1, 12, random.integers(3)).tolist()
    long = int(random.integers(1, 700)) + least // math.prod(short)
    return tuple(random.permutation([*short, long]).tolist())


def _bits(random: Random, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Host:
    raw = random.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def _some(random: Random, names: Sequence[str], most: int) -> list[str]:
    """Return at least one of the names, and at most so many."""
    count = min(int(random.integers(1, len(names) + 1)), most)
    return random.choice(names, count, replace=False).tolist()


def _drawn_bit(random: Random, bits: int) -> int:
    first = max(bits - LAST_BITS, 0) if random.random() < AT_THE_END else 0
    return int(random.integers(first, bits))


def _with_flips(
    random: Random, good: Mapping[str, jax.Array], most: int
) -> tuple[dict[str, jax.Array], Named]:
    """Return arrays some of which have one flipped bit on one device, and whom that concerns."""
    state, named = dict(good), {}
    for name in _some(random, list(good), most):
        shards = good[name].addressable_shards
        position = int(random.integers(len(shards)))
        mine = shards[position]
        host = np.array(mine.data)
        raw = host.reshape(-1).view(np.uint8)
        bit = _drawn_bit(random, 8 * raw.size)
        raw[bit // 8] ^= np.uint8(1 << bit % 8)
        data = [shard.data for shard in shards]
        data[position] = jax.device_put(host, mine.device)
        state[name] = jax.make_array_from_single_device_arrays(
            good[name].shape, good[name].sharding, data
        )
        holders = [shard.device for shard in shards if shard.index == mine.index]
        # Of two there is none that is wrong for certain.
        named[name] = ", ".join(map(str, holders if len(holders) == 2 else [mine.device]))
    return state, named


def _plan(random: Random, name: str, array: jax.Array) -> LeafPlan:
    """Return a plan with any number of chunks, each of which is consecutive memory of a shard."""
    shard = array.sharding.shard_shape(array.shape)
    chunk, most = list(shard), MOST_CHUNKS
    for axis, length in enumerate(shard):
        # None crosses the border of a shard.
        is_cut = length < array.shape[axis]
        lengths = range(-(-length // most), length + 1)
        chunk[axis] = int(random.choice([n for n in lengths if not is_cut or length % n == 0]))
        if chunk[axis] > 1:
            break
        most //= length
    spec = LeafSpec("jax", array.dtype.name, array.shape, array.sharding)
    grid = chunk_grid(array.shape, chunk)
    return LeafPlan(name, spec, tuple(chunk), grid, packed=False, metadata=b"{}")


@contextlib.contextmanager
def _flips_in_staging(random: Random, names: Collection[str]) -> Iterator[list[str]]:
    """Flip a bit of each of some leaves once it is on the host; yield those that have one."""
    # Which chunk, as a part of all, and which bit.
    wanted = {name: (random.random(), int(random.integers(1 << 40))) for name in names}
    flipped: list[str] = []
    original = item_write._stage_batch

    def stage(batch: WriteBatch, plans: Sequence[LeafPlan], sources: Any, block: Block) -> None:
        original(batch, plans, sources, block)
        memory = block.memory[batch.staged_at :]
        for chunk in batch.chunks:
            plan = plans[chunk.leaf]
            part, bit = wanted.get(plan.name, (2, 0))
            if chunk.number == int(part * math.prod(plan.grid)):
                at, within = divmod(bit % (8 * chunk.nbytes), 8)
                memory[chunk.offset + at] ^= np.uint8(1 << within)
                flipped.append(plan.name)

    with mock.patch.object(item_write, "_stage_batch", stage):
        yield flipped


# --- What is said of them -------------------------------------------------------------------------


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield the warnings of the body of the `with`, which are not printed."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, listener = logging.getLogger("ckpt"), Listener(logging.WARNING)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield heard
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


def _misnamed(named: Named, found: Collection[str], heard: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the leaves that are said to differ, and with the one warning."""
    if set(found) != set(named):
        yield f"{sorted(found)} were said to differ, and {sorted(named)} did"
    said = "\n".join(heard)
    missing = [f"{name!r} ({devices})" for name, devices in named.items()]
    missing = [each for each in missing if each not in said]
    if missing or said.count("'leaf ") != len(named):
        yield f"a warning had to name {missing}, and said {heard}"


def _verified(path: Path, number: int) -> ckpt.types.VerifyReport:
    """Verify a checkpoint, by one face of the library or the other."""
    return asyncio.run(ckpt.verify(path)) if number % 2 else ckpt.sync.verify(path)


def _overlooked(path: Path, number: int, place: Place) -> Iterator[str]:
    """Yield what `verify` and a load do not say of a flipped bit."""
    found = [(each.file, each.item, each.leaf) for each in _verified(path, number).problems]
    if found != [(place.file, "default", place.leaf)]:
        yield f"verify named {found}"
    try:
        ckpt.sync.load(path)
    except CorruptCheckpointError as error:
        if (error.item, error.leaf) != ("default", place.leaf):
            yield f"load named {error.leaf!r}"
    except CheckpointError as error:
        yield f"load raised {type(error).__name__}: {error!s:.300}"
    else:
        yield "load was silent"
