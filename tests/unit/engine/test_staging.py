"""The bytes of a batch in its block: logical values, each at its place, and zeros between them.

What is expected is worked out with numpy alone from the values on the host.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding

import ckpt
import ckpt.sync
from ckpt._engine.memory import staging
from ckpt._engine.memory.staging import (
    MovedShard,
    batch_contents,
    copy_batch,
    movable_shards,
    snapshot,
    sources_of,
    to_page_locked,
)
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest_head import digest
from ckpt._plan import chunking
from ckpt._plan.save_plan import SavePlan, plan_save
from ckpt._tree.leaf_specs import classify
from tests.support.trees import P, abstract, assert_same, mesh, sharded

Array = np.ndarray[Any, Any]
WIDE = {"int64", "uint64", "float64", "complex128"}
# With this budget a leaf is packed up to half a kilobyte, and a chunk has at most one.
SMALL_BUDGET = 4096
MODES = ["copy", "view", "device"]
LAYOUTS = {
    "single": lambda: SingleDeviceSharding(jax.devices()[3]),
    "replicated": lambda: NamedSharding(mesh(), P()),
    "by rows": lambda: NamedSharding(mesh(), P(("data", "model"))),
    "by both": lambda: NamedSharding(mesh(), P("data", "model")),
    "by columns": lambda: NamedSharding(mesh(), P(None, "model")),
}
# How many rows, and parts of a row, give shards of a prime length: chunks cross them or are ragged.
PRIME = {None: (293, 1), "single": (293, 1), "replicated": (293, 1), "by rows": (8 * 37, 1)}
PRIME |= {"by both": (2 * 149, 4), "by columns": (293, 4)}
CROSSING = {"by rows", "by both"}


def prime_shape(layout: str | None, dtype: str) -> tuple[int, int]:
    """Return a shape that no shard of the layout can be cut into equal chunks of a kilobyte."""
    rows, parts = PRIME[layout]
    return rows, parts * (52 // DTYPES[dtype].itemsize)


def values(dtype: str, *shape: int) -> Array:
    """Return an array of every bit pattern that its dtype has a meaning for."""
    kind = DTYPES[dtype]
    bits = {"bool": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    count = math.prod(shape) * kind.itemsize
    raw = np.random.default_rng(count).integers(0, 1 << bits.get(dtype, 8), count, np.uint8)
    return raw.view(kind).reshape(shape)


def logical(leaf: Any, host: Array) -> Array:
    """Return what is to be stored of a leaf whose value on the host is `host`."""
    array = np.ascontiguousarray(host) if host.ndim else host
    if array.dtype == np.bool_:
        return array.view(np.uint8) != 0
    return array


def planned(leaves: Sequence[Any], budget: int) -> SavePlan:
    names = [f"leaf{number}" for number in range(len(leaves))]
    return plan_save(names, [classify(leaf, "x") for leaf in leaves], budget)


def held_of(
    plan: SavePlan, leaves: Sequence[Any], mode: Any = "copy", room: int = 0
) -> dict[int, list[Any]]:
    """Take a snapshot that has `room` in page-locked memory."""
    movable = movable_shards(plan.batches, plan.leaves, leaves, mode)
    return snapshot(plan.batches, plan.leaves, leaves, mode, movable, room)


def staged(
    plan: SavePlan, leaves: Sequence[Any], mode: Any = "copy", room: int = 0
) -> Iterator[tuple[int, Array]]:
    """Copy every batch into dirty memory; yield its number and the memory."""
    held = held_of(plan, leaves, mode, room)
    for number, batch in enumerate(plan.batches):
        memory = np.full(batch.nbytes, 0xFF, np.uint8)
        sources = held.get(number) or sources_of(batch, leaves)
        copy_batch(batch, plan.leaves, sources, memory)
        yield number, memory


def check(
    leaves: Sequence[Any], hosts: Sequence[Array], budget: int, mode: Any = "copy", room: int = 0
) -> SavePlan:
    """Check every byte of every batch, and every digest."""
    plan = planned(leaves, budget)
    for number, memory in staged(plan, leaves, mode, room):
        batch = plan.batches[number]
        found = batch_contents(batch, plan.leaves, memory, {}).digests
        expected = np.zeros(batch.nbytes, np.uint8)
        for chunk, each in zip(batch.chunks, found, strict=True):
            leaf = plan.leaves[chunk.leaf]
            part = logical(leaves[chunk.leaf], hosts[chunk.leaf])[chunk.region.slices]
            block = np.zeros(leaf.chunk, DTYPES[leaf.spec.dtype or ""])
            block[tuple(slice(n) for n in part.shape)] = part
            end = chunk.offset + chunk.stored_nbytes
            expected[chunk.offset : end] = np.frombuffer(block.tobytes(), np.uint8)
            assert each == digest(np.ascontiguousarray(part).tobytes()), (leaf.name, chunk.number)
        assert memory.tobytes() == expected.tobytes(), number
    return plan


def chunks_of(plan: SavePlan) -> list[Any]:
    return [chunk for batch in plan.batches for chunk in batch.chunks]


def crossing(plan: SavePlan) -> list[Any]:
    return [chunk for chunk in chunks_of(plan) if len(chunk.parts) > 1]


def ragged(plan: SavePlan) -> list[Any]:
    return [chunk for chunk in chunks_of(plan) if chunk.nbytes < chunk.stored_nbytes]


# -- every leaf there can be ----------------------------------------------------------------------


# jax has the wide ones only where jax_enable_x64 is set.
PLACED = [(dtype, layout) for dtype in sorted(set(DTYPES) - WIDE) for layout in LAYOUTS]
ON_HOST = [(dtype, None) for dtype in sorted(DTYPES)]


@pytest.mark.parametrize(("dtype", "layout"), [*ON_HOST, *PLACED])
def test_every_dtype_packed_and_large(dtype: str, layout: str | None) -> None:
    shapes = [(8, 4), (8, 640), prime_shape(layout, dtype)]
    hosts = [values(dtype, *shape) for shape in shapes]
    leaves: list[Any] = list(hosts)
    if layout is not None:
        leaves = [jax.device_put(host, LAYOUTS[layout]()) for host in hosts]
    for mode in MODES:
        plan = check(leaves, hosts, SMALL_BUDGET, mode)
    assert [leaf.packed for leaf in plan.leaves] == [True, False, False]
    assert {chunk.leaf for chunk in ragged(plan)} == {2}
    assert {chunk.leaf for chunk in crossing(plan)} == ({2} if layout in CROSSING else set())


def test_chunks_that_cross_shards_along_the_second_axis() -> None:
    host = values("int16", 2, 4 * 1201)
    plan = check([jax.device_put(host, LAYOUTS["by both"]())], [host], SMALL_BUDGET)
    assert {len(chunk.parts) for chunk in chunks_of(plan)} == {1, 2}
    assert ragged(plan)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["float32", "bool", "int4", "complex64"]),
    st.sampled_from(["by both", "by rows", "single", None]),
)
def test_chunks_of_any_shape(chunk: tuple[int, int], dtype: str, layout: str | None) -> None:
    """Also of shapes that are never chosen: ragged along both axes, across several shards."""
    host = values(dtype, 8 * 7, 4 * 11)
    leaf = host if layout is None else jax.device_put(host, LAYOUTS[layout]())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "choose_chunk", lambda *_: chunk)
        patch.setattr(chunking, "PACKED_BYTES", 0)
        check([leaf], [host], 1 << 20)


@pytest.mark.parametrize("chunk", [(3, 11), (5, 7), (9, 44), (56, 10), (56, 44), (30, 23)])
def test_chunks_of_any_shape_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: tuple[int, int]
) -> None:
    monkeypatch.setattr(chunking, "choose_chunk", lambda *_: chunk)
    monkeypatch.setattr(chunking, "PACKED_BYTES", 0)
    state = {
        f"{dtype} {layout}": jax.device_put(values(dtype, 8 * 7, 4 * 11), LAYOUTS[layout]())
        for dtype in ("float32", "bool", "int4")
        for layout in LAYOUTS
    }
    ckpt.sync.save(tmp_path / "x", state)
    assert_same(ckpt.sync.load(tmp_path / "x"), state)
    other = jax.tree.map(lambda leaf: jax.device_put(leaf, LAYOUTS["by both"]()), state)
    assert_same(ckpt.sync.load(tmp_path / "x", like=abstract(other)), other)


@pytest.mark.parametrize("budget", [SMALL_BUDGET, 1 << 20])
def test_a_truth_value_is_stored_as_0_or_1(budget: int) -> None:
    """In memory any byte but 0 is true, and foreign code leaves such bytes behind."""
    odd = np.arange(256, dtype=np.uint8)
    for shape in ((256,), (16, 16), (10, 256)):
        host = np.resize(odd, shape).view(np.bool_)
        assert len(np.unique(host.view(np.uint8))) == 256
        leaves = [host, host[::2], host.T, jax.device_put(host), sharded(host)]
        check(leaves, [host, host[::2], host.T, host, host], budget)


@pytest.mark.parametrize("budget", [SMALL_BUDGET, 1 << 20])
def test_host_arrays_of_any_memory_layout(budget: int) -> None:
    base = values("float32", 60, 48)
    frozen = base.copy()
    frozen.flags.writeable = False
    hosts = [
        np.asfortranarray(base),
        base.T,
        base[::-1],
        base[1::3, ::-2],
        np.moveaxis(values("complex64", 3, 40, 20), 0, 2),
        np.broadcast_to(values("int16", 1, 700), (4, 700)),
        np.ndarray((500,), np.int32, np.arange(4096, dtype=np.uint8).data, 3, (7,)),
        frozen,
        values("bfloat16", 30, 60)[:, 1::2],
        np.asfortranarray(values("int4", 64, 32)),
        np.asfortranarray(values("bool", 64, 32)),
    ]
    plan = check(hosts, hosts, budget)
    if budget == SMALL_BUDGET:
        assert not any(leaf.packed for leaf in plan.leaves)


def test_arrays_without_axes_or_elements_and_values() -> None:
    leaves: list[Any] = [
        np.array(7, np.int16),
        np.array(True),
        np.float32(0.5),
        DTYPES["bfloat16"].type(0.5),
        jnp.float32(1.5),
        sharded(np.int32(9)),
        np.zeros((0, 3)),
        jnp.zeros((4, 0, 2)),
        True,
        -12,
        2.5,
        float("nan"),
    ]
    hosts = [np.asarray(leaf) for leaf in leaves]
    plan = check(leaves, hosts, 1 << 20)
    assert {chunk.leaf for chunk in chunks_of(plan)} == {*range(6), *range(8, 12)}
    check(["text", b"bytes", 1j, 2**70, *leaves], [np.zeros(()), *[hosts[0]] * 3, *hosts], 1 << 20)


@st.composite
def leaf_lists(draw: st.DrawFn) -> tuple[list[Any], list[Array]]:
    """Up to five leaves of some kilobytes, and what they are on the host."""
    leaves: list[Any] = []
    hosts: list[Array] = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(set(DTYPES) - WIDE)))
        layout = draw(st.sampled_from([None, None, *LAYOUTS]))
        if layout is None:
            shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
            host = values(dtype, *shape)
            host = draw(st.sampled_from([host, host.T, host[::-1] if shape else host]))
            leaves.append(host)
        else:
            rows, columns = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
            host = values(dtype, 8 * rows, 4 * columns)
            leaves.append(jax.device_put(host, LAYOUTS[layout]()))
        hosts.append(host)
    return leaves, hosts


@given(leaf_lists(), st.sampled_from([512, 1000, 4096, 30_000, 1 << 20]), st.sampled_from(MODES))
def test_any_leaves_at_any_granularity(
    made: tuple[list[Any], list[Array]], budget: int, mode: str
) -> None:
    check(*made, budget, mode)


# -- snapshots ------------------------------------------------------------------------------------


def test_what_a_snapshot_holds() -> None:
    host = values("float32", 64, 64)
    leaves = [host, jnp.asarray(host), sharded(host, "data"), jnp.ones(3), 5]
    plan = planned(leaves, SMALL_BUDGET)
    kinds = {
        number: {chunk.leaf for chunk in batch.chunks} for number, batch in enumerate(plan.batches)
    }
    for mode in MODES:
        held = held_of(plan, leaves, mode)
        expected = set() if mode == "copy" else {1, 2}
        # Of batches with others in them nothing is held; here there is none such.
        assert {leaf for number in held for leaf in kinds[number]} == expected
        for sources in held.values():
            assert all(isinstance(each, jax.Array) == (mode == "device") for each in sources)


@pytest.mark.parametrize("mode", ["view", "device"])
def test_a_batch_is_held_if_all_of_it_can_be(mode: Any) -> None:
    # A numpy array and most of the chunks of the other share a batch.
    hosts = [values("uint8", 132_000), values("float32", 8, 4_350)]
    leaves = [hosts[0], jax.device_put(hosts[1], LAYOUTS["by rows"]())]
    plan = check(leaves, hosts, 1 << 20, mode)
    sizes = [len(batch.chunks) for batch in plan.batches]
    assert sizes[0] > 4
    assert set(held_of(plan, leaves, mode)) == {1}
    plan = check(leaves[1:], hosts[1:], 1 << 20, mode)
    assert [len(batch.chunks) for batch in plan.batches] == [8]
    assert set(held_of(plan, leaves[1:], mode)) == {0}


@pytest.mark.parametrize("mode", ["view", "device"])
def test_what_is_held_outlives_the_arrays(mode: str) -> None:
    hosts = [values("float32", 64, 64), values("int8", *prime_shape("by rows", "int8"))]
    leaves = [jax.device_put(host, LAYOUTS["by rows"]()) for host in hosts]
    plan = planned(leaves, SMALL_BUDGET)
    held = held_of(plan, leaves, mode)
    assert set(held) == set(range(len(plan.batches)))
    for leaf in leaves:
        leaf.delete()
    for number, batch in enumerate(plan.batches):
        memory = np.full(batch.nbytes, 0xFF, np.uint8)
        copy_batch(batch, plan.leaves, held[number], memory)
        for chunk in batch.chunks:
            leaf = plan.leaves[chunk.leaf]
            found = memory[chunk.offset : chunk.offset + chunk.stored_nbytes]
            inside = found.view(hosts[chunk.leaf].dtype).reshape(leaf.chunk)
            part = hosts[chunk.leaf][chunk.region.slices]
            assert inside[tuple(slice(n) for n in part.shape)].tobytes() == part.tobytes()


def test_a_shard_is_held_once_however_many_chunks_it_has() -> None:
    array = jax.device_put(values("float32", 8, 4096), LAYOUTS["by rows"]())
    plan = planned([array], SMALL_BUDGET)
    held = held_of(plan, [array], "device")
    assert len(chunks_of(plan)) == 128
    assert len({id(each) for sources in held.values() for each in sources}) == 8


def test_a_replicated_array_is_taken_once() -> None:
    array = sharded(values("float32", 64, 64))
    plan = planned([array], SMALL_BUDGET)
    assert {part.shard for chunk in chunks_of(plan) for part in chunk.parts} == {0}


def test_a_device_without_room_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.asarray(values("float32", 64, 64))
    plan = planned([array], SMALL_BUDGET)

    def full(_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(jnp, "copy", full)
    assert held_of(plan, [array], "device") == {}


# -- the way of accelerators ----------------------------------------------------------------------


def page_locked() -> str | None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    return "pinned_host" if "pinned_host" in kinds else None


needs_page_locked = pytest.mark.skipif(
    page_locked() is None, reason="this device has no page-locked memory"
)


@needs_page_locked
@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - WIDE))
def test_page_locked_memory_has_the_same_bytes(dtype: str) -> None:
    for number, shape in enumerate([(), (0, 3), (5,), (64, 33)]):
        host = values(dtype, *shape)
        array = jax.device_put(host, jax.devices()[number])
        moved = to_page_locked(array)
        assert moved.sharding.memory_kind == "pinned_host"
        assert moved.devices() == array.devices()
        assert (moved.dtype, moved.shape) == (array.dtype, array.shape)
        # What is there already stays where it is.
        again = to_page_locked(moved)
        assert again.sharding.memory_kind == "pinned_host"
        assert host_copies([array, moved, again]) == []
        assert np.asarray(moved).tobytes() == host.tobytes()
        assert np.asarray(again).tobytes() == host.tobytes()


# Every layout with a dtype of whole bytes and a narrower one, and every other kind of dtype.
NOT_ON_A_CPU = [(dtype, layout) for dtype in ("float32", "int4") for layout in LAYOUTS]
NOT_ON_A_CPU += [(dtype, "by both") for dtype in ("bfloat16", "bool", "float8_e4m3fn")]


@pytest.mark.parametrize(("dtype", "layout"), NOT_ON_A_CPU)
def test_arrays_that_are_not_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, layout: str
) -> None:
    """Parts are cut out on the device and go through page-locked memory."""
    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    hosts = [values(dtype, *shape) for shape in [(8, 4), (8, 640), prime_shape(layout, dtype)]]
    leaves = [jax.device_put(host, LAYOUTS[layout]()) for host in hosts]
    plan = check(leaves, hosts, SMALL_BUDGET)
    check(leaves, hosts, SMALL_BUDGET, "device")
    for room in (6_000, 1 << 20):
        check(leaves, hosts, SMALL_BUDGET, room=room)
    # Views are there for the arrays of CPUs only.
    assert held_of(plan, leaves, "view") == {}
    assert host_copies(leaves) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_accelerators_move_whole_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    hosts = [values("float32", 8, 640), values("float32", 8, 640)[::-1].copy()]
    leaves = [jax.device_put(host, LAYOUTS[layout]()) for host in hosts]
    plan = planned(leaves, SMALL_BUDGET)
    # Replicas are taken once.
    both = [sum(batch.nbytes for batch in plan.batches), sum(host.nbytes for host in hosts)]
    assert both[0] == both[1]
    for room in (both[0], both[0] // 2, both[0] - 1, 0):
        held = held_of(plan, leaves, "copy", room)
        moved = {id(each): each for sources in held.values() for each in sources}
        assert all(isinstance(each, MovedShard) for each in moved.values())
        nbytes = sum(each.array.nbytes for each in moved.values())
        assert nbytes <= room
        assert nbytes > room - max((each.array.nbytes for each in moved.values()), default=1)
    assert not held
    whole = held_of(plan, leaves, "copy", both[0])
    assert set(whole) == set(range(len(plan.batches)))
    for leaf in leaves:
        leaf.delete()
    for number, batch in enumerate(plan.batches):
        memory = np.full(batch.nbytes, 0xFF, np.uint8)
        copy_batch(batch, plan.leaves, whole[number], memory)
        (host,) = {id(hosts[chunk.leaf]): hosts[chunk.leaf] for chunk in batch.chunks}.values()
        parts = [host[chunk.region.slices].tobytes() for chunk in batch.chunks]
        assert memory.tobytes() == b"".join(parts)


def test_a_shard_of_which_a_part_is_wanted_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job every process writes a part of what all of them have."""
    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    array = jnp.asarray(values("float32", 64, 64))
    plan = planned([array], SMALL_BUDGET)
    batches = plan.batches[1:]
    assert movable_shards(plan.batches, plan.leaves, [array], "copy") == {(0, 0): array.nbytes}
    assert movable_shards(batches, plan.leaves, [array], "copy") == {}


