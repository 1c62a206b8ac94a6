"""What numpy saved is read where it is: `*.npz`, compressed or not, and `*.npy`."""

from __future__ import annotations

import asyncio
import io
import logging
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Mapping
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

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._interop import numpy_files
from ckpt._interop.runs_of_bytes import nested
from tests.support.real_jobs import run_processes
from tests.support.trees import P, mesh

# As big_vision names the arrays of a Vision Transformer.
VIT: Mapping[str, Any] = {
    "params/embedding/kernel": np.arange(600 * 64, dtype=np.float32).reshape(600, 64),
    "params/Transformer/encoderblock_0/Dense_0/kernel": np.full((64, 128), 2, np.float16),
    "params/Transformer/encoderblock_1/Dense_0/kernel": np.full((64, 128), 3, np.float16),
    "params/head/bias": np.arange(10, dtype=np.int32),
    "opt/step": np.int64(7),
}
SAVERS: dict[str, Callable[..., None]] = {"plain": np.savez, "compressed": np.savez_compressed}


@pytest.fixture(params=SAVERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    SAVERS[request.param](tmp_path / "vit.npz", **VIT)
    return tmp_path / "vit.npz"


def at(tree: Any, name: str) -> Any:
    for key in name.replace("/", ".").split("."):
        tree = tree[key]
    return tree


def assert_vit(tree: Any) -> None:
    for name, array in VIT.items():
        found = at(tree, name)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array), name
    assert len(jax.tree.leaves(tree)) == len(VIT)


def archive(save: Callable[..., None] = np.savez, /, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def in_memory(name: str, data: bytes) -> str:
    """Put a file into a store, and return its URL."""
    from ckpt.storage._object.connection import _memory_of

    bucket = uuid.uuid4().hex
    kv = ts.KvStore.open({"driver": "memory"}, context=_memory_of(bucket)).result()
    kv.write(name, data).result()
    return f"memory://{bucket}/{name}"


def test_an_archive_is_a_tree_of_arrays(model: Path) -> None:
    assert_vit(ckpt.sync.load(model))
    assert_vit(ckpt.sync.load(str(model)))
    assert_vit(asyncio.run(ckpt.load(model)))


def test_arrays_are_those_of_jax_but_for_what_it_would_cut(model: Path) -> None:
    found = ckpt.sync.load(model)
    assert isinstance(found["params"]["head"]["bias"], jax.Array)
    assert isinstance(found["opt"]["step"], np.ndarray)


def test_metadata_without_reading_arrays(model: Path) -> None:
    found = ckpt.sync.metadata(model)
    assert found.info.nbytes == sum(array.nbytes for array in VIT.values())
    assert found.leaves["default"]["params.embedding.kernel"].shape == (600, 64)
    assert "1970" not in str(found)


def test_onto_a_target_with_shardings_and_other_names(model: Path) -> None:
    rows = NamedSharding(mesh(), P("data"))
    columns = NamedSharding(mesh(), P(None, "model"))
    target: dict[str, Any] = {
        "embed": jax.ShapeDtypeStruct((600, 64), jnp.float32, sharding=rows),
        "layers": [
            {"up": jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=columns)} for _ in range(2)
        ],
        "step": 0,
    }
    adapt = ckpt.Adapt(
        rename={
            "params.embedding.kernel": "embed",
            "params.Transformer.encoderblock_0.Dense_0.kernel": "layers.0.up",
            "params.Transformer.encoderblock_1.Dense_0.kernel": "layers.1.up",
            "opt.step": "step",
        },
        extra="ignore",
    )
    found = ckpt.sync.load(model, like=target, adapt=adapt)
    assert found["embed"].sharding == rows
    assert np.array_equal(found["embed"], VIT["params/embedding/kernel"])
    assert found["step"] == 7
    for number, value in ((0, 2), (1, 3)):
        assert found["layers"][number]["up"].sharding == columns
        assert np.array_equal(found["layers"][number]["up"], np.full((64, 128), value))


def test_a_target_made_of_its_metadata(model: Path) -> None:
    whole = NamedSharding(mesh(), P())
    found = ckpt.sync.load(model, like=ckpt.sync.metadata(model).target(whole))
    assert_vit(found)
    assert found["params"]["head"]["bias"].sharding == whole


