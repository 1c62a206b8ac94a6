"""Compressed chunks: within their block, within the budget, and only when nobody waits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt._engine.codecs import decode_chunk, encode_chunk
from ckpt._engine.memory import staging
from ckpt._engine.memory.staging import batch_contents, copy_batch, sources_of
from ckpt._engine.save.encoding import encode_batch
from ckpt._format.array_format import ArrayFormat, Blosc, Zstd
from ckpt._format.leaf_table import LeafEntry
from ckpt._plan.save_plan import plan_save
from ckpt._plan.write_batches import encoded_bound
from ckpt._tree.leaf_specs import LeafSpec
from ckpt._vitals.extension.device_pass import Kernels
from ckpt._vitals.extension.signs_of_saves import SignsOfItem
from ckpt.errors import CorruptCheckpointError
from ckpt.handlers._base import Deferred
from tests.support.trees import sharded

MIB = 1 << 20
CODECS = [
    Zstd(),
    Zstd(19),
    Blosc(),
    Blosc("zstd", 9, "bitshuffle"),
    Blosc("blosclz", 1, "noshuffle"),
]


@pytest.mark.parametrize("compression", CODECS, ids=str)
@given(
    length=st.integers(1, 70_000), itemsize=st.sampled_from([1, 2, 4, 8, 16]), noise=st.booleans()
)
def test_a_chunk_comes_back_and_is_never_longer_than_its_bound(
    compression: Any, length: int, itemsize: int, noise: bool
) -> None:
    random = np.random.default_rng(length)
    chunk = random.integers(0, 256 if noise else 2, length, np.uint8)
    encoded = np.frombuffer(encode_chunk(chunk, compression, itemsize), np.uint8)
    assert len(encoded) <= encoded_bound(length)
    found = np.zeros_like(chunk)
    leaf = LeafEntry(name="x", kind="numpy", codec=compression.name)
    decode_chunk(leaf, encoded, found)
    np.testing.assert_array_equal(found, chunk)
    # Neither a part of it nor more than it has.
    for size in {length + 1, max(length - 1, 1), 3 * length} - {length}:
        with pytest.raises(CorruptCheckpointError) as caught:
            decode_chunk(leaf, encoded, np.zeros(size, np.uint8))
        assert caught.value.leaf == "x"


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=3),
    st.sampled_from(CODECS),
    st.booleans(),
)
def test_an_encoded_batch_is_a_file_of_its_chunks_and_zeros(
    shapes: list[tuple[int, int]], compression: Any, noise: bool
) -> None:
    random = np.random.default_rng(len(shapes))
    leaves = [random.integers(0, 256 if noise else 2, shape).astype(np.int32) for shape in shapes]
    chosen = ArrayFormat(compression=compression, chunk_bytes=4096)
    specs = [LeafSpec("numpy", "int32", leaf.shape, format=chosen) for leaf in leaves]
    plan = plan_save([f"leaf{n}" for n in range(len(leaves))], specs, MIB)
    signs = {"vital_signs": SignsOfItem("x", "host", (), Kernels())}
    signs["vital_signs"].begin(plan.leaves, leaves, None, ())
    for batch in (each for each in plan.batches if each.encoded):
        # What an earlier save has left must not get into the file.
        memory = np.full(batch.block_bytes, 0xAA, np.uint8)
        staged = memory[batch.staged_at : batch.staged_at + batch.nbytes]
        copy_batch(batch, plan.leaves, sources_of(batch, leaves), staged)
        wanted = batch_contents(batch, plan.leaves, staged, signs)
        chunks = [
            staged[chunk.offset : chunk.offset + chunk.stored_nbytes].copy()
            for chunk in batch.chunks
        ]
        done = encode_batch(batch, plan.leaves, memory, signs)
        assert done.contents.digests == wanted.digests
        found_now, wanted_then = (each.records["vital_signs"] for each in (done.contents, wanted))
        assert found_now.tobytes() == wanted_then.tobytes()
        rest = memory[: done.nbytes].copy()
        entry = LeafEntry(name="x", kind="numpy", codec=compression.name)
        for place, chunk in zip(done.spans, chunks, strict=True):
            found = np.zeros_like(chunk)
            encoded = memory[place.offset : place.offset + place.length].copy()
            decode_chunk(entry, encoded, found)
            np.testing.assert_array_equal(found, chunk)
            rest[place.offset : place.offset + place.length] = 0
        assert not rest.any()


def phases(root: Path, budget: int, tree: Any) -> list[ckpt.types.Event]:
    seen: list[ckpt.types.Event] = []
    formats = {"w": ArrayFormat(compression="zstd")}
    with ckpt.sync.CheckpointManager(
        root, staging=ckpt.Staging(budget), formats=formats, observers=[seen.append]
    ) as manager:
        manager.save(1, tree).result()
        assert manager._service.engine.arena.high_water <= budget
        np.testing.assert_array_equal(manager.restore()["w"], tree["w"])
    return seen


def test_nothing_is_encoded_while_the_caller_waits(tmp_path: Path) -> None:
    tree = {"w": np.random.default_rng(0).standard_normal((16, MIB // 8))}
    seen = phases(tmp_path, 256 * MIB, tree)
    blocked = next(event for event in seen if event.phase == "blocked")
    encoded = [event for event in seen if event.phase == "encode"]
    assert encoded
    assert all(event.began_ns >= blocked.ended_ns for event in encoded)


def test_a_state_larger_than_the_budget_is_encoded_to_make_room(tmp_path: Path) -> None:
    tree = {"w": np.random.default_rng(0).standard_normal((16, MIB // 8))}
    seen = phases(tmp_path, 4 * MIB, tree)
    blocked = next(event for event in seen if event.phase == "blocked")
    encoded = [event for event in seen if event.phase == "encode"]
    assert sum(event.nbytes for event in encoded) >= tree["w"].nbytes
    assert min(event.began_ns for event in encoded) < blocked.ended_ns


@pytest.mark.parametrize("pause_ns", [0, 3600 * 10**9], ids=["every-chunk", "never"])
def test_the_parts_of_a_batch_are_told_and_add_up_to_it(
    pause_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._engine.save.encoding._PART_NS", pause_ns)
    leaf = np.arange(5000, dtype=np.int32)
    chosen = ArrayFormat(compression="zstd", chunk_bytes=4096)
    plan = plan_save(["w"], [LeafSpec("numpy", "int32", leaf.shape, format=chosen)], MIB)
    (batch,) = plan.batches
    memory = np.zeros(batch.block_bytes, np.uint8)
    staged = memory[batch.staged_at : batch.staged_at + batch.nbytes]
    copy_batch(batch, plan.leaves, sources_of(batch, [leaf]), staged)
    told: list[tuple[int, int, int]] = []
    encode_batch(batch, plan.leaves, memory, {}, told=lambda *part: told.append(part))
    assert len(told) == (1 if pause_ns else len(batch.chunks))
    assert sum(nbytes for _, _, nbytes in told) == batch.nbytes
    assert all(began <= ended and nbytes > 0 for began, ended, nbytes in told)
    for (_, ended, _), (began, _, _) in pairwise(told):
        assert ended == began


def test_encoding_that_takes_long_is_told_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt._engine.save.encoding._PART_NS", 0)
    tree = {"w": np.random.default_rng(0).standard_normal((16, MIB // 8))}
    seen = phases(tmp_path, 256 * MIB, tree)
    staged = sum(event.nbytes for event in seen if event.phase == "stage")
    encoded = [event for event in seen if event.phase == "encode"]
    assert len(encoded) > len({event.batch for event in encoded})
    assert sum(event.nbytes for event in encoded) == staged


class Impatient(ckpt.handlers.PyTreeHandler):
    """Waits until its item is durable, while the caller of `save()` waits for it."""

    async def stage(self, item: Any, writer: Any) -> Any:
        entry = await (await super().stage(item, writer))

        async def commit() -> Any:
            return entry

        return Deferred(commit)


def test_a_handler_may_wait_for_its_item_before_the_caller_is_free(tmp_path: Path) -> None:
    tree = {"w": np.arange(MIB)}
    formats = {"w": ArrayFormat(compression="zstd")}
    ckpt.sync.save(tmp_path / "x", tree, formats=formats, handlers=[Impatient()])
    np.testing.assert_array_equal(ckpt.sync.load(tmp_path / "x")["w"], tree["w"])


def test_arrays_of_accelerators_are_cast_before_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[np.dtype[Any]] = []
    move = staging.to_page_locked

    def watch(array: jax.Array) -> jax.Array:
        moved.append(array.dtype)
        return move(array)

    monkeypatch.setattr(staging, "_is_host", lambda sharding: False)
    monkeypatch.setattr(staging, "to_page_locked", watch)
    base = jnp.linspace(-3, 3, MIB).reshape(1024, 1024)
    state = {
        "narrower": sharded(base, "data", "model"),
        "wider": sharded(base.astype(jnp.bfloat16), "data"),
    }
    formats = {"narrower": ArrayFormat(dtype="bfloat16"), "wider": ArrayFormat(dtype="float32")}
    ckpt.sync.save(tmp_path / "x", state, formats=formats)
    assert set(moved) == {jnp.dtype("bfloat16")}
    found = ckpt.sync.load(tmp_path / "x")
    assert jnp.array_equal(found["narrower"], base.astype(jnp.bfloat16))
    assert jnp.array_equal(found["wider"], base.astype(jnp.bfloat16).astype(jnp.float32))
