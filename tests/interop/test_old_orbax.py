"""What old versions of Orbax wrote is read: every layout, from the file of msgpack on."""

from __future__ import annotations

import functools
import json
import logging
import pickle
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

import ckpt
from ckpt import errors, step_names
from ckpt.sync import CheckpointManager
from tests.interop.old_orbax import write_samples
from tests.interop.old_orbax.write_samples import LOSSES, STATES, STEPS, Moments, described
from tests.support import forked_programs
from tests.support.trees import structure

HERE = Path(write_samples.__file__).parent
ARCHIVES = {path.name.removesuffix(".tar.xz"): path for path in HERE.glob("*.tar.xz")}
NAMES = {
    "manager-checkpointers": step_names.Standard("ckpt"),
    "manager-arguments": step_names.Standard("ckpt"),
    "manager-composite": step_names.Standard("", 6),
}


@functools.cache
def samples_of(version: str) -> dict[str, Any]:
    with tarfile.open(ARCHIVES[version]) as archive:
        content = archive.extractfile("expected.json")
        assert content is not None
        found: dict[str, Any] = json.load(content)["samples"]
    return found


def cases(*, roots: bool) -> list[tuple[str, str]]:
    return [
        (version, name)
        for version in sorted(ARCHIVES)
        for name, sample in samples_of(version).items()
        if ("items" in sample) is roots
    ]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for version, path in ARCHIVES.items():
        found[version] = tmp_path_factory.mktemp(version)
        with tarfile.open(path) as archive:
            # Python 3.11.4 is the first of its line with filters.
            safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(found[version], **safely)
    return found


def plain(tree: Any) -> Any:
    """A tree in which named tuples whose class is not here are dicts."""
    if isinstance(tree, ckpt.types.UnknownNode):
        tree = dict(tree.fields)
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return [plain(child) for child in tree] if type(tree) in (list, tuple) else tree


def assert_leaves(found: Any, wanted: Mapping[str, Any]) -> None:
    """Every leaf has its value, dtype and shape."""
    leaves = described(plain(found))
    assert set(leaves) == set(wanted)
    for place, leaf in leaves.items():
        expected = wanted[place]
        if "value" in expected and "values" in leaf:
            # Years ago nothing told a number of Python from an array without dimensions.
            assert leaf["shape"] == [], place
            assert leaf["values"] == expected["value"], place
        else:
            assert leaf == expected, place


def assert_sample(path: Path, sample: Mapping[str, Any]) -> None:
    assert_leaves(ckpt.sync.load(path), sample["leaves"])
    target = STATES[sample["state"]]()
    found = ckpt.sync.load(path, like=target)
    assert structure(found) == structure(target)
    assert described(found) == sample["leaves"]
    shapes = {
        place: list(leaf.shape)
        for place, leaf in flat(ckpt.sync.metadata(path).tree)
        if hasattr(leaf, "shape")
    }
    expected = {place: leaf.get("shape", []) for place, leaf in sample["leaves"].items()}
    assert shapes.items() <= expected.items()
    assert {place for place, leaf in sample["leaves"].items() if "shape" in leaf} <= set(shapes)


def flat(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        ("".join(f"/{getattr(key, 'key', getattr(key, 'idx', None))}" for key in path), leaf)
        for path, leaf in leaves
    ]


def assert_root(root: Path, sample: Mapping[str, Any]) -> None:
    items = sample["items"]
    for each in sample["steps"]:
        found = ckpt.sync.load(root / each)
        if list(items) == ["default"]:
            found = {"default": found}
        assert set(found) == set(items)
    assert_items(ckpt.sync.load(root / sample["steps"][-1]), items)
    with CheckpointManager(root, step_names=NAMES.get(root.name)) as mgr:
        assert mgr.all_steps() == list(STEPS)
        assert_items(mgr.restore(), items)
        assert mgr.metadata(STEPS[0]).info.step == STEPS[0]
        if sample["metrics"] is not None:
            assert mgr.best_step("loss", "min") == STEPS[0]
            assert mgr.metadata(STEPS[0]).info.metrics == {"loss": LOSSES[STEPS[0]]}


def assert_items(found: Any, items: Mapping[str, Any]) -> None:
    whole = {"default": found} if list(items) == ["default"] else found
    for name, wanted in items.items():
        item = whole[name]
        if isinstance(item, jax.Array) and jnp.issubdtype(item.dtype, jax.dtypes.prng_key):
            item = jax.random.key_data(item)
        assert_leaves(item, wanted)


@pytest.mark.parametrize(("version", "name"), cases(roots=False))
def test_a_checkpoint_of_an_old_version(
    unpacked: Mapping[str, Path], version: str, name: str
) -> None:
    assert_sample(unpacked[version] / name, samples_of(version)[name])


@pytest.mark.parametrize(("version", "name"), cases(roots=True))
def test_a_root_of_an_old_version(unpacked: Mapping[str, Path], version: str, name: str) -> None:
    assert_root(unpacked[version] / name, samples_of(version)[name])