def test_a_part_of_it(model: Path) -> None:
    found = ckpt.sync.load(model, at="params.Transformer.encoderblock_1")
    assert np.array_equal(found["Dense_0"]["kernel"], np.full((64, 128), 3))


def test_one_array_of_it(model: Path) -> None:
    array = ckpt.sync.open_array(model, "params.embedding.kernel")
    assert np.array_equal(array[500:502, ::3], VIT["params/embedding/kernel"][500:502, ::3])


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())
def test_in_a_store(save: Callable[..., None]) -> None:
    url = in_memory("vit.npz", archive(save, **VIT))
    assert_vit(ckpt.sync.load(url))
    assert np.array_equal(ckpt.sync.open_array(url, "params.head.bias")[2:4], [2, 3])


def test_a_run_begins_from_it(model: Path, tmp_path: Path) -> None:
    adapt = ckpt.Adapt(rename={"params.head.bias": "bias"}, extra="ignore")
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        begin, state = mgr.resume(
            lambda: {"bias": jnp.zeros(10, jnp.int32)}, source=model, adapt=adapt
        )
    assert begin == 0
    assert np.array_equal(state["bias"], np.arange(10))


def test_a_process_reads_only_its_rows(tmp_path: Path) -> None:
    shape = (1024, 16_384)
    rows = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    np.savez(tmp_path / "large.npz", w=rows)
    for each in run_processes(4, "load_tensors.py", tmp_path / "large.npz", *shape):
        assert each.value["same"]
        # A quarter, and what says where it is.
        assert rows.nbytes / 4 <= each.value["read"] < rows.nbytes / 4 + 4096


