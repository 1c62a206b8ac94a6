"""Hostile names of leaves, items and steps: they come back exactly, or are refused; none gets out.

Names are the user's, or those of who made the user's data. Nothing of them may decide where a file
lies, and no two of them may become one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.testing.compare import differences
from ckpt.testing.strategies import string_keys
from tests.support.damage import files_of
from tests.support.manifests import document_of, rewrite

PARTS = ["..", ".", "", "/", "\\", "a", "%", "%2E", "%e", "%root", "%k", "%h", "\0", "\n", " ", "c"]
KEYS = [
    *PARTS,
    *(f"{first}/{second}" for first, second in itertools.product(["..", "a", "", "."], PARTS)),
    *(f"{first}.{second}" for first, second in itertools.product(["a", "%2E", ""], PARTS)),
    *("../" * n + "etc/passwd" for n in range(1, 9)),
    "/etc/passwd", "//host/share", "C:\\x", "c:/x", "\\\\host\\x", "~", "~root/x", "$HOME", "`id`",
    "file:///etc/passwd", "s3://bucket/x", "http://host/x?a=b#c", "a|b", "a||b", "x.zip|zip:",
    "zarr.json", "manifest.ocdbt", "d", "d/" + "0" * 32, "c/0/0", "c", "ckpt.json", "_METADATA",
    "_sharding", "array_metadatas", "commit_success.txt", "__lock", "x.__lock", "lost+found",
    "CON", "nul", "aux.txt", "a:b", "a*", "a?", "a<b>", 'a"b', "a'b", "trailing.", "trailing ",
    "-rf", "--help", "A", "a ", "\u202ea", "\u200b", "\ufeff", "e\u0301", "\u00e9", "\u212b",
    "\u00c5",     "\x7f", "\x80", "\u2028", "\U0001f600", "%2F", "%2f", "%252F", "%C3%A9",
    "%", "%%", "x" * 300,
    "x" * 600, "x" * 599 + "y", "x" * 65_000, "%h" + "0" * 32, "x" * 64 + "%h" + "0" * 32, "None",
    "null", "0", "00", "-1", "1e5", "nan", "True", "__proto__", "__class__", "self", "{}", "[0]",
]  # fmt: skip
KEYS = list(dict.fromkeys(KEYS))
# The same text, or what looks like it, as a key of another type.
ODD_KEYS = [0, -1, 1.5, 0.5, True, None, b"a", b"..", ("..", "/"), (0,), ((),), 2**70, np.nan]


def outside(top: Path, inside: Path) -> dict[str, bytes]:
    """Every file below `top` that is not below `inside`, and what links are there."""
    return {
        name: (top / name).read_bytes()
        for name in files_of(top)
        if not (top / name).is_relative_to(inside)
    }


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A directory some levels deep, with something to overwrite in every one above it."""
    place = tmp_path / "a" / "b" / "c" / "d"
    place.mkdir(parents=True)
    for above in (tmp_path, *(each for each in place.parents if each.is_relative_to(tmp_path))):
        (above / "x").write_text(above.name)
    return place


def test_hostile_keys_come_back_and_stay_within_the_step(sandbox: Path, tmp_path: Path) -> None:
    assert len(KEYS) > 200
    tree: dict[str, Any] = {key: np.full(3, number) for number, key in enumerate(KEYS)}
    tree["nested"] = {first: {second: first} for first, second in itertools.pairwise(KEYS)}
    tree["large"] = {key: np.full(70_000, n, np.float32) for n, key in enumerate(PARTS)}
    before = outside(tmp_path, sandbox)
    ckpt.sync.save(sandbox / "x", tree)
    assert outside(tmp_path, sandbox) == before
    assert os.listdir(sandbox) == ["x"]
    assert differences(tree, ckpt.sync.load(sandbox / "x")) == []
    # Onto a target as jax orders its keys.
    onto = ckpt.sync.load(sandbox / "x", like=tree)
    assert differences(jax.tree.map(lambda leaf: leaf, tree), onto) == []
    # No name of a file is made of them.
    allowed = {"_METADATA", "_sharding", "_strings.json", "_CHECKPOINT_METADATA", "ckpt.json"}
    allowed |= {"commit_success.txt", "orbax.checkpoint", "manifest.ocdbt", "process_0"}
    # A few words about an item that Orbax cannot see.
    allowed |= {"metadata"}
    for name in files_of(sandbox / "x"):
        last = name.rpartition("/")[2]
        assert last in allowed or (len(last) == 32 and not set(last) - set("0123456789abcdef"))


def test_every_two_keys_that_differ_are_two_leaves(sandbox: Path) -> None:
    tree = dict(enumerate(KEYS))
    # Of a dict jax wants keys that can be sorted.
    named = OrderedDict((key, np.float32(n)) for n, key in enumerate([*KEYS, *ODD_KEYS]))
    ckpt.sync.save(sandbox / "x", {"numbers": tree, "keys": named})
    names = document_of(sandbox / "x")["items"]["default"]["leaves"]["names"]
    assert len(set(names)) == len(names) == len(tree) + len(named)
    found = ckpt.sync.load(sandbox / "x")
    assert differences({"numbers": tree, "keys": named}, found) == []


