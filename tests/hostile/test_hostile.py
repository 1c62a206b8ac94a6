"""Manifests that lie: each is refused, with bounded memory, and nothing of it is believed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.testing.compare import differences
from tests.support.manifests import change_leaf, document_of, rewrite, spread

STATE = {
    "a": np.ones((2, 2), np.float32),
    "b": np.ones((600, 600), np.float32),
    "j": jnp.ones((600, 600), jnp.float32),
}


Change = Callable[[dict[str, Any]], None]


def changed(step: Path, change: Change) -> None:
    """Change a manifest and give it checksums that fit."""
    document = spread(document_of(step))
    change(document)
    rewrite(step, document)


def leaf(number: int, **changes: Any) -> Change:
    """Change what one leaf says; see `change_leaf`."""
    return lambda document: change_leaf(document["items"]["default"], number, **changes)


def columns(**changes: Any) -> Change:
    """Replace whole columns. A text is bytes in base64, as it is in the file."""
    return lambda document: document["items"]["default"]["leaves"].update(changes)


def both(*changes: Change) -> Change:
    def change(document: dict[str, Any]) -> None:
        for each in changes:
            each(document)

    return change


def files(*paths: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["items"]["default"]["data_files"] = list(paths)

    return change


def item(**changes: Any) -> Change:
    return lambda document: document["items"]["default"].update(changes)


def sized(size: int) -> Change:
    def change(document: dict[str, Any]) -> None:
        for entry in document["files"].values():
            entry["size"] = size

    return change


def one_array(*same_as: list[int]) -> Change:
    """Keep the chunk of the first leaf only, and say which leaves are which others."""

    def change(document: dict[str, Any]) -> None:
        table = document["items"]["default"]["leaves"]
        for name in ("digests", "offsets", "files"):
            del table[name][1:]
        table |= {"form": [0, 0, 0], "same_as": list(same_as)}

    return change


LIES: dict[str, Change] = {
    "chunks larger than the array": leaf(0, packed=None, chunks=[2**40, 2**40]),
    "a chunk larger than the array": leaf(0, packed=None, chunks=[2, 2**36]),
    "chunks larger than the array, not located": leaf(1, chunks=[2**47, 2**47], offsets=[-1]),
    "no elements, and huge": leaf(
        0,
        packed=None,
        shape=[0, 2**48, 2**48],
        chunks=[1, 2**48, 2**48],
        count=None,
        digests=[],
        offsets=[],
        files=[],
    ),
    "a huge array": leaf(1, shape=[2**44], chunks=[2**44]),
    "a huge array on a device": leaf(2, shape=[2**44], chunks=[2**44]),
    "more bytes than a number holds": leaf(1, shape=[2**45, 2**18], chunks=[2**45, 2**18]),
    "sixty-four dimensions": leaf(0, shape=[2**48] * 64, chunks=[2**48] * 64),
    "a thousand dimensions": leaf(1, shape=[2**62] * 1000, chunks=[2**62] * 1000, codec="zstd"),
    "a negative length": leaf(1, shape=[-600, -600], chunks=[-600, -600]),
    "a place beyond the file": leaf(1, offsets=[2**62]),
    "a place beyond all files": leaf(1, offsets=[2**63 - 1]),
    "a place before the file": leaf(1, offsets=[-2]),
    "the least of all places": leaf(1, offsets=[-(2**63)]),
    "a place within the file, of other bytes": leaf(1, offsets=[64]),
    "two places for one chunk": leaf(1, offsets=[0, 0]),
    "two digests for one chunk": leaf(1, digests=["1" * 32, "1" * 32]),
    "two chunks for one": leaf(1, count=2, digests=["1" * 32] * 2, offsets=[0, 0], files=[0, 0]),
    "no chunk": leaf(1, count=None, digests=[], offsets=[], files=[]),
    "a count of another leaf's chunks": both(leaf(0, count=2), leaf(1, count=None)),
    "a negative count": leaf(1, count=-1),
    "counts that are one too many and one too few": both(leaf(0, count=-1), leaf(1, count=3)),
    "a count beyond 32 bits": leaf(1, count=2**33),
    "a count beyond 64 bits": leaf(1, count=2**70),
    "a file that is not listed": leaf(1, files=[7]),
    "a negative file": leaf(1, files=[-1]),
    "a file of one leaf only": columns(files=[0]),
    "files without places": columns(offsets=[], files=[0, 0, 0]),
    "no places": columns(offsets=[]),
    "a chunk of no place": leaf(1, offsets=[-1]),
    "a packed leaf of no place": leaf(0, offsets=[-1]),
    "no digests": columns(digests=[]),
    "no places, and no digests": columns(offsets=[], digests=[]),
    "half a digest": columns(digests="AAAAAAAAAAA="),
    "half a place": columns(offsets="AAAA"),
    "digests that are no base64": columns(digests="!" * 64),
    "digests as text": columns(digests=["not one"] * 3),
    "places as numbers": columns(offsets={"0": 0}),
    "places of a million chunks": columns(offsets=[0] * 10**6),
    "lengths of plain chunks": columns(lengths=[16, 16, 16]),
    "one length too few": columns(lengths=[0, 0]),
    "a form that does not exist": columns(form=[0, 1, 1000]),
    "a negative form": columns(form=[0, 1, -1]),
    "a form too few": columns(form=[0, 0]),
    "half a form": columns(form="AAA="),
    "no forms": columns(forms=[]),
    "a form too many of the same name": columns(names=["a", "a", "j"]),
    "a name too few": columns(names=["a", "b"]),
    "a name too many": columns(names=["a", "b", "j", "k"]),
    "no names": columns(names=[]),
    "an unknown kind": leaf(1, kind="tensor"),
    "a scalar with chunks": leaf(1, kind="int"),
    "a scalar without a value": leaf(1, kind="int", count=None, digests=[], offsets=[], files=[]),
    "a function with chunks": leaf(1, kind="callable"),
    "a packed leaf of many chunks": leaf(
        1,
        packed=True,
        chunks=[300, 600],
        count=2,
        digests=["1" * 32] * 2,
        offsets=[0, 720_000],
        files=[0, 0],
    ),
    "a sharding that does not exist": leaf(2, sharding=5),
    "a negative sharding": leaf(2, sharding=-1),
    "a value of a leaf that does not exist": columns(values=[[3, "1"]]),
    "two values of one leaf": columns(values=[[0, "1"], [0, "2"]]),
    "a value of a negative leaf": columns(values=[[-1, "1"]]),
    "a value that is a list": columns(values=[[0, ["1"]]]),
    "no files": files(),
    "a file that is not there": files("d/" + "1" * 32),
    "a file outside the step": files("../../../etc/passwd"),
    "an absolute path": files("/etc/passwd"),
    "a path with a newline": files("d/" + "1" * 32 + "\n"),
    "an unknown dtype": leaf(1, dtype="object"),
    "a key without data": leaf(0, kind="key", impl="threefry2x32", shape=[], chunks=[]),
    "a key of no implementation": leaf(0, kind="key"),
    "an array with an implementation": leaf(0, impl="threefry2x32"),
    "the same array as itself": columns(same_as=[[0, 0]]),
    "the same array as another one": columns(same_as=[[1, 0]]),
    "the same array as a later one": columns(same_as=[[0, 1]]),
    "the same array as one before the first": columns(same_as=[[1, -1]]),
    "the same array as one after the last": columns(same_as=[[1, 3]]),
    "a leaf after the last is the same array": columns(same_as=[[3, 1]]),
    "the same array as two": columns(same_as=[[2, 0], [2, 1]]),
    "the same array, and chunks of its own": columns(form=[0, 0, 0], same_as=[[1, 0], [2, 0]]),
    "the same array as one that is another": one_array([1, 0], [2, 1]),
    "the same array by another form": both(
        one_array([1, 0], [2, 0]), columns(forms=[{"kind": "numpy"}] * 2, form=[0, 0, 1])
    ),
    "an endless number of bytes": item(nbytes=10**400),
    "a negative number of bytes": item(nbytes=-1),
    "a file of endless size": sized(10**30),
    "a file of negative size": sized(-1),
    "another dtype": leaf(1, dtype="float64"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, STATE).result()
        changed(tmp_path / "0", LIES[lie])
        with pytest.raises(errors.CheckpointError) as caught:
            mgr.restore(0)
        assert caught.value.step == 0
        arena = mgr._service.engine.arena
        assert arena.used == 0
        # The manager goes on.
        mgr.save(1, STATE).result()
        mgr.restore(1)


def test_what_the_lies_are_made_of_is_believed_where_it_fits(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", STATE, extensions=[])
    for number in range(3):
        changed(tmp_path / "x", leaf(number))
        assert differences(STATE, ckpt.sync.load(tmp_path / "x")) == []
    changed(tmp_path / "x", one_array([1, 0], [2, 0]))
    found = ckpt.sync.load(tmp_path / "x")
    assert differences(dict.fromkeys(STATE, STATE["a"]), found) == []


def test_a_manifest_without_the_place_of_a_chunk_is_refused_by_leaf(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", STATE)
    changed(tmp_path / "x", leaf(1, offsets=[-1]))
    with pytest.raises(errors.CorruptCheckpointError, match="does not say where") as caught:
        ckpt.sync.load(tmp_path / "x")
    assert "'b'" in str(caught.value)
    assert "'default'" in str(caught.value)
    with pytest.raises(errors.CorruptCheckpointError, match="does not say where"):
        ckpt.sync.metadata(tmp_path / "x")
    [problem] = ckpt.sync.verify(tmp_path / "x").problems
    assert problem.file == "ckpt.json"


def test_a_thousand_leaves_of_thousands_of_chunks_take_little_memory(tmp_path: Path) -> None:
    """Leaves that are one array share what is known of its chunks."""
    count = 4_000
    ckpt.sync.save(tmp_path / "x", {"w": np.zeros(count, np.uint8)}, extensions=[])

    def many(document: dict[str, Any]) -> None:
        entry = document["items"]["default"]
        change_leaf(
            entry,
            0,
            packed=None,
            chunks=[1],
            count=count,
            digests=["1" * 32] * count,
            offsets=list(range(count)),
        )
        names = [f"w{number:05}" for number in range(count)]
        entry["nodes"] = [{"kind": "dict", "keys": names, "children": list(range(count))}]
        entry["leaves"] |= {
            "names": names,
            "form": [1] * count,
            "same_as": [[number, 0] for number in range(1, count)],
        }

    changed(tmp_path / "x", many)
    tracemalloc.start()
    try:
        found = ckpt.sync.metadata(tmp_path / "x")
        assert len(found.leaves["default"]) == count
        assert not ckpt.sync.verify(tmp_path / "x").ok
        # Two and a half bytes for each chunk of each leaf.
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
