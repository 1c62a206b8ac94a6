"""Safetensors are read where they are: files, files with an index, on disks and in stores."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from safetensors.numpy import save, save_file

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._interop.runs_of_bytes import nested
from ckpt._interop.safetensors import parse_header
from tests.support.real_jobs import run_processes
from tests.support.trees import P, mesh

LLAMA = {
    "model.embed_tokens.weight": np.arange(600 * 64, dtype=np.float32).reshape(600, 64),
    "model.layers.0.mlp.up_proj.weight": np.ones((64, 128), ml_dtypes.bfloat16),
    "model.layers.0.mlp.down_proj.weight": np.full((128, 64), 2, ml_dtypes.bfloat16),
    "model.layers.1.mlp.up_proj.weight": np.full((64, 128), 3, ml_dtypes.bfloat16),
    "lm_head.weight": np.arange(64, dtype=np.float16),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(LLAMA, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """As Hugging Face writes large models."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = list(LLAMA)
    files = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, own in files.items():
        save_file({name: LLAMA[name] for name in own}, folder / file, metadata={"format": "pt"})
    listed = {name: file for file, own in files.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def at(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[key]
    return tree


def assert_llama(tree: Any) -> None:
    for name, array in LLAMA.items():
        found = at(tree, name)
        assert isinstance(found, jax.Array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array), name
    assert len(jax.tree.leaves(tree)) == len(LLAMA)


def test_a_file_is_a_tree_of_arrays(model: Path) -> None:
    assert_llama(ckpt.sync.load(model))
    assert_llama(ckpt.sync.load(str(model)))


def test_files_with_an_index_are_one_tree(sharded: Path) -> None:
    assert_llama(ckpt.sync.load(sharded))


def test_the_only_file_of_a_directory(model: Path) -> None:
    assert_llama(ckpt.sync.load(model.parent))


def test_metadata_without_reading_arrays(sharded: Path) -> None:
    found = ckpt.sync.metadata(sharded)
    assert found.info.custom_metadata == {"format": "pt"}
    assert found.info.nbytes == sum(array.nbytes for array in LLAMA.values())
    assert found.leaves["default"]["model.embed_tokens.weight"].shape == (600, 64)
    assert "1970" not in str(found)


def test_onto_a_target_with_shardings_and_other_names(model: Path) -> None:
    rows = NamedSharding(mesh(), P("data"))
    columns = NamedSharding(mesh(), P(None, "model"))
    target: dict[str, Any] = {
        "embed": jax.ShapeDtypeStruct((600, 64), jnp.float32, sharding=rows),
        "layers": [
            {"up": jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=columns)} for _ in range(2)
        ],
    }
    adapt = ckpt.Adapt(
        rename={
            "model.embed_tokens.weight": "embed",
            "model.layers.*.mlp.up_proj.weight": "layers.*.up",
        },
        extra="ignore",
    )
    found = ckpt.sync.load(model, like=target, adapt=adapt)
    assert found["embed"].sharding == rows
    assert np.array_equal(found["embed"], LLAMA["model.embed_tokens.weight"])
    for number, value in ((0, 1), (1, 3)):
        assert found["layers"][number]["up"].sharding == columns
        assert np.array_equal(found["layers"][number]["up"], np.full((64, 128), value))


def test_a_part_of_it(model: Path) -> None:
    found = ckpt.sync.load(model, at="model.layers.0")
    assert sorted(found["mlp"]) == ["down_proj", "up_proj"]


def test_a_run_begins_from_it(model: Path, tmp_path: Path) -> None:
    def init() -> Any:
        return {"head": jnp.zeros(64, jnp.float16), "adapter": jnp.ones((4, 64))}

    adapt = ckpt.Adapt(rename={"lm_head.weight": "head"}, missing="keep", extra="ignore")
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        begin, state = mgr.resume(init, source=model, adapt=adapt)
        assert begin == 0
        assert np.array_equal(state["head"], LLAMA["lm_head.weight"])
        assert np.array_equal(state["adapter"], np.ones((4, 64)))
        info = mgr.save(0, state).result()
    assert info.parent is not None
    assert info.parent.path == str(model)


def test_a_process_reads_only_its_rows(tmp_path: Path) -> None:
    shape = (1024, 16_384)
    rows = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    save_file({"w": rows}, tmp_path / "large.safetensors")
    told = run_processes(4, "load_tensors.py", tmp_path / "large.safetensors", *shape)
    for each in told:
        assert each.value["same"]
        # A quarter, and the header.
        assert rows.nbytes / 4 <= each.value["read"] < rows.nbytes / 4 + 4096


def test_in_a_store() -> None:
    name = uuid.uuid4().hex
    kv = ts.KvStore.open({"driver": "memory", "path": "models/"}, context=_memory(name)).result()
    kv.write("model.safetensors", save(LLAMA)).result()
    assert_llama(ckpt.sync.load(f"memory://{name}/models/model.safetensors"))
    assert_llama(ckpt.sync.load(f"memory://{name}/models"))


def _memory(name: str) -> ts.Context:
    from ckpt.storage._object.connection import _memory_of

    return _memory_of(name)


def test_names_that_are_parts_of_others_are_keys_of_one_dict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"a": np.ones(2, np.int8), "a.b": np.zeros(3, np.int8)}
    save_file(tensors, tmp_path / "odd.safetensors")
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = ckpt.sync.load(tmp_path / "odd.safetensors")
    assert sorted(found) == ["a", "a.b"]
    assert "parts of others" in caplog.text


