"""`ckpt.json`: what was written is read, and anything else is told from it, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import (
    ItemEntry,
    Manifest,
    Node,
    ShardingEntry,
    decode,
    decode_item,
    encode,
    encode_item,
)
from ckpt._format.manifest_head import FORMAT_VERSION, FileEntry, digest, is_whole, peek
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from tests.support.manifests import document, parts, sealed, sealed_body, sealed_parts

TEXT = st.text(max_size=8)
NUMBERS = st.integers(-(2**66), 2**66)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
LENGTHS = st.lists(st.integers(0, 2**48), max_size=3)
TEXTS = st.lists(TEXT, max_size=3)
MAYBE_TEXT = st.one_of(st.none(), TEXT)

# Zeros stand for a digest that is not known, which only a virtual step may have.
DIGESTS = st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex)


@st.composite
def leaves(draw: st.DrawFn) -> LeafTable:
    """Leaves with chunks, with values, and some that are the same as an earlier one."""
    found: list[LeafEntry] = []
    for _ in range(draw(st.integers(0, 3))):
        own = [leaf for leaf in found if leaf.same_as is None]
        again = draw(st.booleans())
        if own and again:
            first = draw(st.sampled_from(own))
            found.append(replace(first, name=draw(TEXT), same_as=found.index(first)))
            continue
        count = draw(st.integers(0, 3))
        codec = draw(st.one_of(st.none(), TEXT))
        places = st.lists(st.integers(0, 2**62), min_size=count, max_size=count)
        found.append(
            LeafEntry(
                name=draw(TEXT),
                kind=draw(TEXT),
                dtype=draw(MAYBE_TEXT),
                shape=tuple(draw(LENGTHS)),
                chunks=tuple(draw(LENGTHS)),
                digests=draw(st.lists(DIGESTS, min_size=count, max_size=count)),
                offsets=draw(places),
                codec=codec,
                lengths=draw(places) if codec is not None else (),
                packed=draw(st.booleans()),
                sharding=draw(st.one_of(st.none(), st.integers(0, 3))),
                committed=draw(st.booleans()),
                weak_type=draw(st.booleans()),
                impl=draw(MAYBE_TEXT),
                value=draw(st.one_of(st.none(), TEXT, st.booleans())),
            )
        )
    return LeafTable.of(found)


NODES = st.builds(
    Node,
    kind=TEXT,
    keys=st.lists(JSON, max_size=3),
    children=st.lists(st.integers(-9, 9), max_size=3),
    class_name=MAYBE_TEXT,
)
SHARDINGS = st.builds(
    ShardingEntry,
    kind=TEXT,
    platform=TEXT,
    device_ids=st.lists(st.integers(0, 99), max_size=3),
    memory_kind=MAYBE_TEXT,
    axis_names=TEXTS,
    axis_sizes=LENGTHS,
    axis_types=TEXTS,
    spec=st.lists(st.one_of(st.none(), TEXT, TEXTS), max_size=3),
    text=MAYBE_TEXT,
)
ITEMS = st.builds(
    ItemEntry,
    handler=TEXT,
    nodes=st.lists(NODES, max_size=2),
    leaves=leaves(),
    shardings=st.lists(SHARDINGS, max_size=2),
    nbytes=st.integers(0, 2**60),
    data=JSON,
)
MANIFESTS = st.builds(
    Manifest,
    format=st.just("ckpt"),
    version=st.just(FORMAT_VERSION),
    requires=st.just([]),
    step=st.one_of(st.none(), st.integers(0, 2**60)),
    attempt=TEXT,
    unnamed=st.booleans(),
    items=st.dictionaries(TEXT, ITEMS, max_size=2),
    metrics=st.one_of(
        st.none(), st.dictionaries(TEXT, st.one_of(FLOATS, st.just("nan")), max_size=2)
    ),
    metadata=JSON,
    created_ns=st.integers(0, 2**62),
    committed_ns=st.integers(0, 2**62),
    writer=st.dictionaries(TEXT, TEXT, max_size=2),
    process_count=st.integers(1, 9),
    left_behind=st.lists(st.integers(0, 1 << 62), max_size=3),
    files=st.dictionaries(
        TEXT, st.builds(FileEntry, size=st.integers(0, 1 << 62), digest=TEXT), max_size=2
    ),
)


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "format": "ckpt",
        "version": FORMAT_VERSION,
        "step": 7,
        "attempt": "ab12",
        "unnamed": True,
        "items": {
            "state": ItemEntry(
                handler="pytree",
                nodes=[Node(kind="dict", keys=["w", "é"], children=[0, 1])],
                leaves=LeafTable.of(
                    [
                        LeafEntry(
                            name="w",
                            kind="jax",
                            dtype="float32",
                            shape=(4,),
                            chunks=(2,),
                            digests=["1" * 32, "f" * 32],
                            offsets=[0, 8],
                            sharding=0,
                        ),
                        LeafEntry(name="é", kind="int", value="1"),
                        LeafEntry(name="u", kind="int", value="2"),
                    ]
                ),
                data_files=["d/" + "a" * 32],
                shardings=[ShardingEntry(kind="single", platform="cpu", device_ids=[0])],
                nbytes=16,
            )
        },
        "metrics": {"loss": 0.1, "best": "nan"},
        "metadata": {"note": ['"}\n', None]},
        "created_ns": 1_700_000_000_000_000_000,
        "committed_ns": 1_700_000_000_000_000_001,
        "writer": {"jax": "0.10.2"},
        "process_count": 1,
        "files": {"state/manifest.ocdbt": FileEntry(size=3, digest="a" * 32)},
    }
    return Manifest(**{**fields, **changes})


GOOD = encode(manifest())


def sealed_json(found: Any) -> bytes:
    """A document with fitting checksums, whatever it is."""
    if isinstance(found, dict):
        return sealed(found)
    return sealed_body(json.dumps(found, ensure_ascii=False).encode()[:-1])


def read(data: bytes) -> Manifest | None:
    """The manifest, or None where a `CheckpointError` says that there is none."""
    try:
        found = decode(data, where="runs/a/7/ckpt.json")
    except CheckpointError as error:
        message = str(error)
        assert message.startswith("runs/a/7/ckpt.json: ")
        return None
    return found


# -- what is written is read ----------------------------------------------------------------------


@given(MANIFESTS)
def test_a_manifest_comes_back_as_it_was(written: Manifest) -> None:
    data = encode(written)
    assert is_whole(data)
    found = decode(data, where="here")
    assert found == written
    summary = peek(data)
    assert summary is not None
    assert summary.step == written.step
    # 1, 1.0 and True are equal; their text is not.
    assert encode(found) == data
    for item in written.items.values():
        assert decode_item(encode_item(item)) == item


def test_a_manifest_is_a_json_document_that_ends_in_its_checksum() -> None:
    found = json.loads(GOOD)
    assert list(found)[-1] == "checksum"
    body = GOOD[: GOOD.rindex(b',"checksum"')]
    assert found["checksum"] == f"xxh3_128:{digest(body)}"
    assert GOOD.endswith(b'"}\n')
    front = GOOD[: GOOD.index(b',"head"')]
    assert found["head"] == f"xxh3_128:{digest(front)}"
    end = len(front) + len(f',"head":"{found["head"]}"')
    assert found["rest"] == len(GOOD) - end
    assert decode(sealed(document(GOOD)), where="here") == manifest()


def test_the_head_is_read_alone() -> None:
    whole = peek(GOOD)
    assert whole is not None
    assert (whole.step, whole.attempt, whole.metrics) == (7, "ab12", {"loss": 0.1, "best": "nan"})
    assert whole.sizes == {"state/manifest.ocdbt": 3}
    end = GOOD.index(b'"unnamed"')
    for most in range(len(GOOD)):
        found = peek(GOOD[:most], len(GOOD))
        assert found == (whole if most >= end - 1 else None)
        # A file that is being written, or was cut, is no manifest.
        assert peek(GOOD[:most], len(GOOD) - 1) is None


def test_the_digest_is_xxh3_128() -> None:
    # From the specification of XXH3: the empty input with seed 0.
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest(memoryview(b"abc")) == digest(b"abc") != digest(b"abd")


@pytest.mark.parametrize("depth", [1, 50, 190, 196, 200, 220, 240, 254])
def test_what_can_be_written_can_be_read_however_deep(depth: int) -> None:
    metadata: Any = "deep"
    for _ in range(depth):
        metadata = [metadata]
    written = manifest(metadata=metadata)
    try:
        data = encode(written)
    except CheckpointError:
        return
    assert decode(data, where="here") == written


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\x00", "\U0010ffff", '"}\n', "\u2028"])
def test_what_cannot_be_written_is_refused_as_a_checkpoint_error(text: str) -> None:
    for written in (manifest(metadata=text), manifest(metadata={text: 1}), manifest(attempt=text)):
        try:
            data = encode(written)
        except CheckpointError:
            continue
        assert decode(data, where="here") == written


# -- damage ---------------------------------------------------------------------------------------


def test_every_changed_byte_is_found() -> None:
    data = bytearray(GOOD)
    for place, byte in enumerate(GOOD):
        for other in range(256):
            if other != byte:
                data[place] = other
                assert not is_whole(bytes(data)), f"byte {place} became {other:#x}"
        data[place] = byte
    assert is_whole(bytes(data))


def test_every_flipped_bit_is_a_checkpoint_error() -> None:
    for place in range(len(GOOD)):
        for bit in range(8):
            data = bytearray(GOOD)
            data[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match="changed after it was written"):
                decode(bytes(data), where="here")
            # Whoever reads the rest finds what was changed there.
            is_head = place < GOOD.index(b'"unnamed"') - 1
            assert (peek(bytes(data)) is None) == is_head


def test_every_cut_is_found() -> None:
    for end in range(len(GOOD)):
        data = GOOD[:end]
        assert not is_whole(data)
        assert peek(data) is None
        with pytest.raises(CorruptCheckpointError, match="cut short"):
            decode(data, where="here")


@pytest.mark.parametrize("more", [b"\n", b" ", b"\0", b"}", GOOD])
def test_bytes_too_many_are_found(more: bytes) -> None:
    for data in (GOOD + more, more + GOOD):
        assert not is_whole(data)
        assert read(data) is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_manifest(data: bytes) -> None:
    assert not is_whole(data)
    assert read(data) is None
    assert peek(data) is None


def test_swapped_and_zeroed_blocks_are_found() -> None:
    half = len(GOOD) // 2
    assert not is_whole(GOOD[half:] + GOOD[:half])
    for start in range(0, len(GOOD), 64):
        block = GOOD[start : start + 64]
        assert not is_whole(GOOD[:start] + bytes(len(block)) + GOOD[start + 64 :])
        assert not is_whole(GOOD[:start] + GOOD[start + 64 :])


# -- other versions -------------------------------------------------------------------------------


@given(JSON)
def test_unknown_fields_are_ignored_everywhere(value: Any) -> None:
    found = document(GOOD)
    item = found["items"]["state"]
    places = [
        found,
        item,
        item["nodes"][0],
        item["leaves"],
        item["leaves"]["forms"][0],
        item["shardings"][0],
        found["files"]["state/manifest.ocdbt"],
    ]
    for place in places:
        place["a_later_field"] = value
    assert decode(sealed_json(found), where="here") == manifest()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": 0},
        {"version": -1},
        {"version": 10**30},
        {"format": "other"},
        {"format": ""},
        {"requires": ["shards-in-the-sky"]},
        {"requires": ["a", "b", "a"]},
        {"version": 2, "requires": ["a"], "items": 5, "files": None},
    ],
)
def test_a_later_format_is_refused_as_such(change: dict[str, Any]) -> None:
    data = sealed_json({**document(GOOD), **change})
    with pytest.raises(UnsupportedFormatError, match="Update the library") as caught:
        decode(data, where="runs/a/7/ckpt.json")
    assert str(caught.value).startswith("runs/a/7/ckpt.json: ")
    assert all(name in str(caught.value) for name in change.get("requires", []))
    # It is there all the same: a step that this library cannot read is a step.
    assert is_whole(data)
    summary = peek(data)
    assert summary is not None
    assert summary.step == 7


# -- what a file may hold -------------------------------------------------------------------------

HOSTILE = st.one_of(
    JSON,
    st.sampled_from([-1, 2**63, 2**64, 10**400, 1e308, "", "nan", [], {}, [[]], {"": {}}, True]),
)


@given(HOSTILE)
def test_any_json_with_a_fitting_checksum_is_read_or_refused(found: Any) -> None:
    data = sealed_json(found)
    assert is_whole(data)
    assert read(data) is None
    peek(data)


@given(st.text(max_size=30))
def test_any_text_with_a_fitting_checksum_is_refused(text: str) -> None:
    assert read(sealed_body(text.encode())) is None


@given(st.binary(max_size=30))
def test_any_bytes_with_a_fitting_checksum_are_refused(body: bytes) -> None:
    assert read(sealed_body(body)) is None
    assert read(sealed_body(b'{"format":"' + body)) is None
    assert peek(sealed_body(body)) is None


@given(st.data())
def test_a_manifest_with_one_wrong_value_is_read_or_refused(data: st.DataObject) -> None:
    found = document(GOOD)
    node: Any = found
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
        elif data.draw(st.booleans()):
            node[key] = data.draw(HOSTILE)
            break
        else:
            del node[key]
            break
    read(sealed_json(found))


@pytest.mark.parametrize("value", [1.5, [[]], {"a": {"b": [None]}}])
@pytest.mark.parametrize(
    "field", sorted(set(Manifest.__struct_fields__) - {"metadata", "extensions"})
)
def test_a_field_of_another_type_is_refused(field: str, value: Any) -> None:
    assert read(sealed_json({**document(GOOD), field: value})) is None


@pytest.mark.timeout(10)
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", [b'"metadata":', b'"unknown":', b'"items":', b'"requires":', b""])
def test_deep_nesting_is_refused_quickly(opening: bytes, field: bytes) -> None:
    more = b"," + field + opening * 200_000
    assert read(sealed(document(GOOD), more)) is None
    head, rest = parts(document(GOOD))
    deep = sealed_parts(head + more, rest)
    assert read(deep) is None
    assert peek(deep) is None
    assert peek(sealed_body(head + more)) is None


NINES = [b"9" * digits for digits in (4300, 4301, 300_000)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("number", [*NINES, b"1e999999999", b"-0", b"NaN"], ids=lambda n: len(n))
@pytest.mark.parametrize("field", ["version", "step", "created_ns", "metadata"])
def test_absurd_numbers_are_read_or_refused(field: str, number: bytes) -> None:
    head, rest = parts({**document(GOOD), field: "HERE"})
    data = sealed_parts(head.replace(b'"HERE"', number), rest.replace(b'"HERE"', number))
    read(data)
    peek(data)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "x" * 10**6},
        {"version": 10**4000},
        {"requires": ["x" * 10**6]},
        {"requires": [f"feature-{n}" for n in range(10**5)]},
        {"items": {"x" * 10**6: {}}},
        {"files": {"x" * 10**6: {"size": "y" * 10**6}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_hostile_manifest_gives_no_endless_message(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        decode(sealed_json({**document(GOOD), **change}), where="here")
    assert len(str(caught.value)) < 2000


def test_a_field_given_twice_is_read_or_refused() -> None:
    found = decode(sealed(document(GOOD), b',"step":9,"files":{}'), where="here")
    # What belongs to the head is read from there alone, as lists of steps read it.
    assert found == manifest()
    assert read(sealed(document(GOOD), b',"items":{}')) in (None, manifest(items={}))


def test_models_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        manifest().step = 8  # type: ignore[misc]