def test_page_locked_memory_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    arrays = [jnp.asarray(values("float32", 64, 64)) + n for n in range(3)]
    plan = planned(arrays, SMALL_BUDGET)
    move, calls = staging.to_page_locked, 0

    def full_at_the_second(array: jax.Array) -> jax.Array:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return move(array)

    monkeypatch.setattr(staging, "to_page_locked", full_at_the_second)
    held = held_of(plan, arrays, "copy", 1 << 30)
    assert calls == 2
    assert {chunk.leaf for number in held for chunk in plan.batches[number].chunks} == {0}


# -- no host copy stays on an array ---------------------------------------------------------------


def host_copies(leaves: Sequence[Any]) -> list[Any]:
    """Return the arrays, and the shards of arrays, that keep a host copy of themselves alive."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return [each for each in (*arrays, *shards) if each._npy_value is not None]


KEPT: dict[str, Callable[[], Any]] = {
    "single device": lambda: jnp.arange(200_000, dtype=jnp.float32),
    "replicated": lambda: sharded(np.arange(200_000, dtype=np.float32)),
    "sharded": lambda: sharded(np.arange(200_000, dtype=np.float32), ("data", "model")),
    "small, single device": lambda: jnp.arange(20, dtype=jnp.float32),
    "small, replicated": lambda: sharded(np.arange(20, dtype=np.float32)),
    "small, sharded": lambda: sharded(np.arange(24, dtype=np.float32), ("data", "model")),
    "small, partly replicated": lambda: sharded(np.arange(24, dtype=np.float32), "data"),
    "truth values": lambda: sharded(np.arange(400_000) % 2 == 0, "data"),
    "narrower than a byte": lambda: jnp.ones(400_000, jnp.int4),
    "narrower than a byte, replicated": lambda: sharded(jnp.ones(400_000, jnp.int4)),
    "narrower than a byte, sharded": lambda: sharded(jnp.ones(400_000, jnp.int4), "data"),
    "small, narrower than a byte": lambda: jnp.ones(30, jnp.float4_e2m1fn),
    "small, narrower than a byte, sharded": lambda: sharded(jnp.ones(32, jnp.uint2), "data"),
}


def test_a_host_copy_would_be_noticed() -> None:
    for make in (KEPT["sharded"], KEPT["small, sharded"]):
        array = make()
        assert host_copies([array]) == []
        np.asarray(array)
        assert host_copies([array]) == [array]


def test_threads_that_ask_at_the_same_time_get_all_shards() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            array = sharded(np.arange(80, dtype=np.float32), ("data", "model"))
            found: list[int] = []
            barrier = threading.Barrier(4)

            def ask(array: Any, found: list[int], barrier: threading.Barrier) -> None:
                barrier.wait()
                found.append(len(staging.shards_of(array)))

            asking = [threading.Thread(target=ask, args=(array, found, barrier)) for _ in range(4)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
            assert found == [len(jax.devices())] * 4
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("mode", ["auto", "copy", "view", "device"])
def test_no_host_copy_stays_on_an_array_that_was_saved(
    tmp_path: Path, mode: Any, kind: str
) -> None:
    array = KEPT[kind]()
    staging = ckpt.Staging(mode=mode, budget_bytes=2 << 20)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        commit = mgr.save(0, {"x": array})
        assert host_copies([array]) == []
        commit.result()
    assert host_copies([array]) == []