NAMES = st.lists(
    st.sampled_from(["a", "b", "w", "0", "12", "ä", "dtype", "format"]), min_size=1, max_size=3
).map(".".join)
DTYPES = st.sampled_from(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "uint32",
        "float16",
        "float32",
        "bfloat16",
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    found = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = (
            np.dtype(ml_dtypes.bfloat16) if (kind := draw(DTYPES)) == "bfloat16" else np.dtype(kind)
        )
        found[name] = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
    return found


@settings(max_examples=80, deadline=None)
@given(tensors())
def test_what_the_package_writes_is_read(made: dict[str, Any]) -> None:
    data = save(made, metadata={"format": "pt", "a": "text"})
    header = parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header.ends[-1] == len(data)
    name = uuid.uuid4().hex
    kv = ts.KvStore.open({"driver": "memory"}, context=_memory(name)).result()
    kv.write("x.safetensors", data).result()
    found = ckpt.sync.load(f"memory://{name}/x.safetensors")
    flat = nested(made, "") is made
    for key, array in made.items():
        leaf = found[key] if flat else at(found, key)
        assert leaf.dtype == array.dtype
        assert np.array_equal(leaf, array)


def test_tensors_of_64_bits_are_kept_as_arrays_of_numpy(tmp_path: Path) -> None:
    """As those of numpy's and Flax's files; jax would cut them where 64 bits are off."""
    save_file({"count": np.arange(3) + 2**40, "w": np.ones(3)}, tmp_path / "x.safetensors")
    found = ckpt.sync.load(tmp_path / "x.safetensors")
    assert type(found["count"]) is np.ndarray
    assert found["count"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    target: dict[str, Any] = {"count": np.zeros(3, int), "w": jnp.zeros(3)}
    assert ckpt.sync.load(tmp_path / "x.safetensors", like=target)["w"].dtype == jnp.float32
    with jax.enable_x64(True):
        assert isinstance(ckpt.sync.load(tmp_path / "x.safetensors")["count"], jax.Array)


def head(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


LIES: dict[str, tuple[bytes, bytes, str]] = {
    "no json": (b"{nothing", b"", "header is damaged"),
    "a list": (b"[1, 2]", b"", "header is damaged"),
    "no entry": (head(a=3), b"", "damaged at 'a'"),
    "too few bytes": (head(a=entry("F32", [4], 0, 12)), bytes(12), "leaf 'a'.*has 16 bytes"),
    "a gap": (head(a=entry("F32", [1], 4, 8)), bytes(8), "leaf 'a'.*leave a gap"),
    "overlapping": (
        head(a=entry("F32", [2], 0, 8), b=entry("F32", [2], 4, 12)),
        bytes(12),
        "leaf 'b'.*overlap",
    ),
    "beyond the end": (
        head(a=entry("F32", [4], 0, 16)),
        bytes(8),
        "it is shorter than the 86 bytes",
    ),
    "backwards": (head(a=entry("F32", [1], 4, 0)), bytes(4), "leaf 'a'"),
    "negative": (head(a=entry("F32", [-1], 0, 4)), bytes(4), "damaged at 'a'"),
    "huge": (head(a=entry("F32", [1 << 62, 1 << 62], 0, 4)), bytes(4), "leaf 'a'"),
    "twice": (
        b'{"a": '
        + head(**entry("F32", [1], 0, 4))
        + b', "a": '
        + head(**entry("F32", [1], 0, 4))
        + b"}",
        bytes(4),
        "'a' is there twice",
    ),
    "twice, escaped": (
        b'{"a": {}, "\\u0061": {}}',
        b"",
        "'a' is there twice",
    ),
    "twice within": (
        b'{"a": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}}',
        bytes(4),
        "'shape' is there twice",
    ),
    "a dtype": (
        head(a=entry("F128", [1], 0, 16)),
        bytes(16),
        "leaf 'a'.*'F128', which is not read",
    ),
    "deep": (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b"", "damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    header, body, text = LIES[lie]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    with pytest.raises(errors.CheckpointError, match=text) as caught:
        ckpt.sync.load(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("data", [b"abc", bytes(8), b"\xff" * 64, b"\x10" + bytes(7) + b"{}"])
def test_what_is_no_safetensors_file_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match=r"bad\.safetensors"):
        ckpt.sync.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointError, match=r"gone\.safetensors"):
        ckpt.sync.load(tmp_path / "gone.safetensors")


def test_an_index_whose_files_are_missing_or_lie(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(
        errors.CorruptCheckpointError, match=r"leaf 'lm_head.weight'.*does not have"
    ):
        ckpt.sync.load(sharded)
    document["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(errors.CorruptCheckpointError, match="cannot be a file beside it"):
        ckpt.sync.load(sharded)
    document["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(
        errors.CorruptCheckpointError, match=r"leaf 'lm_head\.weight'.*model-00003.*No such file"
    ):
        ckpt.sync.load(sharded)
    index.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="2 files of safetensors and no index"):
        ckpt.sync.load(sharded)


def test_there_is_nothing_to_verify(model: Path) -> None:
    with pytest.raises(errors.NotACheckpointError, match="has no digests to verify"):
        ckpt.sync.verify(model)
