"""The pass over a state: what marks keep of its leaves, taken where they are.

All arrays of one mesh are looked at by one compiled call, which is in the queues of the devices
when it returns. So the caller may donate its arrays then. Each device sums up its own shards, and
what comes back are some bytes for each leaf and device. Other leaves are looked at on the host,
before the call returns.

A fingerprint is that of vital signs: it depends on the values alone, not on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec import Struct, field

from ckpt._engine.memory.staging import host_bytes
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest_head import digest
from ckpt._proof.state_marks import ITERATOR, MARK, MOST_PARTS, StateLayout, StateMark, part_of
from ckpt._tree.leaf_specs import Classifier, is_function
from ckpt._tree.structure import describe
from ckpt._vitals.extension.device_pass import column_factors, reduced, row_factors
from ckpt._vitals.signs import Array, box_signs

# Shards up to this size are looked at together if they are alike: a program of thousands of leaves
# would take minutes to compile.
_TOGETHER_BYTES = 1 << 16
# Dtypes that a device looks at, with the integers that have their bits.
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_ON_HOST = frozenset({"complex64", "float4_e2m1fn", "int2", "int4", "uint2", "uint4"})
_MOST_INT = (1 << 63) - 1


class _Kind(Struct, frozen=True, gc=False):
    """What a compiled call depends on, of each array: its shape, dtype and spec on the mesh."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None


class _Call(Struct, frozen=True, eq=False):
    """A compiled call over arrays of one mesh, or of one device.

    Attributes:
        run: Takes the arrays; returns `[devices, leaves, 3] uint32` and `[devices, leaves, 2]
            float32`, see `_sums`.
        devices: The devices, in the order of the results.
        regions: For each leaf, the number of the region that each device holds.
    """

    run: Any
    devices: Sequence[jax.Device]
    regions: Sequence[Sequence[int]]


class _Begun(Struct, frozen=True, eq=False):
    """A call that is under way, over the leaves with these numbers."""

    numbers: Sequence[int]
    call: _Call
    results: tuple[jax.Array, jax.Array]


class BegunMark(Struct, frozen=True, eq=False):
    """A mark that devices are making.

    Attributes:
        step: The step.
        layout: The names and kinds of the leaves.
        leaves: The leaves that the host has looked at, and zeros for the others.
        begun: The calls under way.
    """

    step: int
    layout: StateLayout
    leaves: Array
    begun: Sequence[_Begun]

    def finish(self) -> tuple[StateMark, dict[str, list[str]]]:
        """Wait for the devices; return the mark, and devices that differ from others by leaf.

        Only devices that should hold the same values are compared. Called in a worker thread.
        """
        unequal: dict[str, list[str]] = {}
        leaves = self.leaves.copy()
        for each in self.begun:
            counts, floats = (_rows(result) for result in each.results)
            for at, number in enumerate(each.numbers):
                regions = each.call.regions[at]
                odd = _fill(leaves[number : number + 1], regions, counts[:, at], floats[:, at])
                if self.layout.kinds[number].startswith("uint"):
                    leaves["value"][number] &= 0xFFFFFFFF
                if odd:
                    devices = [str(each.call.devices[row]) for row in odd]
                    unequal[self.layout.names[number]] = devices
        return StateMark(self.step, self.layout, leaves), unequal

    def holders(self, leaf: int, part: int) -> list[str]:
        """Return the devices that hold a part of a leaf, by their numbers."""
        for each in self.begun:
            if leaf in each.numbers:
                regions = each.call.regions[each.numbers.index(leaf)]
                split = max(regions) + 1
                rows = [row for row, it in enumerate(regions) if part_of(it, split) == part]
                return [str(each.call.devices[row]) for row in rows]
        return []


