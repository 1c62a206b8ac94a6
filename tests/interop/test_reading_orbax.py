"""What Orbax wrote is read in place: every layout, without Orbax, and never wrongly."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
from tests.support.trees import P, mesh, sharded, structure

Moments = namedtuple("Moments", ["mu", "nu"])
STEP = 7


def make_state() -> dict[str, Any]:
    """Everything that both interfaces of Orbax save, without typed keys."""
    return {
        "params": {
            "kernel": sharded(np.arange(128.0, dtype=np.float32).reshape(8, 16), "data", "model"),
            "bias": jnp.arange(3, dtype=jnp.bfloat16),
            "zeros": jnp.zeros((5, 2)),
            # One data file of its own: more than Orbax puts into a node of its database.
            "table": jnp.arange(2**18, dtype=jnp.int32).reshape(512, 512),
        },
        "layers": [jnp.ones(2), (jnp.full(1, 7), jnp.int32(3))],
        "moments": Moments(jnp.ones(2), jnp.zeros(3, jnp.uint8)),
        "host": np.arange(5, dtype=np.int16),
        "dotted.key": jnp.full(4, 2.5),
        "nothing": None,
        "empty": {},
        "no_list": [],
        "count": 3,
        "rate": 2.5,
        "flag": True,
        "mask": jnp.array([True, False, True]),
    }


def as_orbax_writes(state: dict[str, Any]) -> dict[str, Any]:
    """What is left of a tree in Orbax's metadata: dicts and lists."""
    layers = state["layers"]
    return state | {
        "layers": [layers[0], list(layers[1])],
        "moments": state["moments"]._asdict(),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert structure(found) == structure(expected)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        where = jax.tree_util.keystr(path)
        if isinstance(leaf, bool | int | float | str):
            assert type(other) is type(leaf), where
            assert other == leaf, where
            continue
        assert isinstance(other, jax.Array) == isinstance(leaf, jax.Array), where
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), where
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes(), where


def by_manager(path: Path, state: Any) -> Path:
    with ocp0.CheckpointManager(path) as manager:
        manager.save(STEP, args=ocp0.args.StandardSave(state))
        manager.wait_until_finished()
    return path / str(STEP)


def by_pytree_save(path: Path, state: Any) -> Path:
    with ocp0.CheckpointManager(path) as manager:
        manager.save(STEP, args=ocp0.args.PyTreeSave(state))
        manager.wait_until_finished()
    return path / str(STEP)


def handled(path: Path, state: Any, **options: Any) -> Path:
    with ocp0.Checkpointer(ocp0.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp0.args.PyTreeSave(state))
    return path


def by_standard_checkpointer(path: Path, state: Any) -> Path:
    with ocp0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def by_v1(path: Path, state: Any) -> Path:
    ocp.save(path, state)
    return path


def by_v1_checkpointer(path: Path, state: Any) -> Path:
    with ocp.training.Checkpointer(path) as checkpointer:
        checkpointer.save(STEP, state)
    return path / str(STEP)


def by_async_checkpointer(path: Path, state: Any) -> Path:
    with ocp0.AsyncCheckpointer(ocp0.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp0.args.PyTreeSave(state))
        checkpointer.wait_until_finished()
    return path


def by_pytree_checkpointer(path: Path, state: Any) -> Path:
    ocp0.PyTreeCheckpointer(use_ocdbt=False).save(path, state)
    return path


def in_one_file(path: Path, state: Any) -> Path:
    """What can be in the file of msgpack is there."""
    arguments = jax.tree.map(lambda _: ocp0.SaveArgs(aggregate=True), state)
    handler = ocp0.PyTreeCheckpointHandler(use_ocdbt=False)
    ocp0.Checkpointer(handler).save(path, state, save_args=arguments)
    return path


WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "async": by_async_checkpointer,
    "checkpointer": by_pytree_checkpointer,
    "one-file": in_one_file,
    "manager": by_manager,
    "pytree": by_pytree_save,
    "files": lambda path, state: handled(path, state, use_ocdbt=False),
    "files-zarr3": lambda path, state: handled(path, state, use_ocdbt=False, use_zarr3=True),
    "zarr3": lambda path, state: handled(path, state, use_zarr3=True),
    "standard": by_standard_checkpointer,
    "v1": by_v1,
    "v1-checkpointer": by_v1_checkpointer,
}


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return make_state()


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, state: Any
) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("orbax") / "x", state)


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to / "copy")
    return to / "copy"


def test_a_state_comes_back_without_a_target(written: Path, state: Any) -> None:
    assert_same(ckpt.sync.load(written), as_orbax_writes(state))


def test_arrays_come_back_where_they_were(written: Path, state: Any) -> None:
    kernel = ckpt.sync.load(written)["params"]["kernel"]
    assert kernel.sharding.is_equivalent_to(state["params"]["kernel"].sharding, 2)


def test_a_state_comes_back_onto_a_target(written: Path, state: Any) -> None:
    target = jax.tree.map(lambda leaf: leaf, state)
    other = jax.sharding.NamedSharding(mesh(), P("model", "data"))
    kernel = state["params"]["kernel"]
    target["params"]["kernel"] = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=other)
    found = ckpt.sync.load(written, like=target)
    assert_same(found, state)
    assert isinstance(found["moments"], Moments)
    assert found["params"]["kernel"].sharding == other


