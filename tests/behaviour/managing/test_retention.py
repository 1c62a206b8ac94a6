"""What a manager deletes, how, and what it never touches."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.step_names
import ckpt.sync
from ckpt import errors
from ckpt.storage._local import attempts, posix
from ckpt.testing.clock import set_clock
from tests.support.faults import Effect, Fail, FaultyFiles, FileOperation

Deletion = ckpt.keep.Deletion


def plain(root: Path, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **settings)


def save_all(mgr: ckpt.sync.CheckpointManager, steps: Sequence[int], **metrics: float) -> None:
    for step in steps:
        mgr.save(step, {"n": step}, metrics=metrics or None).result()
        mgr.wait_until_finished()


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) - {".ckpt-run"}


def test_the_latest_stays_whatever_the_metric_says(tmp_path: Path) -> None:
    """Orbax's `best_fn` deletes the step that one would resume from."""
    best = ckpt.keep.Best(1, metric="loss", mode="min")
    with plain(tmp_path, keep=best) as mgr:
        for step, loss in enumerate([0.1, 0.5, 0.9, 0.7]):
            mgr.save(step, {"n": step}, metrics={"loss": loss}).result()
            mgr.wait_until_finished()
            assert mgr.all_steps() == sorted({0, step})
            assert mgr.latest_step() == step
            assert mgr.best_step() == 0


def test_the_latest_stays_also_when_the_run_has_gone_back(tmp_path: Path) -> None:
    with plain(tmp_path, keep=ckpt.keep.Steps([])) as mgr:
        save_all(mgr, [30, 11, 12])
        assert mgr.all_steps() == [12, 30]


