"""`open_array`: any index gives what numpy gives, and only the chunks that it touches are read."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._plan.slices import region_of_index
from ckpt.storage._local.storage import LocalStorage
from tests.support.trees import P, mesh

ROWS, COLUMNS = 4096, 2048


def values() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With an array in chunks of 64 rows, half a MiB each."""
    state = {
        "params": {"w": jnp.asarray(values()), "half": jnp.arange(6, dtype=jnp.bfloat16)},
        "count": 3,
        "key": jax.random.key(0),
    }
    formats = {"params.w": ckpt.ArrayFormat(chunk_bytes=64 * COLUMNS * 4, split_axes=(0,))}
    ckpt.sync.save(tmp_path / "one", state, formats=formats)
    return tmp_path / "one"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read of a data file."""
    found: list[int] = []
    plain = LocalStorage.read_block

    async def counted(
        self: Any, step_dir: str, path: str, offset: int, target: Any, *more: Any
    ) -> None:
        found.append(len(target))
        await plain(self, step_dir, path, offset, target, *more)

    monkeypatch.setattr(LocalStorage, "read_block", counted)
    return found


def test_what_is_known_of_it(checkpoint: Path) -> None:
    array = ckpt.sync.open_array(checkpoint, "params.w")
    assert array.shape == (ROWS, COLUMNS)
    assert array.dtype == np.float32
    assert array.chunks == (64, COLUMNS)
    assert array.nbytes == ROWS * COLUMNS * 4
    assert "float32[4096, 2048]" in repr(array)
    assert "params.w" in repr(array)


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        (np.s_[0], 1),
        (np.s_[-1, 5], 1),
        (np.s_[10:20, ::2], 1),
        (np.s_[60:70], 2),
        (np.s_[200:100:-50], 2),
        (np.s_[..., 7], ROWS // 64),
        (np.s_[5:5], 0),
        (np.s_[:, 3:3], 0),
    ],
)
def test_only_the_chunks_that_it_touches_are_read(
    index: Any, chunks: int, checkpoint: Path, read: list[int]
) -> None:
    array = ckpt.sync.open_array(checkpoint, "params.w")
    assert read == []
    assert np.array_equal(array[index], values()[index])
    assert sum(read) == chunks * 64 * COLUMNS * 4


def test_all_of_it(checkpoint: Path) -> None:
    array = ckpt.sync.open_array(checkpoint, "params.w")
    assert np.array_equal(np.asarray(array), values())
    half = ckpt.sync.open_array(checkpoint, "params.half")
    assert half[:].dtype == ml_dtypes.bfloat16
    assert np.asarray(half, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="makes a copy"):
        half.__array__(copy=False)


def test_with_asyncio(checkpoint: Path) -> None:
    async def main() -> None:
        array = await ckpt.open_array(checkpoint, "params.w")
        parts = await asyncio.gather(*(array[at : at + 3] for at in range(0, 300, 100)))
        for at, part in zip(range(0, 300, 100), parts, strict=True):
            assert np.array_equal(part, values()[at : at + 3])

    asyncio.run(main())


def test_a_flipped_byte_is_found(checkpoint: Path) -> None:
    data = max((checkpoint / "default" / "d").iterdir(), key=lambda each: each.stat().st_size)
    with data.open("r+b") as file:
        file.write(b"\x55")
    array = ckpt.sync.open_array(checkpoint, "params.w")
    found = []
    for at in range(0, ROWS, 64):
        try:
            assert np.array_equal(array[at], values()[at])
        except errors.CorruptCheckpointError as error:
            found.append(error.leaf)
    assert found == ["params.w"]


def test_however_it_was_stored(tmp_path: Path) -> None:
    sharded = jax.device_put(values()[:512], NamedSharding(mesh(), P("data", "model")))
    formats = {"packed": ckpt.ArrayFormat(compression="zstd")}
    state = {
        "sharded": sharded,
        "packed": values()[:64],
        "small": np.int16(4),
        "none": np.zeros((0, 3)),
    }
    for path in (tmp_path / "one", f"memory://open-array/{uuid.uuid4().hex}"):
        ckpt.sync.save(path, state, formats=formats)
        for leaf, wanted in state.items():
            array = ckpt.sync.open_array(path, leaf)
            assert np.array_equal(array[...], wanted), leaf
        assert np.array_equal(
            ckpt.sync.open_array(path, "sharded")[100:300, 9], values()[100:300, 9]
        )


def test_what_others_wrote(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"p": {"w": jnp.asarray(values())}})
    save_file({"p.w": values()}, tmp_path / "model.safetensors")
    for path in (tmp_path / "orbax", tmp_path / "model.safetensors"):
        array = ckpt.sync.open_array(path, "p.w")
        assert np.array_equal(array[1000:1010, 3], values()[1000:1010, 3])


def test_items(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", items={"a": {"w": np.arange(3)}, "b": {"w": np.arange(4)}})
    assert ckpt.sync.open_array(tmp_path / "one", "b:w").shape == (4,)
    with pytest.raises(errors.InvalidArgumentError, match=r"several items \(a, b\): .* 'a:w'"):
        ckpt.sync.open_array(tmp_path / "one", "w")
    with pytest.raises(errors.InvalidArgumentError, match=r"several items \(a, b\): .* 'a:w'"):
        ckpt.sync.open_array(tmp_path / "one", "c:w")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("params.v", "there is no leaf 'params.v'.*'w'"),
        ("params", "it is a branch with 2 of them, such as 'params.half'"),
        ("count", r"'count' is no array \(int\): read it with ckpt.load\(path, at='count'\)"),
        ("key", r"'key' is no array \(PRNG key\)"),
        (3, "there is no leaf 3"),
    ],
)
def test_a_leaf_that_is_no_array_is_told(leaf: Any, text: str, checkpoint: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        ckpt.sync.open_array(checkpoint, leaf)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (ROWS, "axis 0 has the length 4096"),
        (np.s_[0, -COLUMNS - 1], "axis 1 has the length 2048"),
        (np.s_[0, 0, 0], "it has 2 axes"),
        (np.s_[..., 0, ...], "it has 2 axes"),
        ("w", "expected integers, slices"),
        ([1, 2], "expected integers, slices"),
        (None, "expected integers, slices"),
        (True, "expected integers, slices"),
        (1.5, "expected integers, slices"),
        (slice(None, None, 0), "zero"),
        (slice("a", None), "slice indices"),
    ],
)
def test_a_wrong_index_is_told(index: Any, text: str, checkpoint: Path) -> None:
    array = ckpt.sync.open_array(checkpoint, "params.w")
    with pytest.raises(errors.InvalidArgumentError, match=text):
        array[index]
    with pytest.raises(errors.InvalidArgumentError, match="not iterated"):
        list(array)


def test_a_step_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": values()}, durable=True)
        array = ckpt.sync.open_array(tmp_path / "1", "w")
        mgr.delete(1)
        with pytest.raises(errors.StepDeletedError):
            array[0]


shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


@given(st.data(), shapes)
def test_an_index_takes_what_numpy_takes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=False, allow_ellipsis=True))
    region, within = region_of_index(index, shape)
    assert all(
        o >= 0 and o + n <= size
        for o, n, size in zip(region.offset, region.shape, shape, strict=True)
    )
    found = array[region.slices][within]
    wanted = array[index]
    assert np.array_equal(found, wanted)
    assert np.shape(found) == np.shape(wanted)