class StatePass(Struct):
    """The compiled calls of one program."""

    _classifier: Classifier = field(default_factory=lambda: Classifier(spanning=True))
    _calls: dict[tuple[Any, tuple[_Kind, ...]], _Call] = field(default_factory=dict)

    def begin(self, step: int, tree: Any) -> BegunMark:
        """Begin a mark of a tree. Compiles a call for arrays that are new.

        Raises:
            UnsupportedLeafError: The tree cannot be saved either.
        """
        structure = describe(tree)
        leaves = np.zeros(len(structure.names), MARK)
        kinds: list[str] = []
        groups: dict[Any, list[tuple[int, _Kind, jax.Array]]] = {}
        for number, (name, leaf) in enumerate(zip(structure.names, structure.leaves, strict=True)):
            state = _state_of(leaf)
            if state is not None:
                kinds.append(f"{ITERATOR} {type(leaf).__name__}")
                leaves[number]["fingerprint"] = state
                continue
            found = self._classifier.classify(leaf, name)
            is_key = found.kind == "key"
            shape = leaf.shape if is_key else found.shape
            what = f"key {found.impl}" if is_key else found.dtype or found.kind
            kinds.append(f"{what}{list(shape)}")
            array = jax.random.key_data(leaf) if is_key else leaf
            where = _place_of(array) if isinstance(array, jax.Array) else None
            if where is None:
                leaves[number] = _on_host(array)
            elif array.size:
                spec: Any = getattr(array.sharding, "spec", None)
                kind = _Kind(array.shape, array.dtype.name, spec)
                groups.setdefault(where, []).append((number, kind, array))
        begun = []
        for where, members in groups.items():
            key = where, tuple(kind for _, kind, _ in members)
            arrays = [array for _, _, array in members]
            call = self._calls.get(key)
            if call is None:
                # In a thread of its own, where none of the caller's contexts of jax is set.
                x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
                with ThreadPoolExecutor(1) as thread:
                    made = thread.submit(_compiled, where, key[1], arrays, x64)
                    call = self._calls[key] = made.result()
            begun.append(_Begun([number for number, _, _ in members], call, call.run(*arrays)))
        return BegunMark(step, StateLayout(structure.names, tuple(kinds)), leaves, begun)


def _place_of(array: jax.Array) -> Mesh | jax.Device | None:
    """Return the mesh or the device of an array; None if the host is to look at it."""
    sharding = array.sharding
    device: Any = next(iter(sharding.device_set))
    if array.dtype.name in _ON_HOST or array.dtype.itemsize not in _WORDS:
        return None
    if sharding.memory_kind not in (None, device.default_memory().kind):
        return None
    if len(sharding.device_set) == 1:
        return device
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def _state_of(leaf: Any) -> Array | None:
    """Return a fingerprint of the state of an object that has one, such as an iterator."""
    for name in ("get_state", "state_dict"):
        if callable(getattr(type(leaf), name, None)):
            state = describe(getattr(leaf, name)())
            parts = (
                each.encode() + _on_host(value).tobytes()
                for each, value in zip(state.names, state.leaves, strict=True)
            )
            return _hashed(b"".join(parts))
    return None


def _hashed(data: bytes) -> Array:
    return np.frombuffer(bytes.fromhex(digest(data)[:16]), np.uint32)


def _on_host(leaf: Any) -> Array:
    """Return the mark of a leaf that no device looks at."""
    mark = np.zeros((), MARK)
    if is_function(leaf) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        # A function has no values. And of an array that spans processes, none has all values.
        return mark
    array = np.asarray(leaf) if isinstance(leaf, bool | int | float | jax.Array) else leaf
    if not isinstance(array, np.ndarray | np.generic) or array.dtype.name not in DTYPES:
        # Also integers that are too large for an array.
        mark["fingerprint"] = _hashed(repr(leaf).encode())
        return mark
    signs = box_signs(host_bytes(array), (0,) * array.ndim, array.shape, array.dtype, len)
    mark["fingerprint"], mark["norm"] = signs["fingerprint"], signs["norm"]
    if jnp.issubdtype(array.dtype, jnp.inexact):
        parts = array.real, array.imag if array.dtype.kind == "c" else ()
        flat = np.concatenate([np.ravel(part).astype(np.float32) for part in parts])
        values = np.nan_to_num(flat, posinf=0, neginf=0)
        factors = np.random.default_rng(0).uniform(-1, 1, values.size).astype(np.float32)
        mark["norm"] = np.linalg.norm(values)
        mark["sketch"] = math.sqrt(3) * float(values @ factors)
    elif array.dtype.kind in "iu" and not array.shape:
        mark["value"] = min(int(array), _MOST_INT)
    return mark