def test_the_latest_may_go_where_that_is_asked_for(tmp_path: Path) -> None:
    best = ckpt.keep.Best(1, metric="loss", mode="min")
    with plain(tmp_path, keep=best, trash=Deletion(keep_latest=False)) as mgr:
        for step, loss in enumerate([0.1, 0.5, 0.9]):
            mgr.save(step, {"n": step}, metrics={"loss": loss}).result()
            mgr.wait_until_finished()
            # What was acknowledged just now is never deleted by its own save.
            assert mgr.all_steps() == sorted({0, step})
        mgr.save(1, {"n": 1}, metrics={"loss": 0.0}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [1]


def test_a_function_says_what_is_kept(tmp_path: Path) -> None:
    with plain(tmp_path, keep=lambda step: step % 4 == 0) as mgr:
        save_all(mgr, range(10))
        assert mgr.all_steps() == [0, 4, 8, 9]


def test_a_policy_that_fails_deletes_nothing_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(step: int) -> bool:
        raise RuntimeError("no idea")

    with plain(tmp_path, keep=broken) as mgr, caplog.at_level(logging.WARNING, "ckpt"):
        save_all(mgr, range(3))
        assert mgr.all_steps() == [0, 1, 2]
    assert "no idea" in caplog.text


@pytest.mark.parametrize("absolute", [False, True])
def test_steps_are_moved_to_a_trash_folder_whole(tmp_path: Path, absolute: bool) -> None:
    root = tmp_path / "root"
    folder = tmp_path / "bin" / "of mine" if absolute else root / "trash"
    trash = folder if absolute else "trash"
    with plain(root, keep=ckpt.keep.Latest(1), trash=trash) as mgr:
        save_all(mgr, [1, 2, 3])
        assert mgr.all_steps() == [3]
        assert sorted(os.listdir(folder)) == ["1", "2"]
        # The same step again gets a name of its own.
        mgr.save(2, {"n": -2}).result()
        mgr.delete(2)
        assert sorted(os.listdir(folder)) == ["1", "2", "2-1"]
        (folder / "1").rename(root / "1")
        assert mgr.restore(1) == {"n": 1}
    assert ckpt.sync.load(folder / "2-1") == {"n": -2}
    assert ckpt.sync.verify(folder / "2")


@pytest.mark.disk
def test_a_trash_that_cannot_be_renamed_into_is_refused_by_the_first_save(tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    trash = Path("/dev/shm") / f"ckpt-trash-{os.getpid()}"
    try:
        with (
            plain(tmp_path, trash=trash) as mgr,
            pytest.raises(errors.StorageError, match="another file system") as caught,
        ):
            mgr.save(1, {"n": 1}).result()
        assert caught.value.errno == errno.EXDEV
        assert not (tmp_path / "1").exists()
    finally:
        trash.rmdir()


def test_nothing_that_others_wrote_is_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "weights.bin").write_text("of another library")
    (tmp_path / "backup").mkdir()
    (tmp_path / "5").write_text("a file that looks like a step")
    with plain(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        save_all(mgr, [8])
        plots = tmp_path / "8" / "plots"
        plots.mkdir()
        (plots / "loss.png").write_bytes(b"picture")
        (tmp_path / "8" / "eval.json").write_text("{}")
        with caplog.at_level(logging.WARNING, "ckpt"):
            save_all(mgr, [9])
        assert mgr.all_steps() == [9]
        for step in (7, 5):
            with pytest.raises(errors.StepNotFoundError):
                mgr.delete(step)
    assert "eval.json" in caplog.text
    assert names(tmp_path) == {"notes.txt", "7", "backup", "5", "8.others", "9"}
    assert (tmp_path / "7" / "weights.bin").read_text() == "of another library"
    assert (tmp_path / "8.others" / "plots" / "loss.png").read_bytes() == b"picture"
    assert (tmp_path / "8.others" / "eval.json").read_text() == "{}"


def test_files_of_others_never_replace_each_other(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for text in ("first", "second"):
            save_all(mgr, [3])
            (tmp_path / "3" / "eval.json").write_text(text)
            mgr.delete(3)
    kept = [tmp_path / name / "eval.json" for name in ("3.others", "3.others-1")]
    assert [path.read_text() for path in kept] == ["first", "second"]


def test_pinned_steps_stay_until_they_are_unpinned(tmp_path: Path) -> None:
    with plain(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        save_all(mgr, [1, 2])
        mgr.pin(2, "release")
        save_all(mgr, [3, 4])
        assert mgr.all_steps() == [2, 4]
        assert [each.name for each in mgr.pins()[2]] == ["release"]
        with pytest.raises(errors.StepPinnedError, match="release") as caught:
            mgr.delete(2)
        assert caught.value.step == 2
        with pytest.raises(errors.StepPinnedError, match="release"):
            mgr.delete(2, item="state")
        with pytest.raises(errors.StepNotFoundError):
            mgr.pin(3, "late")
    # It is known to everybody, also later.
    with plain(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        save_all(mgr, [5])
        assert mgr.all_steps() == [2, 5]
        assert mgr.unpin(2, "release")
        assert not mgr.unpin(2, "release")
        save_all(mgr, [6])
        assert mgr.all_steps() == [6]


def test_deletions_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, range(9))
    guard = threading.Lock()
    running, most = 0, 0
    whole: Callable[..., Any] = attempts.hide

    together = threading.Barrier(3)

    def hide(*args: Any) -> Any:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        try:
            together.wait(30)
            return whole(*args)
        finally:
            with guard:
                running -= 1

    monkeypatch.setattr(attempts, "hide", hide)
    one = ckpt.keep.Latest(1)
    with plain(tmp_path, keep=one, trash=Deletion(concurrency=3)) as mgr:
        # Nine go, three at a time: any other number would wait at the barrier for ever.
        save_all(mgr, [9])
        assert mgr.all_steps() == [9]
    assert most == 3


def test_one_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, range(5))
    whole: Callable[..., Any] = attempts.hide

    def hide(root: Path, step_dir: str, *args: Any) -> Any:
        if step_dir == "1":
            raise OSError(errno.EIO, "no luck", step_dir)
        return whole(root, step_dir, *args)

    with plain(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "ckpt"):
            patch.setattr(attempts, "hide", hide)
            assert mgr.save(5, {"n": 5}).result()
            mgr.wait_until_finished()
            assert mgr.all_steps() == [1, 5]
        assert "no luck" in caplog.text
        # The next save tries again.
        save_all(mgr, [6])
        assert mgr.all_steps() == [6]


def test_a_deletion_that_is_cut_off_is_finished_by_the_next_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_nothing(path: Path) -> None:
        raise OSError(errno.EIO, "cut off", str(path))

    one = ckpt.keep.Latest(1)
    with plain(tmp_path, keep=one) as mgr, monkeypatch.context() as patch:
        patch.setattr(posix, "remove_tree", remove_nothing)
        save_all(mgr, [1, 2])
        assert mgr.all_steps() == [2]
        assert len(names(tmp_path)) > 1
    with plain(tmp_path) as mgr:
        assert mgr.all_steps() == [2]
    assert names(tmp_path) == {"2"}


def test_one_line_and_one_event_for_every_deletion(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[ckpt.types.Event] = []
    with (
        plain(tmp_path, keep=ckpt.keep.Latest(1), observers=[events.append]) as mgr,
        caplog.at_level(logging.INFO, "ckpt"),
    ):
        save_all(mgr, range(4))
        mgr.pin(3, "x")
        with pytest.raises(errors.StepPinnedError):
            mgr.delete(3)
    lines = [line for line in caplog.messages if line.startswith("deleted")]
    assert [line.split()[2] for line in lines] == ["0", "1", "2"]
    ends = [(e.step, e.outcome) for e in events if e.operation == "delete" and e.phase == "end"]
    assert ends == [(0, "ok"), (1, "ok"), (2, "ok"), (3, "skipped")]


@pytest.mark.parametrize("trash", ["", 3, ckpt.keep.Deletion, {"trash": "x"}])
def test_what_is_no_trash_is_refused(tmp_path: Path, trash: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="trash"):
        plain(tmp_path, trash=trash)


def test_two_thousand_steps_with_every_policy_on(tmp_path: Path) -> None:
    """Under a clock that tells what the test wants; what is kept is what the policies say."""
    now = 1_000_000.0
    save_policy = ckpt.save_when.Any(
        ckpt.save_when.First(),
        ckpt.save_when.EverySteps(50),
        ckpt.save_when.Steps([3, 777]),
        ckpt.save_when.EverySeconds(400),
        ckpt.save_when.Continuously(300),
        # Saving takes real time, so under this clock nearly none.
        ckpt.save_when.BoundedOverhead(1e-6),
        ckpt.save_when.Preempted(),
        lambda step, previous, context: step == 1999,
    )
    members = (
        ckpt.keep.Latest(3),
        ckpt.keep.EverySteps(500),
        ckpt.keep.ClosestToEvery(400),
        ckpt.keep.EverySeconds(3000),
        ckpt.keep.Newer(900),
        ckpt.keep.Best(2, metric="loss", mode="min"),
        ckpt.keep.Steps([777]),
        lambda step: step == 3,
    )
    preservation = ckpt.keep.Any(*members)
    model: dict[int, ckpt.keep.SavedStep] = {}
    saved = 0
    with (
        set_clock(lambda: now),
        plain(tmp_path, save_when=save_policy, keep=preservation) as mgr,
    ):
        for step in range(2000):
            now += 10.0
            loss = float((step * 7919) % 1000)
            commit = mgr.save(step, {"n": np.int64(step)}, metrics={"loss": loss})
            if step in (0, 3, 777, 1999) or step % 50 == 0:
                assert commit, commit.skipped
            if not commit:
                assert f"{step}" in str(commit.skipped)
                continue
            commit.result()
            mgr.wait_until_finished()
            saved += 1
            model[step] = ckpt.keep.SavedStep(step, now, {"loss": loss})
            every = [model[each] for each in sorted(model)]
            kept = set().union(*(ckpt.keep.steps_kept(each, every, now) for each in members))
            model = {each: model[each] for each in sorted(kept | {step, max(model)})}
            assert mgr.all_steps() == sorted(model)
        assert 60 < saved < 1000
        assert {3, 777, 1500, 1999} <= set(model)
        for each in model:
            assert mgr.restore(each) == {"n": each}
        losses = {each: model[each].metrics or {} for each in model}
        assert mgr.best_step() == min(losses, key=lambda each: (losses[each]["loss"], -each))


def test_what_is_moved_to_the_trash_is_what_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, range(3))
    whole = ckpt.keep.steps_kept
    with plain(tmp_path) as other:

        def kept(*args: Any) -> Any:
            # After the steps were listed.
            other.save(1, {"n": "new"}, if_exists="replace").result()
            return whole(*args)

        one, trash = ckpt.keep.Latest(1), Deletion(trash="trash")
        with plain(tmp_path, keep=one, trash=trash) as mgr:
            monkeypatch.setattr("ckpt._steps.removal.deletion_plan.steps_kept", kept)
            save_all(mgr, [3])
            assert mgr.all_steps() == [1, 3]
            assert mgr.restore(1) == {"n": "new"}
    assert sorted(os.listdir(tmp_path / "trash")) == ["0", "2"]


def test_a_step_that_is_saved_anew_while_others_are_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was going to be deleted, and is the newest now."""
    with plain(tmp_path) as mgr:
        save_all(mgr, range(4))
    begun, go_on = threading.Event(), threading.Event()
    whole: Callable[..., Any] = attempts.hide

    def hide(root: Path, step_dir: str, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return whole(root, step_dir, *args)

    one = ckpt.keep.Latest(1)
    with plain(tmp_path, keep=one, trash=Deletion(concurrency=1)) as mgr:
        with monkeypatch.context() as patch:
            patch.setattr(attempts, "hide", hide)
            mgr.save(100, {"n": 100}).result()
            assert begun.wait(60)
            try:
                # The deletions after the save of 100 wait with the first of them.
                assert mgr.save(3, {"n": -3}, if_exists="replace").result()
            finally:
                go_on.set()
            mgr.wait_until_finished()
        assert mgr.all_steps() == [3, 100]
        assert mgr.restore(3) == {"n": -3}


def test_another_process_that_saves_a_step_anew_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the step between the look at it and its deletion."""
    with plain(tmp_path) as mgr:
        save_all(mgr, range(2))
    whole: Callable[..., Any] = attempts.hide

    def hide(root: Path, step_dir: str, *args: Any) -> Any:
        if step_dir == "0":
            with plain(tmp_path) as other:
                other.save(0, {"n": "new"}, if_exists="replace").result()
        return whole(root, step_dir, *args)

    with plain(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        with monkeypatch.context() as patch:
            patch.setattr(attempts, "hide", hide)
            save_all(mgr, [2])
        assert mgr.all_steps() == [0, 2]
        assert mgr.restore(0) == {"n": "new"}
        assert names(tmp_path) == {"0", "2"}


def test_saves_that_follow_each_other_delete_one_after_the_other_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, range(12))
    guard = threading.Lock()
    running, most = 0, 0
    whole: Callable[..., Any] = attempts.hide

    def hide(*args: Any) -> Any:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        try:
            return whole(*args)
        finally:
            with guard:
                running -= 1

    monkeypatch.setattr(attempts, "hide", hide)
    events: list[ckpt.types.Event] = []
    with (
        caplog.at_level(logging.INFO, "ckpt"),
        plain(
            tmp_path,
            keep=ckpt.keep.Latest(1),
            trash=Deletion(concurrency=1),
            observers=[events.append],
        ) as mgr,
    ):
        for step in range(100, 106):
            mgr.save(step, {"n": step})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [105]
    assert most == 1
    gone = [*range(12), *range(100, 105)]
    ended = [e.step or 0 for e in events if e.operation == "delete" and e.phase == "end"]
    assert sorted(ended) == gone
    lines = [line for line in caplog.messages if line.startswith("deleted")]
    assert len(lines) == len(gone)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_replaced_step_leaves_the_files_of_others(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, [3])
        (tmp_path / "3" / "eval.json").write_text("mine")
        mgr.save(3, {"n": -3}, if_exists="replace").result()
        assert mgr.restore(3) == {"n": -3}
    assert (tmp_path / "3.others" / "eval.json").read_text() == "mine"
    ckpt.sync.save(tmp_path / "one", {"n": 1})
    (tmp_path / "one" / "notes.txt").write_text("mine")
    ckpt.sync.save(tmp_path / "one", {"n": 2}, if_exists="replace")
    assert (tmp_path / "one.others" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("trash", [".", "5", "metadata/x", "trash/deeper", "7/trash", ".hidden"])
def test_a_trash_among_the_steps_is_refused(tmp_path: Path, trash: str) -> None:
    for path in (tmp_path / trash, tmp_path / "link" / trash):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(errors.InvalidArgumentError, match="trash"):
            plain(tmp_path, trash=path)


def test_a_trash_that_could_be_a_step_by_the_names_in_use_is_refused(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt")
    with pytest.raises(errors.InvalidArgumentError, match="trash"):
        plain(tmp_path, step_names=names, trash="ckpt_5")
    plain(tmp_path, trash="ckpt_5").close()


@pytest.mark.parametrize("absolute", [False, True])
def test_a_trash_folder_that_is_not_there_is_made_again(tmp_path: Path, absolute: bool) -> None:
    root = tmp_path / "root"
    folder = tmp_path / "bin" / "trash" if absolute else root / "trash"
    with plain(root) as mgr:
        save_all(mgr, [1, 2])
    deletion = Deletion(trash=folder if absolute else "trash")
    # Never entered, so nobody has made the folder.
    mgr = plain(root, trash=deletion)
    mgr.delete(1)
    mgr.close()
    assert os.listdir(folder) == ["1"]
    with plain(root, keep=ckpt.keep.Latest(1), trash=deletion) as mgr:
        # That is how one empties it.
        shutil.rmtree(folder)
        save_all(mgr, [3])
        assert mgr.all_steps() == [3]
    assert os.listdir(folder) == ["2"]
    assert ckpt.sync.load(folder / "2") == {"n": 2}


def test_a_file_of_others_may_take_the_place_of_a_directory_of_others(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for path in ("a", "a/b"):
            save_all(mgr, [3])
            file = tmp_path / "3" / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(path)
            mgr.delete(3)
    assert names(tmp_path) == {"3.others", "3.others-1"}
    assert (tmp_path / "3.others" / "a").read_text() == "a"
    assert (tmp_path / "3.others-1" / "a" / "b").read_text() == "a/b"


def test_a_step_that_may_not_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(tmp_path) as mgr:
        save_all(mgr, [1, 2, 3])

    for name in ("lstat", "open"):

        def refused(operation: FileOperation, name: str = name) -> Effect | None:
            inside = operation.path == "2/ckpt.json" and operation.name == name
            return Fail(errno.EACCES) if inside else None

        with plain(tmp_path, mode="r") as mgr, FaultyFiles(tmp_path, refused, sync=False):
            caplog.clear()
            assert mgr.all_steps() == [1, 3]
            [warning] = [each.getMessage() for each in caplog.records]
            assert "step 2 cannot be read and is left out" in warning
            assert f"{tmp_path}/2/ckpt.json" in warning
            assert mgr.all_steps() == [1, 3]
            assert mgr.latest_step() == 3
            assert len(caplog.records) == 1


class Marked:
    """Keeps the steps whose metadata says so, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def keep(self, steps: Sequence[ckpt.keep.SavedStep], now: float) -> set[int]:
        self.seen.append({each.step: each.custom_metadata for each in steps})
        return {each.step for each in steps if (each.custom_metadata or {}).get("kind") == "keep"}


@pytest.mark.parametrize("form", ["alone", "among others", "of an item"])
def test_a_policy_of_ones_own_sees_the_metadata_of_steps(tmp_path: Path, form: str) -> None:
    marked = Marked()
    forms: dict[str, Any] = {
        "alone": marked,
        "among others": ckpt.keep.Any(ckpt.keep.EverySteps(100), marked),
        "of an item": {"*": marked},
    }
    with plain(tmp_path, keep=forms[form]) as mgr:
        for step in range(1, 6):
            kind = "keep" if step in (1, 3) else "replace"
            mgr.save(step, {"n": step}, custom_metadata={"kind": kind}, durable=True)
            mgr.wait_until_finished()
        assert mgr.all_steps() == [1, 3, 5]
    assert marked.seen[-1] == {
        1: {"kind": "keep"},
        3: {"kind": "keep"},
        4: {"kind": "replace"},
        5: {"kind": "replace"},
    }
