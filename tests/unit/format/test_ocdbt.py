"""OCDBT databases as real TensorStore reads, extends and merges them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt._format.array_format import MAX_KEY_BYTES
from ckpt._interop.orbax import database_index as ocdbt
from ckpt._interop.orbax.database_index import Database, DatabaseIndex, KeyValue

UUID = bytes(range(16))
CREATED_NS = 1_700_000_000_123_456_789
TREE_FILE = f"d/{'f' * 32}"


@dataclass(frozen=True)
class Value:
    """A value, and where it lies: in a data file, or (None) in the tree."""

    data: bytes
    file: int | None = None


@contextmanager
def limits(entries: int, inline_bytes: int = 1 << 20) -> Iterator[None]:
    """Let a node hold so little that small trees have several levels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "_NODE_ENTRIES", entries)
        patch.setattr(ocdbt, "_NODE_INLINE_BYTES", inline_bytes)
        yield


def laid_out(values: Mapping[bytes, Value]) -> tuple[list[KeyValue], list[bytes]]:
    """Return the entries of values, and the data files they lie in, with gaps between them."""
    files = [bytearray(b"gap" * n) for n in range(3)]
    entries = []
    for key, value in values.items():
        if value.file is None:
            entries.append(KeyValue(key, value.data))
            continue
        data = files[value.file]
        entries.append(KeyValue(key, None, value.file, len(data), len(value.data)))
        data += value.data + b"gap"
    return entries, [bytes(data) for data in files]


def data_file(number: int) -> str:
    return f"d/{number:032x}"


def encoded(values: Mapping[bytes, Value]) -> tuple[Database, dict[str, bytes]]:
    """Return the database of values, and all of its files by path."""
    entries, data = laid_out(values)
    names = [data_file(number) for number in range(len(data))]
    database = DatabaseIndex(entries).encode(names, TREE_FILE, UUID, CREATED_NS)
    files = dict(zip(names, data, strict=True))
    return database, files | {TREE_FILE: database.tree, "manifest.ocdbt": database.manifest}


class Memory:
    """A store of files in memory, and the OCDBT databases in it."""

    def __init__(self) -> None:
        self.context = ts.Context()
        self.store = ts.KvStore.open("memory://", context=self.context).result()

    def put(self, files: Mapping[str, bytes], base: str = "") -> None:
        for path, data in files.items():
            self.store.write(base + path, data).result()

    def database(self, base: str = "") -> ts.KvStore:
        spec = {"driver": "ocdbt", "base": f"memory://{base}"}
        return ts.KvStore.open(spec, context=self.context).result()


def opened(files: Mapping[str, bytes]) -> ts.KvStore:
    memory = Memory()
    memory.put(files)
    return memory.database()


def content(database: ts.KvStore) -> dict[bytes, bytes]:
    """Return every key and value that TensorStore finds."""
    keys = database.list().result()
    assert len(keys) == len(set(keys))
    return {key: value_at(database, key) for key in keys}


def value_at(database: ts.KvStore, key: bytes) -> bytes:
    found = database.read(key).result()
    assert found.state == "value", key
    return bytes(found.value)


def datas(values: Mapping[bytes, Value]) -> dict[bytes, bytes]:
    return {key: value.data for key, value in values.items()}


# Bytes that are first, last, the separator and ordinary; keys of few of them share long prefixes.
BYTES = st.sampled_from([b"\x00", b"\xff", b"/", b"a", b"b", b"\x7f\x80"])
SHORT_KEYS = st.lists(BYTES, max_size=6).map(b"".join)
LONG_KEYS = st.builds(
    lambda byte, length, end: (byte * length)[: MAX_KEY_BYTES - len(end)] + end,
    st.sampled_from([b"\xff", b"k", b"\x00"]),
    st.sampled_from([126, 127, 128, 129, 300, 16_383, 16_384, MAX_KEY_BYTES]),
    SHORT_KEYS,
)
KEYS = st.one_of(SHORT_KEYS, SHORT_KEYS, SHORT_KEYS, st.binary(max_size=40), LONG_KEYS)
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 1000, 1025, 20_000]))
VALUES = st.builds(
    lambda length, fill, file: Value(bytes([fill]) * length, file),
    LENGTHS,
    st.integers(0, 255),
    st.sampled_from([None, 0, 1, 2]),
)
CONTENTS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=40)
LIMITS = st.tuples(st.integers(2, 6), st.sampled_from([0, 10, 200, 1 << 20]))