def test_a_target_that_does_not_fit_is_refused_leaf_by_leaf(written: Path, state: Any) -> None:
    target = jax.tree.map(lambda leaf: leaf, state)
    target["params"]["bias"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    target["more"] = jnp.ones(1)
    del target["host"]
    with pytest.raises(ckpt.errors.TargetMismatchError) as caught:
        ckpt.sync.load(written, like=target)
    text = str(caught.value)
    assert "params.bias" in text
    assert "more" in text
    assert "host" in text


def test_a_branch_and_a_cast(written: Path, state: Any) -> None:
    found = ckpt.sync.load(written, at="params", adapt=ckpt.Adapt(cast="float16"))
    assert set(found) == set(state["params"])
    assert found["kernel"].dtype == np.float16
    assert found["table"].dtype == np.int32


def test_metadata_without_arrays(written: Path) -> None:
    found = ckpt.sync.metadata(written)
    leaf = found.tree["params"]["table"]
    assert (leaf.shape, leaf.dtype, leaf.kind) == ((512, 512), np.int32, "jax")
    assert found.tree["count"] == 3
    assert "params.kernel" in str(found)


WITHOUT_ORBAX = """
import sys
sys.modules["orbax"] = None
import ckpt.sync
for line in sys.stdin:
    found = ckpt.sync.load(line.strip())
    assert float(found["rate"]) == 2.5
    imported = {name.split(".")[0] for name, module in sys.modules.items() if module}
    assert not imported & {"orbax", "tensorstore"}
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def without_orbax() -> Iterator[subprocess.Popen[str]]:
    """A Python that loads what it is told to."""
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", WITHOUT_ORBAX], text=True, **pipes) as process:
        yield process
        process.communicate(timeout=100)


def test_neither_orbax_nor_tensorstore_is_needed(
    written: Path, without_orbax: subprocess.Popen[str]
) -> None:
    assert without_orbax.stdin is not None
    assert without_orbax.stdout is not None
    print(written, file=without_orbax.stdin, flush=True)
    # Its errors are those of this process.
    assert without_orbax.stdout.readline() == "done\n"


def test_a_composite_comes_back_by_item(tmp_path: Path) -> None:
    state, key = {"w": jnp.arange(4.0)}, jax.random.key(3)
    with ocp0.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            STEP,
            args=ocp0.args.Composite(
                model=ocp0.args.StandardSave(state),
                config=ocp0.args.JsonSave({"lr": 0.1, "layers": [1, 2]}),
                key=ocp0.args.JaxRandomKeySave(key),
                array=ocp0.args.ArraySave(jnp.arange(3)),
            ),
            custom_metadata={"note": "x"},
        )
        manager.wait_until_finished()
    path = tmp_path / "run" / str(STEP)
    found = ckpt.sync.load(path)
    assert set(found) == {"model", "config", "key", "array"}
    assert_same(found["model"], state)
    assert found["config"] == {"lr": 0.1, "layers": [1, 2]}
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(key))
    assert jnp.array_equal(found["array"], jnp.arange(3))
    assert_same(ckpt.sync.load(path, items=["model"]), {"model": state})
    assert ckpt.sync.metadata(path).info.custom_metadata == {"note": "x"}


def test_items_of_v1_come_back_by_name(tmp_path: Path) -> None:
    ocp.save_checkpointables(
        tmp_path / "x", {"model": {"w": jnp.arange(4.0), "name": "small"}, "config": {"lr": 0.1}}
    )
    found = ckpt.sync.load(tmp_path / "x")
    assert found["model"]["name"] == "small"
    assert found["config"] == {"lr": 0.1}


def test_typed_keys_and_texts(tmp_path: Path) -> None:
    state: dict[str, Any] = {"key": jax.random.key(5), "name": "small", "w": jnp.ones(2)}
    handled(tmp_path / "x", state)
    found = ckpt.sync.load(tmp_path / "x")
    assert found["name"] == "small"
    assert found["key"].dtype == state["key"].dtype
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(state["key"]))


def test_metrics_are_those_of_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ckpt")
    options = ocp0.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp0.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(STEP, args=ocp0.args.StandardSave({"w": jnp.ones(1)}), metrics={"loss": 0.5})
        manager.wait_until_finished()
    info = ckpt.sync.metadata(tmp_path / "run" / str(STEP)).info
    assert info.metrics == {"loss": 0.5}
    assert info.items == ("default",)
    # They are no item that is left out.
    assert not [record for record in caplog.records if record.name == "ckpt"]


def test_files_that_orbax_could_do_without(tmp_path: Path, written: Path, state: Any) -> None:
    path = copied(written, tmp_path)
    for name in ("_sharding", "commit_success.txt", "orbax.checkpoint", "array_metadatas"):
        for each in path.rglob(name):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    found = ckpt.sync.load(path)
    assert_same(found, as_orbax_writes(state))


def in_files(path: Path, state: Any) -> Path:
    return handled(path, state, use_ocdbt=False)


def in_v3_files(path: Path, state: Any) -> Path:
    return handled(path, state, use_ocdbt=False, use_zarr3=True)


@pytest.mark.parametrize("write", [handled, in_files, in_v3_files, by_v1, by_v1_checkpointer])
@pytest.mark.parametrize(
    "leaf",
    [jnp.arange(6.0).reshape(2, 3), np.arange(3, dtype=np.int16), jnp.bfloat16(2), 3, 2.5],
    ids=str,
)
def test_a_tree_that_is_one_leaf(tmp_path: Path, write: Any, leaf: Any) -> None:
    path = write(tmp_path / "x", leaf)
    assert_same(ckpt.sync.load(path), leaf)
    assert_same(ckpt.sync.load(path, like=leaf), leaf)


# -- what is not one ------------------------------------------------------------------------------


def test_what_orbax_never_finished_is_refused(tmp_path: Path, written: Path) -> None:
    shutil.copytree(written, tmp_path / "7.orbax-checkpoint-tmp")
    with pytest.raises(ckpt.errors.NotACheckpointError, match="never finished"):
        ckpt.sync.load(tmp_path / "7.orbax-checkpoint-tmp")


def test_a_database_that_was_never_merged_is_refused(tmp_path: Path, state: Any) -> None:
    path = by_manager(tmp_path / "run", state)
    (path / "default" / "manifest.ocdbt").unlink()
    with pytest.raises(ckpt.errors.CorruptCheckpointError, match=r"manifest\.ocdbt") as caught:
        ckpt.sync.load(path)
    assert caught.value.item == "default"


@pytest.mark.parametrize("content", ["{}", "{", "[]", '{"tree_metadata": 3}', ""])
def test_a_damaged_description_of_the_tree_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "_METADATA").write_text(content)
    for call in (ckpt.sync.load, ckpt.sync.metadata):
        with pytest.raises(ckpt.errors.CorruptCheckpointError, match="_METADATA is damaged") as at:
            call(tmp_path)
        assert str(tmp_path / "_METADATA") in str(at.value)


def test_a_step_of_this_library_without_its_manifest_is_not_read(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": jnp.ones(3)})
    (tmp_path / "x" / "ckpt.json").unlink()
    with pytest.raises(ckpt.errors.NotACheckpointError):
        ckpt.sync.load(tmp_path / "x")


def files_with_data(path: Path) -> list[Path]:
    skipped = ("_sharding", "commit_success.txt", "orbax.checkpoint", "process_0")
    return [
        each
        for each in sorted(path.rglob("*"))
        if each.is_file()
        and each.name not in skipped
        and "ocdbt.process" not in str(each.parent.name)
    ]


def error_of(path: Path) -> ckpt.CheckpointError | None:
    try:
        ckpt.sync.load(path)
    except ckpt.CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("writer", WRITERS)
def test_a_cut_file_is_found(tmp_path: Path, state: Any, writer: str) -> None:
    # One leaf of each kind: there is a load of all for each cut of a file.
    params = {name: state["params"][name] for name in ("kernel", "table")}
    few = {"params": params, **{name: state[name] for name in ("layers", "host", "rate")}}
    path = WRITERS[writer](tmp_path / "x", few)
    assert error_of(path) is None
    for file in files_with_data(path):
        whole = file.read_bytes()
        for kept in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:kept])
            error = error_of(path)
            if error is None:
                # Orbax keeps what a process wrote, also where the merged database has all of it.
                assert kept == len(whole) - 1 or "d" in file.parts, file
            elif isinstance(error, ckpt.errors.NotACheckpointError):
                assert file.name in ("_CHECKPOINT_METADATA", "_METADATA"), file
            else:
                assert isinstance(error, ckpt.errors.CorruptCheckpointError)
                assert error.item or file.name in str(error), (file, error)
        file.write_bytes(whole)


def test_metadata_that_lies_about_a_shape_is_refused(tmp_path: Path, state: Any) -> None:
    path = handled(tmp_path / "x", state, use_ocdbt=False)
    file = path / "host" / ".zarray"
    about = json.loads(file.read_text())
    for shape in ([10], [2**40], [5, 5], [-1], "five"):
        file.write_text(json.dumps(about | {"shape": shape}))
        with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
            ckpt.sync.load(path)
        assert caught.value.leaf == "host"


def test_an_array_that_is_missing_is_named(tmp_path: Path, state: Any) -> None:
    path = handled(tmp_path / "x", state, use_ocdbt=False)
    shutil.rmtree(path / "params.bias")
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(path)
    assert caught.value.leaf == "params.bias"


def test_codecs_that_are_not_read_are_named(tmp_path: Path, state: Any) -> None:
    path = handled(tmp_path / "x", state, use_ocdbt=False)
    file = path / "host" / ".zarray"
    about = json.loads(file.read_text())
    for change in ({"compressor": {"id": "bz2"}}, {"filters": [{"id": "delta"}]}, {"dtype": ">i2"}):
        file.write_text(json.dumps(about | change))
        with pytest.raises(ckpt.errors.UnsupportedFormatError) as caught:
            ckpt.sync.load(path)
        assert caught.value.leaf == "host"


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}, {"id": "gzip"}])
def test_chunks_that_old_versions_did_not_write(tmp_path: Path, compressor: Any) -> None:
    path = handled(tmp_path / "x", {"w": jnp.ones((4, 2))}, use_ocdbt=False)
    about = json.loads((path / "_METADATA").read_text())
    del about["store_array_data_equal_to_fill_value"]
    (path / "_METADATA").write_text(json.dumps(about))
    file = path / "w" / ".zarray"
    zarr = json.loads(file.read_text())
    file.write_text(json.dumps(zarr | {"compressor": compressor, "fill_value": 3.5}))
    for chunk in (path / "w").glob("[0-9]*"):
        chunk.unlink()
    assert jnp.array_equal(ckpt.sync.load(path)["w"], jnp.full((4, 2), 3.5))
    # Nothing is made that could not be.
    file.write_text(json.dumps(zarr | {"shape": [2**40, 2], "chunks": [2**40, 2]}))
    with pytest.raises(ckpt.errors.UnsupportedFormatError, match="was not stored"):
        ckpt.sync.load(path)


def test_arrays_in_gzip_come_back(tmp_path: Path) -> None:
    path = handled(tmp_path / "x", {"w": jnp.ones(5)}, use_ocdbt=False)
    file = path / "w" / ".zarray"
    about = json.loads(file.read_text()) | {"compressor": {"id": "gzip", "level": 5}}
    file.write_text(json.dumps(about))
    wanted = np.arange(5, dtype=np.float32)
    (path / "w" / "0").write_bytes(gzip.compress(wanted.tobytes()))
    np.testing.assert_array_equal(ckpt.sync.load(path)["w"], wanted)
    for length in (4, 6):
        (path / "w" / "0").write_bytes(gzip.compress(bytes(4 * length)))
        with pytest.raises(ckpt.errors.CorruptCheckpointError):
            ckpt.sync.load(path)


def test_paths_that_lead_out_of_the_checkpoint_are_refused(tmp_path: Path, state: Any) -> None:
    path = handled(tmp_path / "x", {"w": jnp.ones(2)}, use_ocdbt=False)
    secret = tmp_path / "secret"
    secret.mkdir()
    shutil.move(path / "w", secret / "w")
    about = json.loads((path / "_METADATA").read_text())
    (leaf,) = about["tree_metadata"].values()
    leaf["key_metadata"][0]["key"] = "../secret/w"
    (path / "_METADATA").write_text(json.dumps(about))
    with pytest.raises(ckpt.errors.CorruptCheckpointError):
        ckpt.sync.load(path)


@pytest.mark.parametrize("write", [by_manager, by_standard_checkpointer, by_v1])
def test_a_branch_comes_from_orbax_and_another_from_here(tmp_path: Path, write: Any) -> None:
    theirs = {"params": {"w": jnp.arange(6.0)}, "opt_state": {"mean": jnp.zeros(3)}}
    ckpt.sync.save(tmp_path / "ours", {"opt_state": {"mean": jnp.ones(3)}})
    sources = {"params": write(tmp_path / "theirs", theirs), "opt_state": tmp_path / "ours"}
    found: Any = ckpt.sync.load(sources, like=theirs)
    assert found["params"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["opt_state"]["mean"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["AUTO", "train state", "params:v2", "-x"])
def test_items_have_the_names_that_orbax_gave_them(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The rules for names are for what this library writes."""
    tree, words = {"w": jnp.ones((3, 2))}, {"lr": 0.1, "schedule": ["cosine", 10]}
    with ocp0.CheckpointManager(tmp_path / "run") as theirs:
        args = {"state": ocp0.args.StandardSave(tree), name: ocp0.args.JsonSave(words)}
        theirs.save(3, args=ocp0.args.Composite(**args))
        theirs.wait_until_finished()
    step = tmp_path / "run" / "3"
    assert ckpt.sync.load(step)[name] == words
    assert ckpt.sync.load(step, items=[name]) == {name: words}
    assert name in ckpt.sync.metadata(step).items
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        found: Any = mgr.restore(3, {"state": tree, name: {"lr": 0.0, "schedule": ["", 0]}})
    assert found[name] == words
    assert np.array_equal(found["state"]["w"], tree["w"])
    writers: list[Any] = [ckpt.sync.convert, ckpt.sync.adopt]
    for number, write in enumerate(writers):
        caplog.clear()
        write(step, tmp_path / f"ours{number}")
        [told] = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
        assert repr(name) in told
        ours = ckpt.sync.load(tmp_path / f"ours{number}")
        assert np.array_equal(ours["state"]["w"], tree["w"])
        assert list(ours) == ["state"]
