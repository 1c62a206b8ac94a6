"""Manifests that lie: each is refused, with bounded memory, and nothing of it is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._format.digests import digest

STATE = {
    "a": np.ones((2, 2), np.float32),
    "b": np.ones((600, 600), np.float32),
    "j": jnp.ones((600, 600), jnp.float32),
}


def rewrite(step: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and give it the checksum of a whole one."""
    path = step / "ckpt.json"
    document = json.loads(path.read_bytes())
    del document["checksum"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + b',"checksum":"xxh3_128:' + digest(body).encode() + b'"}\n')


def leaf(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Change members of one leaf; None takes a member away."""

    def change(document: dict[str, Any]) -> None:
        entry = document["items"]["default"]["leaves"][number]
        for name, value in changes.items():
            entry.pop(name, None)
            if value is not None:
                entry[name] = value

    return change


def files(*paths: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["items"]["default"]["data_files"] = list(paths)

    return change


def item(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["items"]["default"].update(changes)


def sized(size: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for entry in document["files"].values():
            entry["size"] = size

    return change


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "chunks larger than the array": leaf(0, packed=None, chunks=[2**40, 2**40]),
    "a chunk larger than the array": leaf(0, packed=None, chunks=[2, 2**36]),
    "chunks larger than the array, not located": leaf(1, chunks=[2**47, 2**47], offsets=None),
    "no elements, and huge": leaf(
        0, packed=None, shape=[0, 2**48, 2**48], chunks=[1, 2**48, 2**48], digests=[], offsets=[]
    ),
    "a huge array": leaf(1, shape=[2**44], chunks=[2**44]),
    "a huge array on a device": leaf(2, shape=[2**44], chunks=[2**44]),
    "more bytes than a number holds": leaf(1, shape=[2**45, 2**18], chunks=[2**45, 2**18]),
    "sixty-four dimensions": leaf(0, shape=[2**48] * 64, chunks=[2**48] * 64),
    "a place beyond the file": leaf(1, offsets=[2**62]),
    "a place before the file": leaf(1, offsets=[-1]),
    "a place within the file, of other bytes": leaf(1, offsets=[64]),
    "two places for one chunk": leaf(1, offsets=[0, 0]),
    "a file that is not listed": leaf(1, files=[7]),
    "a negative file": leaf(1, files=[-1]),
    "files without places": leaf(1, offsets=None, files=[0]),
    "no places": leaf(1, offsets=None),
    "no places of a packed leaf": leaf(0, offsets=None),
    "no places, and no digests": leaf(1, offsets=None, digests=[]),
    "no files": files(),
    "a file that is not there": files("d/" + "0" * 32),
    "a file outside the step": files("../../../etc/passwd"),
    "an absolute path": files("/etc/passwd"),
    "a path with a newline": files("d/" + "0" * 32 + "\n"),
    "an unknown dtype": leaf(1, dtype="object"),
    "a key without data": leaf(0, kind="key", impl="threefry2x32", shape=[], chunks=[]),
    "a key of no implementation": leaf(0, kind="key"),
    "an array with an implementation": leaf(0, impl="threefry2x32"),
    "the same array as itself": leaf(0, same_as=0),
    "the same array as another one": leaf(1, same_as=0),
    "the same array as one before the first": leaf(1, same_as=-1),
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
        rewrite(tmp_path / "0", LIES[lie])
        with pytest.raises(errors.CheckpointError) as caught:
            mgr.restore(0)
        assert caught.value.step == 0
        arena = mgr._service._engine.arena
        assert arena.used == 0
        # The manager goes on.
        mgr.save(1, STATE).result()
        mgr.restore(1)


def test_a_manifest_without_the_places_of_chunks_is_refused_by_leaf(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", STATE)
    rewrite(tmp_path / "x", leaf(1, offsets=None))
    with pytest.raises(errors.CorruptCheckpointError, match="does not say where") as caught:
        ckpt.sync.load(tmp_path / "x")
    assert (caught.value.item, caught.value.leaf) == ("default", "b")
    [problem] = ckpt.sync.verify(tmp_path / "x").problems
    assert (problem.file, problem.item, problem.leaf) == ("ckpt.json", "default", "b")