# Four levels of two, with inline and other values in turns.
DEEP = {
    f"leaf{n}/{part}".encode(): Value(f"{part} of {n}".encode() * 3, file)
    for n in range(6)
    for part, file in (("zarr.json", None), ("c/0", n % 3))
}


# -- reading --------------------------------------------------------------------------------------


@given(CONTENTS, LIMITS)
@example({b"": Value(b"")}, (2, 0))
@example({b"": Value(b"x", 0), b"\xff": Value(b"", 1), b"\xff\xff": Value(b"y")}, (2, 0))
def test_every_key_is_found_with_its_value(
    values: dict[bytes, Value], limit: tuple[int, int]
) -> None:
    with limits(*limit):
        _, files = encoded(values)
    assert content(opened(files)) == datas(values)


@given(CONTENTS, LIMITS, st.lists(KEYS, max_size=8))
def test_a_key_that_was_not_given_is_missing(
    values: dict[bytes, Value], limit: tuple[int, int], others: list[bytes]
) -> None:
    with limits(*limit):
        database = opened(encoded(values)[1])
    near = [key[:-1] for key in values] + [key + b"\x00" for key in values]
    for key in {*others, *near} - set(values):
        if len(key) <= MAX_KEY_BYTES:
            assert database.read(key).result().state == "missing"


