"""How what is not kept is deleted."""

from __future__ import annotations

import math
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import ckpt
from ckpt.errors import InvalidArgumentError


def test_the_defaults_are_the_safe_ones() -> None:
    assert ckpt.keep.Deletion() == ckpt.keep.Deletion(concurrency=2, trash=None, keep_latest=True)


@pytest.mark.parametrize(
    "trash", ["trash", ".trash", "to delete", "7a", "step_7x", "1.0", "/tmp/trash", "/a/b/", "…"]
)
def test_a_trash_is_a_folder_name_or_an_absolute_path(trash: str) -> None:
    assert ckpt.keep.Deletion(trash=trash).trash == trash
    assert ckpt.keep.Deletion(trash=PurePosixPath(trash)) == ckpt.keep.Deletion(
        trash=str(PurePosixPath(trash))
    )


@pytest.mark.parametrize(
    "trash",
    [
        "",
        ".",
        "..",
        "a/b",
        "trash/",
        "./trash",
        "../trash",
        "/a/../b",
        "/",
        "//",
        "a\0b",
        "/a\0b",
        "7",
        "0",
        "007",
        "metadata",
        "7.orbax-checkpoint-tmp-1",
        ".ckpt-lease-1",
        "gs://bucket/trash",
        "x" * 256,
        b"trash",
        7,
        True,
        Path("../trash"),
        Path("a/b"),
    ],
)
def test_a_trash_that_cannot_be_meant_is_refused(trash: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Deletion") as caught:
        ckpt.keep.Deletion(trash=trash)
    assert f"trash={trash!r:.100}" in str(caught.value)


class Odd:
    def __fspath__(self) -> bytes:
        return b"trash"


def test_paths_of_bytes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="trash"):
        ckpt.keep.Deletion(trash=Odd())  # type: ignore[arg-type]


@pytest.mark.parametrize("concurrency", [0, -1, 65, 2.0, True, None, "2", math.inf])
def test_a_concurrency_that_cannot_be_meant_is_refused(concurrency: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="from 1 to 64") as caught:
        ckpt.keep.Deletion(concurrency=concurrency)
    assert repr(concurrency) in str(caught.value)
    assert [ckpt.keep.Deletion(concurrency=n).concurrency for n in (1, 64)] == [1, 64]


@pytest.mark.parametrize("keep_latest", [None, 0, 1, "no"])
def test_keep_latest_is_a_bool(keep_latest: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="keep_latest"):
        ckpt.keep.Deletion(keep_latest=keep_latest)
