"""A virtual step names files of others. Whatever it says, a reader neither hangs nor guesses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt import errors
from tests.support.manifests import document_of, rewrite, spread

Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save_file({"w": np.arange(1000, dtype=np.int32)}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "x")
    ckpt.sync.verify(tmp_path / "x")
    return tmp_path / "x"


def source(**changes: Any) -> Change:
    def change(document: dict[str, Any], folder: Path) -> None:
        [found] = document["sources"].values()
        found.update(changes)

    return change


def fifo(document: dict[str, Any], folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    source(folder=str(folder), path="fifo")(document, folder)


def link(document: dict[str, Any], folder: Path) -> None:
    (folder / "link").symlink_to("m.safetensors")
    source(folder=str(folder), path="link")(document, folder)


def zeros(document: dict[str, Any], folder: Path) -> None:
    document["items"]["default"]["leaves"]["digests"] = ["0" * 32]


def no_longer_virtual(document: dict[str, Any], folder: Path) -> None:
    document["requires"] = []


def without_digests(document: dict[str, Any], folder: Path) -> None:
    """Of a step with files of its own: the checks would be off."""
    no_longer_virtual(document, folder)
    zeros(document, folder)
    del document["sources"]


def elsewhere(document: dict[str, Any], folder: Path) -> None:
    [path] = document["sources"]
    document["sources"] = {f"default/d/{'1' * 32}": document["sources"].pop(path)}


HOSTILE: dict[str, Change] = {
    "a device": source(folder="/dev", path="zero"),
    "a fifo": fifo,
    "a link": link,
    "a directory": source(path="x"),
    "a way out": source(path="../m.safetensors"),
    "an absolute path": source(path="/etc/hostname"),
    "no path": source(path=""),
    "no folder": source(folder=""),
    "an unknown store": source(folder="ftp://host/x"),
    "a NUL": source(path="m\0"),
    "a size that is none": source(size=-1),
    "a number": source(fingerprint=7),
    "nothing known": zeros,
    "not virtual": no_longer_virtual,
    "checks turned off": without_digests,
    "another data file": elsewhere,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_manifest_says_of_its_sources_is_not_trusted(
    kind: str, step: Path, tmp_path: Path
) -> None:
    document = spread(document_of(step))
    HOSTILE[kind](document, tmp_path)
    rewrite(step, document)
    if kind == "nothing known":
        # The file is still the one that was adopted.
        os.truncate(tmp_path / "m.safetensors", 100)
    for deep in (False, True):
        assert not ckpt.sync.verify(step, deep=deep).ok
    with pytest.raises(errors.CorruptCheckpointError) as told:
        ckpt.sync.load(step)
    assert len(str(told.value)) < 2000