@given(CONTENTS, LIMITS, st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=6))
def test_a_range_of_keys_is_listed_exactly(
    values: dict[bytes, Value], limit: tuple[int, int], ranges: list[tuple[bytes, bytes]]
) -> None:
    with limits(*limit):
        database = opened(encoded(values)[1])
    edges = sorted(values)
    for first, end in [*ranges, (edges[0], edges[-1]), (edges[len(edges) // 2], b"")]:
        expected = [key for key in edges if first <= key and (key < end or not end)]
        found = database.list(range=ts.KvStore.KeyRange(first, end)).result()
        assert sorted(found) == expected


def test_a_tree_has_as_many_levels_as_it_needs() -> None:
    heights = []
    for count in (1, 2, 3, 4, 5, 8, 9):
        with limits(2):
            _, files = encoded({bytes([n]): Value(b"x") for n in range(count)})
        database = opened(files)
        assert database.base is not None
        heights.append(ts.ocdbt.dump(database.base).result()["versions"][0]["root_height"])
        assert len(content(database)) == count
    assert heights == [0, 0, 1, 1, 2, 2, 3]


def test_many_keys_with_the_limits_as_they_are() -> None:
    values = {f"layer{n}/c/0".encode(): Value(str(n).encode(), n % 3) for n in range(20_000)}
    _, files = encoded(values)
    database = opened(files)
    assert sorted(database.list().result()) == sorted(values)
    for n in range(0, 20_000, 997):
        assert value_at(database, f"layer{n}/c/0".encode()) == str(n).encode()


def test_a_value_far_beyond_four_gigabytes_is_found(tmp_path: Path) -> None:
    offset = (5 << 30) + 1
    database = DatabaseIndex([KeyValue(b"far", None, 0, offset, 3)]).encode(
        [data_file(0)], TREE_FILE, UUID, CREATED_NS
    )
    (tmp_path / "d").mkdir()
    with open(tmp_path / data_file(0), "wb") as file:
        file.seek(offset)
        file.write(b"yes")
    (tmp_path / TREE_FILE).write_bytes(database.tree)
    (tmp_path / "manifest.ocdbt").write_bytes(database.manifest)
    assert content(on_disk(tmp_path)) == {b"far": b"yes"}


def test_one_index_serves_any_names_of_files() -> None:
    with limits(2):
        entries, data = laid_out(DEEP)
        index = DatabaseIndex(reversed(entries))
        for names in (["d/x", "elsewhere/in/here", "y"], ["1", "2", "3"], ["1", "2", "3"]):
            database = index.encode(names, "tree", UUID, CREATED_NS)
            files = dict(zip(names, data, strict=True))
            files |= {"tree": database.tree, "manifest.ocdbt": database.manifest}
            assert content(opened(files)) == datas(DEEP)
        # Neither earlier calls nor the order of the entries make a difference.
        assert database == DatabaseIndex(entries).encode(names, "tree", UUID, CREATED_NS)


# -- what is refused ------------------------------------------------------------------------------


def test_keys_may_be_as_long_as_tensorstore_takes_them() -> None:
    longest = bytes(MAX_KEY_BYTES)
    values = {longest: Value(b"1"), longest[:-1] + b"\x01": Value(b"2", 0)}
    assert content(opened(encoded(values)[1])) == datas(values)
    with pytest.raises(ValueError, match=f"{MAX_KEY_BYTES + 1} bytes"):
        DatabaseIndex([KeyValue(longest + b"\x00", b"1")])


def test_tensorstore_takes_no_longer_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(MAX_KEY_BYTES + 1)
    with pytest.raises(ValueError, match="exceeds"):
        opened(encoded({b"a": Value(b"1")})[1]).write(key, b"1").result()
    monkeypatch.setattr(ocdbt, "MAX_KEY_BYTES", MAX_KEY_BYTES + 1)
    with pytest.raises(ValueError, match="DATA_LOSS"):
        opened(encoded({key: Value(b"1")})[1]).list().result()


def test_an_index_needs_entries_with_different_keys() -> None:
    with pytest.raises(ValueError, match="without entries"):
        DatabaseIndex([])
    with pytest.raises(ValueError, match="one key"):
        DatabaseIndex([KeyValue(b"a", b"1"), KeyValue(b"b", b"2"), KeyValue(b"a", b"3")])


@pytest.mark.parametrize("path", [TREE_FILE, "manifest.ocdbt"])
def test_a_changed_byte_is_refused_or_changes_nothing(path: str) -> None:
    with limits(3):
        _, files = encoded(DEEP)
    whole = files[path]
    refused = 0
    for place, flip in itertools.product(range(len(whole)), (0x01, 0x80, 0xFF)):
        broken = bytearray(whole)
        broken[place] ^= flip
        try:
            found = content(opened(files | {path: bytes(broken)}))
        except ValueError:
            refused += 1
        else:
            assert found == datas(DEEP), f"byte {place} of {path}"
    # Every byte is below a checksum.
    assert refused == 3 * len(whole)


@pytest.mark.parametrize("path", [TREE_FILE, "manifest.ocdbt", data_file(1)])
def test_a_file_cut_short_is_refused(path: str) -> None:
    with limits(3):
        _, files = encoded(DEEP)
    # Behind the last value of a data file is a gap that nobody needs.
    needed = len(files[path].removesuffix(b"gap"))
    for length in range(0, needed, 7):
        with pytest.raises(ValueError, match=r"DATA_LOSS|OUT_OF_RANGE|FAILED_PRECONDITION"):
            content(opened(files | {path: files[path][:length]}))


# -- what TensorStore is told ---------------------------------------------------------------------


def check_statistics(base: ts.KvStore, reference: dict[str, Any]) -> tuple[int, int, int]:
    """Check what the tree says of a node and all below it; return that."""
    node = ts.ocdbt.dump(base, reference["location"]).result()
    keys = len(node["entries"]) if node["height"] == 0 else 0
    tree_bytes, indirect = int(reference["location"].split(":")[-1]), 0
    for entry in node["entries"]:
        if node["height"]:
            below = check_statistics(base, entry)
            keys, tree_bytes, indirect = (
                a + b for a, b in zip((keys, tree_bytes, indirect), below, strict=True)
            )
        elif "indirect_value" in entry:
            indirect += int(entry["indirect_value"].split(":")[-1])
    assert reference["statistics"] == {
        "num_keys": keys,
        "num_tree_bytes": tree_bytes,
        "num_indirect_value_bytes": indirect,
    }
    return keys, tree_bytes, indirect


@given(CONTENTS, LIMITS)
def test_the_statistics_of_every_node_are_right(
    values: dict[bytes, Value], limit: tuple[int, int]
) -> None:
    with limits(*limit):
        database, files = encoded(values)
    base = opened(files).base
    assert base is not None
    [version] = ts.ocdbt.dump(base).result()["versions"]
    keys, tree_bytes, indirect = check_statistics(base, version["root"])
    assert keys == len(values)
    assert tree_bytes == len(database.tree)
    assert indirect == sum(len(v.data) for v in values.values() if v.file is not None)


def test_the_manifest_says_what_it_was_given() -> None:
    base = opened(encoded(DEEP)[1]).base
    assert base is not None
    found = ts.ocdbt.dump(base).result()
    assert found["config"] == {
        "uuid": UUID.hex(),
        "compression": None,
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "version_tree_arity_log2": 4,
    }
    [version] = found["versions"]
    assert (version["generation_number"], version["commit_time"]) == (1, CREATED_NS)
    assert found["version_tree_nodes"] == []


def test_nodes_are_kept_small() -> None:
    """A reader of one key decodes one node of every level."""
    values = {b"%06d" % n: Value(bytes(900)) for n in range(10_000)}
    database, files = encoded(values)
    base = opened(files).base
    assert base is not None
    [version] = ts.ocdbt.dump(base).result()["versions"]
    assert version["root_height"] == 1
    root = ts.ocdbt.dump(base, version["root"]["location"]).result()
    sizes = [entry["statistics"]["num_tree_bytes"] for entry in root["entries"]]
    assert max(sizes) < 3 << 20
    assert sum(sizes) < len(database.tree)


# -- who goes on writing --------------------------------------------------------------------------


def on_disk(path: Path, context: ts.Context | None = None) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"{path.as_uri()}/"}
    return ts.KvStore.open(spec, context=context).result()


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@given(CONTENTS, st.dictionaries(KEYS, st.binary(max_size=2000), max_size=6), LIMITS, st.data())
def test_tensorstore_can_write_to_such_a_database(
    values: dict[bytes, Value],
    added: dict[bytes, bytes],
    limit: tuple[int, int],
    choice: st.DataObject,
) -> None:
    removed = choice.draw(st.lists(st.sampled_from(sorted(values)), max_size=3))
    memory = Memory()
    with limits(*limit):
        memory.put(encoded(values)[1])
    database = memory.database()
    for key, value in added.items():
        database.write(key, value).result()
    for key in removed:
        database.write(key, None).result()
    expected = datas(values) | added
    for key in removed:
        expected.pop(key, None)
    assert content(memory.database()) == expected


def test_tensorstore_writes_new_files_and_leaves_the_old(tmp_path: Path) -> None:
    with limits(3):
        _, files = encoded(DEEP)
    write_files(tmp_path, files)
    on_disk(tmp_path).write(b"leaf0/more", bytes(5000)).result()
    for name, data in files.items():
        assert name == "manifest.ocdbt" or (tmp_path / name).read_bytes() == data
    assert content(on_disk(tmp_path)) == datas(DEEP) | {b"leaf0/more": bytes(5000)}


@given(CONTENTS, CONTENTS, LIMITS)
def test_two_databases_are_merged_by_reference(
    one: dict[bytes, Value], two: dict[bytes, Value], limit: tuple[int, int]
) -> None:
    # Of keys in both only one value could stay.
    two = {key: value for key, value in two.items() if key not in one}
    memory = Memory()
    with limits(*limit):
        memory.put(encoded(one)[1], "one/")
        if two:
            memory.put(encoded(two)[1], "two/")
    transaction = ts.Transaction()
    target = memory.database().with_transaction(transaction)
    for base in ("one/", "two/") if two else ("one/",):
        memory.database(base).experimental_copy_range_to(target).result()
    transaction.commit_async().result()
    assert content(memory.database()) == datas(one) | datas(two)


def test_a_merge_copies_no_data(tmp_path: Path) -> None:
    context = ts.Context()
    size = 1 << 20
    for base in ("one", "two"):
        values = {f"{base}/{n}".encode(): Value(bytes([n]) * size, n % 3) for n in range(4)}
        write_files(tmp_path / base, encoded(values)[1])
    transaction = ts.Transaction()
    target = on_disk(tmp_path, context).with_transaction(transaction)
    for base in ("one", "two"):
        source = on_disk(tmp_path / base, context)
        source.experimental_copy_range_to(target).result()
    transaction.commit_async().result()
    own = [file for file in (tmp_path / "d").iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in own) < 4096
    found = content(on_disk(tmp_path))
    assert found == {
        f"{base}/{n}".encode(): bytes([n]) * size for base in ("one", "two") for n in range(4)
    }
