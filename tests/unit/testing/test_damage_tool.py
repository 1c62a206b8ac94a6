"""Damage is what it says, is undone without a trace, and is the same for the same seed."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import ckpt.sync
from tests.support.damage import (
    Append,
    Cut,
    Damage,
    Delete,
    FlipBit,
    Replace,
    Zero,
    damaged,
    damages_of,
    files_of,
    same_role,
    sampled_damages,
)

KINDS = {FlipBit, Cut, Append, Delete, Zero, Replace}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A manager's root with two steps of the same kind and other values."""
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": np.arange(1000.0) * step, "n": step}).result()
    return tmp_path / "run"


def contents(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            status = path.stat()
            name = path.relative_to(directory).as_posix()
            found[name] = path.read_bytes(), status.st_mode, status.st_mtime_ns
    return found


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (FlipBit("d/a", 9), b"a\x60cdef"),
        (FlipBit("d/a", 47), b"abcde\xe6"),
        (Cut("d/a", 0), b""),
        (Cut("d/a", 4), b"abcd"),
        (Append("d/a", b"!!"), b"abcdef!!"),
        (Delete("d/a"), None),
        (Zero("d/a"), bytes(6)),
        (Zero("d/a", 1, 2), b"a\0\0def"),
        (Zero("d/a", 5, 4096), b"abcde\0"),
    ],
    ids=repr,
)
def test_a_damage_is_what_it_says(tmp_path: Path, damage: Damage, expected: bytes | None) -> None:
    file = tmp_path / "d" / "a"
    file.parent.mkdir()
    file.write_bytes(b"abcdef")
    file.chmod(0o640)
    before = contents(tmp_path)
    with damaged(tmp_path, damage):
        assert (file.read_bytes() if file.exists() else None) == expected
        assert os.listdir(file.parent) in ([], ["a"])
    assert contents(tmp_path) == before
    damage.apply(tmp_path)
    assert (file.read_bytes() if file.exists() else None) == expected


def test_a_file_becomes_another_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"other")
    with damaged(tmp_path, Replace("a", tmp_path / "b")):
        assert (tmp_path / "a").read_bytes() == b"other"
    assert (tmp_path / "a").read_bytes() == b"one"


def test_a_damage_says_what_it_is() -> None:
    assert repr(FlipBit("state/d/0f", 12)) == "FlipBit(file='state/d/0f', bit=12)"
    assert FlipBit("a", 1) == FlipBit("a", 1) != FlipBit("a", 2)
    assert len({Delete("a"), Delete("a"), Delete("b")}) == 2


def test_it_is_undone_also_when_the_case_fails(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    with pytest.raises(ZeroDivisionError), damaged(tmp_path, Delete("a")):
        _ = 1 // 0
    assert (tmp_path / "a").read_bytes() == b"one"
    with pytest.raises(FileNotFoundError), damaged(tmp_path, Delete("b")):
        pass
    assert files_of(tmp_path) == ["a"]


def test_a_copy_of_hard_links_leaves_its_original_alone(tmp_path: Path) -> None:
    for name in ("whole", "copy"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / "a").write_bytes(b"abcdef")
    os.link(tmp_path / "whole" / "a", tmp_path / "copy" / "a")
    for damage in damages_of(tmp_path / "copy"):
        with damaged(tmp_path / "copy", damage):
            assert (tmp_path / "whole" / "a").read_bytes() == b"abcdef", damage
    assert (tmp_path / "copy" / "a").read_bytes() == b"abcdef"


def test_every_damage_of_a_checkpoint_changes_one_file_and_no_other(root: Path) -> None:
    before = contents(root / "1")
    kinds: Counter[tuple[str, type]] = Counter()
    for damage in damages_of(root / "1", other=root / "2", places=2):
        with damaged(root / "1", damage):
            after = contents(root / "1")
            changed = {
                name
                for name in before | after
                if before.get(name, b"")[:1] != after.get(name, b"")[:1]
            }
        assert changed == {damage.file}, damage
        kinds[damage.file, type(damage)] += 1
    assert contents(root / "1") == before
    for file, (data, _, _) in before.items():
        expected = KINDS if data else {Append, Delete, Replace}
        assert {kind for name, kind in kinds if name == file} == expected, file


def test_every_place_is_found_where_all_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdef")
    found = list(damages_of(tmp_path, places=None))
    assert {each.bit for each in found if isinstance(each, FlipBit)} == set(range(48))
    assert [each.size for each in found if isinstance(each, Cut)] == list(range(6))
    starts = {each.start for each in found if isinstance(each, Zero) and each.count}
    assert starts == set(range(6))
    assert len(set(found)) == len(found)


def test_the_same_seed_draws_the_same_damages(root: Path) -> None:
    for draw in (
        lambda seed: list(damages_of(root / "1", other=root / "2", places=3, seed=seed)),
        lambda seed: sampled_damages(root / "1", 60, other=root / "2", seed=seed),
    ):
        assert draw(1) == draw(1) != draw(2)


def test_samples_reach_all_files_and_kinds(root: Path) -> None:
    found = sampled_damages(root / "1", 300, other=root / "2")
    assert len(found) == 300
    files = Counter(damage.file for damage in found)
    assert set(files) == set(files_of(root / "1"))
    assert max(files.values()) - min(files.values()) <= 1
    assert {type(damage) for damage in found} == KINDS
    assert sampled_damages(root / "metadata" / "none", 5) == []


def test_samples_of_one_kind_only(root: Path) -> None:
    found = sampled_damages(root / "1", 60, kinds=(FlipBit, Delete))
    assert {type(damage) for damage in found} == {FlipBit, Delete}
    assert len(found) == 60
    # An empty file has no bit to flip; where there is nothing else, there is no end to wait for.
    flips = sampled_damages(root / "1", 60, kinds=[FlipBit])
    assert "orbax.checkpoint" not in {damage.file for damage in flips}
    assert len(flips) == 60
    assert sampled_damages(root / "1", 5, kinds=[]) == []


def test_the_file_of_the_same_role_is_found(root: Path) -> None:
    for file in files_of(root / "1"):
        found = same_role(file, root / "1", root / "2")
        assert found is not None
        assert found.parent == (root / "2" / file).parent
        assert found.is_file()
        assert found.stat().st_size == (root / "1" / file).stat().st_size or "/d/" not in file
    (root / "1" / "more").write_bytes(b"")
    assert same_role("more", root / "1", root / "2") is None
