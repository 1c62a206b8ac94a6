"""Files of others are known by what is in them; what is not read is named for what it is."""

from __future__ import annotations

import io
import json
import logging
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.interop.test_flax_msgpack import in_memory

checkpoints = pytest.importorskip("flax.training.checkpoints")
config = pytest.importorskip("flax.configurations").config
serialization = pytest.importorskip("flax.serialization")
traverse_util = pytest.importorskip("flax.traverse_util")

NAMES = ckpt.step_names.Standard("checkpoint")


def state(value: float) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), float(value)), "step": int(value)}


def save_with_flax(folder: Path, step: float, **options: Any) -> None:
    with config.temp_flip_flag("use_orbax_checkpointing", False):
        checkpoints.save_checkpoint(str(folder), state(step), step, **options)


pytestmark = pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon:DeprecationWarning")

# --- Files of Flax, whatever they are called ------------------------------------------------------


@pytest.mark.parametrize("name", ["best_model", "params.flax", "checkpoint", "checkpoint_x", "a.b"])
def test_a_file_of_flax_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(serialization.to_bytes(state(3)))
    assert ckpt.sync.load(tmp_path / name)["w"].tolist() == [[3] * 3] * 4
    assert ckpt.sync.metadata(tmp_path / name).leaves["default"]["w"].shape == (4, 3)
    assert ckpt.sync.load(in_memory(name, serialization.to_bytes(state(3))))["step"] == 3
    with pytest.raises(errors.NotACheckpointError, match=f"{name} has no digests to verify"):
        ckpt.sync.verify(tmp_path / name)


def test_steps_of_flax_may_be_fractions(tmp_path: Path) -> None:
    save_with_flax(tmp_path, 0.5)
    assert ckpt.sync.load(tmp_path / "checkpoint_0.5", like=state(0))["w"][0, 0] == 0.5


@pytest.mark.parametrize("tree", [{}, {"a": 1}, np.arange(3.0, dtype=np.float32)])
def test_short_files_are_known_too(tree: Any, tmp_path: Path) -> None:
    data = serialization.to_bytes(tree)
    (tmp_path / "short").write_bytes(data)
    for path in (tmp_path / "short", in_memory("short", data)):
        assert str(ckpt.sync.load(path)) == str(tree)


# --- A root of them -------------------------------------------------------------------------------


def test_a_run_of_flax_goes_on(tmp_path: Path) -> None:
    for step in (100, 200):
        save_with_flax(tmp_path, step, keep=9)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=NAMES) as mgr:
        assert mgr.all_steps() == [100, 200]
        start, found = mgr.resume(state(0))
        assert start == 201
        assert found["w"].tolist() == [[200] * 3] * 4
        assert mgr.restore(100, like=state(0))["step"] == 100
        assert mgr.metadata(100).info.step == 100
        with pytest.raises(errors.NotACheckpointError, match=r"checkpoint_100 .*without digests"):
            mgr.verify(100)
        with pytest.raises(errors.StepExistsError, match="checkpoint_200 exists"):
            mgr.save(200, found).result()
        mgr.save(300, state(300))
    with ckpt.sync.CheckpointManager(tmp_path, step_names=NAMES) as mgr:
        assert mgr.all_steps() == [100, 200, 300]
        assert mgr.resume(state(0))[0] == 301
        assert mgr.restore(200)["step"] == 200


def test_a_run_of_flax_in_a_store_goes_on() -> None:
    root = in_memory("checkpoint_7", serialization.to_bytes(state(7))).rpartition("/")[0]
    with ckpt.sync.CheckpointManager(root, step_names=NAMES) as mgr:
        assert mgr.resume(state(0))[0] == 8
        with pytest.raises(errors.StepExistsError, match="checkpoint_7 exists"):
            mgr.save(7, state(7)).result()
        mgr.save(8, state(8), durable=True)
        assert mgr.all_steps() == [7, 8]
        assert mgr.restore(7)["step"] == 7
        mgr.delete(7)
        assert mgr.all_steps() == [8]


def test_without_names_of_steps_the_root_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_flax(tmp_path, 100)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.resume(state(0))[0] == 0
    assert "pass step_names=ckpt.step_names.Standard('checkpoint')" in caplog.text


def test_files_of_flax_stay_unless_the_policy_may_delete_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_with_flax(tmp_path, step, keep=9)
    keep = ckpt.keep.Latest(1)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=NAMES, keep=keep) as mgr:
        mgr.save(3, state(3), durable=True)
    assert "steps that another library wrote stay" in caplog.text
    assert mgr_steps(tmp_path) == [1, 2, 3]
    deletion = ckpt.keep.Deletion(orbax_steps=True)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=NAMES, keep=keep, trash=deletion) as mgr:
        mgr.save(4, state(4), durable=True)
    assert mgr_steps(tmp_path) == [4]
    save_with_flax(tmp_path, 5, keep=9)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=NAMES) as mgr:
        mgr.delete(5)
        assert mgr.all_steps() == [4]
    assert not (tmp_path / "checkpoint_5").exists()


