"""Other things in the place of files: a typed error or the right result, and nothing from outside.

A step may lie where somebody else can write: links, pipes, sockets and devices in it are neither
followed nor waited for, and nothing outside of it is read, written or removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CheckpointError
from ckpt.testing.compare import differences
from tests.reliability.specimens import METRICS, comparable, items
from tests.support.damage import files_of

PATIENCE_S = 120


# -- steps with something else in the place of a file ---------------------------------------------


def save_items(path: Path) -> Any:
    ckpt.sync.save(
        path, items=items(1), handlers={"config": ckpt.handlers.JsonHandler()}, metrics=METRICS
    )


def save_zstd(path: Path) -> None:
    state = {"a": np.zeros((300, 400)), "b": [jnp.ones(3), "text"]}
    ckpt.sync.save(path, state, formats={"**": ckpt.ArrayFormat(compression="zstd")})


MAKERS: dict[str, Callable[[Path], object]] = {
    "items": save_items,
    "zstd": save_zstd,
}


@pytest.fixture(params=MAKERS)
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint, beside which there is nothing."""
    path = tmp_path / "root" / "5"
    path.parent.mkdir()
    MAKERS[request.param](path)
    return path


# Each puts something at `path`; what belongs there lies at `original`, outside of the step.


def link_outside(path: Path, original: Path) -> None:
    path.symlink_to(original)


def link_inside(path: Path, original: Path) -> None:
    if original.is_dir():
        shutil.copytree(original, beside(path))
    else:
        shutil.copy(original, beside(path))
    path.symlink_to(beside(path).name)


def dangling(path: Path, original: Path) -> None:
    path.symlink_to("nowhere")


def endless(path: Path, original: Path) -> None:
    path.symlink_to(path.name)


def fifo(path: Path, original: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, original: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def device(path: Path, original: Path) -> None:
    # That of /dev/zero, which has no end.
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def directory(path: Path, original: Path) -> None:
    path.mkdir()
    (path / "file").write_text("x")


def file(path: Path, original: Path) -> None:
    path.write_text("x")


def other_hard_link(path: Path, original: Path) -> None:
    foreign = original.with_name("foreign")
    foreign.write_bytes(b"somebody's")
    os.link(foreign, path)


def hard_link(path: Path, original: Path) -> None:
    os.link(original, path)


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}-moved")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


Put = Callable[[Path, Path], None]
# Only root may make devices.
LINKS: list[Put] = [link_outside, link_inside, dangling, endless]
SPECIAL: list[Put] = [fifo, unix_socket, *([device] if os.geteuid() == 0 else [])]
OF_FILES: list[Put] = [*LINKS, *SPECIAL, directory, other_hard_link, hard_link]
OF_DIRECTORIES: list[Put] = [*LINKS, *SPECIAL, file]
# For what no load needs.
FEW: list[Put] = [link_outside, fifo]