def test_one_array_in_a_file_of_its_own(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for order in ("C", "F"):
        np.save(tmp_path / "a.npy", np.asarray(array, order=order))
        assert np.array_equal(ckpt.sync.load(tmp_path / "a.npy"), array)
        assert np.array_equal(ckpt.sync.load(tmp_path / "a.npy", like=np.zeros((3, 4))), array)
    file = io.BytesIO()
    np.save(file, array)
    assert np.array_equal(ckpt.sync.load(in_memory("a.npy", file.getvalue())), array)


NAMES = st.lists(
    st.sampled_from(["a", "b", "w", "0", "arr_0", "ä", "", "x.npy"]), min_size=1, max_size=3
).flatmap(lambda keys: st.sampled_from(["/", "."]).map(lambda mark: mark.join(keys)))
DTYPES = st.sampled_from(
    ["?", "i1", "<i2", ">i2", "<i4", ">u4", "<f2", "<f4", ">f4", "<f8", ">i8", "<c8", ">c8", ">c16"]
)


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    found = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        order: Any = draw(st.sampled_from("CF"))
        count = int(np.prod(shape))
        array = (np.arange(count) * 37 % 101).astype(draw(DTYPES)).reshape(shape)
        found[name] = np.asarray(array, order=order)
    return found


@settings(max_examples=120, deadline=None)
@given(arrays(), st.sampled_from(list(SAVERS)))
def test_what_numpy_writes_is_read(made: dict[str, Any], how: str) -> None:
    # `savez` itself writes names that are no file names, and cannot be given "".
    file = io.BytesIO()
    method = zipfile.ZIP_STORED if how == "plain" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(file, "w", method) as opened:
        for name, array in made.items():
            with opened.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array)
    found = ckpt.sync.load(in_memory("x.npz", file.getvalue()))
    flat = nested(made, "", "./") is made
    for name, array in made.items():
        leaf = found[name] if flat else at(found, name)
        assert leaf.dtype == array.dtype.newbyteorder("=")
        assert leaf.shape == array.shape
        assert np.array_equal(leaf, array)


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())
def test_archives_with_64_bit_records(
    save: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    data = archive(save, **VIT)
    assert b"PK\6\6" in data
    assert_vit(ckpt.sync.load(in_memory("x.npz", data)))


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())
def test_archives_that_went_through_a_pipe(save: Callable[..., None], tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        """Cannot go back, so that sizes are behind members and not before them."""

        def __init__(self) -> None:
            self.written = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.written += data
            return len(data)

    pipe = Pipe()
    save(pipe, **VIT)
    assert b"PK\7\x08" in pipe.written
    (tmp_path / "x.npz").write_bytes(pipe.written)
    assert_vit(ckpt.sync.load(tmp_path / "x.npz"))


def test_what_is_compressed_is_read_forward_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by `convert`, whose memory does not grow with an array."""
    # Three pieces, of equal numbers in a row, which are compressed fast.
    array = np.repeat(np.arange(5 << 10, dtype=np.float32), 1 << 10).reshape(2048, 2560)
    np.savez_compressed(tmp_path / "x.npz", a=array)
    asked: list[tuple[int, int]] = []
    files: set[int] = set()
    read = numpy_files._Elements._read

    def watch(self: Any, offset: int, target: memoryview) -> None:
        asked.append((offset, len(target)))
        read(self, offset, target)
        files.add(id(self._file))

    monkeypatch.setattr(numpy_files._Elements, "_read", watch)
    assert np.array_equal(ckpt.sync.load(tmp_path / "x.npz")["a"], array)
    # Never back, and opened once: after the last piece it is None.
    assert asked == sorted(asked)
    assert len(files) == 2
    assert max(nbytes for _, nbytes in asked) <= 8 << 20
    asked.clear()
    ckpt.sync.convert(tmp_path / "x.npz", tmp_path / "out")
    assert sum(nbytes for _, nbytes in asked) == array.nbytes
    assert max(nbytes for _, nbytes in asked) <= 8 << 20
    assert np.array_equal(ckpt.sync.load(tmp_path / "out")["a"], array)


def test_earlier_elements_can_be_asked_for_again(tmp_path: Path) -> None:
    array = np.arange(2 << 20, dtype=">i4").reshape(2048, 1024)
    np.savez_compressed(tmp_path / "x.npz", a=array)
    opened = ckpt.sync.open_array(tmp_path / "x.npz", "a")
    for rows in (slice(2000, 2048), slice(0, 10), slice(1000, 1001), slice(999, 1002)):
        assert np.array_equal(opened[rows], array[rows])


def test_names_that_are_parts_of_others_are_keys_of_one_dict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "odd.npz").write_bytes(archive(**{"a": np.ones(2), "a/b": np.zeros(3)}))
    (tmp_path / "same.npz").write_bytes(archive(**{"a.b": np.ones(2), "a/b": np.zeros(3)}))
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert sorted(ckpt.sync.load(tmp_path / "odd.npz")) == ["a", "a/b"]
        assert sorted(ckpt.sync.load(tmp_path / "same.npz")) == ["a.b", "a/b"]
    assert caplog.text.count("parts of others") == 2


def test_files_that_are_no_arrays_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.ones(2))
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr("README.md", "hello")
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert list(ckpt.sync.load(path)) == ["a"]
    assert "'README.md'" in caplog.text
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("README.md", "hello")
    with pytest.raises(
        errors.UnsupportedFormatError, match=r"x\.npz: it is an archive that holds no array"
    ):
        ckpt.sync.load(path)


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([{"a": 1}], object), "pickle.*Save arrays of numbers"),
    "structured": (np.zeros(2, [("x", "f4"), ("y", "i4")]), "for each of its fields"),
    "float8": (np.ones(3, ml_dtypes.float8_e5m2), "dtypes that it does not know.*float32"),
    "text": (np.array(["a", "bc"]), "the dtype <U2, which is not read"),
    "times": (np.zeros(2, "M8[s]"), "datetime64"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())
def test_arrays_that_are_not_read_are_named(
    kind: str, save: Callable[..., None], tmp_path: Path
) -> None:
    array, text = REFUSED[kind]
    save(tmp_path / "bad.npz", **{"net/odd": array, "net/w": np.ones(2)})
    with pytest.raises(errors.UnsupportedFormatError, match=rf"leaf 'net\.odd'.*{text}") as caught:
        ckpt.sync.load(tmp_path / "bad.npz")
    assert "bad.npz" in str(caught.value)


@pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())
def test_two_bytes_without_a_dtype_are_bfloat16(
    save: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """numpy does not know the name, and saves "V2"."""
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    save(tmp_path / "x.npz", a=array, b=array + 1, c=np.ones(2, np.float32))
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = ckpt.sync.load(tmp_path / "x.npz")
    assert found["a"].dtype == jnp.bfloat16
    assert np.array_equal(found["b"], array + 1)
    [told] = [each.getMessage() for each in caplog.records]
    assert "x.npz: 2 arrays" in told
    assert "'a'" in told
    target: dict[str, Any] = {"a": jnp.zeros((2, 3), jnp.bfloat16), "b": ..., "c": ...}
    assert np.array_equal(ckpt.sync.load(tmp_path / "x.npz", like=target)["a"], array)


def test_the_order_of_fortran_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_files, "host_memory_bytes", lambda: 1000)
    np.savez(tmp_path / "large.npz", a=np.zeros((63, 2), np.int32, order="F"))
    with pytest.raises(
        errors.UnsupportedFormatError, match=r"leaf 'a': .*large\.npz.* 1008 bytes.* has 1000"
    ):
        ckpt.sync.load(tmp_path / "large.npz")
    np.savez(tmp_path / "small.npz", a=np.zeros((60, 2), np.int32, order="F"))
    assert ckpt.sync.load(tmp_path / "small.npz")["a"].shape == (60, 2)


# --- Files that lie -------------------------------------------------------------------------------

ENTRY, LOCAL = b"PK\1\2", b"PK\3\4"


def patched(data: bytes, mark: bytes, at: int, form: str, value: Any, which: int = 0) -> bytes:
    """Put another value into a record of an archive."""
    place = -1
    for _ in range(which + 1):
        place = data.index(mark, place + 1)
    changed = bytearray(data)
    struct.pack_into(form, changed, place + at, value)
    return bytes(changed)


def header(text: str, body: bytes = b"", version: int = 1) -> bytes:
    """An archive of one array with a header of one's own."""
    return zipped({"a.npy": npy(text, version) + body})


def npy(text: str, version: int = 1) -> bytes:
    form = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(form, len(text)) + text.encode()


def zipped(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return file.getvalue()


def twice() -> bytes:
    data = archive(a=np.ones(2), b=np.zeros(2))
    return data.replace(b"b.npy", b"a.npy")


TWO = archive(a=np.arange(4, dtype=np.int32), b=np.arange(4, 8, dtype=np.int32))
SQUEEZED = archive(np.savez_compressed, a=np.zeros(1000, np.int32))
USUAL = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }"
LIES: dict[str, tuple[bytes, str]] = {
    "other": (b"hello" * 100, "not a zip file"),
    "directory outside": (patched(TWO, b"PK\5\6", 16, "<I", 1 << 30), "leaf 'a'"),
    "long directory": (patched(TWO, b"PK\5\6", 12, "<I", 1 << 30), "directory"),
    "member outside": (patched(TWO, ENTRY, 42, "<I", 1 << 20), "leaf 'a'"),
    "long member": (
        patched(patched(TWO, ENTRY, 20, "<I", 1 << 20), ENTRY, 24, "<I", 1 << 20),
        "leaf 'a'",
    ),
    "other place": (patched(TWO, ENTRY, 42, "<I", 1), "leaf 'a'"),
    "same place": (patched(TWO, ENTRY, 42, "<I", 0, which=1), "leaf '[ab]'"),
    "other name": (patched(TWO, LOCAL, 30, "5s", b"c.npy"), "leaf 'a'.*differ"),
    "extra": (patched(TWO, LOCAL, 28, "<H", 500), "leaf 'a'"),
    "sizes": (patched(TWO, ENTRY, 24, "<I", 9), "leaf 'a'"),
    "64 bits": (patched(TWO, ENTRY, 42, "<I", 0xFFFFFFFF), "leaf 'a'"),
    "encrypted": (patched(TWO, ENTRY, 8, "<H", 1), "leaf 'a'.*encrypted"),
    "method": (patched(TWO, ENTRY, 10, "<H", 99), "leaf 'a'.*compression"),
    "no text": (
        patched(patched(TWO, ENTRY, 8, "<H", 1 << 11), ENTRY, 46, "1s", b"\xff"),
        "utf-8",
    ),
    "twice": (twice(), "leaf 'a'.*two members"),
    "bomb": (patched(SQUEEZED, ENTRY, 24, "<I", 0xFFFFFFF0), "leaf 'a'.*there are 4294967152"),
    "larger": (patched(SQUEEZED, ENTRY, 24, "<I", 4129), "leaf 'a'.*4000 bytes.* there are 4001"),
    "no array": (zipped({"a.npy": b"hello, this is text"}), "leaf 'a'.*magic"),
    "nothing": (zipped({"a.npy": b""}), "leaf 'a'.*magic"),
    "cut header": (zipped({"a.npy": npy(USUAL)[:40]}), "leaf 'a'.*header"),
    "long header": (header(" " * 20_000, version=2), "leaf 'a'.*large"),
    "version": (header(USUAL, bytes(8), version=4), "leaf 'a'.*version 4"),
    "too few": (header(USUAL, bytes(7)), r"leaf 'a'.*int32\[2\] has 8 bytes.* there are 7"),
    "too many": (header(USUAL, bytes(9)), "leaf 'a'.*there are 9"),
    "no dict": (header("[1, 2]"), "leaf 'a'.*[Hh]eader"),
    "no text at all": (header("\0\0((("), "leaf 'a'.*damaged"),
    "deep": (header("(" * 9000), "leaf 'a'.*damaged"),
    "more": (header(USUAL[:-1] + "'more': 1}", bytes(8)), "leaf 'a'.*[Hh]eader"),
    "negative": (header(USUAL.replace("2", "-2"), bytes(8)), "leaf 'a'.*the shape is"),
    "huge": (header(USUAL.replace("2", f"{1 << 61}, {1 << 61}")), "leaf 'a'.*has \\d+ bytes"),
    "axes": (header(USUAL.replace("2,", "1," * 65), bytes(4)), "leaf 'a'.*the shape is"),
    "levels": (zipped({"a/" * 300 + "b.npy": npy(USUAL) + bytes(8)}), "deeper than 200"),
}
# What `zipfile` passes over, as the arrays are what they were.
HARMLESS: dict[str, bytes] = {
    "prefix": b"#!" + TWO,
    "suffix": TWO + b"\0",
    "comment": patched(TWO, b"PK\5\6", 20, "<H", 3),
    "count": patched(TWO, b"PK\5\6", 10, "<H", 3),
    "method before a member": patched(TWO, LOCAL, 8, "<H", 8),
}


@pytest.mark.parametrize("lie", HARMLESS)
def test_what_changes_no_array_does_no_harm(lie: str, tmp_path: Path) -> None:
    (tmp_path / "odd.npz").write_bytes(HARMLESS[lie])
    found = ckpt.sync.load(tmp_path / "odd.npz")
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [0, 1, 2, 3],
        "b": [4, 5, 6, 7],
    }


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("call", [ckpt.sync.load, ckpt.sync.metadata])
def test_an_archive_that_lies_is_refused(lie: str, call: Any, tmp_path: Path) -> None:
    data, text = LIES[lie]
    (tmp_path / "bad.npz").write_bytes(data)
    refusals = (errors.CorruptCheckpointError, errors.UnsupportedFormatError)
    with pytest.raises(refusals, match=text) as caught:
        refused(call(tmp_path / "bad.npz"))
    assert "bad.npz" in str(caught.value)


