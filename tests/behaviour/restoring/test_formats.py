"""Formats on disk: what is saved in one is read back by this library, TensorStore and Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp0
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import ArrayFormat, Blosc, Zstd
from tests.support.manifests import document_of, leaf_rows
from tests.support.trees import P, abstract, mesh, sharded
from tests.support.trees import assert_same as assert_same_arrays

# Little enough that a megabyte has several chunks, and an item several data files.
SMALL = ckpt.Staging(budget_bytes=1 << 20)
CODECS: dict[str, Any] = {
    "zstd": "zstd",
    "zstd-9": Zstd(level=9),
    "blosc": "blosc",
    "blosc-zstd": Blosc(cname="zstd", clevel=3, shuffle="bitshuffle"),
    "blosc-zlib": Blosc(cname="zlib", shuffle="noshuffle"),
}


def make_state() -> dict[str, Any]:
    random = np.random.default_rng(0)
    table = np.cumsum(random.standard_normal((1024, 512), np.float32), axis=0)
    return {
        "params": {
            "table": sharded(table, "data", "model"),
            # Ragged chunks, and shards of prime length.
            "odd": sharded(np.arange(2 * 1009 * 100, dtype=np.int32).reshape(2018, 100), "data"),
            "noise": random.integers(0, 256, 300_007, dtype=np.uint8),
            "half": sharded(table[:, :256].astype(ml_dtypes.bfloat16), None, "model"),
            "wide": np.arange(60_001, dtype=np.complex128),
            "zeros": jnp.zeros((512, 512)),
            "bias": jnp.ones(7),
        },
        "rng": jax.random.key(3),
        "step": 7,
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return make_state()


def assert_same(found: Any, wanted: Any) -> None:
    """Compare two trees, PRNG keys by their data."""
    assert_same_arrays(*(jax.tree.map(_plain, tree) for tree in (found, wanted)))


def _plain(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def leaves_of(path: Path, item: str = "default") -> dict[str, dict[str, Any]]:
    return {leaf["name"]: leaf for leaf in leaf_rows(document_of(path)["items"][item])}


def read_by_tensorstore(path: Path, name: str) -> np.ndarray[Any, Any]:
    base = f"{(path / 'default').as_uri()}/"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result().read().result()


# -- compression ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_arrays_are_what_was_saved_to_every_reader(
    tmp_path: Path, state: dict[str, Any], codec: str
) -> None:
    path = tmp_path / "x"
    formats = {"params": ArrayFormat(compression=CODECS[codec])}
    ckpt.sync.save(path, state, staging=SMALL, formats=formats)
    kind = codec.partition("-")[0]
    leaves = leaves_of(path)
    for name, array in state["params"].items():
        entry = leaves[f"params.{name}"]
        assert entry.get("codec") == (None if name == "bias" else kind)
        assert entry["dtype"] == str(array.dtype)
        np.testing.assert_array_equal(read_by_tensorstore(path, f"params.{name}"), array)
    assert len(leaves["params.table"]["digests"]) > 8
    assert_same(ckpt.sync.load(path), state)
    assert_same(ckpt.sync.load(path, abstract(state)), state)


def test_compressed_arrays_are_restored_onto_other_shardings(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    path = tmp_path / "x"
    formats = {"params": ArrayFormat(compression="zstd", chunk_bytes=1 << 16)}
    ckpt.sync.save(path, state, staging=SMALL, formats=formats)
    other = mesh(4, 2)
    like = {
        "params": {
            name: jax.ShapeDtypeStruct(
                array.shape,
                array.dtype,
                sharding=jax.sharding.NamedSharding(
                    other, P(None, "data") if name in ("table", "half") else P()
                ),
            )
            for name, array in state["params"].items()
            if name not in ("wide",)
        }
        | {"wide": np.empty(60_001, np.complex128)},
        "rng": ...,
        "step": int,
    }
    found: Any = ckpt.sync.load(path, like)
    for name, array in state["params"].items():
        np.testing.assert_array_equal(np.asarray(found["params"][name]), np.asarray(array))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> Path:
    """The root of a manager whose steps have a bit of everything."""
    root = tmp_path_factory.mktemp("formats") / "run"
    formats = {
        "params.table": ArrayFormat(dtype="bfloat16", compression="zstd", chunk_bytes=1 << 15),
        "params.odd": ArrayFormat(compression="blosc", split_axes=(1,), chunk_bytes=1 << 16),
        "params.half": ArrayFormat(dtype="float32"),
        "params.bias": ArrayFormat(dtype="float16"),
        "params": ArrayFormat(compression="zstd"),
    }
    with ckpt.sync.CheckpointManager(root, staging=SMALL, formats=formats) as manager:
        for step in (1, 2):
            manager.save(step, state)
    return root


def as_stored(state: dict[str, Any]) -> dict[str, Any]:
    params = dict(state["params"])
    for name, dtype in (("table", "bfloat16"), ("half", "float32"), ("bias", "float16")):
        params[name] = params[name].astype(dtype)
    return state | {"params": params}


@pytest.mark.parametrize("step", [1, 2])
def test_orbax_reads_every_format(run: Path, state: dict[str, Any], step: int) -> None:
    expected = as_stored(state)
    assert_same(ckpt.sync.load(run / str(step)), expected)
    found = [ocp.load(run / str(step)), ocp.load(run / str(step), abstract(expected))]
    with ocp0.StandardCheckpointer() as checkpointer:
        found.append(checkpointer.restore(run / str(step) / "default"))
    for tree in found:
        for name, array in expected["params"].items():
            assert tree["params"][name].dtype == array.dtype, name
            np.testing.assert_array_equal(
                np.asarray(tree["params"][name]), np.asarray(array), err_msg=name
            )


def test_what_compression_needs_is_said_only_where_it_is_used(
    run: Path, tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.sync.save(
        tmp_path / "plain", state, formats={"params.table": ArrayFormat(dtype="float16")}
    )
    # Too small to be compressed, all of it.
    small = {"a": jnp.ones(1000)}
    ckpt.sync.save(tmp_path / "small", small, formats={"a": ArrayFormat(compression="zstd")})
    needed = {
        path.name: document_of(path).get("requires", [])
        for path in (run / "1", tmp_path / "plain", tmp_path / "small")
    }
    assert needed == {"1": ["compression"], "plain": [], "small": []}
    # A reader that does not know it refuses the step, before anything else.
    monkeypatch.setattr("ckpt._format.manifest.SUPPORTED_FEATURES", frozenset())
    with pytest.raises(ckpt.errors.UnsupportedFormatError, match="compression"):
        ckpt.sync.load(run / "1")
    ckpt.sync.load(tmp_path / "plain")


def test_compressible_arrays_take_less_room(tmp_path: Path) -> None:
    state = {"w": np.repeat(np.arange(1 << 16, dtype=np.float32), 16)}
    sizes = {}
    for name, formats in (("plain", None), ("zstd", {"w": ArrayFormat(compression="zstd")})):
        info = ckpt.sync.save(tmp_path / name, state, formats=formats)
        files = [file for file in (tmp_path / name).rglob("*") if file.is_file()]
        sizes[name] = sum(file.stat().st_size for file in files)
        # The logical bytes, whatever they take.
        assert info.nbytes == state["w"].nbytes
    assert sizes["zstd"] < sizes["plain"] / 10


def test_data_files_are_as_long_as_the_manifest_says_and_hold_nothing_else(run: Path) -> None:
    """No byte of an older state is in the gaps between encoded chunks."""
    step = run / "2"
    item = document_of(step)["items"]["default"]
    covered: dict[str, list[tuple[int, int]]] = {}
    encoded = set()
    for leaf in leaf_rows(item):
        for number, offset in enumerate(leaf.get("offsets", [])):
            file = item["data_files"][leaf["files"][number] if leaf.get("files") else 0]
            itemsize = jnp.dtype(leaf["dtype"]).itemsize
            length = int(np.prod(leaf["chunks"])) * itemsize
            if "codec" in leaf:
                encoded.add(file)
                length = leaf["lengths"][number]
            covered.setdefault(file, []).append((offset, length))
    assert len(encoded) > 2
    for file in encoded:
        places = covered[file]
        data = bytearray((step / "default" / file).read_bytes())
        end = 0
        for offset, length in sorted(places):
            assert offset >= end
            end = offset + length
            data[offset:end] = bytes(length)
        assert len(data) >= end
        assert not any(data)


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "device", "view"])
def test_arrays_are_cast_in_every_mode(tmp_path: Path, mode: Any) -> None:
    random = np.random.default_rng(1)
    large = random.standard_normal((512, 512)).astype(np.float32)
    large[0, :3] = np.nan, np.inf, 1e38
    state = {
        "large": sharded(large, "data", "model"),
        "host": large,
        "small": jnp.asarray(large[0]),
        "scalar": np.float64(1 / 3),
        "short": np.arange(5, dtype=np.int16),
        "narrow": jnp.asarray([1, -2], jnp.int4),
    }
    formats = {
        "short": ArrayFormat(dtype="int32"),
        "narrow": ArrayFormat(dtype="int8"),
        "**": ArrayFormat(dtype="float16"),
    }
    with np.errstate(over="ignore"):
        half = large.astype(np.float16)
    expected = {
        "large": half,
        "host": half,
        "small": half[0],
        "scalar": np.float16(1 / 3),
        "short": np.arange(5, dtype=np.int32),
        "narrow": np.array([1, -2], np.int8),
    }
    staging = ckpt.Staging(budget_bytes=1 << 20, mode=mode)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, formats=formats) as manager:
        manager.save(1, state)
        manager.save(2, state)
        manager.wait_until_finished()
        for step in (1, 2):
            found = manager.restore(step)
            for name, array in expected.items():
                assert found[name].dtype == array.dtype, name
                np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)
        assert manager.metadata(2)
    # No host copy was left on the caller's array.
    assert state["narrow"]._npy_value is None  # type: ignore[attr-defined]


def test_a_cast_array_comes_back_in_its_own_dtype_if_the_target_says_so(tmp_path: Path) -> None:
    state = {"w": jnp.linspace(0, 1, 100_000)}
    ckpt.sync.save(tmp_path / "x", state, formats={"w": ArrayFormat(dtype="bfloat16")})
    found = ckpt.sync.load(tmp_path / "x", abstract(state))
    assert found["w"].dtype == jnp.float32
    assert jnp.array_equal(found["w"], state["w"].astype(jnp.bfloat16).astype(jnp.float32))


def test_what_was_donated_after_save_is_stored_as_it_was(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = jnp.arange(1_000_000, dtype=jnp.float32)
    wanted = np.asarray(array.astype(jnp.bfloat16))
    formats = {"w": ArrayFormat(dtype="bfloat16", compression="zstd")}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as manager:
        manager.save(1, {"w": array})
        array = step(array)
        manager.wait_until_finished()
        np.testing.assert_array_equal(np.asarray(manager.restore()["w"]), wanted)


def test_one_array_at_two_places_is_stored_once_for_each_format(tmp_path: Path) -> None:
    shared = jnp.asarray(np.random.default_rng(0).standard_normal(300_000, np.float32))
    state = {"a": shared, "b": shared, "c": shared, "d": shared}
    formats = {
        "b": ArrayFormat(dtype="bfloat16", compression="zstd"),
        "c": ArrayFormat(dtype="bfloat16", compression="zstd"),
    }
    info = ckpt.sync.save(tmp_path / "x", state, formats=formats)
    assert info.nbytes == shared.nbytes + shared.nbytes // 2
    leaves = leaves_of(tmp_path / "x")
    assert [leaves[name].get("same_as") for name in "abcd"] == [None, None, 1, 0]
    found = ckpt.sync.load(tmp_path / "x")
    assert found["a"] is found["d"]
    assert found["b"] is found["c"]
    for name in "bc":
        np.testing.assert_array_equal(
            read_by_tensorstore(tmp_path / "x", name), np.asarray(shared.astype(jnp.bfloat16))
        )


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ({"param": ArrayFormat()}, ckpt.errors.InvalidArgumentError, r"is it 'params"),
        ({"rng": ArrayFormat(dtype="uint32")}, ckpt.errors.InvalidArgumentError, "PRNG key"),
        ({"step": ArrayFormat(dtype="int32")}, ckpt.errors.InvalidArgumentError, "kind int"),
        ({"params": ArrayFormat(dtype="bfloat16")}, ckpt.errors.UnsupportedLeafError, "noise|odd"),
    ],
)
def test_a_refused_format_leaves_nothing_behind(
    tmp_path: Path, state: dict[str, Any], formats: Any, error: type[Exception], message: str
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run", formats=formats) as manager:
        with pytest.raises(error, match=message):
            manager.save(1, state)
        assert manager.all_steps() == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == []
    with pytest.raises(error, match=message):
        ckpt.sync.save(tmp_path / "one", state, formats=formats)
    assert not (tmp_path / "one").exists()


def test_a_pattern_may_be_for_one_of_several_items(tmp_path: Path) -> None:
    items = {"params": {"w": np.ones(100_000)}, "moments": {"m": np.ones(100_000)}}
    formats = {"m": ArrayFormat(dtype="float32")}
    ckpt.sync.save(tmp_path / "x", items=items, formats=formats)
    found = ckpt.sync.load(tmp_path / "x")
    assert found["params"]["w"].dtype == np.float64
    assert found["moments"]["m"].dtype == np.float32
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="'q' covers no leaf"):
        ckpt.sync.save(tmp_path / "y", items=items, formats={"q": ArrayFormat()})


def test_the_asyncio_api_takes_formats_too(tmp_path: Path) -> None:
    def choose(path: str, leaf: jax.ShapeDtypeStruct) -> ArrayFormat | None:
        return ArrayFormat(compression="zstd") if path == "w" else None

    async def main() -> None:
        state = {"w": jnp.zeros(100_000), "b": jnp.zeros(100_000)}
        await ckpt.save(tmp_path / "x", state, formats=choose)
        async with ckpt.CheckpointManager(tmp_path / "run", formats=choose) as manager:
            await (await manager.save(1, state))
            assert_same(await manager.restore(), state)
        for path in (tmp_path / "x", tmp_path / "run" / "1"):
            assert [leaf.get("codec") for leaf in leaves_of(path).values()] == [None, "zstd"]

    anyio.run(main)


def test_a_dtype_alone_is_for_the_floating_arrays_of_a_train_state(tmp_path: Path) -> None:
    """Optimizers count their steps in int32, which no pattern has to name."""
    params = {"w": jnp.ones((4, 3))}
    state: dict[str, Any] = {"params": params, "opt": optax.adam(1e-3).init(params), "step": 3}
    ckpt.sync.save(tmp_path / "half", state, formats="bfloat16")
    found = ckpt.sync.load(tmp_path / "half")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(found["params"])}
    assert dtypes == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found["opt"])} == {"int32", "bfloat16"}
    with ckpt.sync.CheckpointManager(tmp_path / "run", formats=jnp.bfloat16) as mgr:
        mgr.save(0, state)
        assert mgr.restore(0)["params"]["w"].dtype == jnp.bfloat16