def within_seconds(call: Callable[[], Any], pipe: Path) -> Any:
    """What a call returns or raises; a failure where it hangs, which then is let go."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if thread.is_alive():
        with contextlib.suppress(OSError):
            # Whoever waits for the other end of a pipe gets it.
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        pytest.fail(f"{pipe}: still waiting after {PATIENCE_S} s")
    return found[0]


def load(step: Path) -> Any:
    try:
        return comparable(ckpt.sync.load(step))
    except CheckpointError as error:
        return error


def right(found: Any, expected: Any) -> bool:
    return not isinstance(found, BaseException) and differences(expected, found) == []


def try_all(step: Path, path: Path, puts: list[Put], expected: Any) -> None:
    """Put one thing after the other in the place of `path`, load and verify."""
    original = step.parent.parent / "original"
    os.rename(path, original)
    needed = not right(load(step), expected)
    for put in puts if needed else FEW:
        put(path, original)
        try:
            where = f"{put.__name__} at {path.relative_to(step)}"
            found = within_seconds(lambda: load(step), path)
            if isinstance(found, CheckpointError):
                assert needed or put not in (hard_link, other_hard_link), f"{where}: {found}"
            else:
                assert right(found, expected), f"{where}: {found!r:.300}"
                assert not needed or put is hard_link, f"{where} was followed"
            report = within_seconds(lambda: ckpt.sync.verify(step), path)
            if not isinstance(report, CheckpointError):
                assert report.ok == (put is hard_link), f"{where}: {report!s:.300}"
        finally:
            remove(path)
            remove(beside(path))
    os.rename(original, path)


@pytest.mark.slow
def test_something_else_in_the_place_of_any_file(step: Path) -> None:
    expected = comparable(ckpt.sync.load(step))
    for name in files_of(step):
        try_all(step, step / name, OF_FILES, expected)


def test_something_else_in_the_place_of_any_directory(step: Path) -> None:
    expected = comparable(ckpt.sync.load(step))
    for path in sorted(each for each in step.rglob("*") if each.is_dir()):
        try_all(step, path, OF_DIRECTORIES, expected)


UNREADABLE = """
import os, sys
import ckpt.sync
from tests.support.damage import files_of

calls = (ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify)
# Root may read everything; what has to be imported is, before it is somebody else.
for call in calls:
    for path in (*sys.argv[1:], sys.argv[1] + "-none"):
        try:
            call(path)
        except ckpt.CheckpointError:
            pass
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for step in sys.argv[1:]:
    files = files_of(step)
    noticed = 0
    for name in [*files, *{os.path.dirname(file) for file in files} - {""}]:
        path = os.path.join(step, name)
        mode = os.stat(path).st_mode
        os.chmod(path, 0)
        for call in calls:
            try:
                found = call(step)
            except ckpt.CheckpointError as error:
                told = error.item == name.split("/")[0] or step in str(error)
                assert told, (name, str(error))
                noticed += 1
            else:
                assert call is not ckpt.sync.verify or not found.ok, name
        os.chmod(path, mode)
    ckpt.sync.load(step)
    assert noticed > 3, noticed
print("done")
"""


def test_files_that_may_not_be_read() -> None:
    # Everybody may pass the directories above it, those of pytest its owner only.
    root = Path(tempfile.mkdtemp(prefix="ckpt-unreadable-"))
    try:
        for name, make in MAKERS.items():
            (root / name).mkdir()
            make(root / name / "5")
        for path in [root, *root.rglob("*")] if os.geteuid() == 0 else ():
            os.chown(path, 65534, 65534)
        done = subprocess.run(
            [sys.executable, "-c", UNREADABLE, *(root / name / "5" for name in MAKERS)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.stdout == "done\n", done.stderr[-3000:]
    finally:
        shutil.rmtree(root)


# -- steps, attempts and trash that are links -----------------------------------------------------


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A directory outside of the root in which nothing may change."""
    path = tmp_path / "precious"
    (path / "d").mkdir(parents=True)
    (path / "thesis.txt").write_text("years")
    (path / "d" / "data").write_bytes(b"x" * 5000)
    yield path
    assert files_of(path) == ["d/data", "thesis.txt"]
    assert (path / "thesis.txt").read_text() == "years"
    assert (path / "d" / "data").read_bytes() == b"x" * 5000


def sprinkle(directory: Path, precious: Path) -> None:
    """Put links to what is outside everywhere below a directory."""
    for path in [directory, *(each for each in directory.rglob("*") if each.is_dir())]:
        (path / "link-to-directory").symlink_to(precious)
        (path / "link-to-file").symlink_to(precious / "thesis.txt")
        (path / "relative").symlink_to(os.path.relpath(precious, path))


