"""Conversions: between checkpoints, safetensors and zarr, within a budget, and verified."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._conversion.tensors import LargeFile, runs_of, write_region
from ckpt._format.regions import Region
from ckpt._settings import IfTaken
from ckpt.exports import Safetensors, Zarr
from ckpt.testing.compare import differences
from tests.support.real_jobs import run_processes
from tests.support.trees import sharded

MIB = 1 << 20
Point = namedtuple("Point", ["x", "y"])


def params() -> dict[str, Any]:
    """Arrays alone, of many dtypes, some of several chunks, some sharded."""
    return {
        "w": jnp.arange(3000 * 701, dtype=jnp.float32).reshape(3000, 701),
        "s": sharded(np.arange(64.0 * 1024, dtype=np.float32).reshape(64, 1024), "data", "model"),
        "b": jnp.full(7, 2.5, jnp.bfloat16),
        "none": jnp.zeros((0, 3), jnp.int8),
        "scalar": jnp.float16(3),
        "host": np.arange(5),
        "mask": jnp.array([True, False]),
    }


def state() -> dict[str, Any]:
    """Everything that a step can hold."""
    found: dict[str, Any] = {
        "params": params(),
        "key": jax.random.key(3),
        "count": 3,
        "rate": 0.1,
        "name": "run",
        "blob": b"\x00\xff",
        "pair": (1, [np.float64(2.5), None]),
        "empty": {},
        "fn": jnp.tanh,
    }
    found["tied"] = found["params"]["w"]
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "x"
    ckpt.sync.save(
        path, state(), metrics={"loss": 0.5, "bad": float("nan")}, custom_metadata={"a": [1]}
    )
    return path


def same(path: Path, other: Path, **options: Any) -> None:
    first, second = (ckpt.sync.load(each, **options) for each in (path, other))
    assert differences(first, second) == []


def test_a_checkpoint_becomes_an_equal_one(ours: Path, tmp_path: Path) -> None:
    done = ckpt.sync.convert(ours, tmp_path / "copy")
    assert (done.format, done.path) == ("ckpt", str(tmp_path / "copy"))
    same(ours, tmp_path / "copy", like=state())
    assert ckpt.sync.verify(tmp_path / "copy").ok
    old, new = (ckpt.sync.metadata(path) for path in (ours, tmp_path / "copy"))
    assert done.nbytes == new.info.nbytes == old.info.nbytes
    assert str(new.info.metrics) == str(old.info.metrics)
    assert new.info.custom_metadata == old.info.custom_metadata
    for leaf, info in old.leaves["default"].items():
        found = new.leaves["default"][leaf]
        if hasattr(info, "saved_sharding"):
            assert (found.kind, found.shape, found.dtype) == (info.kind, info.shape, info.dtype)
            assert (found.weak_type, found.same_as) == (info.weak_type, info.same_as)
            assert found.saved_sharding == info.saved_sharding, leaf


def test_items_of_all_handlers_are_kept(tmp_path: Path) -> None:
    items: dict[str, Any] = {
        "model": params(),
        "config": {"lr": 0.1},
        "text": "notes",
        "data": b"\x00\x01",
        "generator": np.random.default_rng(5),
    }
    handlers = {"config": ckpt.handlers.JsonHandler()}
    with ckpt.sync.CheckpointManager(tmp_path / "run", handlers=handlers) as mgr:
        mgr.save(7, items=items, metrics={"train": {"loss": 1.5}})
    ckpt.sync.convert(tmp_path / "run" / "7", tmp_path / "other", step=8)
    with ckpt.sync.CheckpointManager(tmp_path / "other", handlers=handlers) as mgr:
        assert mgr.all_steps() == [8]
        found = mgr.restore(8)
        assert mgr.metadata(8).info.metrics == {"train/loss": 1.5}
        assert mgr.verify(8).ok
    assert found["generator"].random() == items["generator"].random()
    assert found["config"] == {"lr": 0.1}
    assert (found["text"], found["data"]) == ("notes", b"\x00\x01")
    assert differences(params(), found["model"]) == []


def test_classes_are_kept_that_this_process_does_not_have(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"at": Point(jnp.ones(2), 3)})
    told = run_processes(1, "convert_steps.py", tmp_path / "x", tmp_path / "y")
    assert told[0].value == {"unknown": True}
    same(tmp_path / "x", tmp_path / "y")
    assert isinstance(ckpt.sync.load(tmp_path / "y")["at"], Point)


def test_it_can_be_compressed_on_the_way(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.zeros((2048, 1024))})
    zstd = {"**": ckpt.ArrayFormat(compression=ckpt.Zstd())}
    ckpt.sync.convert(tmp_path / "x", tmp_path / "y", formats=zstd)
    size = sum(each.stat().st_size for each in (tmp_path / "y").rglob("*") if each.is_file())
    assert size < MIB
    same(tmp_path / "x", tmp_path / "y")
    # And what is compressed is decoded.
    ckpt.sync.convert(tmp_path / "y", tmp_path / "z")
    same(tmp_path / "x", tmp_path / "z")


def of_orbax(path: Path) -> Path:
    with ocp.CheckpointManager(path / "orbax") as manager:
        # Orbax cannot save arrays without elements.
        full = {name: each for name, each in params().items() if each.size}
        manager.save(7, args=ocp.args.StandardSave(full))
        manager.wait_until_finished()
    return path / "orbax" / "7"


def of_safetensors(path: Path) -> Path:
    arrays = {"a.w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "b": np.ones(3, "i4")}
    save_file(arrays, path / "m.safetensors")
    return path / "m.safetensors"


def of_a_virtual_step(path: Path) -> Path:
    ckpt.sync.adopt(of_safetensors(path), path / "adopted")
    return path / "adopted"


@pytest.mark.parametrize("make", [of_orbax, of_safetensors, of_a_virtual_step])
def test_what_others_wrote_becomes_a_checkpoint_that_orbax_reads(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = make(tmp_path)
    ckpt.sync.convert(source, tmp_path / "ours")
    same(source, tmp_path / "ours")
    assert ckpt.sync.verify(tmp_path / "ours").ok
    found = ocp.StandardCheckpointer().restore(tmp_path / "ours" / "default")
    expected = ckpt.sync.load(source)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes()


def assert_tensors(found: dict[str, Any], top: str = "") -> None:
    expected = params()
    assert found.keys() == {f"{top}{name}" for name in expected}
    for name, each in expected.items():
        other = found[f"{top}{name}"]
        assert (other.dtype, other.shape) == (each.dtype, each.shape), name
        assert other.tobytes() == np.asarray(each).tobytes(), name


def test_a_branch_becomes_safetensors_that_the_package_reads(ours: Path, tmp_path: Path) -> None:
    done = ckpt.sync.convert(ours, tmp_path / "m.safetensors", format="safetensors", at="params")
    assert done.arrays == len(params())
    assert_tensors(load_file(tmp_path / "m.safetensors"))
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]


def test_narrow_floats_become_safetensors(tmp_path: Path) -> None:
    """The numpy reader of the package has no names for them."""
    narrow = {"a": jnp.arange(3, dtype=jnp.float8_e4m3fn), "b": jnp.ones(2, jnp.float8_e5m2)}
    ckpt.sync.save(tmp_path / "x", narrow)
    ckpt.sync.convert(tmp_path / "x", tmp_path / "m.safetensors", format="safetensors")
    same(tmp_path / "x", tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as opened:
        assert set(opened.keys()) == {"a", "b"}


def test_safetensors_in_several_files_with_names_and_texts(ours: Path, tmp_path: Path) -> None:
    options = Safetensors(lambda path: f"model.{path}", {"license": "none"}, file_bytes=MIB)
    ckpt.sync.convert(ours, tmp_path / "m", format=options, at="params")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))
    ]
    assert len(files) > 1
    found: dict[str, Any] = {}
    for file in files:
        here = load_file(tmp_path / "m" / file)
        assert all(index["weight_map"][name] == file for name in here)
        found |= here
        with safetensors.safe_open(tmp_path / "m" / file, "np") as opened:
            assert opened.metadata() == {"license": "none"}
    assert_tensors(found, "model.")
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    # And this library reads them as one model.
    assert (
        differences(
            ckpt.sync.load(tmp_path / "m", at="model.w"), ckpt.sync.load(ours, at="params.w")
        )
        == []
    )


def test_a_branch_becomes_zarr_that_zarr_opens(ours: Path, tmp_path: Path) -> None:
    plain = params()
    # What zarr itself has no name for.
    del plain["b"]
    ckpt.sync.save(tmp_path / "plain", {"net": plain})
    ckpt.sync.convert(tmp_path / "plain", tmp_path / "z", format="zarr")
    group = zarr.open_group(tmp_path / "z", mode="r")
    for name, each in plain.items():
        found: Any = group[f"net/{name}"]
        assert (found.dtype, found.shape) == (each.dtype, each.shape)
        assert np.array_equal(found[...], np.asarray(each)), name


def test_zarr_of_dtypes_that_only_tensorstore_knows(ours: Path, tmp_path: Path) -> None:
    import tensorstore as ts

    ckpt.sync.convert(ours, tmp_path / "z", format=Zarr(), at="params")
    for name in ("b", "w", "s"):
        spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/z/{name}/"}
        found = ts.open(spec, read=True).result().read().result()
        assert found.tobytes() == np.asarray(params()[name]).tobytes()


def test_leaves_that_a_format_cannot_hold_are_all_named(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedLeafError) as told:
        ckpt.sync.convert(ours, tmp_path / "m.safetensors", format="safetensors")
    for part in ("key: it is a PRNG key", "count: it is a Python int", "name: it is a Python str"):
        assert part in str(told.value)
    assert "at='params'" in str(told.value)
    ckpt.sync.save(tmp_path / "c", {"z": np.ones(2, np.complex128), "i": jnp.ones(2, jnp.int4)})
    with pytest.raises(errors.UnsupportedLeafError, match="no complex128; cast it to complex64"):
        ckpt.sync.convert(tmp_path / "c", tmp_path / "m.safetensors", format="safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_functions_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones(2), "fn": jnp.tanh})
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.sync.convert(tmp_path / "x", tmp_path / "m.safetensors", format="safetensors")
    assert "1 functions among the leaves (fn, ...) are left out" in caplog.text


def test_what_is_at_the_target_is_replaced_only_if_asked(ours: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_text("mine")
    formats: list[Any] = ["safetensors", "zarr", "ckpt"]
    for format in formats:
        at = None if format == "ckpt" else "params"
        with pytest.raises(errors.StepExistsError):
            ckpt.sync.convert(ours, target, format=format, at=at)
    assert target.read_text() == "mine"
    ckpt.sync.convert(ours, target, format="safetensors", at="params", if_exists="replace")
    assert_tensors(load_file(target))
    mine = tmp_path / "folder"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    for options in (Zarr(), Safetensors(file_bytes=MIB)):
        with pytest.raises(errors.StepExistsError, match="never replaced"):
            ckpt.sync.convert(ours, mine, format=options, at="params", if_exists="replace")
    assert (mine / "thesis.tex").read_text() == "mine"
    for options in (Zarr(), Safetensors(file_bytes=MIB)):
        for if_exists in get_args(IfTaken):
            path = tmp_path / type(options).__name__
            ckpt.sync.convert(
                ours,
                path,
                format=options,
                at="params",
                if_exists=if_exists,
            )
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "zarr"])
def test_damage_is_found_on_the_way_and_nothing_is_left(
    format: Any, ours: Path, tmp_path: Path
) -> None:
    ckpt.sync.convert(ours, tmp_path / "x")
    largest = max(
        (tmp_path / "x" / "default" / "d").iterdir(), key=lambda each: each.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    at = None if format == "ckpt" else "params"
    with pytest.raises(errors.CorruptCheckpointError, match="not what was saved"):
        ckpt.sync.convert(tmp_path / "x", tmp_path / "y", format=format, at=at)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("format", ["ckpt", "safetensors", "zarr"])
def test_damage_of_one_array_ends_the_reads_of_all(format: Any, tmp_path: Path) -> None:
    """Several are being read when the first of them turns out to be damaged."""
    leaves = {f"w{number}": np.full((2048, 1024), number, np.float32) for number in range(16)}
    ckpt.sync.save(tmp_path / "x", leaves)
    for number, path in enumerate(sorted((tmp_path / "x" / "default" / "d").iterdir())):
        if path.stat().st_size > MIB and number % 2:
            data = bytearray(path.read_bytes())
            data[1000] ^= 1
            path.write_bytes(data)
    for _ in range(5):
        with pytest.raises(errors.CorruptCheckpointError, match="not what was saved"):
            ckpt.sync.convert(tmp_path / "x", tmp_path / "y", format=format)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["x"]


class Telling:
    """A handler that keeps a file of the name that Orbax reads."""

    name = "telling"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, bytearray)

    async def stage(self, item: Any, writer: Any) -> Any:
        data = bytes(item)

        async def commit() -> ckpt.manifest.ItemEntry:
            await writer.write_file("metadata", data)
            return ckpt.manifest.ItemEntry(self.name, nbytes=len(data))

        return ckpt.handlers.Deferred(commit)

    async def load(self, entry: Any, like: Any, adapt: Any, reader: Any) -> Any:
        return bytearray(await reader.read_file("metadata"))


def test_files_of_handlers_that_are_not_here_are_kept(tmp_path: Path) -> None:
    items = {"own": bytearray(b'{"handler": "mine"}'), "text": "notes"}
    ckpt.sync.save(tmp_path / "x", items=items, handlers=[Telling()])
    ckpt.sync.convert(tmp_path / "x", tmp_path / "y")
    assert ckpt.sync.load(tmp_path / "y", handlers=[Telling()]) == items
    assert ckpt.sync.verify(tmp_path / "y").ok


def test_an_export_never_removes_what_it_did_not_write(ours: Path, tmp_path: Path) -> None:
    def refused(path: Path, options: Any) -> None:
        before = sorted(path.rglob("*"))
        with pytest.raises(errors.StepExistsError, match="never replaced"):
            ckpt.sync.convert(ours, path, format=options, at="params", if_exists="replace")
        assert sorted(path.rglob("*")) == before

    shards = Safetensors(file_bytes=MIB)
    # Somebody's downloads, without an index, and folders with such names.
    (tmp_path / "models").mkdir()
    save_file({"a": np.ones(1)}, tmp_path / "models" / "llama.safetensors")
    refused(tmp_path / "models", shards)
    (tmp_path / "more" / "x.safetensors").mkdir(parents=True)
    (tmp_path / "more" / "x.safetensors" / "thesis.tex").write_text("mine")
    refused(tmp_path / "more", shards)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", shards)
    ckpt.sync.convert(ours, tmp_path / "shards", format=shards, at="params")
    save_file({"a": np.ones(1)}, tmp_path / "shards" / "another.safetensors")
    refused(tmp_path / "shards", shards)
    # A group of another program, and one of ours with something more in it.
    zarr.create_group(tmp_path / "theirs")
    refused(tmp_path / "theirs", Zarr())
    ckpt.sync.convert(ours, tmp_path / "z", format="zarr", at="params")
    (tmp_path / "z" / "thesis.tex").write_text("mine")
    refused(tmp_path / "z", Zarr())


def test_the_keys_of_an_lstm_are_names_in_zarr(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"c": jnp.ones(3), "h": {"c": jnp.zeros(2)}})
    for if_exists in get_args(IfTaken):
        ckpt.sync.convert(
            tmp_path / "x",
            tmp_path / "z",
            format="zarr",
            if_exists=if_exists,
        )
    group: Any = zarr.open_group(tmp_path / "z", mode="r")
    assert (group["c"][...].tolist(), group["h/c"][...].tolist()) == ([1] * 3, [0] * 2)
    ckpt.sync.save(tmp_path / "one", jnp.arange(3))
    for if_exists in get_args(IfTaken):
        ckpt.sync.convert(
            tmp_path / "one",
            tmp_path / "a",
            format="zarr",
            if_exists=if_exists,
        )
    array: Any = zarr.open_array(tmp_path / "a", mode="r")
    assert array[...].tolist() == [0, 1, 2]


def test_what_the_system_refuses_is_an_error_of_the_library(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    formats: list[Any] = ["safetensors", "zarr"]
    for format in formats:
        with pytest.raises(errors.StorageError, match="cannot write"):
            ckpt.sync.convert(ours, tmp_path / "file" / "x", format=format, at="params")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": "pickle"}, "format='pickle': expected"),
    "format object": ({"format": 3}, "which Orbax reads, too"),
    "at of a checkpoint": ({"at": "params"}, "written whole"),
    "step of an export": ({"format": "zarr", "step": 3}, "step= is for format='ckpt' only"),
    "formats of an export": ({"format": "zarr", "formats": "bfloat16"}, "formats= is for"),
    "budget": ({"budget_bytes": 5}, "budget_bytes=5"),
    "branch": ({"format": "zarr", "at": "parms"}, "is it 'params'?"),
    "if_exists": ({"if_exists": 1}, "if_exists=1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_say_what_was_expected(kind: str, ours: Path, tmp_path: Path) -> None:
    options, text = WRONG[kind]
    with pytest.raises(errors.InvalidArgumentError) as told:
        ckpt.sync.convert(ours, tmp_path / "y", **options)
    assert text.lower() in str(told.value).lower()
    assert list(tmp_path.iterdir()) == []


def test_exports_go_to_a_disk(ours: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="copy the result to the store"):
        ckpt.sync.convert(ours, "memory://x/m.safetensors", format="safetensors", at="params")


def test_two_leaves_with_one_name_are_refused(ours: Path, tmp_path: Path) -> None:
    options = Safetensors(lambda path: "all")
    with pytest.raises(errors.InvalidArgumentError, match="would both be the tensor 'all'"):
        ckpt.sync.convert(ours, tmp_path / "m.safetensors", format=options, at="params")
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_stores_are_converted(ours: Path, tmp_path: Path) -> None:
    ckpt.sync.convert(ours, "memory://converted/run/x", if_exists="replace")
    ckpt.sync.convert("memory://converted/run/x", tmp_path / "back")
    same(ours, tmp_path / "back", like=state())


# Memory.


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "zarr", "merge"])
def test_memory_stays_within_the_budget(format: str, tmp_path: Path) -> None:
    """Of 512 MiB of arrays, with a budget of 128."""
    told = run_processes(1, "convert_within_budget.py", tmp_path, format)
    value = told[0].value
    assert value["same"]
    assert value["grown"] < 128 * MIB + 48 * MIB, value


# Pure parts.


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_region_is_written_to_its_places(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    corner = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    inside = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, corner, strict=True))
    region = Region(corner, inside)
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    target = np.full(whole.size, -1, np.int32)
    index: tuple[Any, ...] = (*region.slices, ...)
    source = whole[index].reshape(-1)
    done = 0
    for offset, count in runs_of(shape, region):
        target[offset : offset + count] = source[done : done + count]
        done += count
    expected = np.full(shape, -1, np.int32)
    expected[index] = whole[index]
    assert done == source.size
    assert target.tolist() == expected.reshape(-1).tolist()


@given(offset=st.integers(0, 9000), extra=st.integers(0, 9000))
@settings(max_examples=30, deadline=None)
def test_bytes_that_begin_anywhere_are_written_there(
    offset: int, extra: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Past the page cache in the middle, and through it at both ends."""
    data = np.random.default_rng(offset).integers(0, 256, 2 * MIB + extra, np.uint8)
    path = tmp_path_factory.mktemp("large") / "file"
    file = LargeFile(path, offset + len(data))
    scratch = np.frombuffer(bytearray(MIB + 8192), np.uint8)
    scratch = scratch[-scratch.ctypes.data % 4096 :][:MIB]
    write_region(file, offset, data.shape, Region((0,), data.shape), data, scratch)
    file.sync()
    file.close()
    assert path.read_bytes() == bytes(offset) + data.tobytes()


def test_it_can_be_awaited(ours: Path, tmp_path: Path) -> None:
    async def convert() -> Any:
        return await ckpt.convert(ours, tmp_path / "x")

    done = asyncio.run(convert())
    assert "ckpt" in repr(done)
    assert done.seconds > 0
