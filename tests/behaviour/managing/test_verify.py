"""`verify`: all damage is found, and named by file, item and leaf path."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt import ArrayFormat, errors
from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._engine.verify.report import Problem, VerifyReport
from ckpt._engine.verify.scanner import Scanner
from ckpt._format.chunk_locations import parts_inside
from ckpt._format.digests import digest
from ckpt._format.manifest import Manifest, decode
from ckpt._steps.step_metadata import LeafInfo
from ckpt.storage._local.storage import LocalStorage
from tests.hostile.test_hostile import LIES, STATE, rewrite
from tests.support.paths import GOLDEN
from tests.support.stateful_objects import Config, Recording

PATIENCE_S = 60


class Cell:
    """A box around one value: its key is no part of leaf paths."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_with_keys(
    Cell,
    lambda cell: ([(jax.tree_util.GetAttrKey("value"), cell.value)], None),
    lambda _, children: Cell(*children),
)


def model() -> dict[str, Any]:
    random = np.random.default_rng(0)
    tied = jnp.asarray(random.standard_normal(70_000, np.float32))
    return {
        "large": jnp.asarray(random.standard_normal((512, 512), np.float32)),
        "tied": [tied, {"again": tied}],
        # Neither length has a divisor, so chunks have padding between their rows.
        "padded": random.standard_normal((317, 331)).astype(np.float32),
        "squeezed": np.cumsum(random.standard_normal((300, 300), np.float32), axis=0),
        "small": [random.standard_normal(100) for _ in range(5)],
        "cell": Cell(random.standard_normal(10)),
        "key": jax.random.key(3),
        "n": 3,
    }


