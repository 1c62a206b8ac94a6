"""The states that a power cut may leave: each rule of the model, on records of a few operations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.storage._local import posix
from tests.support.crash_states import CrashState, crash_states, read_tree, write_tree
from tests.support.disk_model import Tree
from tests.support.faults import Fail, FaultyFiles, FileOperation, at

Act = Callable[[Path], object]


def states(
    top: Path, act: Act, before: Tree | None = None, losses: int = 2
) -> tuple[list[CrashState], int]:
    """Record what `act` does in a directory that holds `before`; return states and the end."""
    write_tree(before or {}, top)
    with FaultyFiles(top, sync=False) as files:
        act(top)
        end = files.now()
    return crash_states(before or {}, files.operations, losses=losses), end


def trees(found: tuple[list[CrashState], int]) -> list[dict[str, bytes | None]]:
    return [dict(state.tree) for state in found[0]]


def at_the_end(found: tuple[list[CrashState], int]) -> list[dict[str, bytes | None]]:
    return [dict(state.tree) for state in found[0] if state.may_follow(found[1])]


def sync(path: Path) -> None:
    posix.fsync_directory(path)


def write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwrite(fd, data, 0)
    os.close(fd)


def test_what_was_not_synced_may_be_there_in_part_or_not_at_all(tmp_path: Path) -> None:
    found = states(tmp_path / "x", lambda top: write(top / "a", b"1234"))
    wanted: list[dict[str, bytes | None]] = [
        {},
        {"a": b""},
        {"a": b"1234"},
        {"a": b"\0\0\0\0"},
        {"a": b"12"},
    ]
    assert sorted(map(str, trees(found))) == sorted(map(str, wanted))
    assert sorted(map(str, at_the_end(found))) == sorted(map(str, wanted))


def test_a_synced_file_is_there_once_its_directory_is_synced_too(tmp_path: Path) -> None:
    def file_only(top: Path) -> None:
        write(top / "a", b"1234")
        sync(top / "a")

    def both(top: Path) -> None:
        file_only(top)
        sync(top)

    def directory_only(top: Path) -> None:
        write(top / "a", b"1234")
        sync(top)

    assert {str(each) for each in at_the_end(states(tmp_path / "1", file_only))} == {
        "{}",
        "{'a': b'1234'}",
    }
    assert at_the_end(states(tmp_path / "2", both)) == [{"a": b"1234"}]
    # The name may be there without the bytes.
    assert {"a": b""} in at_the_end(states(tmp_path / "3", directory_only))


def test_a_sync_says_nothing_of_what_came_after_it_began(tmp_path: Path) -> None:
    def act(top: Path) -> None:
        fd = os.open(top / "a", os.O_WRONLY)
        os.fsync(fd)
        os.pwrite(fd, b"new", 0)
        os.close(fd)

    assert {"a": b"old"} in at_the_end(states(tmp_path / "1", act, {"a": b"old"}))
    # Also where it ends afterwards.
    operations = [
        FileOperation("fsync", "a", began=1, ended=4),
        FileOperation("pwrite", "a", offset=0, data=b"new", began=2, ended=3),
    ]
    assert {"a": b"old"} in [state.tree for state in crash_states({"a": b"old"}, operations)]
    operations.append(FileOperation("fsync", "a", began=5, ended=6))
    last = [state.tree for state in crash_states({"a": b"old"}, operations) if state.may_follow(7)]
    assert last == [{"a": b"new"}]


def test_a_rename_is_one_act_and_may_come_before_what_is_in_the_directory(tmp_path: Path) -> None:
    def act(top: Path) -> None:
        os.mkdir(top / "tmp")
        write(top / "tmp" / "a", b"12")
        sync(top / "tmp" / "a")
        os.rename(top / "tmp", top / "step")
        sync(top)

    found = trees(states(tmp_path / "x", act))
    assert {"step": None, "step/a": b"12"} in found
    assert {"step": None} in found, "published before it was durable, and nobody sees it"
    assert not any("tmp" in tree and "step" in tree for tree in found)


def test_what_is_removed_behind_a_rename_may_be_gone_before_it(tmp_path: Path) -> None:
    before: dict[str, bytes | None] = {"0": None, "0/a": b"1", "0/b": b"2"}

    def hasty(top: Path) -> None:
        os.rename(top / "0", top / "trash")
        os.unlink(top / "trash" / "a")
        os.unlink(top / "trash" / "b")
        os.rmdir(top / "trash")

    def careful(top: Path) -> None:
        os.rename(top / "0", top / "trash")
        sync(top)
        os.unlink(top / "trash" / "a")
        os.unlink(top / "trash" / "b")
        os.rmdir(top / "trash")

    halves: list[dict[str, bytes | None]] = [
        {"0": None, "0/a": b"1"},
        {"0": None, "0/b": b"2"},
        {"0": None},
    ]
    found = trees(states(tmp_path / "1", hasty, before, losses=3))
    assert all(half in found for half in halves)
    found = trees(states(tmp_path / "2", careful, before, losses=3))
    assert not any(half in found for half in halves)
    assert before in found
    assert {"trash": None, "trash/b": b"2"} in found


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="Linux")
def test_an_exchange_and_reserved_space_are_known(tmp_path: Path) -> None:
    before: dict[str, bytes | None] = {"a": None, "a/x": b"1", "b": None, "b/x": b"2"}
    swapped: dict[str, bytes | None] = {"a": None, "a/x": b"2", "b": None, "b/x": b"1"}
    found = states(tmp_path / "1", lambda top: posix.exchange(top / "a", top / "b"), before)
    assert sorted(map(sorted, trees(found))) == [sorted(before)] * 2
    assert before in trees(found)
    assert swapped in trees(found)

    def reserve(top: Path) -> None:
        fd = os.open(top / "f", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(fd, 0, 4)
        os.pwrite(fd, b"1234", 0)
        os.ftruncate(fd, 3)
        os.fsync(fd)
        os.close(fd)
        sync(top)

    found = states(tmp_path / "2", reserve)
    assert {"f": b"\0\0\0\0"} in trees(found)
    assert at_the_end(found) == [{"f": b"123"}]


def test_a_state_is_there_once_for_all_moments_at_which_it_may_be_left(tmp_path: Path) -> None:
    def act(top: Path) -> None:
        for name in "abc":
            os.mkdir(top / name)
            sync(top / name)
            sync(top)

    found, end = states(tmp_path / "x", act)
    assert sorted("".join(sorted(state.tree)) for state in found) == ["", "a", "ab", "abc"]
    in_order = sorted(found, key=lambda state: state.first)
    assert [len(state.tree) for state in in_order] == [0, 1, 2, 3]
    for earlier, later in itertools.pairwise(in_order):
        assert earlier.first < later.first <= earlier.last < later.last
    assert [state.may_follow(end) for state in in_order] == [False, False, False, True]
    assert "mkdir c" in in_order[2].missing[0] if in_order[2].missing else True


def test_more_losses_at_once_make_more_states(tmp_path: Path) -> None:
    def act(top: Path) -> None:
        for name in "abcdef":
            os.mkdir(top / name)

    counts = [len(states(tmp_path / str(n), act, losses=n)[0]) for n in range(4)]
    # All subsets of six are 64; all, and all but one, are among the states in any case.
    assert counts == sorted(counts)
    assert counts[0] < counts[3] <= 64
    assert len(states(tmp_path / "all", act, losses=6)[0]) == 64


def test_what_failed_has_done_nothing_and_what_is_nameless_is_lost(tmp_path: Path) -> None:
    top = tmp_path / "x"
    top.mkdir()
    with FaultyFiles(top, at(1, Fail(5))) as files:
        with pytest.raises(OSError, match="Input/output"):
            os.mkdir(top / "a")
        fd = os.open(top / "b", os.O_WRONLY | os.O_CREAT)
        os.unlink(top / "b")
        os.write(fd, b"1")
        os.fsync(fd)
        os.close(fd)
    found = [state.tree for state in crash_states({}, files.operations)]
    assert sorted(map(str, found)) == ["{'b': b''}", "{}"]


def test_a_second_name_of_a_file_may_be_lost_and_the_first_one_may_not(tmp_path: Path) -> None:
    def act(top: Path) -> None:
        os.link(top / "a", top / "d" / "b")
        os.unlink(top / "a")

    found = [state.tree for state in states(tmp_path / "x", act, {"a": b"1", "d": None})[0]]
    both = {"a": b"1", "d": None, "d/b": b"1"}
    assert sorted(map(str, found)) == sorted(
        map(str, [{"a": b"1", "d": None}, both, {"d": None, "d/b": b"1"}, {"d": None}])
    )


def test_what_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not know symlink"):
        states(tmp_path / "x", lambda top: os.symlink("a", top / "b"), {"a": b""})
    with pytest.raises(ValueError, match="is `before` the whole tree"):
        crash_states({}, [FileOperation("unlink", "x/a", began=1, ended=2)])


def test_a_tree_comes_back_as_it_was_written(tmp_path: Path) -> None:
    tree = {"a": None, "a/b": b"\0\1", "c": b"", "d": None, "d/e": None, "d/e/f": b"x" * 9000}
    write_tree(tree, tmp_path / "x")
    assert read_tree(tmp_path / "x") == tree
    assert read_tree(tmp_path / "missing") == {}
    state = CrashState(tree, 0, 0, ())
    state.write(tmp_path / "y")
    assert read_tree(tmp_path / "y") == tree