def refused(found: Any) -> None:
    """Raise for what metadata say cannot be read, as a load does."""
    for leaf, reason in found.unreadable.items():
        raise errors.CorruptCheckpointError(reason, leaf=leaf)


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_that_lies_is_refused_in_a_store(lie: str) -> None:
    with pytest.raises((errors.CorruptCheckpointError, errors.UnsupportedFormatError)):
        ckpt.sync.load(in_memory("bad.npz", LIES[lie][0]))


@pytest.mark.filterwarnings("ignore:Reading .* created on Python 2")
def test_headers_of_python_2_are_read(tmp_path: Path) -> None:
    text = "{'descr': '<i4', 'fortran_order': True, 'shape': (2L, 3L), }"
    (tmp_path / "old.npz").write_bytes(header(text, np.arange(6, dtype=np.int32).tobytes()))
    assert ckpt.sync.load(tmp_path / "old.npz")["a"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("where", ["disk", "store"])
def test_compressed_bytes_that_were_changed_are_noticed(where: str, tmp_path: Path) -> None:
    data = bytearray(archive(np.savez_compressed, x=np.arange(2000, dtype=np.int32)))
    data[data.index(b"PK\1\2") // 2] ^= 0xFF
    path: Any = tmp_path / "bad.npz"
    path.write_bytes(data)
    if where == "store":
        path = in_memory("bad.npz", bytes(data))
    with pytest.raises(errors.CorruptCheckpointError, match=r"leaf 'x': .*bad\.npz"):
        ckpt.sync.load(path)


def test_a_checksum_is_compared(tmp_path: Path) -> None:
    """Other bytes, rightly compressed."""
    zeros, other = npy(USUAL) + bytes(8), npy(USUAL) + bytes(7) + b"\1"
    data = zipped({"a.npy": other}, zipfile.ZIP_DEFLATED)
    crc = struct.pack("<I", zlib.crc32(zeros))
    (tmp_path / "bad.npz").write_bytes(data.replace(struct.pack("<I", zlib.crc32(other)), crc))
    with pytest.raises(errors.CorruptCheckpointError, match=r"leaf 'a'.*CRC"):
        ckpt.sync.load(tmp_path / "bad.npz")


def deflated(content: bytes, behind: bytes, nbytes: int) -> bytes:
    """An archive of one array that says to have so many bytes, with more behind its stream."""
    squeezed = zlib.compress(content, wbits=-15) + behind
    data = zipped({"a.npy": squeezed})
    for mark, at in ((ENTRY, 10), (LOCAL, 8)):
        data = patched(data, mark, at, "<H", zipfile.ZIP_DEFLATED)
    data = patched(data, ENTRY, 16, "<I", zlib.crc32(content))
    return patched(data, ENTRY, 24, "<I", nbytes)


@pytest.mark.parametrize(
    ("length", "behind", "text"),
    [(7, b"", "fewer than|CRC"), (9, b"", "CRC")],
)
def test_a_stream_is_as_long_as_it_is_said_to_be(
    length: int, behind: bytes, text: str, tmp_path: Path
) -> None:
    good = npy(USUAL) + bytes(8)
    (tmp_path / "good.npz").write_bytes(deflated(good, b"", len(good)))
    assert ckpt.sync.load(tmp_path / "good.npz")["a"].tolist() == [0, 0]
    data = deflated(npy(USUAL) + bytes(length), behind, len(good))
    (tmp_path / "bad.npz").write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match=rf"leaf 'a': .*bad\.npz: .*{text}"):
        ckpt.sync.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_a_file_that_was_cut_anywhere(name: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(4))
    data = SQUEEZED if name == "x.npz" else file.getvalue()
    for length in range(1, len(data)):
        (tmp_path / name).write_bytes(data[:length])
        with pytest.raises(errors.CorruptCheckpointError, match=name):
            ckpt.sync.metadata(tmp_path / name)


PLACES = [(number, bit) for number in range(len(SQUEEZED)) for bit in (0, 3, 7)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:numpy")
@pytest.mark.filterwarnings("ignore::UserWarning:numpy")
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PLACES))
def test_a_changed_bit_is_an_error_or_changes_nothing(place: tuple[int, int]) -> None:
    number, bit = place
    data = bytearray(SQUEEZED)
    data[number] ^= 1 << bit
    try:
        found = ckpt.sync.load(in_memory("x.npz", bytes(data)))
    except (errors.CorruptCheckpointError, errors.UnsupportedFormatError):
        return
    # Such as the time at which the member was written; or its name, in both places.
    [array] = jax.tree.leaves(found)
    assert np.array_equal(array, np.zeros(1000, np.int32))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("gone.npz", "gone.npy"):
        with pytest.raises(
            errors.NotACheckpointError, match=f"there is no directory or file .*{name}"
        ):
            ckpt.sync.load(tmp_path / name)
        with pytest.raises(errors.NotACheckpointError, match=name):
            ckpt.sync.load(f"memory://{uuid.uuid4().hex}/{name}")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(errors.NotACheckpointError, match=r"folder\.npz"):
        ckpt.sync.load(tmp_path / "folder.npz")


def test_there_is_nothing_to_verify(model: Path) -> None:
    with pytest.raises(errors.NotACheckpointError, match="has no digests to verify"):
        ckpt.sync.verify(model)