def test_everything_that_the_installed_version_writes(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    run = forked_programs.run(write_samples.__file__, folder)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads((folder / "expected.json").read_text())
    assert {"standard-full", "v1-full", "classes-full", "manager-composite"} <= set(
        found["samples"]
    ), found["skipped"]
    for name, sample in found["samples"].items():
        check = assert_root if "items" in sample else assert_sample
        check(folder / name, sample)


def test_named_tuples_and_tuples_that_orbax_wrote_down(unpacked: Mapping[str, Path]) -> None:
    path = unpacked["0.11.20"] / "classes-full"
    found = ckpt.sync.load(path)
    assert type(found["layers"]) is list
    assert type(found["layers"][1]) is tuple
    assert found["moments"]["mu"].shape == (2,)
    handler = ckpt.handlers.PyTreeHandler(classes={"__main__:Moments": Moments})
    found = ckpt.sync.load(path, handlers={"default": handler})
    assert type(found["moments"]) is Moments
    assert described(found) == samples_of("0.11.20")["classes-full"]["leaves"]


@pytest.mark.parametrize(
    "classes",
    [
        "[1]",
        '"x"',
        '{"layers": {"category": "custom", "clazz": "tuple", "entries": 3}}',
        '{"params": {"category": "namedtuple", "entries": [{"key": "x"}, 4]}}',
        '{"category": "namedtuple", "entries": [{"key": "other"}]}',
    ],
)
def test_classes_that_do_not_fit_change_nothing(
    unpacked: Mapping[str, Path], tmp_path: Path, classes: str
) -> None:
    written_in = unpacked["0.11.20"] / "files-full"
    copy = shutil.copytree(written_in, tmp_path / "copy")
    about = json.loads((copy / "_METADATA").read_text()) | {"value_metadata_tree": classes}
    (copy / "_METADATA").write_text(json.dumps(about))
    assert_leaves(ckpt.sync.load(copy), samples_of("0.11.20")["files-full"]["leaves"])


def test_classes_that_are_no_json_are_damage(tmp_path: Path) -> None:
    about = {"tree_metadata": {}, "value_metadata_tree": "{"}
    (tmp_path / "_METADATA").write_text(json.dumps(about))
    with pytest.raises(errors.CorruptCheckpointError, match="_METADATA is damaged"):
        ckpt.sync.load(tmp_path)


def test_an_item_in_a_pickle_does_not_hide_the_others(
    unpacked: Mapping[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = shutil.copytree(unpacked["0.3.5"] / "manager-checkpointers", tmp_path / "run")
    (root / "ckpt_3" / "state" / "checkpoint").write_bytes(pickle.dumps({"w": 1}))
    caplog.set_level(logging.WARNING, logger="ckpt")
    assert ckpt.sync.load(root / "ckpt_3", items=["config"]) == {"config": write_samples.CONFIG}
    assert set(ckpt.sync.load(root / "ckpt_3")) == {"array", "config"}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "ckpt"]
    assert "'state'" in said
    assert "pickle" in said
    with pytest.raises(errors.UnsupportedFormatError, match="pickle") as caught:
        ckpt.sync.load(root / "ckpt_3", items=["state"])
    assert caught.value.item == "state"


# -- the file of msgpack --------------------------------------------------------------------------


def packed_array(array: np.ndarray) -> msgpack.ExtType:
    content = (array.shape, array.dtype.name, array.tobytes())
    return msgpack.ExtType(1, msgpack.packb(content, use_bin_type=True))


def write_packed(path: Path, tree: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "checkpoint").write_bytes(tree if isinstance(tree, bytes) else msgpack.packb(tree))
    return path


def test_every_value_of_msgpack(tmp_path: Path) -> None:
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "none_in_it": np.zeros((0, 3), np.float32),
        "number": np.float64(0.5),
        "complex": 1 - 2j,
        "text": "small",
        "bytes": b"\x00\xff",
        "flag": True,
        "count": -(2**40),
        "rate": 0.1,
        "nothing": None,
        "deep": {"empty": {}},
    }
    serialized = pytest.importorskip("flax.serialization").msgpack_serialize(state)
    found = ckpt.sync.load(write_packed(tmp_path, serialized))
    assert structure(found) == structure(state)
    for name, leaf in state.items():
        assert type(found[name]) is type(leaf), name
        if isinstance(leaf, np.ndarray | np.generic):
            assert (found[name].dtype, found[name].shape) == (leaf.dtype, leaf.shape)
        np.testing.assert_array_equal(found[name], leaf)


def in_pieces(whole: np.ndarray, *pieces: np.ndarray) -> dict[str, Any]:
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(place): n for place, n in enumerate(whole.shape)},
        "chunks": {str(place): packed_array(piece) for place, piece in enumerate(pieces)},
    }