def mgr_steps(root: Path) -> list[int]:
    with ckpt.sync.CheckpointManager(root, step_names=NAMES) as mgr:
        return mgr.all_steps()


def test_other_files_that_are_named_like_steps_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty file, or one of another program, is never a damaged step."""
    (tmp_path / "5").touch()
    (tmp_path / "6").write_text("hello")
    (tmp_path / "7").write_bytes(pickle.dumps({"w": 1}))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == []
        with pytest.raises(errors.StepNotFoundError, match=r"another program \(5, 6, 7\)"):
            mgr.resume(state(0))
        with pytest.raises(errors.StepExistsError, match="not a checkpoint of this library"):
            mgr.save(5, state(5)).result()
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "3 steps of another program (5, 6, 7)" in said[0]
    assert "damaged" not in caplog.text


# --- What is not read -----------------------------------------------------------------------------


def easylm() -> bytes:
    """As EasyLM streams a state: each leaf by itself, under its keys."""
    packer = msgpack.Packer()
    flat = traverse_util.flatten_dict({"params": {"w": np.ones(3), "b": np.ones(2)}})
    return b"".join(packer.pack((key, serialization.to_bytes(x))) for key, x in flat.items())


def equinox(head: bytes = b"") -> bytes:
    file = io.BytesIO(head)
    file.seek(len(head))
    eqx = pytest.importorskip("equinox")
    eqx.tree_serialise_leaves(file, {"a": jnp.ones(3), "b": jnp.zeros(2)})
    return file.getvalue()


def archive(*members: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for member in members:
            opened.writestr(member, "{}")
    return file.getvalue()


def part() -> bytes:
    return bytes(serialization.to_bytes({"h/0/kernel": np.ones(3)}))


UNREAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "EasyLM": ("streaming_params_100", easylm, "stream of msgpack, which EasyLM writes"),
    "part": (
        "flax_model-00001-of-00002.msgpack",
        part,
        "a part of weights of Flax in several",
    ),
    "Equinox": ("model.eqx", equinox, "file of Equinox, which .*tree_deserialise_leaves"),
    "Equinox elsewhere": ("model", equinox, "more than one array.*Equinox"),
    "Equinox with a head": ("model.eqx", lambda: equinox(b'{"width": 3}\n'), "file of Equinox"),
    "several arrays": ("a.npy", equinox, "more than one array"),
    "Keras": (
        "model.keras",
        lambda: archive("metadata.json", "config.json", "model.weights.h5"),
        "one of Keras",
    ),
    "HDF5": ("weights.h5", lambda: b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5, as Keras writes it"),
    "torch": ("model.pt", lambda: archive("model/data.pkl", "model/data/0"), "one of PyTorch"),
    "pickle": ("model.pkl", lambda: pickle.dumps({"a": np.ones(3)}), "a pickle, and to read"),
    "other archive": ("odd", lambda: archive("a.txt"), "holds no array of numpy.*'a.txt'"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_is_named_for_what_it_is(kind: str, tmp_path: Path) -> None:
    name, data, text = UNREAD[kind]
    (tmp_path / name).write_bytes(data())
    for path in (tmp_path / name, in_memory(name, data())):
        for call in (ckpt.sync.load, ckpt.sync.metadata):
            with pytest.raises(errors.UnsupportedFormatError, match=text) as caught:
                call(path)
            assert str(caught.value).count(name) == 1
    with pytest.raises(errors.NotACheckpointError, match=text):
        ckpt.sync.verify(tmp_path / name)


def test_sharded_weights_of_flax_are_named_by_their_index(tmp_path: Path) -> None:
    (tmp_path / "flax_model-00001-of-00002.msgpack").write_bytes(part())
    index = {"weight_map": {"h/0/kernel": "flax_model-00001-of-00002.msgpack"}}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.UnsupportedFormatError, match=r"index\.json is the index of weights"):
        ckpt.sync.load(tmp_path)


@pytest.mark.parametrize("name", ["x", "x.msgpack", "x.npz", "x.npy", "x.safetensors", "x.eqx"])
def test_an_empty_file_is_called_that(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    for path in (tmp_path / name, in_memory(name, b"")):
        with pytest.raises(errors.NotACheckpointError, match=f"{name} is an empty file"):
            ckpt.sync.load(path)


@pytest.mark.parametrize("data", [b"hello", b"hello, this is a text of some length"])
def test_another_file_is_called_a_file(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(data)
    with pytest.raises(errors.NotACheckpointError, match="notes is a file"):
        ckpt.sync.load(tmp_path / "notes")
    with pytest.raises(errors.NotACheckpointError):
        ckpt.sync.load(in_memory("notes", data))
