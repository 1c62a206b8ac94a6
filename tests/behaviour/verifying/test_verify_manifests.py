"""`verify` finds manifests that are damaged or that lie."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.behaviour.verifying.verified_step import STEP, Watched, damaged, files_of, flip, verified
from tests.hostile.test_hostile import LIES, STATE, changed
from tests.support.manifests import change_leaf


def test_no_flip_in_a_manifest_goes_unseen(step: Path) -> None:
    data = (step / "ckpt.json").read_bytes()
    for byte in [0, 1, len(data) - 1, *np.random.default_rng(0).integers(0, len(data), 20)]:
        flip(step / "ckpt.json", int(byte))
        assert damaged(ckpt.sync.verify(step, deep=False)) == {"ckpt.json"}
        (step / "ckpt.json").write_bytes(data)


def test_what_is_no_checkpoint_is_an_error(root: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", root, root / "9"):
        with pytest.raises(errors.NotACheckpointError):
            ckpt.sync.verify(path)
    (root / "9").mkdir()
    (root / str(STEP) / "ckpt.json").unlink()
    with pytest.raises(errors.NotACheckpointError):
        ckpt.sync.verify(root / str(STEP))
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for step in (STEP, 8, 9, None):
            with pytest.raises(errors.StepNotFoundError):
                mgr.verify(step)
        with pytest.raises(errors.InvalidArgumentError):
            mgr.verify(-1)


def test_a_later_format_is_an_error(root: Path) -> None:
    changed(root / str(STEP), lambda document: document.update(version=2))
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for step in (STEP, None):
            with pytest.raises(errors.UnsupportedFormatError) as caught:
                mgr.verify(step)
            assert caught.value.step == STEP
    with pytest.raises(errors.UnsupportedFormatError):
        ckpt.sync.verify(root / str(STEP))


def test_a_step_under_another_number_is_damaged(root: Path) -> None:
    (root / str(STEP)).rename(root / "8")
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert damaged(mgr.verify(8)) == {"ckpt.json"}


def listing(path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["files"][path] = {"size": 1, "digest": "0" * 32}

    return change


def unlisting(part: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for path in [path for path in document["files"] if part in path]:
            del document["files"][path]

    return change


def everywhere(**members: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        columns = document["items"]["default"]["leaves"]
        for name, value in members.items():
            columns[name] = [value] * len(columns["offsets"])

    return change


def nodes(*records: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["items"]["default"].update(nodes=list(records))


def a_bomb(document: dict[str, Any]) -> None:
    """A few bytes that would be decoded to more than there is memory."""
    document["requires"] = ["compression"]
    length = {"shape": [2**40], "chunks": [2**40]}
    change_leaf(document["items"]["default"], 1, packed=None, codec="zstd", lengths=[64], **length)
    for path, file in document["files"].items():
        if "/d/" in path:
            file["digest"] = "0" * 32


MORE_LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a listed file outside the step": listing("../../x"),
    "a listed absolute path": listing("/etc/passwd"),
    "a listed path that is empty in the middle": listing("default//x"),
    "a listed manifest": listing("ckpt.json"),
    "a listed file with a null": listing("a\0b"),
    "a listed file that cannot be": listing("x" * 5000),
    "a listed file of no text": listing("\x1b[2J\n"),
    "data files that are not listed": unlisting("/d/"),
    "a database that is not listed": unlisting("manifest.ocdbt"),
    "nothing listed": unlisting(""),
    "all at one place": everywhere(offsets=0),
    "a node within itself": nodes({"kind": "list", "children": [0, 1, 2, 0]}),
    "a leaf that no node has": nodes({"kind": "list", "children": [0, 1]}),
    "a node of no kind": nodes({"kind": "set", "children": [0, 1, 2]}),
    "an item that leads out": lambda document: document["items"].update(
        {"../x": document["items"]["default"]}
    ),
    "a compressed bomb": a_bomb,
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "s"
    ckpt.sync.save(path, STATE)
    return path


@pytest.mark.parametrize("lie", [*LIES, *MORE_LIES])
def test_a_manifest_that_lies_is_found_out(honest: Path, tmp_path: Path, lie: str) -> None:
    (tmp_path / "x").write_bytes(b"x")
    shutil.copytree(honest, tmp_path / "run" / "s")
    changed(tmp_path / "run" / "s", {**LIES, **MORE_LIES}[lie])
    before = peak()
    for deep in (True, False):
        try:
            report = ckpt.sync.verify(tmp_path / "run" / "s", deep=deep)
        except errors.CheckpointError:
            continue
        # Without reading it cannot be told of a consistent lie.
        if deep or lie not in QUIET:
            assert not report.ok, report
        assert len(str(report).splitlines()) >= len(report.problems) + 1
        assert all(line.isprintable() for line in str(report).splitlines())
    assert peak() - before < 256 << 20


QUIET = {"a place within the file, of other bytes", "another dtype", "a compressed bomb"}


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.mark.parametrize("path", ["../x", "/etc/hostname", "state//x", "./x", "ckpt.json", "a\0b"])
@pytest.mark.parametrize("lists", [True, False])
def test_no_path_that_leads_out_of_a_step_is_followed(
    honest: Path, tmp_path: Path, path: str, lists: bool
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    shutil.copytree(honest, tmp_path / "s")
    changed(tmp_path / "s", listing(path))
    storage = Watched(tmp_path, lambda asked: asked == "" and not lists)
    report = verified(storage, "s", deep=True)
    assert damaged(report) == {"ckpt.json"} | (set() if lists else {"."})
    assert storage.paths == {"", "ckpt.json", *files_of(honest)}