def _compiled(where: Any, kinds: Sequence[_Kind], arrays: Sequence[jax.Array], x64: bool) -> _Call:
    """Return the call over arrays of one mesh or device; `x64` is that of the caller."""
    devices = list(where.devices.flat) if isinstance(where, Mesh) else [where]
    offsets, regions = [], []
    for array in arrays:
        places = array.sharding.devices_indices_map(array.shape)
        corners = [
            tuple(part.indices(n)[0] for part, n in zip(places[device], array.shape, strict=True))
            for device in devices
        ]
        order = {corner: number for number, corner in enumerate(sorted(set(corners)))}
        regions.append([order[corner] for corner in corners])
        offsets.append(np.array(corners, np.uint32).reshape(len(devices), -1))
    groups: dict[Any, list[int]] = {}
    for number, (kind, offset) in enumerate(zip(kinds, offsets, strict=True)):
        shard = arrays[number].sharding.shard_shape(arrays[number].shape)
        nbytes = math.prod(shard) * arrays[number].dtype.itemsize
        alone = number if nbytes > _TOGETHER_BYTES else -1
        groups.setdefault((shard, kind.dtype, offset.tobytes(), alone), []).append(number)

    def sums(*shards: jax.Array) -> tuple[jax.Array, jax.Array]:
        device = lax.axis_index(where.axis_names) if isinstance(where, Mesh) else 0
        counts: list[Any] = [None] * len(shards)
        floats: list[Any] = [None] * len(shards)
        for members in groups.values():
            offset = jnp.asarray(offsets[members[0]])[device]
            together = jnp.stack([shards[number] for number in members])
            found = jax.vmap(_sums, (0, None))(together, offset)
            for at, number in enumerate(members):
                counts[number], floats[number] = found[0][at], found[1][at]
        return jnp.stack(counts)[None], jnp.stack(floats)[None]

    # The settings of a program may forbid it what is done here.
    with jax.enable_x64(x64), jax.numpy_rank_promotion("allow"):
        return _Call(_jitted(where, sums, kinds).lower(*arrays).compile(), devices, regions)


def _jitted(where: Any, sums: Callable[..., Any], kinds: Sequence[_Kind]) -> Any:
    """Return the function over the arrays of a mesh or a device, from that over their shards."""
    if not isinstance(where, Mesh):
        return jax.jit(sums)
    # jax declares no types here.
    make: Any = PartitionSpec
    axes = make(where.axis_names)
    specs = tuple(kind.spec for kind in kinds)
    mapped = jax.shard_map(sums, mesh=where, in_specs=specs, out_specs=(axes, axes))
    # In a job, every process gets the sums of all devices.
    out = NamedSharding(where, make()) if jax.process_count() > 1 else None
    return jax.jit(mapped, out_shardings=out)


