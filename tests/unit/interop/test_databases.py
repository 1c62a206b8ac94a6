"""OCDBT databases: every key is found, whoever wrote them; and damage is noticed."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import anyio
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt._interop.orbax import database_index
from ckpt._interop.orbax.database import ValueLocation, check_path, read_database
from ckpt._interop.orbax.database_index import DatabaseIndex, KeyValue
from ckpt.errors import CorruptCheckpointError

KEYS = st.text("ab/c.0é", min_size=1, max_size=12).map(str.encode)
SETTINGS = settings(max_examples=40, deadline=None)


def values_of(top: Path) -> dict[bytes, bytes]:
    """All keys of a database on a disk, with their values."""

    async def read(path: str, offset: int, length: int) -> bytes:
        data = (top / path).read_bytes()
        if offset + length > len(data):
            raise CorruptCheckpointError("cut")
        return data[offset : offset + length]

    async def everything() -> dict[bytes, bytes]:
        found = await read_database((top / "manifest.ocdbt").read_bytes(), read)
        values = {}
        for key, value in found.items():
            if isinstance(value, ValueLocation):
                value = await read(check_path(value.file), value.offset, value.length)
            values[key.encode(errors="surrogateescape")] = value
        return values

    return anyio.run(everything)


@SETTINGS
@given(st.dictionaries(KEYS, st.binary(max_size=40), min_size=1, max_size=60), st.randoms())
def test_a_database_that_this_library_wrote(wanted: dict[bytes, bytes], rng: random.Random) -> None:
    blob = b""
    entries = []
    for key, value in wanted.items():
        if rng.random() < 0.5:
            entries.append(KeyValue(key, inline=value))
        else:
            entries.append(KeyValue(key, file=0, offset=len(blob), length=len(value)))
            blob += value
    # Nodes so small that there are levels.
    with mock.patch.object(database_index, "_NODE_ENTRIES", 5):
        database = DatabaseIndex(entries).encode(["d/data"], "d/tree", bytes(16), 1, "state")
    with tempfile.TemporaryDirectory() as above:
        top = Path(above) / "state"
        (top / "d").mkdir(parents=True)
        (top / "d" / "data").write_bytes(blob)
        (top / "d" / "tree").write_bytes(database.tree)
        (top / "manifest.ocdbt").write_bytes(database.manifest)
        (Path(above) / "manifest.ocdbt").write_bytes(database.manifest_above)
        for place in (top, Path(above)):
            assert values_of(place) == wanted
            store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{place}/"}).result()
            assert {key: bytes(store[key]) for key in store.list().result()} == wanted


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the damage in a group of errors, which concurrent reads make."""
    try:
        yield
    except* CorruptCheckpointError as group:
        raise CorruptCheckpointError("damage") from group


def written_by_tensorstore(
    top: Path, rounds: list[dict[bytes, bytes]], compression: dict[str, object] | None
) -> dict[bytes, bytes]:
    """Write a database in several transactions, into nodes so small that there are levels."""
    config = {"max_inline_value_bytes": 8, "max_decoded_node_bytes": 256}
    spec = {
        "driver": "ocdbt",
        "base": f"file://{top}/",
        "config": {**config, "compression": compression},
    }
    store = ts.KvStore.open(spec).result()
    wanted: dict[bytes, bytes] = {}
    for number, each in enumerate(rounds):
        with ts.Transaction() as transaction:
            for key, value in each.items():
                store.with_transaction(transaction)[key] = value
            if number and wanted:
                gone = min(wanted)
                del store.with_transaction(transaction)[gone]
                each = {key: value for key, value in each.items() if key != gone}
                wanted.pop(gone)
        wanted |= each
    return wanted


@SETTINGS
@given(
    st.lists(
        st.dictionaries(KEYS, st.binary(max_size=40), min_size=1, max_size=60),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, {"id": "zstd", "level": 1}]),
)
def test_a_database_that_tensorstore_wrote(
    rounds: list[dict[bytes, bytes]], compression: dict[str, object] | None
) -> None:
    with tempfile.TemporaryDirectory() as top:
        wanted = written_by_tensorstore(Path(top), rounds, compression)
        assert values_of(Path(top)) == wanted


def test_many_keys_in_many_levels(tmp_path: Path) -> None:
    rounds = [
        {f"layer{n}/c/{m}".encode(): bytes([n % 256]) * m for n in range(200) for m in (1, 20)}
    ]
    wanted = written_by_tensorstore(tmp_path, rounds, {"id": "zstd", "level": 1})
    assert len(wanted) == 400
    assert values_of(tmp_path) == wanted


def test_a_database_that_was_merged_of_others(tmp_path: Path) -> None:
    """Nodes of the others stay where they are, and name their files relative to themselves."""
    config = {"max_inline_value_bytes": 8, "max_decoded_node_bytes": 256}
    top = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    wanted: dict[bytes, bytes] = {}
    # TensorStore copies nodes only between databases of one context.
    context = ts.Context()
    for process in range(2):
        below = tmp_path / f"ocdbt.process_{process}"
        rounds = [{f"{process}/key{n}".encode(): bytes([n]) * 30 for n in range(100)}]
        wanted |= written_by_tensorstore(below, rounds, {"id": "zstd", "level": 1})
        child = ts.KvStore.open({**top, "base": f"file://{below}/"}, context=context).result()
        parent = ts.KvStore.open(top, context=context).result()
        with ts.Transaction(atomic=True) as transaction:
            child.experimental_copy_range_to(parent.with_transaction(transaction)).result()
    assert values_of(tmp_path) == wanted


def test_a_database_without_keys(tmp_path: Path) -> None:
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    store[b"a"] = b"x"
    del store[b"a"]
    assert values_of(tmp_path) == {}


@pytest.mark.parametrize("compression", [None, {"id": "zstd", "level": 1}], ids=["plain", "zstd"])
def test_a_changed_byte_is_noticed(tmp_path: Path, compression: dict[str, object] | None) -> None:
    rounds = [{f"key{n}".encode(): b"v" * 4 for n in range(60)}]
    wanted = written_by_tensorstore(tmp_path, rounds, compression)
    rng = random.Random(0)
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    noticed = 0
    for _ in range(300):
        file = rng.choice(files)
        whole = file.read_bytes()
        at = rng.randrange(len(whole))
        file.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        )
        found = None
        with contextlib.suppress(CorruptCheckpointError), unwrapped():
            found = values_of(tmp_path)
        assert found in (None, wanted)
        noticed += found is None
        file.write_bytes(whole)
    # Some are in nodes that newer ones have replaced.
    assert noticed > 50


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a\0b"])
def test_names_of_files_that_lead_elsewhere(path: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        check_path(path)