@given(
    st.lists(st.one_of(string_keys(), st.sampled_from(KEYS)), min_size=2, max_size=6, unique=True)
)
@settings(suppress_health_check=list(HealthCheck), max_examples=40)
def test_any_keys_come_back_or_are_refused(tmp_path: Path, keys: list[str]) -> None:
    tree = {keys[0]: {key: np.float64(n) for n, key in enumerate(keys)}, keys[1]: keys[0]}
    root = tmp_path / "any" / "place"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    try:
        ckpt.sync.save(root / "x", tree)
    except CheckpointError:
        assert os.listdir(root) == []
    else:
        assert os.listdir(root) == ["x"]
        assert differences(tree, ckpt.sync.load(root / "x")) == []
    assert os.listdir(tmp_path) == ["any"]
    assert os.listdir(tmp_path / "any") == ["place"]


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


def saved_items(root: Path, name: Any) -> None:
    """Save an item of some name, and load it again; a refusal leaves nothing."""
    tree = {"w": np.arange(3)}
    try:
        ckpt.sync.save(root / "x", items={name: tree})
    except InvalidArgumentError:
        assert os.listdir(root) == []
        return
    assert os.listdir(root) == ["x"]
    # What was taken for a name is one directory below the step.
    assert (root / "x" / name).is_dir()
    assert os.sep not in name
    assert name not in ("..", ".")
    assert differences({name: tree}, ckpt.sync.load(root / "x", items=[name])) == []
    shutil.rmtree(root / "x")


def test_hostile_item_names_are_refused_or_directories(sandbox: Path, tmp_path: Path) -> None:
    before = outside(tmp_path, sandbox)
    taken = 0
    for name in [*KEYS, *ODD_KEYS]:
        saved_items(sandbox, name)
        assert outside(tmp_path, sandbox) == before, name
        taken += isinstance(name, str) and name.isalpha() and name.isascii() and len(name) <= 100
    assert taken


@given(TEXT)
@settings(suppress_health_check=list(HealthCheck), max_examples=40)
def test_any_text_as_an_item_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "any" / "place"
    root.mkdir(parents=True, exist_ok=True)
    saved_items(root, name)
    assert os.listdir(tmp_path) == ["any"]
    assert os.listdir(tmp_path / "any") == ["place"]


@pytest.mark.parametrize("name", ["state", "STATE", "State"])
def test_items_that_differ_in_case_are_two(tmp_path: Path, name: str) -> None:
    items = {"state": {"w": np.zeros(2)}, f"{name}-2": {"w": np.ones(2)}, name.upper(): {"w": 2}}
    ckpt.sync.save(tmp_path / "x", items=items)
    assert differences(items, ckpt.sync.load(tmp_path / "x")) == []


STEPS = [*KEYS, -1, 1.5, True, None, 10**19, float("nan"), "5", "05", "5.orbax-checkpoint-tmp-x"]


def test_hostile_steps_are_refused(sandbox: Path, tmp_path: Path) -> None:
    before = outside(tmp_path, sandbox)
    with ckpt.sync.CheckpointManager(sandbox / "run") as mgr:
        mgr.save(5, {"w": 1}).result()
        for step in STEPS:
            calls = [
                lambda step=step: mgr.save(step, {"w": 2}),
                lambda step=step: mgr.delete(step),
                *([] if step is None else [lambda step=step: mgr.restore(step)]),
                *([] if step is None else [lambda step=step: mgr.metadata(step)]),
            ]
            for call in calls:
                with pytest.raises(InvalidArgumentError):
                    call()
        assert mgr.all_steps() == [5]
    assert sorted(os.listdir(sandbox / "run")) == ["5"]
    assert outside(tmp_path, sandbox) == before


def test_directories_of_hostile_names_are_no_steps(tmp_path: Path) -> None:
    """Whole checkpoints under names that only look like numbers."""
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(5, {"w": 1}).result()
    names = ["05", " 5", "5 ", "5\n", "+5", "-5", "5.0", "0x5", "5e0", "\u0665", "\uff15", "five"]
    names += ["9" * 20, "5.orbax-checkpoint-tmp-", ".5", "5~", "1_0"]
    for name in names:
        shutil.copytree(root / "5", root / name)
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [5]
        assert mgr.latest_step() == 5
    assert set(names) <= set(os.listdir(root))


def test_hostile_names_in_a_manifest_are_refused(tmp_path: Path) -> None:
    """Where the names come from the file instead of the user."""
    path = tmp_path / "step" / "x"
    ckpt.sync.save(path, items={"state": {"w": np.arange(3)}, "notes": "text"})
    (tmp_path / "secret").mkdir()
    for file in ("text.txt", "metadata"):
        shutil.copy(path / "notes" / file, tmp_path / "secret" / file)
    whole = document_of(path)
    for name in ["../../secret", str(tmp_path / "secret"), "notes/../../../secret", "..", ".", ""]:
        document = json.loads(json.dumps(whole))
        document["items"][name] = document["items"].pop("notes")
        for file in ("text.txt", "metadata"):
            document["files"][f"{name}/{file}"] = document["files"].pop(f"notes/{file}")
        rewrite(path, document)
        for call in (ckpt.sync.load, ckpt.sync.metadata):
            with pytest.raises(CheckpointError, match="name of an item"):
                call(path)
        try:
            assert not ckpt.sync.verify(path).ok
        except CheckpointError:
            continue