def _sums(shard: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sums over a shard.

    Args:
        shard: The shard.
        offset: `[rank] uint32`, its first corner in its array.

    Returns:
        `[3] uint32`, the two channels of the fingerprint, and the bits of an integer without
        dimensions; and `[2] float32`, the sum of the squares and the sketch.
    """
    bits = shard.astype(jnp.uint8) if shard.dtype == jnp.bool_ else shard
    number = jnp.uint32(0)
    if not bits.shape:
        bits, offset = bits[None], jnp.zeros(1, jnp.uint32)
    words = lax.bitcast_convert_type(bits, _WORDS[bits.dtype.itemsize])
    first, itemsize = offset[-1], min(bits.dtype.itemsize, 4)
    if bits.dtype.itemsize == 8:
        words, first = words.reshape(*bits.shape[:-1], -1), first * 2
    words = words.astype(jnp.uint32)
    if not shard.shape and jnp.issubdtype(shard.dtype, jnp.integer):
        # Its sign is extended.
        number = lax.bitcast_convert_type(shard.astype(jnp.int32), jnp.uint32)
    if itemsize == 4:
        words += words >> 16
    rows = row_factors(offset, words.shape[:-1])
    columns = column_factors(first, words.shape, itemsize)
    counts = [words * rows * columns[channel] for channel in range(2)]
    if not jnp.issubdtype(shard.dtype, jnp.floating):
        one, two = (jnp.sum(each, dtype=jnp.uint32) for each in counts)
        return jnp.stack([one, two, number]), jnp.zeros(2, jnp.float32)
    values = bits.astype(jnp.float32)
    values = jnp.where(jnp.isfinite(values), values, 0)
    # A factor from -1 to 1 for each place.
    factors = (rows * columns[0] >> 8).astype(jnp.float32) * (2.0**-23) - 1
    if bits.dtype.itemsize == 8:
        # Two words for each value.
        one, two = (jnp.sum(each, dtype=jnp.uint32) for each in counts)
        weighted = values * factors.reshape(*bits.shape, 2)[..., 0]
        squares, sketch = jnp.sum(jnp.square(values)), jnp.sum(weighted)
    else:
        # It takes the maximum of the last one.
        operands = (*counts, jnp.square(values), values * factors, values)
        one, two, squares, sketch, _ = (each[0] for each in reduced(operands, words.shape))
    return jnp.stack([one, two, number]), jnp.stack([squares, sketch])


def _rows(result: jax.Array) -> Array:
    """Return the results of all devices on the host."""
    if result.is_fully_replicated and not result.is_fully_addressable:
        return np.asarray(result.addressable_data(0))
    return np.asarray(result)


def _fill(leaf: Array, regions: Sequence[int], counts: Array, floats: Array) -> list[int]:
    """Fill in a leaf from the sums of its devices; return the devices that differ from others.

    Args:
        leaf: `[1]` of dtype `MARK`.
        regions: The region that each device holds.
        counts: `[devices, 3] uint32`.
        floats: `[devices, 2] float32`.
    """
    split = max(regions) + 1
    odd: list[int] = []
    prints = np.zeros(2, np.uint32)
    parts = np.zeros(MOST_PARTS, np.uint32)
    squares, sketch = 0.0, 0.0
    for region in range(split):
        rows = [row for row, each in enumerate(regions) if each == region]
        odd += _minority(rows, counts)
        prints += counts[rows[0], :2]
        parts[part_of(region, split)] += counts[rows[0], 0]
        squares += float(floats[rows[0], 0])
        sketch += float(floats[rows[0], 1])
    leaf["fingerprint"], leaf["split"] = prints, split
    leaf["parts"] = parts if split > 1 else 0
    # The variance of a factor is a third.
    leaf["norm"], leaf["sketch"] = math.sqrt(squares), math.sqrt(3) * sketch
    leaf["value"] = counts[0, 2].astype(np.int32)
    return odd


def _minority(rows: Sequence[int], counts: Array) -> list[int]:
    """Return those of some devices that differ from most; all of them if there is no majority."""
    found: dict[bytes, list[int]] = {}
    for row in rows:
        found.setdefault(counts[row].tobytes(), []).append(row)
    if len(found) < 2:
        return []
    most = max(map(len, found.values()))
    alone = sum(len(each) == most for each in found.values()) == 1
    return [row for each in found.values() if len(each) < most or not alone for row in each]
