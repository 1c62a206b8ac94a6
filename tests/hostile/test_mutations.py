"""Manifests made to harm: refused by an error of the library, soon, with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt._engine.codecs import encode_chunk
from ckpt._format.array_format import Blosc, Zstd
from ckpt._format.manifest_head import digest
from ckpt.errors import CheckpointError
from tests.reliability.mutations import OTHERS, WORDS, mutations
from tests.support.manifests import change_leaf, document_of, packed, rewrite, sealed, spread
from tests.support.paths import PROGRAMS

MIB = 1 << 20


@pytest.mark.slow
def test_manifests_that_lie_are_refused_or_harmless(tmp_path: Path) -> None:
    mutations(tmp_path, 500).check(faults=450)


# -- one value, chosen by Hypothesis --------------------------------------------------------------

TEXT = st.one_of(st.text(max_size=10), st.sampled_from(WORDS))
VALUES = st.recursive(
    st.one_of(st.sampled_from(OTHERS), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A step with its manifest."""
    root = tmp_path_factory.mktemp("root")
    state = {"a": np.arange(6.0), "b": [1, "x", None], "c": np.ones((30, 40), np.float16)}
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
    return root, document_of(root / "0")


@given(st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_any_value_at_any_place_is_refused_or_harmless(
    victim: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    root, whole = victim
    # A value of a column, or all of it.
    document = data.draw(st.sampled_from([spread, packed]))(whole)
    node = document
    while True:
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        if (
            not isinstance(node[key], dict | list)
            or not node[key]
            or not data.draw(st.integers(0, 9))
        ):
            break
        node = node[key]
    node[key] = data.draw(VALUES)
    rewrite(root / "0", document)
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for call in (mgr.metadata, mgr.restore, mgr.verify):
            try:
                call(0)
            except CheckpointError:
                continue
        assert mgr.all_steps() in ([0], [])


@pytest.mark.parametrize("count", [0, 2])
def test_an_object_saved_without_a_name_is_one_item(
    victim: tuple[Path, dict[str, Any]], count: int
) -> None:
    root, whole = victim
    items = {f"item-{number}": whole["items"]["default"] for number in range(count)}
    rewrite(root / "0", {**whole, "items": items})
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for call in (mgr.restore, lambda step: mgr.metadata(step).tree):
            with pytest.raises(CheckpointError):
                call(0)
        assert not mgr.verify(0).ok


# -- bombs ----------------------------------------------------------------------------------------


def saved(path: Path) -> dict[str, Any]:
    """Save a small checkpoint of two arrays; return its manifest, spread."""
    state = {"a": np.ones((600, 600), np.float32), "b": np.ones(5, np.float32)}
    ckpt.sync.save(path, state)
    return spread(document_of(path))


def rewritten(path: Path, document: dict[str, Any], extra: bytes = b"") -> None:
    (path / "ckpt.json").write_bytes(sealed(document, extra))


def leaf(**changes: Any) -> Callable[[Path], None]:
    """A checkpoint whose first leaf says something else; None takes a member away."""

    def make(path: Path) -> None:
        document = saved(path)
        change_leaf(document["items"]["default"], 0, **changes)
        rewritten(path, document)

    return make


def data_file(path: Path, document: dict[str, Any], size: int) -> str:
    """Put a sparse data file of `size` bytes of zeros into the manifest; return its path."""
    name = "d/" + "0" * 32
    with (path / "default" / name).open("wb") as file:
        file.truncate(size)
    document["files"][f"default/{name}"] = {"size": size, "digest": "0" * 32}
    document["items"]["default"]["data_files"] = [name]
    return name


CHUNK = 256 * MIB


def many_chunks(path: Path) -> None:
    """An array of a terabyte of zeros, in a sparse file that is as large."""
    document = saved(path)
    total = 1 << 40
    data_file(path, document, total)
    zeros = digest(bytes(CHUNK))
    count = total // CHUNK
    document["items"]["default"]["nodes"] = []
    document["items"]["default"]["leaves"] = {
        "names": ["%root"],
        "forms": [array("numpy", total, count)],
        "digests": [zeros] * count,
        "offsets": list(range(0, total, CHUNK)),
    }
    rewritten(path, document)


def array(kind: str, total: int, count: int) -> dict[str, Any]:
    """The form of an array of bytes in large chunks."""
    shape = {"shape": [total], "chunks": [CHUNK]}
    return {"kind": kind, "dtype": "uint8", **shape, "count": count}


def many_leaves(kind: str) -> Callable[[Path], None]:
    """Arrays of 256 MiB each, a terabyte together, which are all said to lie at the same place."""

    def make(path: Path) -> None:
        document = saved(path)
        data_file(path, document, CHUNK)
        count = (1 << 40) // CHUNK
        zeros = digest(bytes(CHUNK))
        item = document["items"]["default"]
        item["leaves"] = {
            "names": list(map(str, range(count))),
            "forms": [array(kind, CHUNK, 1)],
            "digests": [zeros] * count,
            "offsets": [0] * count,
        }
        item["nodes"] = [{"kind": "list", "children": list(range(count))}]
        item["nbytes"] = 0
        rewritten(path, document)

    return make


def encoded(codec: Any, name: str) -> Callable[[Path], None]:
    """A chunk of 1.4 MB that decodes to 256 MiB."""

    def make(path: Path) -> None:
        document = saved(path)
        content = encode_chunk(np.zeros(256 * MIB, np.uint8), codec, 1)
        file = path / "default" / data_file(path, document, 0)
        file.write_bytes(content)
        document["files"][f"default/{file.parent.name}/{file.name}"]["size"] = len(content)
        document["requires"] = ["compression"]
        entry = document["items"]["default"]
        table = entry["leaves"]
        first = table["forms"][table.get("form", [0])[0]]
        entry["leaves"] = {
            "names": table["names"][:1],
            "forms": [{**first, "codec": name}],
            "digests": table["digests"][:1],
            "offsets": [0],
            "lengths": [len(content)],
        }
        document["items"]["default"]["nodes"] = [{"kind": "list", "children": [0]}]
        rewritten(path, document)

    return make


def text(size: int) -> Callable[[Path], None]:
    """An item of another handler, whose file is a sparse one."""

    def make(path: Path) -> None:
        ckpt.sync.save(path, items={"notes": "x"})
        document = document_of(path)
        with (path / "notes" / "text.txt").open("wb") as file:
            file.truncate(size)
        document["files"]["notes/text.txt"]["size"] = size
        rewritten(path, document)

    return make


def with_json(extra: bytes) -> Callable[[Path], None]:
    return lambda path: rewritten(path, saved(path), extra)


def sparse_manifest(size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        saved(path)
        with (path / "ckpt.json").open("wb") as file:
            file.truncate(size)

    return make


def long_chain(path: Path) -> None:
    """A tree of twenty thousand levels."""
    document = saved(path)
    nodes = [{"kind": "list", "children": [-(number + 1)]} for number in range(20_000)]
    nodes.append({"kind": "list", "children": [0, 1]})
    document["items"]["default"]["nodes"] = nodes
    rewritten(path, document)


def scalar(value: str, kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        document = saved(path)
        entry = document["items"]["default"]
        change_leaf(entry, 1, digests=[], offsets=[], files=[])
        entry["leaves"]["forms"][-1] = {"kind": kind}
        entry["leaves"]["values"] = [[1, value]]
        rewritten(path, document)

    return make


def many_counts(path: Path) -> None:
    """Leaves with more chunks together than anything can hold."""
    document = saved(path)
    document["items"]["default"]["leaves"] = {
        "names": [str(number) for number in range(10**6)],
        "forms": [{**array("numpy", 2**31, 2**31), "chunks": [1]}],
    }
    rewritten(path, document)


def one_array(path: Path) -> None:
    """Leaves that have the chunks of the first one: four hundred million, if they were copied."""
    document = saved(path)
    count = 20_000
    item = document["items"]["default"]
    item["leaves"] = {
        "names": [f"{number:05}" for number in range(count)],
        "forms": [{**array("numpy", count, count), "chunks": [1]}],
        "digests": ["0" * 32] * count,
        "offsets": list(range(count)),
        "same_as": [[number, 0] for number in range(1, count)],
    }
    item["nodes"] = [{"kind": "list", "children": list(range(count))}]
    rewritten(path, document)


def long_form(path: Path) -> None:
    """Two equal forms of a million dimensions, each compared with the other by every leaf."""
    document = saved(path)
    count = 100_000
    form = {"kind": "numpy", "dtype": "uint8", "shape": [0] * 10**6, "chunks": [1] * 10**6}
    document["items"]["default"]["leaves"] = {
        "names": [str(number) for number in range(count)],
        "forms": [form, form],
        "form": [0] + [1] * (count - 1),
        "same_as": [[number, 0] for number in range(1, count)],
    }
    rewritten(path, document)


def long_shape(path: Path) -> None:
    """A scalar with a codec and a shape whose size is a number of millions of digits."""
    document = saved(path)
    most = [2**62] * 200_000
    form = {"kind": "int", "dtype": "uint8", "shape": most, "chunks": most, "codec": "zstd"}
    document["items"]["default"]["leaves"] = {"names": ["a", "b"], "forms": [form]}
    rewritten(path, document)


BOMBS: dict[str, Callable[[Path], None]] = {
    "a product beyond 64 bits": leaf(shape=[2**32, 2**32], chunks=[2**32, 2**32]),
    "a product of a hundred digits": leaf(shape=[2**48] * 8, chunks=[2**48] * 8),
    "a negative length": leaf(shape=[-1, 600], chunks=[600, 600]),
    "2**33 chunks": leaf(shape=[2**33], chunks=[1]),
    "2**31 chunks of which nothing is said": leaf(
        shape=[2**31], chunks=[1], count=2**31, digests=[], offsets=[], files=[]
    ),
    "2**33 chunks that only the database has": leaf(
        shape=[2**33], chunks=[1], count=2**31, offsets=[], digests=[]
    ),
    "2**80 chunks": leaf(shape=[2**40, 2**40], chunks=[1, 1]),
    "an array larger than its file": leaf(shape=[2**34], chunks=[2**34]),
    "a terabyte in a sparse file": many_chunks,
    "a terabyte of numpy arrays at one place": many_leaves("numpy"),
    "a terabyte of jax arrays at one place": many_leaves("jax"),
    "a text of a terabyte": text(1 << 40),
    "zstd of 256 MiB in a small array": encoded(Zstd(), "zstd"),
    "blosc of 256 MiB in a small array": encoded(Blosc(), "blosc"),
    "a manifest of a gigabyte": sparse_manifest(1 << 30),
    "a manifest as large as may be": sparse_manifest(256 * MIB),
    "a million brackets": with_json(b',"metadata":' + b"[" * 10**6),
    "a million braces": with_json(b',"later":' + b'{"a":' * 10**6),
    "a million lists": with_json(b',"later":[' + b"[]," * 10**6 + b"0]"),
    "a long chain of nodes": long_chain,
    "a million leaves of 2**31 chunks": many_counts,
    "twenty thousand leaves that are one array of as many chunks": one_array,
    "a long form of a hundred thousand leaves": long_form,
    "lists of dimensions without end": long_shape,
    "a number of a million digits": scalar("9" * 10**6, "int"),
    "a hexadecimal number of a million digits": scalar("0x" + "9" * 10**6, "int"),
    "a fraction of a million digits": scalar("0." + "9" * 10**6, "float"),
}  # fmt: skip
MAY_BE_BELIEVED = {
    "a million lists", "a hexadecimal number of a million digits", "a fraction of a million digits",
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """What came of every bomb: by bomb and call, the outcome, the seconds, and the bytes.

    Of these, twice the manifest is left out, unless it is larger than one may be.
    """
    root = tmp_path_factory.mktemp("bombs")
    saved(root / "sound")
    for name, make in BOMBS.items():
        make(root / name.replace(" ", "_"))
    child = PROGRAMS / "open_bombs.py"
    done = subprocess.run(
        [sys.executable, child, root, str(1 << 30)],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    found: dict[str, dict[str, list[Any]]] = {}
    for line in done.stdout.splitlines():
        path, call, outcome, seconds, nbytes = json.loads(line)
        manifest = (root / path / "ckpt.json").stat().st_size
        beyond = nbytes - (2 * manifest if manifest <= 256 * MIB else 0)
        found.setdefault(path.replace("_", " "), {})[call] = [outcome, seconds, beyond]
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], list(found.items())[-1:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(
    reports: dict[str, dict[str, list[Any]]], bomb: str
) -> None:
    for call, (outcome, seconds, nbytes) in reports[bomb].items():
        assert outcome.partition(":")[0] in ("refused", "problems", "believed", "sound"), outcome
        assert seconds < 20, call
        # A million names alone are 69 MiB of Python's texts, whatever their leaves claim.
        assert nbytes < 96 * MIB, (call, outcome)
    # To metadata a terabyte is a number; whether the bytes are there, only those who read see.
    if bomb not in MAY_BE_BELIEVED:
        assert reports[bomb]["load"][0].startswith("refused: ")
    assert reports["sound"]["load"][0] == "believed"
