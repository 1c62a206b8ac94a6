"""What a manifest says of items that were dropped: read as written, refused if hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from ckpt import errors
from ckpt._format.manifest import ItemEntry, decode, encode
from ckpt._format.manifest_head import FILE_NAME, DroppedItem, is_same_save, peek
from ckpt.storage import open_root
from ckpt.storage._manifests import read_manifest
from tests.support.manifests import document, sealed
from tests.unit.format.test_manifest import GOOD, manifest

WHEN = 1_790_000_000_000_000_000
GONE = DroppedItem("opt_state", WHEN, "Latest(3)", 600)


def test_what_was_dropped_comes_back_and_is_in_the_head() -> None:
    written = manifest(dropped=[GONE, DroppedItem("rng", 5)])
    data = encode(written)
    assert decode(data, where="here") == written
    summary = peek(data)
    assert summary is not None
    assert summary.dropped == written.dropped
    assert str(GONE) == "dropped on 2026-09-21 14:13:20 UTC by Latest(3)"
    assert str(written.dropped[1]).startswith("deleted by hand on 1970-01-01")


def test_a_step_that_lost_nothing_has_no_word_of_it() -> None:
    assert "dropped" not in document(GOOD)
    assert "fileless" not in document(GOOD)
    assert decode(GOOD, where="here").dropped == []


def test_items_without_a_file_are_named_in_the_head() -> None:
    items = {**manifest().items, "config": ItemEntry(handler="json", data={"a": 1})}
    data = encode(manifest(items=items))
    assert document(data)["fileless"] == ["config"]
    assert decode(data, where="here").items == items
    # Earlier writers did not name them.
    without = {name: value for name, value in document(data).items() if name != "fileless"}
    assert decode(sealed(without), where="here").items == items
    for wrong in (["state"], ["other"], ["config", "config"]):
        with pytest.raises(errors.CorruptCheckpointError, match="other items without files"):
            decode(sealed({**document(data), "fileless": wrong}), where="here")


@pytest.mark.parametrize(
    "wrong",
    [
        {"item": 3},
        {"item": None},
        {"dropped_ns": -1},
        {"dropped_ns": 1 << 63},
        {"dropped_ns": 1.5},
        {"nbytes": -1},
        {"policy": ""},
        {"policy": 7},
        {"policy": "x" * 201},
        {"policy": "a\x1b[2Jb"},
        {"policy": "two\nlines"},
        # It is there, too.
        {"item": "state"},
    ],
)
def test_hostile_values_are_refused(wrong: dict[str, Any]) -> None:
    good = {"item": "opt_state", "dropped_ns": WHEN, "policy": "Latest(3)", "nbytes": 600}
    found = sealed({**document(GOOD), "dropped": [{**good, **wrong}]})
    with pytest.raises(errors.CorruptCheckpointError):
        decode(found, where="here")
    others: list[Any] = [{}, "opt_state", [[]], [good, good], [{"dropped_ns": 1}]]
    for value in others:
        with pytest.raises(errors.CorruptCheckpointError):
            decode(sealed({**document(GOOD), "dropped": value}), where="here")


@pytest.mark.parametrize("name", ["../etc", "a/b", "", ".hidden", "x" * 101, "\x1b[2J"])
def test_a_name_that_no_item_can_have_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "7").mkdir()
    data = encode(manifest(dropped=[DroppedItem(name, WHEN)]))
    (tmp_path / "7" / FILE_NAME).write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match="cannot be the name of an item"):
        anyio.run(read_manifest, open_root(tmp_path), "7")


def test_the_rest_of_a_step_is_told_from_another_save() -> None:
    known = manifest()
    rest = replace(known, attempt="cd34", dropped=[GONE])
    assert is_same_save(known, known)
    assert is_same_save(rest, known)
    assert is_same_save(replace(rest, attempt="ef56", dropped=[GONE, GONE]), rest)
    assert not is_same_save(replace(known, attempt="cd34"), known)
    assert not is_same_save(replace(rest, created_ns=known.created_ns + 1), known)
    # A step does not get an item back.
    assert not is_same_save(known, rest)
