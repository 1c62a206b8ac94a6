"""What a root says of itself, its permissions, and whether it is made."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._settings import Timeouts
from ckpt._steps.root import read_root_metadata, write_root_metadata
from ckpt.storage import Local
from ckpt.storage._local.storage import LocalStorage
from tests.support.faults import Effect, Fail, FaultyFiles, FileOperation


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def plain(root: Path | Local, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **settings)


def test_the_first_metadata_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain(tmp_path, custom_metadata={"run": "a", "lr": 0.1}) as mgr:
        mgr.save(1, {"n": 1})
    with caplog.at_level(logging.WARNING, "ckpt"):
        with plain(tmp_path, custom_metadata={"run": "a", "lr": 0.1}) as mgr:
            mgr.save(2, {"n": 2})
        assert not caplog.messages
        with plain(tmp_path, custom_metadata={"run": "a", "lr": 0.2, "new": 1}) as mgr:
            for step in (3, 4):
                mgr.save(step, {"n": step})
            assert mgr.root_metadata() == {"run": "a", "lr": 0.1}
    (line,) = caplog.messages
    assert "lr, new" in line
    with plain(tmp_path, mode="r") as mgr:
        assert mgr.root_metadata() == {"run": "a", "lr": 0.1}


def test_a_root_without_metadata_takes_the_first_that_come(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(1, {"n": 1})
        assert mgr.root_metadata() == {}
    assert names(tmp_path) == ["1"]
    with plain(tmp_path, custom_metadata={"run": 1}) as mgr:
        mgr.save(2, {"n": 2})
    with plain(tmp_path) as mgr:
        assert mgr.root_metadata() == {"run": 1}


def test_opening_makes_the_directory_and_the_first_save_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options: dict[str, Any] = {
        "custom_metadata": {"run": 1},
        "keep": ckpt.keep.Latest(2),
        "trash": "trash",
    }
    with plain(root, **options) as mgr:
        assert mgr.root_metadata() == {"run": 1}
        assert mgr.should_save(1)
        assert mgr.resume({"n": 0}) == (0, {"n": 0})
        assert names(root) == []
        mgr.save(1, {"n": 1}).result()
        assert names(root) == [".ckpt-run", "1", "metadata", "trash"]
    with plain(tmp_path / "other", **options) as mgr, mgr.partial(1) as part:
        part.save({"n": 1})
    assert names(tmp_path / "other") == names(root)


def test_a_run_with_tiers_says_it_of_every_place(tmp_path: Path) -> None:
    near, root = tmp_path / "near", tmp_path / "run"
    with plain(root, tiers=[ckpt.tiers.Tier(near)], custom_metadata={"run": 1}) as mgr:
        assert "metadata" not in names(root) + names(near)
        mgr.save(1, {"n": 1}).in_root.result()
    for place in (near, root):
        assert anyio.run(read_root_metadata, LocalStorage(place, Timeouts())) == {"run": 1}


@pytest.mark.parametrize("is_there", [True, False])
def test_who_only_reads_sees_what_it_was_given_where_nothing_is_stored(
    tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        ckpt.sync.save(tmp_path / "run" / "1", {"n": 1})
    with plain(tmp_path / "run", mode="r", custom_metadata={"run": 1}) as mgr:
        assert mgr.root_metadata() == {"run": 1}
    assert names(tmp_path) == (["run"] if is_there else [])


def test_metadata_that_orbax_had_in_its_old_form_stay_what_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "metadata" / "metadata"
    with ocp.CheckpointManager(tmp_path) as theirs:
        theirs.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))
    old.parent.mkdir()
    old.write_text('{"run": "old"}')
    for given in (None, {"run": "old"}, {"run": "new"}):
        with plain(tmp_path, custom_metadata=given) as mgr:
            assert mgr.root_metadata() == {"run": "old"}
            mgr.save(len(mgr.all_steps()) + 1, {"w": np.ones(3)})
        assert names(old.parent) == ["metadata"]
        assert old.read_text() == '{"run": "old"}'
    assert ["differs now" in line for line in caplog.messages] == [True]
    with ocp.CheckpointManager(tmp_path) as theirs:
        assert theirs.metadata().custom_metadata == {"run": "old"}


def test_orbax_reads_the_metadata_of_the_root_and_we_read_its(tmp_path: Path) -> None:
    with plain(tmp_path / "ours", custom_metadata={"run": "a"}) as mgr:
        mgr.save(1, {"w": np.ones(3)}).result()
    with ocp.CheckpointManager(tmp_path / "ours") as theirs:
        assert theirs.metadata().custom_metadata == {"run": "a"}
    with ocp.CheckpointManager(tmp_path / "theirs", metadata={"run": "b"}) as theirs:
        theirs.wait_until_finished()
    with plain(tmp_path / "theirs") as mgr:
        assert mgr.root_metadata() == {"run": "b"}


@pytest.mark.parametrize("metadata", [3, "run", ["a"], {"x": object()}, {"x": float("nan")}])
def test_metadata_that_are_no_json_are_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="metadata"):
        plain(tmp_path / "root", custom_metadata=metadata)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({1: 2}, "expected strings as keys, as in JSON, not 1"),
        ({"x": [{"y": ({None: 1},)}]}, "as in JSON, not None"),
        ({"x": {True: 1, "True": 2}}, "as in JSON, not True"),
        ({"x": 10**5000}, "too long to write"),
        ({10**5000: "x"}, "too long to write"),
    ],
    ids=["number", "deep", "bool", "long", "long key"],
)
def test_metadata_that_would_come_back_as_others_are_refused(
    tmp_path: Path, metadata: Any, said: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=said):
        plain(tmp_path / "root", custom_metadata=metadata)
    with plain(tmp_path / "root") as mgr:
        with pytest.raises(errors.InvalidArgumentError, match=said) as caught:
            mgr.save(1, {"w": np.ones(3)}, custom_metadata=metadata)
        assert caught.value.step == 1
        with pytest.raises(errors.InvalidArgumentError, match=said):
            ckpt.sync.save(tmp_path / "one", {"w": np.ones(3)}, custom_metadata=metadata)
        assert mgr.all_steps() == []


def test_tuples_in_metadata_come_back_as_lists(tmp_path: Path) -> None:
    given = {"t": (1, {"u": (2,)}), "": None}
    with plain(tmp_path, custom_metadata=given) as mgr:
        mgr.save(1, {"w": np.ones(3)}, custom_metadata=given).result()
        kept = mgr.metadata(1).info.custom_metadata
        assert kept == mgr.root_metadata() == {"t": [1, {"u": [2]}], "": None}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"custom_metadata": 3}'])
def test_damaged_metadata_of_the_root_stop_no_step(tmp_path: Path, content: str) -> None:
    with plain(tmp_path, custom_metadata={"run": 1}) as mgr:
        mgr.save(1, {"n": 1}).result()
    (tmp_path / "metadata" / "_ROOT_METADATA").write_text(content)
    with plain(tmp_path, custom_metadata={"run": 1}) as mgr:
        mgr.save(2, {"n": 2}).result()
        assert mgr.restore() == {"n": 2}
        with pytest.raises(errors.CorruptCheckpointError, match="_ROOT_METADATA"):
            mgr.root_metadata()


def test_what_else_orbax_says_of_a_root_stays(tmp_path: Path) -> None:
    note = tmp_path / "metadata" / "_ROOT_METADATA"
    customs: list[dict[str, Any] | None] = [{}, None]
    for custom in customs:
        said = {"internal_metadata": {"k": [1, "é"]}, "custom_metadata": custom, "new": 1.5}
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps(said))
        with plain(tmp_path) as mgr:
            assert mgr.root_metadata() == {}
            mgr.save(1, {"n": 1}, if_exists="replace")
        assert json.loads(note.read_text()) == said
        with plain(tmp_path, custom_metadata={"run": "a"}) as mgr:
            mgr.save(2, {"n": 1}, if_exists="replace")
        assert json.loads(note.read_text()) == said | {"custom_metadata": {"run": "a"}}


class Late(LocalStorage):
    """A storage whose user is overtaken between a look at a note and what follows."""

    def __init__(self, root: Path, *others: dict[str, Any] | None) -> None:
        super().__init__(root, Timeouts())
        self.others = list(others)

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        data = await super().read(step_dir, path, limit)
        if self.others:
            # Before anything is awaited: the other one looks, too.
            other = self.others.pop()
            await write_root_metadata(LocalStorage(Path(self.location), Timeouts()), other or {})
        return data


@pytest.mark.parametrize(
    ("other", "kept", "warnings"),
    [(None, {"run": 1}, 0), ({"run": 1}, {"run": 1}, 0), ({"run": 2}, {"run": 2}, 1)],
)
def test_of_two_that_open_a_root_none_loses_its_metadata_unheard(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    other: dict[str, Any] | None,
    kept: dict[str, Any],
    warnings: int,
) -> None:
    storage = Late(tmp_path, other)
    anyio.run(write_root_metadata, storage, {"run": 1})
    assert not storage.others
    assert anyio.run(read_root_metadata, storage) == kept
    assert ["run" in line for line in caplog.messages] == [True] * warnings


def test_a_note_that_comes_and_goes_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fleeting(LocalStorage):
        async def put_note(self, *_: Any, **__: Any) -> bool:
            return False

    with anyio.from_thread.start_blocking_portal() as portal, caplog.at_level(logging.WARNING):
        storage = Fleeting(tmp_path, Timeouts())
        portal.start_task_soon(write_root_metadata, storage, {"run": 1}).result(60)
    assert "_ROOT_METADATA" in caplog.text


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_metadata_of_the_root_that_may_not_be_read_stop_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    with plain(tmp_path, custom_metadata={"run": "a"}) as mgr:
        mgr.save(1, {"n": 1}).result()

    def refused(operation: FileOperation) -> Effect | None:
        return Fail(code) if operation.path == "metadata/_ROOT_METADATA" else None

    with FaultyFiles(tmp_path, refused, sync=False):
        with plain(tmp_path, custom_metadata={"run": "b"}) as mgr:
            mgr.save(2, {"n": 2}).result()
            assert mgr.all_steps() == [1, 2]
            assert mgr.restore(1) == {"n": 1}
            with pytest.raises(errors.StorageError, match="_ROOT_METADATA") as caught:
                mgr.root_metadata()
        assert caught.value.errno == code
    assert "_ROOT_METADATA" in caplog.text
    with plain(tmp_path) as mgr:
        assert mgr.root_metadata() == {"run": "a"}


def test_other_errors_are_told_by_the_first_save(tmp_path: Path) -> None:
    def failing(operation: FileOperation) -> Effect | None:
        return Fail(errno.EIO) if operation.path == "metadata/_ROOT_METADATA" else None

    with plain(tmp_path, custom_metadata={"run": "a"}) as mgr:
        mgr.save(1, {"n": 1})
    with plain(tmp_path, custom_metadata={"run": "a"}) as mgr:
        with (
            FaultyFiles(tmp_path, failing, sync=False),
            pytest.raises(errors.StorageError, match="_ROOT_METADATA"),
        ):
            mgr.save(2, {"n": 2}).result()
        # The next one tries again.
        mgr.save(2, {"n": 2}).result()


def test_a_root_that_is_not_to_be_made_has_to_be_there(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    with pytest.raises(errors.StorageError, match="may not be made here"), plain(root, mode="r+"):
        pass
    mgr = plain(root, mode="r+")
    with pytest.raises(errors.StorageError, match="may not be made here"):
        mgr.latest_step()
    with pytest.raises(errors.StorageError, match="may not be made here"):
        mgr.save(1, {"n": 1})
    mgr.close()
    assert not root.parent.exists()
    root.mkdir(parents=True)
    with plain(root, mode="r+") as mgr:
        assert mgr.save(1, {"n": 1}).result()


@pytest.mark.parametrize(("mode", "umask"), [(0o750, 0o022), (0o700, 0o000), (0o2775, 0o077)])
def test_directories_and_files_get_the_permissions_asked_for(
    tmp_path: Path, mode: int, umask: int
) -> None:
    root = tmp_path / "runs" / "a"
    before = os.umask(umask)
    try:
        with plain(Local(root, permission_mode=mode)) as mgr:
            mgr.save(1, {"w": np.ones(300_000), "n": 1}).result()
    finally:
        os.umask(before)
    made = [root.parent, root, root / "1", *(root / "1").rglob("*")]
    assert len(made) > 10
    for path in made:
        wanted = mode if path.is_dir() else mode & 0o666
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(wanted), path
    assert json.loads((root / "1" / "ckpt.json").read_bytes())["step"] == 1


@pytest.mark.parametrize(("mode", "umask"), [(0o770, 0o077), (0o2770, 0o077), (0o700, 0o022)])
def test_so_does_all_that_lies_beside_the_steps(tmp_path: Path, mode: int, umask: int) -> None:
    root = tmp_path / "root"
    foreign = root / "2.others" / "x"
    seen, wrong = set(), set()

    def look() -> None:
        for path in [root, *root.rglob("*")]:
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                wanted = mode if stat.S_ISDIR(status.st_mode) else mode & 0o666
                if stat.S_IMODE(status.st_mode) != wanted and path.name != foreign.name:
                    wrong.add((oct(status.st_mode), str(path.relative_to(root))))
                seen.add(path.name[:12] if path.name.startswith(".ckpt") else path.name)

    def look_before(operation: FileOperation) -> Effect | None:
        # By then everything has its permissions; a lease and an attempt are gone at the end.
        if operation.target is not None:
            look()
        return None

    before = os.umask(umask)
    try:
        trash = ckpt.keep.Deletion(trash="trash")
        with (
            FaultyFiles(root, look_before, sync=False),
            plain(
                Local(root, permission_mode=mode), custom_metadata={"run": "a"}, trash=trash
            ) as mgr,
            plain(Local(root, permission_mode=mode)) as second,
        ):
            for step in (1, 2, 3):
                mgr.save(step, {"w": np.ones(3)}).result()
                mgr.wait_until_finished()
            mgr.pin(3, "release")
            (root / "2" / "x").write_text("mine")
            second.delete(2)
            mgr.delete(1)
            look()
    finally:
        os.umask(before)
    assert wrong == set()
    assert foreign.read_text() == "mine"
    assert {"metadata", "_ROOT_METADATA"} <= seen
    assert {".ckpt-pins", "3.release", ".ckpt-lease-", "2.others", "trash"} <= seen


def test_no_permission_is_changed_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slow would stop all else that goes on there."""
    changed = []
    real = os.chmod

    def chmod(path: Any, *args: Any, **options: Any) -> None:
        changed.append((threading.get_ident(), Path(path).name))
        real(path, *args, **options)

    async def work() -> int:
        storage = LocalStorage(Local(tmp_path / "root", permission_mode=0o750), Timeouts())
        await storage.prepare()
        attempt = await storage.begin("1")
        await storage.write(attempt, "a/b/x", b"1")
        await storage.publish(attempt, overwrite=False)
        return threading.get_ident()

    monkeypatch.setattr(os, "chmod", chmod)
    loop = anyio.run(work)
    assert {"root", "a", "b"} <= {name for _, name in changed}
    assert [name for thread, name in changed if thread == loop] == []


@pytest.mark.parametrize("mode", [0o077, 0o600, -1, 0o10700, "0o750", 7.0, True])
def test_permissions_that_cannot_be_meant_are_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="permission_mode"):
        Local(tmp_path, permission_mode=mode)
