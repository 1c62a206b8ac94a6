"""Texts and bytes as items."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import errors
from ckpt.handlers._text import _decoded, _frozen


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(text: str) -> None:
    assert _decoded(_frozen(text)) == text


@pytest.mark.parametrize("item", ["", "ü\0\r\n", b"", b"\xff\0", bytearray(b"ab")])
def test_it_comes_back_as_what_it_was(item: Any, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", item)
    found = ckpt.sync.load(tmp_path / "x")
    assert type(found) is type(item)
    assert found == item


def test_it_is_a_file_that_any_tool_can_read(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", items={"log": "line\n", "blob": b"\0\1"})
    assert (tmp_path / "x" / "log" / "text.txt").read_text() == "line\n"
    assert (tmp_path / "x" / "blob" / "data.bin").read_bytes() == b"\0\1"


def test_bytes_of_many_megabytes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes((20 << 20) + 1)
    info = ckpt.sync.save(tmp_path / "x", data, staging=ckpt.Staging(budget_bytes=1 << 20))
    assert info.nbytes == len(data)
    assert ckpt.sync.load(tmp_path / "x") == data


def test_a_memoryview_is_its_bytes(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    ckpt.sync.save(tmp_path / "x", memoryview(array)[::2])  # type: ignore[arg-type]
    assert ckpt.sync.load(tmp_path / "x") == array[::2].tobytes()
    view = ckpt.sync.load(tmp_path / "x", memoryview)
    assert isinstance(view, memoryview)
    assert view.tobytes() == array[::2].tobytes()
    assert ckpt.sync.load(tmp_path / "x", bytearray()) == bytearray(array[::2].tobytes())


def test_a_text_does_not_come_back_as_bytes_nor_bytes_as_a_text(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", items={"text": "a", "data": b"a"})
    for items in ({"text": b""}, {"text": bytearray}, {"data": str}, {"data": ""}, {"data": 3}):
        with pytest.raises(errors.TargetMismatchError, match="like="):
            ckpt.sync.load(tmp_path / "x", items=items)


def test_a_text_with_lone_surrogates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match="surrogates") as caught:
        ckpt.sync.save(tmp_path / "x", items={"log": "a\udc80"})
    assert caught.value.item == "log"


def test_subclasses_are_not_made_plain(tmp_path: Path) -> None:
    class Mode(enum.StrEnum):
        TRAIN = "train"

    with pytest.raises(errors.UnsupportedLeafError, match="Mode"):
        ckpt.sync.save(tmp_path / "x", Mode.TRAIN)
    ckpt.sync.save(tmp_path / "y", np.str_("a"))
    assert type(ckpt.sync.load(tmp_path / "y")) is np.str_
