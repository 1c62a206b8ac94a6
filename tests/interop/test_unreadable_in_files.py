"""One leaf of a file of another library that cannot be read never makes the others unreadable."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt import errors
from tests.interop.test_flax_msgpack import FOUR, array, in_memory, packed, pieces
from tests.interop.test_t5x import STATE, save_as_t5x

W = np.arange(6, dtype=np.float32).reshape(2, 3)


def npz(odd: Any, save: Callable[..., None] = np.savez) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "x.npz", **{"net/w": W, "net/odd": odd})
        return folder / "x.npz"

    return make


def damaged_npz(folder: Path) -> Path:
    """What stands before one member was overwritten."""
    path = npz(np.arange(1000))(folder)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        place = opened.getinfo("net/odd.npy").header_offset
    path.write_bytes(data[:place] + b"XXXX" + data[place + 4 :])
    return path


def flax(odd: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        w = array(W.shape, "float32", W.tobytes())
        (folder / "model").write_bytes(packed({"net": {"w": w, "odd": odd}}))
        return folder / "model"

    return make


def tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "x.safetensors"
        save_file({"net.w": W, "net.odd": np.ones(4, np.int32)}, path)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header["net.odd"])
        new = json.dumps(header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
        return path

    return make


def cut_tensors(folder: Path) -> Path:
    path = folder / "x.safetensors"
    save_file({"net.w": W, "net.x": np.ones(3, np.int8), "net.odd": np.ones(9, np.int8)}, path)
    path.write_bytes(path.read_bytes()[:-11])
    return path


def lost_shard(folder: Path) -> Path:
    save_file({"net.w": W}, folder / "a.safetensors")
    index = {"weight_map": {"net.w": "a.safetensors", "net.odd": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def damaged_shard(folder: Path) -> Path:
    (folder / "b.safetensors").write_bytes(b"hello, this is no header")
    return lost_shard(folder)


def t5x(folder: Path) -> Path:
    state = {"net": {"w": W, "odd": STATE["target"]["encoder"]["kernel"]}}
    save_as_t5x(folder / "checkpoint_1", state)
    shutil.rmtree(folder / "checkpoint_1" / "net.odd")
    return folder / "checkpoint_1"


UNSUPPORTED, CORRUPT = errors.UnsupportedFormatError, errors.CorruptCheckpointError
CASES: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "npz, objects": (npz(np.array([{"a": 1}], object)), UNSUPPORTED, "numpy pickles"),
    "npz, objects, compressed": (
        npz(np.array([1, "a"], object), np.savez_compressed),
        UNSUPPORTED,
        "numpy pickles",
    ),
    "npz, dtype": (npz(np.zeros(2, "M8[s]")), UNSUPPORTED, "dtype datetime64"),
    "npz, damaged": (damaged_npz, CORRUPT, "damaged"),
    "flax, dtype": (flax(array((2,), "float13", bytes(4))), UNSUPPORTED, "'float13'"),
    "flax, objects": (flax(array((2,), "object", bytes(4))), UNSUPPORTED, "'object'"),
    "flax, shape": (flax(array((-1,), "int16", b"")), CORRUPT, r"shape \[-1\]"),
    "flax, bytes": (flax(array((3,), "int16", bytes(4))), CORRUPT, "the 6 bytes"),
    "flax, other kind": (flax(msgpack.ExtType(9, b"")), UNSUPPORTED, "unknown kind 9"),
    "flax, time": (flax(msgpack.Timestamp(3)), UNSUPPORTED, "unknown kind datetime"),
    "flax, pieces": (flax(pieces(FOUR, shape={"0": 3})), CORRUPT, "do not fit"),
    "flax, pieces of nothing": (flax({"__msgpack_chunked_array__": True}), CORRUPT, "damaged"),
    "flax, keys": (flax({b"a": 1}), CORRUPT, "has the key b'a'"),
    "flax, elsewhere": (flax("//GDAPlaceholder:a"), UNSUPPORTED, "directory beside the file"),
    "safetensors, dtype": (tensors(lambda it: it.update(dtype="F4")), UNSUPPORTED, "'F4'"),
    "safetensors, shape": (tensors(lambda it: it.update(shape=[3])), CORRUPT, "has 12 bytes"),
    "safetensors, cut": (cut_tensors, CORRUPT, "it was cut"),
    "safetensors, lost": (lost_shard, CORRUPT, "b.safetensors"),
    "safetensors, damaged": (damaged_shard, CORRUPT, "b.safetensors.*begin like"),
    "t5x, lost": (t5x, CORRUPT, "its array is missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_other_leaves_are_read(case: str, tmp_path: Path) -> None:
    make, error, text = CASES[case]
    path = make(tmp_path)
    top = "optimizer." if case.startswith("t5x") else ""
    # What cannot be read is named with its true reason.
    with pytest.raises(error, match=text) as caught:
        ckpt.sync.load(path)
    assert isinstance(caught.value, errors.CheckpointError)
    assert caught.value.leaf == f"{top}net.odd"
    info = ckpt.sync.metadata(path)
    assert info.leaves["default"][f"{top}net.w"].shape == (2, 3)
    assert f"{top}net.odd" in info.unreadable
    assert path.name in str(caught.value) or case.startswith("t5x")
    # The rest is read.
    assert np.array_equal(ckpt.sync.load(path, at=f"{top}net.w"), W)
    nested: Any = {"net": {"w": jnp.zeros((2, 3)), "odd": ...}}
    like = {"optimizer": nested, "version": 0} if top else nested
    if case == "safetensors, cut":
        nested["net"]["x"] = ...
    found = ckpt.sync.load(path, like=like)
    assert np.array_equal((found["optimizer"] if top else found)["net"]["w"], W)
    part = ckpt.sync.load(
        path, like={"w": jnp.zeros((2, 3))}, at=f"{top}net", adapt=ckpt.Adapt(extra="ignore")
    )
    assert np.array_equal(part["w"], W)
    assert np.array_equal(ckpt.sync.open_array(path, f"{top}net.w")[...], W)
    with pytest.raises(error, match=text):
        ckpt.sync.load(path, like={"odd": jnp.zeros(4), "w": ..., "x": ...}, at=f"{top}net",
                       adapt=ckpt.Adapt(missing="keep"))  # fmt: skip


def test_a_cut_file_in_a_store(tmp_path: Path) -> None:
    url = in_memory("x.safetensors", cut_tensors(tmp_path).read_bytes())
    assert set(ckpt.sync.metadata(url).unreadable) == {"net.odd", "net.x"}
    assert np.array_equal(ckpt.sync.load(url, at="net.w"), W)


@pytest.mark.parametrize("case", ["npz, objects", "safetensors, dtype"])
def test_what_is_written_anew_has_everything_or_is_refused(case: str, tmp_path: Path) -> None:
    path = CASES[case][0](tmp_path)
    with pytest.raises(errors.UnsupportedFormatError):
        ckpt.sync.convert(path, tmp_path / "out")
    with pytest.raises(errors.UnsupportedFormatError):
        ckpt.sync.adopt(path, tmp_path / "adopted")
    assert not (tmp_path / "out").exists()