def test_an_array_in_pieces(tmp_path: Path) -> None:
    whole = np.arange(12.0).reshape(3, 4)
    parts = np.split(whole.reshape(-1), [5, 10])
    found = ckpt.sync.load(write_packed(tmp_path, {"w": in_pieces(whole, *parts), "x": 3}))
    np.testing.assert_array_equal(found["w"], whole)
    assert found["x"] == 3


def test_a_leaf_as_the_first_versions_wrote_it(
    unpacked: Mapping[str, Path], tmp_path: Path
) -> None:
    before = unpacked["0.1.8"] / "default-sequence"
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": "/elsewhere/1.w"}}
    path = write_packed(tmp_path / "copy", [None, {"w": spec}])
    shutil.copytree(before / "1.w", path / "1.w")
    np.testing.assert_array_equal(ckpt.sync.load(path)[1]["w"], np.ones(2))


WRONG = {
    "text": b"model_checkpoint_path: x",
    "nothing": b"",
    "a number": msgpack.packb(5),
    "cut": msgpack.packb({"w": packed_array(np.ones(3))})[:-1],
    "more": msgpack.packb({"w": 1}) + b"\x01",
    "deep": b"\x91" * 100_000 + b"\x90",
    "rather deep": b"\x91" * 500 + b"\x90",
    "key": msgpack.packb({3: 1}),
    "kind": msgpack.packb({"w": msgpack.ExtType(9, b"x")}),
    "time": msgpack.packb({"w": msgpack.Timestamp(1)}),
    "no array": msgpack.packb({"w": msgpack.ExtType(1, b"x")}),
    "no number": msgpack.packb({"w": msgpack.ExtType(2, msgpack.packb("ab"))}),
    "shape": msgpack.packb(
        {"w": msgpack.ExtType(1, msgpack.packb(((2**62, 9), "float32", b"1234")))}
    ),
    "negative": msgpack.packb(
        {"w": msgpack.ExtType(1, msgpack.packb(((-1,), "float32", b"1234")))}
    ),
    "dtype": msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((1,), "object", b"12345678")))}),
    "no pieces": msgpack.packb({"w": {"__msgpack_chunked_array__": True}}),
    "pieces": msgpack.packb({"w": in_pieces(np.ones(3), np.ones(2))}),
    "kinds": msgpack.packb({"w": in_pieces(np.ones(3), np.ones(2), np.ones(1, np.int8))}),
    "out of it": msgpack.packb({"w": "PLACEHOLDER://../secret"}),
    "missing": msgpack.packb({"w": "PLACEHOLDER://w"}),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_of_msgpack_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write_packed(tmp_path / "x", content)
    with pytest.raises(ckpt.CheckpointError):
        ckpt.sync.load(path)


def test_a_changed_byte_of_msgpack_ends_in_no_other_error(tmp_path: Path) -> None:
    tree = {"w": packed_array(np.ones(3)), "deep": [1, 2.5, "PLACEHOLDER://x", None]}
    whole = msgpack.packb(tree)
    for place in range(len(whole)):
        for value in (0, 0x7F, 0x80, 0xC1, 0xDF, 0xFF):
            changed = whole[:place] + bytes([value]) + whole[place + 1 :]
            path = write_packed(tmp_path / "x", changed)
            try:
                ckpt.sync.load(path)
            except ckpt.CheckpointError:
                continue


def test_damage_is_named_with_its_file(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "x", WRONG["cut"])
    with pytest.raises(errors.CorruptCheckpointError, match="checkpoint is damaged") as caught:
        ckpt.sync.load(path)
    assert str(path / "checkpoint") in str(caught.value)


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was loaded",))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    path = write_packed(tmp_path / "x", pickle.dumps({"w": Bomb()}, protocol))
    with pytest.raises(errors.UnsupportedFormatError, match="pickle"):
        ckpt.sync.load(path)


def test_a_value_that_the_file_of_msgpack_lacks_is_named(
    unpacked: Mapping[str, Path], tmp_path: Path
) -> None:
    before = unpacked["0.4.8"] / "one-file-texts"
    path = write_packed(tmp_path / "x", {"w": 1})
    (path / "_METADATA").write_bytes((before / "_METADATA").read_bytes())
    with pytest.raises(errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(path)
    assert caught.value.leaf in ("name", "deep.name", "deep.number")
    (path / "checkpoint").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="checkpoint is missing"):
        ckpt.sync.load(path)


def test_directories_of_other_programs_are_no_steps(tmp_path: Path) -> None:
    write_packed(tmp_path / "run" / "5", b"model_checkpoint_path: x")
    write_packed(tmp_path / "run" / "6", b"")
    write_packed(tmp_path / "run" / "7", {"w": 1})
    write_packed(tmp_path / "run" / "8.orbax-checkpoint-tmp-123", {"w": 1})
    with CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == [7]
        assert mgr.restore() == {"w": 1}
    for name in ("5", "6"):
        with pytest.raises(errors.NotACheckpointError):
            ckpt.sync.load(tmp_path / "run" / name)
