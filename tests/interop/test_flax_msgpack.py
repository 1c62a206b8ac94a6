"""Files of msgpack that Flax wrote are read where they are, onto states and meshes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack  # type: ignore[import-untyped]
import numpy as np
import optax
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._interop import flax
from tests.support.real_jobs import run_processes
from tests.support.trees import P, mesh, structure

nn = pytest.importorskip("flax.linen")
serialization = pytest.importorskip("flax.serialization")
train_state = pytest.importorskip("flax.training.train_state")

TX = optax.chain(optax.clip(1.0), optax.adamw(1e-3))


def fresh(value: float = 0.0) -> Any:
    """A train state, as a run of Flax has it."""
    params = {
        "layers": [{"kernel": jnp.full((4, 8), value)}, {"kernel": jnp.full((8, 4), value)}],
        "embed": {"table": jnp.full((600, 64), value, jnp.bfloat16)},
    }
    return train_state.TrainState.create(apply_fn=len, params=params, tx=TX)


@pytest.fixture(scope="module")
def trained() -> Any:
    state = fresh(1.0)
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))


@pytest.fixture
def model(trained: Any, tmp_path: Path) -> Path:
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(serialization.to_bytes(trained))
    return path


def assert_same(found: Any, expected: Any) -> None:
    assert structure(found) == structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.array_equal(one, other)


def in_memory(name: str, data: bytes) -> str:
    """Put a file into a store, and return its URL."""
    from ckpt.storage._object.connection import _memory_of

    bucket = uuid.uuid4().hex
    kv = ts.KvStore.open({"driver": "memory"}, context=_memory_of(bucket)).result()
    kv.write(name, data).result()
    return f"memory://{bucket}/{name}"


def test_a_train_state_comes_back(model: Path, trained: Any) -> None:
    assert_same(ckpt.sync.load(model, like=fresh()), trained)
    assert_same(asyncio.run(ckpt.load(str(model), like=fresh())), trained)


def test_without_a_target_it_is_a_dict(model: Path, trained: Any) -> None:
    found = ckpt.sync.load(model)
    assert list(found["params"]["layers"]) == ["0", "1"]
    kernel = found["params"]["layers"]["1"]["kernel"]
    assert isinstance(kernel, jax.Array)
    assert np.array_equal(kernel, trained.params["layers"][1]["kernel"])
    assert found["params"]["embed"]["table"].dtype == jnp.bfloat16
    assert found["step"] == 1
    assert found["opt_state"]["0"] == {}


def test_metadata_without_reading_arrays(model: Path) -> None:
    found = ckpt.sync.metadata(model)
    assert found.leaves["default"]["params.embed.table"].shape == (600, 64)
    assert "1970" not in str(found)


def test_the_parameters_alone_onto_a_mesh(model: Path, trained: Any) -> None:
    rows = NamedSharding(mesh(), P("data"))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=rows), fresh().params
    )
    found = ckpt.sync.load(model, like=target, at="params")
    assert found["embed"]["table"].sharding == rows
    assert np.array_equal(found["embed"]["table"], trained.params["embed"]["table"])


def test_one_array_of_it(model: Path, trained: Any) -> None:
    array = ckpt.sync.open_array(model, "params.embed.table")
    assert np.array_equal(array[100:102], trained.params["embed"]["table"][100:102])


def test_in_a_store(trained: Any) -> None:
    url = in_memory("flax_model.msgpack", serialization.to_bytes(trained))
    assert_same(ckpt.sync.load(url, like=fresh()), trained)


def test_a_run_begins_from_it(model: Path, trained: Any, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        begin, state = mgr.resume(fresh, source=model)
    assert begin == 0
    assert_same(state, trained)


@pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon:DeprecationWarning")
def test_what_flax_itself_calls_checkpoints(tmp_path: Path, trained: Any) -> None:
    checkpoints = pytest.importorskip("flax.training.checkpoints")
    config = pytest.importorskip("flax.configurations").config
    with config.temp_flip_flag("use_orbax_checkpointing", False):
        checkpoints.save_checkpoint(str(tmp_path), trained, 100)
    path = tmp_path / "checkpoint_100"
    assert path.is_file()
    assert_same(ckpt.sync.load(path, like=fresh()), trained)
    # Directories of such a name are what they were.
    ckpt.sync.save(tmp_path / "checkpoint_7", {"w": jnp.ones(3)})
    assert ckpt.sync.load(tmp_path / "checkpoint_7")["w"].tolist() == [1, 1, 1]
    (tmp_path / "checkpoint_8").mkdir()
    with pytest.raises(errors.NotACheckpointError, match="checkpoint_8"):
        ckpt.sync.load(tmp_path / "checkpoint_8")


def test_a_directory_of_that_name_may_have_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "checkpoint_500").mkdir()
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "checkpoint_500" / "model.safetensors")
    assert ckpt.sync.load(tmp_path / "checkpoint_500")["w"].tolist() == [1, 1, 1]


def test_every_kind_of_leaf(tmp_path: Path) -> None:
    state = {
        "bfloat16": jnp.arange(3, dtype=jnp.bfloat16),
        "float8": np.ones(3, ml_dtypes.float8_e4m3fn),
        "float64": np.arange(3.0),
        "complex": np.array([1 + 2j], np.complex64),
        "empty": np.zeros((0, 3), np.int8),
        "no axes": jnp.float32(1.5),
        "number": np.float16(2.5),
        "count": np.int64(3),
        "int": 7,
        "negative": -(2**62),
        "float": 0.1,
        "nan": float("nan"),
        "bool": True,
        "text": "adam",
        "bytes": b"\0\1",
        "complex number": 1 - 2j,
        "none": None,
        "nothing": {},
    }
    (tmp_path / "x.msgpack").write_bytes(serialization.to_bytes(state))
    found = ckpt.sync.load(tmp_path / "x.msgpack")
    assert found.keys() == state.keys()
    assert np.isnan(found.pop("nan"))
    for name, value in found.items():
        expected = state[name]
        if isinstance(expected, np.ndarray | jax.Array):
            assert value.dtype == expected.dtype, name
            assert value.shape == expected.shape
            assert np.array_equal(value, expected)
        else:
            assert type(value) is type(expected), name
            assert value == expected
    # Of 64 bits, which jax would cut here.
    assert isinstance(found["float64"], np.ndarray)
    assert isinstance(found["float8"], jax.Array)


@pytest.mark.parametrize("where", ["disk", "store"])
def test_arrays_in_pieces(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax cuts arrays of more than a GiB."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1 << 19)
    table = np.arange(1500 * 300, dtype=np.int32).reshape(1500, 300)
    data = serialization.to_bytes({"a": table, "b": np.arange(3, dtype=np.int32)})
    assert data.count(b"__msgpack_chunked_array__") == 1
    path: Any = tmp_path / "x.msgpack"
    path.write_bytes(data)
    if where == "store":
        path = in_memory("x.msgpack", data)
    found = ckpt.sync.load(path)
    assert np.array_equal(found["a"], table)
    assert np.array_equal(found["b"], np.arange(3))
    array = ckpt.sync.open_array(path, "a")
    assert array.chunks[0] < 1500
    assert np.array_equal(array[430:450], table[430:450])
    rows = NamedSharding(mesh(), P("data"))
    target = ckpt.sync.metadata(path).target({"a": rows, "b": NamedSharding(mesh(), P())})
    assert np.array_equal(ckpt.sync.load(path, like=target)["a"], table)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 100), st.integers(0, 100)
)
def test_bytes_of_joined_pieces(lengths: list[int], one: int, other: int) -> None:
    data = bytes(range(256))
    pieces, place = [], 3
    for length in lengths:
        pieces.append((place, length))
        place += length + 7
    whole = b"".join(data[start : start + length] for start, length in pieces)
    first, last = sorted(each % (len(whole) + 1) for each in (one, other))

    async def read(offset: int, target: memoryview) -> None:
        target[:] = data[offset : offset + len(target)]

    target = bytearray(last - first)

    async def fill() -> None:
        await flax.joined(read, pieces)(first, memoryview(target))

    asyncio.run(fill())
    assert target == whole[first:last]


def test_a_process_reads_only_its_rows(tmp_path: Path) -> None:
    shape = (1024, 4096)
    rows = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    (tmp_path / "large.msgpack").write_bytes(serialization.to_bytes({"w": rows}))
    for each in run_processes(4, "load_tensors.py", tmp_path / "large.msgpack", *shape):
        assert each.value["same"]
        # A quarter, and a block of rows at most at its end; beside one look at all of the file.
        assert rows.nbytes / 4 <= each.value["read"] < rows.nbytes / 4 + (2 << 20)


LEAVES = (
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.none()
    | st.sampled_from(
        [np.arange(3, dtype=np.int16), np.float32(2), np.zeros((0, 2)), 1 + 2j, np.array(4.5)]
    )
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.dictionaries(st.integers(-3, 300), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_what_flax_writes_is_read_as_flax_reads_it(tree: Any) -> None:
    data = serialization.msgpack_serialize(tree)
    found = ckpt.sync.load(in_memory("x.msgpack", data))
    expected = serialization.msgpack_restore(data)
    assert structure(found) == structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.array_equal(one, other)


def test_boxes_of_partitioned_parameters(tmp_path: Path) -> None:
    """Flax writes a box as a dict with the key `value`; a target has the box."""
    state = {"kernel": nn.Partitioned(jnp.arange(6.0).reshape(2, 3), names=(None, "model"))}
    (tmp_path / "x.msgpack").write_bytes(serialization.to_bytes(state))
    target = jax.tree.map(jnp.zeros_like, state)
    found = ckpt.sync.load(tmp_path / "x.msgpack", like=target)
    assert isinstance(found["kernel"], nn.Partitioned)
    assert np.array_equal(found["kernel"].value, state["kernel"].value)


# --- Files that lie -------------------------------------------------------------------------------


def array(shape: Any, dtype: Any, content: Any, code: int = 1) -> Any:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, content)))


def pieces(*each: Any, shape: Any) -> dict[str, Any]:
    return {
        "__msgpack_chunked_array__": True,
        "shape": shape,
        "chunks": {str(number): one for number, one in enumerate(each)},
    }


def packed(tree: Any) -> bytes:
    data: bytes = msgpack.packb(tree)
    return data


FOUR = array((2,), "int16", bytes(4))
LIES: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "damaged"),
    "pickle": (pickle.dumps({"a": 1}), "is a pickle"),
    "cut": (packed({"a": FOUR})[:-1], "damaged"),
    "more": (packed({"a": FOUR}) + b"\0", "damaged"),
    "long map": (b"\xdf\xff\xff\xff\xff", "damaged"),
    "long array": (b"\xdd\xff\xff\xff\xff", "damaged"),
    "long text": (b"\xdb\xff\xff\xff\xffa", "damaged"),
    "deep": (b"\x91" * 100_000 + b"\0", "damaged"),
    "levels": (b"\x81\xa1a" * 300 + b"\0", "deeper than 200"),
    "unknown kind": (packed({"a": msgpack.ExtType(9, b"")}), "unknown kind 9"),
    "time": (packed({"a": msgpack.Timestamp(3)}), "unknown kind datetime"),
    "key": (packed({b"a": 1}), "has the key b'a'"),
    "keys of two kinds": (packed({"a": 1, 2: 3}), "cannot be sorted"),
    "array of nothing": (packed({"a": msgpack.ExtType(1, b"")}), "damaged"),
    "negative": (packed({"a": array((-1,), "int16", b"")}), r"shape \[-1\]"),
    "axes": (packed({"a": array((1,) * 65, "int8", b"\0")}), "shape"),
    "too few": (packed({"a": {"b": array((3,), "int16", bytes(4))}}), "leaf 'a.b'.*the 6 bytes"),
    "too many": (packed({"a": array((1,), "int16", bytes(4))}), "leaf 'a'.*the 2 bytes"),
    "huge": (packed({"a": array((2**62, 2**62), "int16", bytes(4))}), "leaf 'a'.*bytes"),
    "dtype": (packed({"a": array((1,), "object", bytes(8))}), "leaf 'a'.*'object'.*with Flax"),
    "texts": (packed({"a": array((1,), "str32", bytes(4))}), "leaf 'a'.*'str32'"),
    "complex": (packed({"a": msgpack.ExtType(2, packed([1.0]))}), "damaged"),
    "no pieces": (packed({"a": pieces(shape={"0": 0})}), "has none"),
    "odd pieces": (packed({"a": pieces(1, shape={"0": 1})}), "or others"),
    "missing pieces": (packed({"a": {"__msgpack_chunked_array__": True}}), "damaged"),
    "few pieces": (packed({"a": pieces(FOUR, shape={"0": 3})}), "do not fit"),
    "shifted pieces": (
        packed(
            {
                "a": pieces(
                    array((2,), "int16", bytes(6)), array((2,), "int16", b"\0\0"), shape={"0": 4}
                )
            }
        ),
        "do not fit",
    ),
    "no shape": (packed({"a": pieces(FOUR, shape=3)}), "damaged"),
    "other dtypes": (
        packed({"a": pieces(FOUR, array((2,), "int8", bytes(2)), shape={"0": 4})}),
        "do not fit",
    ),
    "elsewhere": (packed({"a": "//GDAPlaceholder:a"}), "leaf 'a'.*flax.training.checkpoints"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("call", [ckpt.sync.load, ckpt.sync.metadata])
def test_a_file_that_lies_is_refused(lie: str, call: Any, tmp_path: Path) -> None:
    data, text = LIES[lie]
    (tmp_path / "bad.msgpack").write_bytes(data)
    refusals = (errors.CorruptCheckpointError, errors.UnsupportedFormatError)
    with pytest.raises(refusals, match=text) as caught:
        call(tmp_path / "bad.msgpack")
    assert str(caught.value).count("bad.msgpack") == 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_of_any_kind_are_a_tree_or_refused(data: Any) -> None:
    content = bytearray(packed({"a": FOUR, "b": pieces(FOUR, FOUR, shape={"0": 4}), "c": [1, 2]}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(1, len(content)))]
    with contextlib.suppress(errors.CorruptCheckpointError, errors.UnsupportedFormatError):
        ckpt.sync.load(in_memory("x.msgpack", bytes(content)))


def test_a_file_larger_than_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax, "host_memory_bytes", lambda: 100)
    (tmp_path / "large.msgpack").write_bytes(packed({"a": bytes(200)}))
    with pytest.raises(errors.CorruptCheckpointError, match=r"large\.msgpack: .* more than .* 100"):
        ckpt.sync.load(tmp_path / "large.msgpack")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        errors.NotACheckpointError, match=r"there is no directory or file .*gone\.msgpack"
    ):
        ckpt.sync.load(tmp_path / "gone.msgpack")
    with pytest.raises(errors.NotACheckpointError, match=r"gone\.msgpack"):
        ckpt.sync.load(f"memory://{uuid.uuid4().hex}/gone.msgpack")


def test_there_is_nothing_to_verify(model: Path) -> None:
    with pytest.raises(errors.NotACheckpointError, match="has no digests to verify"):
        ckpt.sync.verify(model)