ITEMS = {
    "model": model(),
    "averages": {"mean": np.full((3, 2), 1.5), "steps": (1, 2)},
    "config": Config(),
    "notes": "ä text",
    "random": np.random.default_rng(1),
    "loader": Recording({"index.json": b"{}", "parts/one.bin": b"one" * 1000, "empty": b""}),
}
FORMATS = {
    "padded": ArrayFormat(chunk_bytes=1 << 16, split_axes=(1,)),
    "squeezed": ArrayFormat(chunk_bytes=1 << 16, compression="zstd"),
}
STEP = 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run with one step, whose data lies in many files."""
    root = tmp_path_factory.mktemp("verify") / "run"
    staging = ckpt.Staging(budget_bytes=1 << 20)
    with ckpt.sync.CheckpointManager(root, staging=staging, formats=FORMATS) as mgr:
        mgr.save(STEP, items=ITEMS, metrics={"loss": 0.5}).result()
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def step(root: Path) -> Path:
    return root / str(STEP)


def manifest_of(step: Path) -> Manifest:
    return decode((step / "ckpt.json").read_bytes(), where="x")


def files_of(step: Path) -> list[str]:
    """Every file of a step but the manifest."""
    found = (file.relative_to(step).as_posix() for file in step.rglob("*") if file.is_file())
    return sorted(set(found) - {"ckpt.json"})


def damaged(report: VerifyReport) -> set[str]:
    return {problem.file for problem in report.problems}


def hit(report: VerifyReport) -> set[tuple[str | None, str]]:
    """The leaves that a report names, with their items."""
    return {(each.item, each.leaf) for each in report.problems if each.leaf is not None}


def refused(root: Path, step: int | None = STEP) -> set[tuple[str | None, str]]:
    """The leaves that a restore cannot give, each asked for by itself: what `hit` should say."""
    found = set()
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        metadata = mgr.metadata(step)
        for item, leaves in metadata.leaves.items():
            for leaf, about in leaves.items():
                if not isinstance(about, LeafInfo):
                    continue
                try:
                    adapt = {item: ckpt.Adapt(select=[leaf])}
                    mgr.restore(step, items=[item], adapt=adapt)
                except (errors.CorruptCheckpointError, errors.StorageError):
                    found.add((item, leaf))
    return found


def flip(file: Path, byte: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if byte is None else byte] ^= 0x10
    file.write_bytes(data)


def become(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.rename(file.with_name(f"{file.name}.kept"))
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flip": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size * 2 // 3),
    "empty": lambda file: os.truncate(file, 0),
    "append": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zero": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "delete": lambda file: file.unlink(),
    "link": become(lambda file: file.symlink_to(f"{file.name}.kept")),
    "directory": become(lambda file: file.mkdir()),
    "pipe": become(lambda file: os.mkfifo(file)),
}
# What can be seen without reading.
OUTSIDE = set(DAMAGES) - {"flip", "zero"}


def changes(damage: str, file: Path) -> bool:
    """Tell whether a damage changes a file at all."""
    size = file.stat().st_size
    return size > 0 or damage not in {"flip", "cut", "empty", "zero"}


# --- Nothing is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_step_is_ok(whole: Path, deep: bool) -> None:
    report = ckpt.sync.verify(whole / str(STEP), deep=deep)
    assert report.ok
    assert bool(report)
    assert report.problems == ()
    assert report.unlisted == ()
    assert (report.step, report.deep, report.path) == (STEP, deep, str(whole / str(STEP)))
    files = manifest_of(whole / str(STEP)).files
    assert report.files == len(files) + 1
    assert report.nbytes == (sum(file.size for file in files.values()) if deep else 0)
    assert report.seconds > 0
    assert "is whole" in str(report)
    assert len(str(report).splitlines()) == 1


@pytest.mark.parametrize(
    "step", sorted(path.parent for path in GOLDEN.rglob("ckpt.json")), ids=lambda path: path.name
)
def test_what_older_versions_wrote_is_ok(step: Path) -> None:
    for deep in (True, False):
        report = ckpt.sync.verify(step, deep=deep)
        assert report.ok, report
        assert not report.unlisted


def test_a_copy_made_with_any_tool_is_ok(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / str(STEP), tmp_path / "a")
    subprocess.run(["cp", "-r", str(whole / str(STEP)), str(tmp_path / "b")], check=True)
    for name in ("a", "b"):
        assert ckpt.sync.verify(tmp_path / name).ok


def test_files_that_the_manifest_does_not_know_are_told_and_no_problem(step: Path) -> None:
    (step / "model" / "deep").mkdir()
    (step / "model" / "deep" / "stray").write_bytes(b"x")
    (step / ".nfs0001").symlink_to("nowhere")
    for deep in (True, False):
        report = ckpt.sync.verify(step, deep=deep)
        assert report.ok
        assert report.unlisted == (".nfs0001", "model/deep/stray")
        assert "model/deep/stray" in str(report)


# --- Damage ---------------------------------------------------------------------------------------


def in_file(step: Path, path: str) -> set[tuple[str | None, str]]:
    """All leaves that have a chunk in a data file."""
    name, _, own = path.partition("/")
    item = manifest_of(step).items[name]
    number = item.data_files.index(own)
    return {
        (name, leaf.name.removesuffix(".value"))
        for leaf in item.leaves
        if leaf.offsets and number in (leaf.files or [0])
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_of_every_file_is_found_and_named(root: Path, damage: str) -> None:
    step = root / str(STEP)
    items = manifest_of(step).items
    data_files = {f"{name}/{path}" for name in items for path in items[name].data_files}
    assert len(data_files) > 6
    everything_lost = damage in {"empty", "delete", "link", "directory", "pipe"}
    aside = root.parent / "aside"
    for path in files_of(step):
        file = step / path
        if not changes(damage, file):
            continue
        shutil.copy(file, aside)
        DAMAGES[damage](file)
        report = ckpt.sync.verify(step)
        assert damaged(report) == {path}, report
        item = path.split("/")[0]
        assert {each.item for each in report.problems} == {item if item in ITEMS else None}
        # Exactly the arrays that a restore refuses; and if there is none, it says so.
        expected = set()
        if path in data_files:
            expected = in_file(step, path) if everything_lost else refused(root)
        assert hit(report) == expected
        assert len(report.problems) == max(len(expected), 1)
        told = set(str(report).splitlines())
        assert {f"  {problem}" for problem in report.problems} < told

        shallow = ckpt.sync.verify(step, deep=False)
        assert damaged(shallow) == ({path} if damage in OUTSIDE else set())
        assert hit(shallow) <= expected
        if everything_lost:
            assert hit(shallow) == expected
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.kept").unlink(missing_ok=True)
        shutil.move(aside, file)
    assert ckpt.sync.verify(step).ok


def places(step: Path, leaf: str) -> Iterator[tuple[Path, int]]:
    """The file and the first byte of every chunk of a leaf of the model."""
    item = manifest_of(step).items["model"]
    [entry] = [entry for entry in item.leaves if entry.name == leaf]
    for number, offset in enumerate(entry.offsets):
        yield step / "model" / item.data_files[entry.files[number] if entry.files else 0], offset


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("large", {"large"}),
        ("padded", {"padded"}),
        ("squeezed", {"squeezed"}),
        ("tied.0", {"tied.0", "tied.1.again"}),
        ("small.3", {"small.3"}),
        ("cell.value", {"cell"}),
        ("key", {"key"}),
    ],
)
def test_a_flipped_bit_is_named_by_leaf_and_chunk(step: Path, stored: str, named: set[str]) -> None:
    chunks = list(places(step, stored))
    number = len(chunks) - 1
    file, offset = chunks[number]
    flip(file, offset + 5)
    report = ckpt.sync.verify(step)
    assert [(each.item, each.leaf) for each in report.problems] == [
        ("model", name) for name in sorted(named)
    ]
    metadata = ckpt.sync.metadata(step)
    for problem in report.problems:
        assert f"chunk {number} of {len(chunks)} " in problem.message
        assert problem.leaf in metadata.leaves["model"]
        assert problem.file == file.relative_to(step).as_posix()


def test_damage_between_chunks_says_that_every_array_still_reads_right(step: Path) -> None:
    # The last columns of the last chunk lie beyond the array.
    file, offset = list(places(step, "padded"))[-1]
    item = manifest_of(step).items["model"]
    [entry] = [entry for entry in item.leaves if entry.name == "padded"]
    inside = entry.shape[1] % entry.chunks[1]
    assert inside
    flip(file, offset + 4 * inside)
    report = ckpt.sync.verify(step)
    [problem] = report.problems
    assert (problem.item, problem.leaf) == ("model", None)
    assert "every array still reads right" in problem.message
    assert refused(step.parent) == set()
    # The last element inside is seen.
    flip(file, offset + 4 * inside - 4)
    assert hit(ckpt.sync.verify(step)) == {("model", "padded")}


def test_several_damages_are_all_reported(step: Path) -> None:
    large, padded = (list(places(step, name)) for name in ("large", "padded"))
    flip(large[0][0], large[0][1])
    flip(large[-1][0], large[-1][1] + 1)
    padded[2][0].unlink()
    flip(step / "averages" / "_METADATA")
    (step / "config" / "metadata").write_bytes(b"")
    (step / "notes" / "text.txt").unlink()
    (step / "loader" / "parts" / "one.bin").write_bytes(b"other")
    (step / "commit_success.txt").unlink()
    report = ckpt.sync.verify(step)
    assert damaged(report) >= {
        *(file.relative_to(step).as_posix() for file, _ in (large[0], large[-1], padded[2])),
        "averages/_METADATA",
        "config/metadata",
        "notes/text.txt",
        "loader/parts/one.bin",
        "commit_success.txt",
    }
    assert len(damaged(report)) == len({large[0][0], large[-1][0], padded[2][0]}) + 5
    assert hit(report) == refused(step.parent)
    lines = str(report).splitlines()
    assert len(lines) == len(report.problems) + 1
    assert f"{len(report.problems)} problems in {len(damaged(report))} files" in lines[0]


def test_chunks_that_were_damaged_before_they_were_written_are_found(step: Path) -> None:
    """The file is as the manifest says, and its arrays are not."""
    found = set()
    for leaf in ("large", "padded", "small.1"):
        file, offset = next(places(step, leaf))
        flip(file, offset)
        name = file.relative_to(step).as_posix()
        new = digest(file.read_bytes())
        rewrite(
            step, lambda document, name=name, new=new: document["files"][name].update(digest=new)
        )
        found.add(("model", leaf))
        report = ckpt.sync.verify(step)
        assert hit(report) == found == refused(step.parent)
        assert len(report.problems) == len(found)


def test_a_file_of_another_step_in_its_place_is_found(whole: Path, step: Path) -> None:
    first, second = (f"model/{path}" for path in manifest_of(step).items["model"].data_files[:2])
    shutil.copy(whole / str(STEP) / second, step / first)
    report = ckpt.sync.verify(step)
    assert damaged(report) == {first}
    assert hit(report) == refused(step.parent)


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=0, max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(8, 100),
)
def test_a_chunk_is_digested_in_parts_that_make_up_what_is_inside(
    lengths: list[tuple[int, int]], itemsize: int, limit: int
) -> None:
    shape = tuple(max(pair) for pair in lengths)
    inside = tuple(min(pair) for pair in lengths)
    chunk = np.arange(np.prod(shape, dtype=int)).astype(f"u{itemsize}").reshape(shape)
    data, found = chunk.tobytes(), b""
    for part in parts_inside(shape, inside, itemsize, limit):
        length = int(np.prod(part.shape, dtype=int)) * itemsize
        assert length <= limit
        piece = data[part.offset : part.offset + length]
        whole = np.frombuffer(piece, chunk.dtype).reshape(part.shape)
        found += whole[tuple(slice(n) for n in part.inside)].tobytes()
    assert found == chunk[tuple(slice(n) for n in inside)].tobytes()


# --- The manifest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"delete"}))
def test_a_damaged_manifest_is_one_problem(root: Path, damage: str) -> None:
    DAMAGES[damage](root / str(STEP) / "ckpt.json")
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        reports = [mgr.verify(STEP), ckpt.sync.verify(root / str(STEP), deep=False)]
    for report in reports:
        [problem] = report.problems
        assert (problem.file, problem.item, problem.leaf) == ("ckpt.json", None, None)
        assert not report


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
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        for step in (STEP, 8, 9, None):
            with pytest.raises(errors.StepNotFoundError):
                mgr.verify(step)
        with pytest.raises(errors.InvalidArgumentError):
            mgr.verify(-1)


def test_a_later_format_is_an_error(root: Path) -> None:
    rewrite(root / str(STEP), lambda document: document.update(version=2))
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        for step in (STEP, None):
            with pytest.raises(errors.UnsupportedFormatError) as caught:
                mgr.verify(step)
            assert caught.value.step == STEP
    with pytest.raises(errors.UnsupportedFormatError):
        ckpt.sync.verify(root / str(STEP))


def test_a_step_under_another_number_is_damaged(root: Path) -> None:
    (root / str(STEP)).rename(root / "8")
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
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
        for leaf in document["items"]["state"]["leaves"]:
            leaf.update(members)

    return change


def nodes(*records: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["items"]["state"].update(nodes=list(records))


def a_bomb(document: dict[str, Any]) -> None:
    """A few bytes that would be decoded to more than there is memory."""
    document["requires"] = ["compression"]
    leaf = document["items"]["state"]["leaves"][1]
    leaf.pop("packed", None)
    leaf.update(shape=[2**40], chunks=[2**40], codec="zstd", lengths=[64])
    for path, file in document["files"].items():
        if "/d/" in path:
            file["digest"] = "0" * 32


MORE_LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a listed file outside the step": listing("../../x"),
    "a listed absolute path": listing("/etc/passwd"),
    "a listed path that is empty in the middle": listing("state//x"),
    "a listed manifest": listing("ckpt.json"),
    "a listed file with a null": listing("a\0b"),
    "a listed file that cannot be": listing("x" * 5000),
    "a listed file of no text": listing("\x1b[2J\n"),
    "data files that are not listed": unlisting("/d/"),
    "a database that is not listed": unlisting("manifest.ocdbt"),
    "nothing listed": unlisting(""),
    "all at one place": everywhere(offsets=[0]),
    "a node within itself": nodes({"kind": "list", "children": [0, 1, 2, 0]}),
    "a leaf that no node has": nodes({"kind": "list", "children": [0, 1]}),
    "a node of no kind": nodes({"kind": "set", "children": [0, 1, 2]}),
    "an item that leads out": lambda document: document["items"].update(
        {"../x": document["items"]["state"]}
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
    rewrite(tmp_path / "run" / "s", {**LIES, **MORE_LIES}[lie])
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


# --- Without reading ------------------------------------------------------------------------------


class Watched(LocalStorage):
    """A real store that counts what it is asked for, and can refuse it."""

    def __init__(self, root: Path, refuse: Callable[[str], bool] = lambda path: False) -> None:
        super().__init__(root, ckpt.Timeouts())
        self.calls: list[str] = []
        self.paths: set[str] = set()
        self.bytes_read = 0
        self.refuse = refuse

    def _note(self, call: str, path: str) -> None:
        self.calls.append(call)
        self.paths.add(path)
        if self.refuse(path):
            raise errors.StorageError(f"cannot read {path}: broken", errno=errno.EIO)

    async def files(self, step_dir: str) -> dict[str, int | None]:
        self._note("files", "")
        return await super().files(step_dir)

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        self._note("read", path)
        return await super().read(step_dir, path, limit)

    async def read_block(self, step_dir: str, path: str, offset: int, target: memoryview) -> None:
        self._note("read_block", path)
        self.bytes_read += len(target)
        await super().read_block(step_dir, path, offset, target)


def verified(storage: Watched, step_dir: str, *, deep: bool) -> VerifyReport:
    return anyio.run(verify_step_dir, storage, step_dir, None, deep, ())


def test_without_deep_the_manifest_is_all_that_is_read(tmp_path: Path) -> None:
    asked = []
    for number, size in enumerate((1 << 10, 1 << 24)):
        step_dir = str(number)
        ckpt.sync.save(tmp_path / step_dir, {"w": np.ones(size, np.uint8)})
        storage = Watched(tmp_path)
        assert verified(storage, step_dir, deep=False).ok
        assert storage.bytes_read == 0
        asked.append(storage.calls)
    assert asked == [["read", "files"]] * 2


def test_deep_reads_every_byte_once(whole: Path) -> None:
    storage = Watched(whole)
    report = verified(storage, str(STEP), deep=True)
    files = manifest_of(whole / str(STEP)).files
    assert storage.bytes_read == report.nbytes == sum(file.size for file in files.values())
    assert storage.calls.count("read") == storage.calls.count("files") == 1


def test_a_file_that_the_store_refuses_is_a_problem_of_that_file(root: Path) -> None:
    step = root / str(STEP)
    bad = next(file for file, _ in places(step, "large")).relative_to(step).as_posix()
    (step / "notes" / "text.txt").unlink()
    report = verified(Watched(root, lambda path: path == bad), str(STEP), deep=True)
    assert damaged(report) == {bad, "notes/text.txt"}
    (step / bad).unlink()
    assert hit(report) == refused(root)
    assert all("broken" in each.message for each in report.problems if each.file == bad)
    # A store that cannot list: what is read is still compared.
    report = verified(Watched(root, lambda path: path == ""), str(STEP), deep=True)
    assert damaged(report) == {".", bad, "notes/text.txt"}
    # Or cannot give the manifest.
    report = verified(Watched(root, lambda path: path == "ckpt.json"), str(STEP), deep=True)
    assert damaged(report) == {"ckpt.json"}


@pytest.mark.parametrize("path", ["../x", "/etc/hostname", "state//x", "./x", "ckpt.json", "a\0b"])
@pytest.mark.parametrize("lists", [True, False])
def test_no_path_that_leads_out_of_a_step_is_followed(
    honest: Path, tmp_path: Path, path: str, lists: bool
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    shutil.copytree(honest, tmp_path / "s")
    rewrite(tmp_path / "s", listing(path))
    storage = Watched(tmp_path, lambda asked: asked == "" and not lists)
    report = verified(storage, "s", deep=True)
    assert damaged(report) == {"ckpt.json"} | (set() if lists else {"."})
    assert storage.paths == {"", "ckpt.json", *files_of(honest)}


# --- How it runs ----------------------------------------------------------------------------------


def test_every_way_to_call_it_gives_the_same(root: Path) -> None:
    trio = pytest.importorskip("trio")
    file, offset = next(places(root / str(STEP), "large"))
    flip(file, offset)

    async def main() -> list[VerifyReport]:
        async with ckpt.CheckpointManager(root, read_only=True) as mgr:
            return [
                await ckpt.verify(root / str(STEP)),
                await mgr.verify(),
                await mgr.verify(STEP, deep=True),
            ]

    reports = [*asyncio.run(main()), *trio.run(main), ckpt.sync.verify(root / str(STEP))]
    with ckpt.sync.CheckpointManager(root) as mgr:
        reports += [mgr.verify(), mgr.verify(np.int64(STEP))]
    assert {report.problems for report in reports} == {reports[0].problems}
    assert all(hit(report) == {("model", "large")} for report in reports)
    assert {report.step for report in reports} == {STEP}


def test_the_latest_step_is_the_default(root: Path) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(9, {"w": np.ones(3)}).result()
        assert mgr.verify().step == 9
        assert mgr.verify(STEP).step == STEP


def test_it_writes_nothing(whole: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        found = [whole, *whole.rglob("*")]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}

    before = state()
    with ckpt.sync.CheckpointManager(whole, read_only=True) as mgr:
        mgr.verify()
    ckpt.sync.verify(whole / str(STEP))
    assert state() == before


def test_a_manager_tells_its_observers_and_the_log(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[ckpt.Event] = []
    caplog.set_level(logging.INFO, logger="ckpt")
    with ckpt.sync.CheckpointManager(whole, read_only=True, observers=[events.append]) as mgr:
        report = mgr.verify()
    assert {(event.operation, event.step) for event in events} == {("verify", STEP)}
    reads = [event for event in events if event.phase == "read"]
    assert sum(event.nbytes for event in reads) == report.nbytes
    assert len({event.lane for event in reads}) > 1
    [record] = [each for each in caplog.records if each.levelno >= logging.INFO]
    assert "verified" in record.getMessage()
    assert "0 problems" in record.getMessage()


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_step_that_is_deleted_or_replaced_meanwhile_is_an_error(root: Path, what: str) -> None:
    other = ckpt.sync.CheckpointManager(root)
    done: list[str] = []

    def interfere(event: ckpt.Event) -> None:
        # On the thread that reads: it goes on once the step is gone.
        if event.operation == "verify" and not done:
            done.append(what)
            if what == "deleted":
                other.delete(STEP)
            else:
                other.save(STEP, {"w": np.ones(3)}, overwrite=True, force=True).result()

    with other, ckpt.sync.CheckpointManager(root, observers=[interfere]) as mgr:
        with pytest.raises(errors.StepDeletedError) as caught:
            mgr.verify(STEP)
        assert caught.value.step == STEP
        assert what in caught.value.message
        done.clear()
        if what == "replaced":
            # Of the latest step the one that is there now is taken.
            other.save(STEP, model(), overwrite=True, force=True).result()
            assert mgr.verify().ok


def scanners() -> list[Scanner]:
    return [each for each in gc.get_objects() if isinstance(each, Scanner)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelling_stops_the_reading_and_gives_the_memory_back(whole: Path, backend: str) -> None:
    begun, held = threading.Event(), threading.Event()
    events: list[ckpt.Event] = []

    def hold(event: ckpt.Event) -> None:
        events.append(event)
        begun.set()
        assert held.wait(PATIENCE_S)

    async def main() -> None:
        async with ckpt.CheckpointManager(whole, read_only=True, observers=[hold]) as mgr:
            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(mgr.verify)
                    # The caller's loop goes on while the library's own is held.
                    await anyio.to_thread.run_sync(begun.wait)
                    tasks.cancel_scope.cancel()
                    held.set()
            assert len(events) < 10
            assert all(not scanner._regions for scanner in scanners())
            assert (await mgr.verify()).ok

    anyio.run(main, backend=backend)


BOUNDED = """
import sys
from pathlib import Path
import ckpt
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
ckpt.sync.verify(sys.argv[1])
before = peak()
report = ckpt.sync.verify(sys.argv[2])
print(len(report.problems), report.nbytes >> 20, peak() - before)
"""


def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    # One chunk of 64 MiB in one file, and one file of a handler as large.
    nbytes = 64 << 20
    ckpt.sync.save(tmp_path / "small", {"w": np.ones(1000)})
    ckpt.sync.save(tmp_path / "large", items={"blob": b"x", "tree": {"w": np.ones(9)}})

    def grow(document: dict[str, Any]) -> None:
        whole = digest(bytes(nbytes))
        [leaf] = document["items"]["tree"]["leaves"]
        leaf.update(dtype="uint8", shape=[nbytes], chunks=[nbytes], offsets=[0], digests=[whole])
        [path] = document["items"]["tree"]["data_files"]
        for name in (f"tree/{path}", "blob/data.bin"):
            os.truncate(tmp_path / "large" / name, 0)
            os.truncate(tmp_path / "large" / name, nbytes)
            document["files"][name].update(size=nbytes, digest=whole)

    rewrite(tmp_path / "large", grow)
    flip(tmp_path / "large" / "tree" / manifest_of(tmp_path / "large").items["tree"].data_files[0])
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    problems, read, grown = map(int, done.stdout.split())
    assert (problems, read) == (1, 128)
    assert grown < 40


def test_reports_and_problems_are_plain_values() -> None:
    problem = Problem("model/d/ab", "model", "layers.0.w", "was changed")
    assert str(problem) == "model/d/ab: item 'model', leaf 'layers.0.w': was changed"
    assert str(Problem("ckpt.json", None, None, "is cut")) == "ckpt.json: is cut"
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.file = "x"  # type: ignore[misc]
    assert problem == dataclasses.replace(problem)