def test_deleting_a_step_follows_no_link(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "root"
    with ckpt.sync.CheckpointManager(root) as mgr:
        for number in (1, 2, 3):
            mgr.save(number, {"w": np.arange(5.0)}).result()
            sprinkle(root / str(number), precious)
        mgr.delete(1)
        mgr.save(2, {"w": np.ones(5)}, if_exists="replace").result()
        assert mgr.all_steps() == [2, 3]
        assert_same_array(mgr.restore(2)["w"], np.ones(5))
    # Links are not the library's own, so they are moved aside: as links.
    assert sorted(os.listdir(root)) == ["1.others", "2", "2.others", "3"]
    assert all(path.is_symlink() for path in (root / "1.others").iterdir() if not path.is_dir())


def assert_same_array(found: Any, expected: Any) -> None:
    assert differences(expected, found) == []


TOKEN = "0123456789abcdef" * 2
LEFTOVERS = (
    f"5.orbax-checkpoint-tmp-{TOKEN}",
    f"6.orbax-checkpoint-tmp-{TOKEN}.trash",
    f".ckpt-new-{TOKEN}",
)


def test_the_cleaner_follows_no_link(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "root"
    for name in LEFTOVERS:
        (root / name / "default" / "d").mkdir(parents=True)
        sprinkle(root / name, precious)
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == []
        mgr.save(1, {"w": np.arange(5.0)}).result()
    ckpt.sync.save(root / "one-shot", {"w": np.arange(5.0)})


@pytest.mark.parametrize("target", ["directory", "file", "nothing", "fifo"])
def test_the_cleaner_takes_no_link_for_an_attempt(
    tmp_path: Path, precious: Path, target: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    places = {
        "directory": precious,
        "file": precious / "thesis.txt",
        "nothing": tmp_path / "not-there",
    }
    names = [*LEFTOVERS, f".ckpt-lease-{TOKEN}", f".ckpt-lease-{'f' * 32}"]
    for name in names:
        if target == "fifo":
            os.mkfifo(root / name)
        else:
            (root / name).symlink_to(places[target])
    # One of the leases is that of an attempt that looks dead.
    (root / f"7.orbax-checkpoint-tmp-{'f' * 32}").mkdir()

    def run() -> None:
        with ckpt.sync.CheckpointManager(root) as mgr:
            mgr.save(1, {"w": np.arange(5.0)}).result()
            assert mgr.all_steps() == [1]

    found = within_seconds(run, root / f".ckpt-lease-{'f' * 32}")
    assert not isinstance(found, BaseException), found
    assert not (tmp_path / "not-there").exists()


def test_a_link_is_no_step(tmp_path: Path, precious: Path) -> None:
    root = tmp_path / "root"
    ckpt.sync.save(tmp_path / "elsewhere" / "5", {"w": np.arange(5.0)})
    root.mkdir()
    (root / "5").symlink_to(tmp_path / "elsewhere" / "5")
    (root / "6").symlink_to(precious)
    (root / "7").symlink_to("nowhere")
    before = files_of(tmp_path / "elsewhere")
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == []
        for number in (5, 6, 7):
            with pytest.raises(CheckpointError):
                mgr.restore(number)
            with pytest.raises(CheckpointError):
                mgr.save(number, {"w": np.ones(3)}).result()
            for call in (
                lambda number=number: mgr.delete(number),
                lambda number=number: mgr.save(number, {"x": 1}, if_exists="replace").result(),
            ):
                with contextlib.suppress(CheckpointError):
                    call()
    assert files_of(tmp_path / "elsewhere") == before
    assert not (root / "nowhere").exists()


def test_nothing_is_written_through_a_link_in_the_root(tmp_path: Path, precious: Path) -> None:
    """The only file that a manager writes beside steps is its view for Orbax."""
    for number, place in enumerate(("metadata", "metadata/_ROOT_METADATA")):
        root = tmp_path / f"root-{number}"
        (root / place).parent.mkdir(parents=True)
        target = precious if place == "metadata" else precious / "new"
        (root / place).symlink_to(target)
        with (
            contextlib.suppress(CheckpointError),
            ckpt.sync.CheckpointManager(root, custom_metadata={"run": 1}) as mgr,
        ):
            mgr.save(1, {"w": np.arange(5.0)}).result()
