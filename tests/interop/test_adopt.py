"""Virtual steps: what another library wrote is a step, where it lies, and no byte is copied."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp0
import pytest
import tensorstore as ts
from flax.serialization import to_bytes
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save, save_file

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._engine.restore.step_files import FileLocation
from ckpt._format.step_files import SourceFile
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._object.connection import _memory_of
from ckpt.testing.compare import differences
from tests.support.real_jobs import run_processes
from tests.support.simulated_job import closed, managers, together
from tests.support.trees import P, mesh

MIB = 1 << 20
TENSORS: dict[str, Any] = {
    # Several blocks of rows, and a last one that is not whole.
    "model.embed.weight": np.arange(3001 * 700, dtype=np.float32).reshape(3001, 700),
    "model.norm.weight": np.full(7, 1.5, ml_dtypes.bfloat16),
    "model.empty": np.zeros((0, 4), np.int32),
    "head.bias": np.float16(3),
}


def state() -> dict[str, Any]:
    return {
        "w": jnp.arange(2**18, dtype=jnp.int32).reshape(512, 512),
        "b": jnp.full(3, 2.5, jnp.bfloat16),
        "zeros": jnp.zeros((5, 2)),
        "count": 3,
    }


def of_one_file(folder: Path) -> Path:
    save_file({name: np.asarray(each) for name, each in TENSORS.items()}, folder / "m.safetensors")
    return folder / "m.safetensors"


def of_several_files(folder: Path) -> Path:
    listed = {}
    for number, (name, each) in enumerate(TENSORS.items()):
        file = f"m-{number}.safetensors"
        save_file({name: np.asarray(each)}, folder / file)
        listed[name] = file
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def of_links(folder: Path) -> Path:
    """A cache of Hugging Face: the files of a snapshot are links to files of other names."""
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots" / "0f5e"
    snapshot.mkdir(parents=True)
    for path in of_several_files(folder).glob("m[-.]*"):
        path.rename(folder / "blobs" / uuid.uuid5(uuid.NAMESPACE_URL, path.name).hex)
        (snapshot / path.name).symlink_to(
            f"../../blobs/{uuid.uuid5(uuid.NAMESPACE_URL, path.name).hex}"
        )
    return snapshot


def of_a_link(folder: Path) -> Path:
    of_one_file(folder).rename(folder / "0123")
    (folder / "m.safetensors").symlink_to("0123")
    return folder / "m.safetensors"


def of_orbax(folder: Path) -> Path:
    with ocp0.CheckpointManager(folder / "run") as manager:
        manager.save(7, args=ocp0.args.StandardSave(state()))
        manager.wait_until_finished()
    return folder / "run" / "7"


def of_orbax_files(folder: Path) -> Path:
    with ocp0.Checkpointer(ocp0.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "x", args=ocp0.args.PyTreeSave(state()))
    return folder / "x"


def of_orbax_items(folder: Path) -> Path:
    items = ocp0.args.Composite(
        state=ocp0.args.StandardSave(state()), config=ocp0.args.JsonSave({"lr": 0.1})
    )
    with ocp0.Checkpointer(ocp0.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "x", items)
    return folder / "x"


def of_orbax_v1(folder: Path) -> Path:
    ocp.save(folder / "x", state())
    return folder / "x"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "file": of_one_file,
    "files": of_several_files,
    "links": of_links,
    "link": of_a_link,
    "orbax": of_orbax,
    "orbax-files": of_orbax_files,
    "orbax-items": of_orbax_items,
    "orbax-v1": of_orbax_v1,
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return SOURCES[request.param](folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    return of_one_file(folder)


def nbytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def change(path: Path, at: int = 1_000_000) -> None:
    """Change a byte of a file, and its time, however coarse the clock of the disk is."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


def test_a_virtual_step_is_what_its_source_is(source: Path, tmp_path: Path) -> None:
    before = ckpt.sync.load(source)
    info = ckpt.sync.adopt(source, tmp_path / "ours")
    assert info.path == str(tmp_path / "ours")
    assert differences(before, ckpt.sync.load(tmp_path / "ours")) == []
    # Small things that lie in files of metadata are copied.
    assert nbytes_in(tmp_path / "ours") < 64 << 10
    manifest = json.loads((tmp_path / "ours" / "ckpt.json").read_text())
    assert "virtual" in manifest["requires"]
    # And again when all have digests.
    assert ckpt.sync.verify(tmp_path / "ours").first_digests
    assert differences(before, ckpt.sync.load(tmp_path / "ours")) == []
    assert ckpt.sync.verify(tmp_path / "ours").ok


def test_it_is_a_step_of_a_manager(model: Path, tmp_path: Path) -> None:
    info = ckpt.sync.adopt(model, tmp_path / "run", step=0)
    assert info.step == 0
    placed = NamedSharding(mesh(), P(None, "model"))
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == [0]
        params = mgr.restore(0, at="model.norm")
        mgr.save(1, params)
        assert mgr.verify(0).first_digests == len(TENSORS) - 1
        mgr.verify(0)
        like = {"weight": jax.ShapeDtypeStruct((3001, 700), jnp.bfloat16, sharding=placed)}
        adapt = ckpt.Adapt(cast="bfloat16")
        found: Any = mgr.restore(0, like=like, at="model.embed", adapt=adapt)
        assert found["weight"].sharding == placed
        assert np.asarray(found["weight"])[3000, 699] == ml_dtypes.bfloat16(3001 * 700 - 1)
        mgr.delete(0)
        assert mgr.all_steps() == [1]
    # What others own is left alone.
    assert differences(ckpt.sync.load(model, at="model.norm"), params) == []


def test_one_array_is_read_from_it(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    array = ckpt.sync.open_array(tmp_path / "ours", "model.embed.weight")
    assert array[2990:3001, 5].tolist() == TENSORS["model.embed.weight"][2990:, 5].tolist()


def test_items_of_orbax_are_items_and_one_can_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    source = of_orbax_items(tmp_path / "theirs")
    ckpt.sync.adopt(source, tmp_path / "run", step=3)
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.restore(3)["config"] == {"lr": 0.1}
        mgr.delete(3, item="config")
        found = mgr.restore(3)
        assert list(found) == ["state"]
        assert differences(ckpt.sync.load(source)["state"], found["state"]) == []
        assert mgr.verify(3).first_digests
        ckpt.sync.adopt(source, tmp_path / "run", step=4)
        mgr.delete(4, item="state")
        assert mgr.restore(4) == {"config": {"lr": 0.1}}
    assert "sources" not in json.loads((tmp_path / "run" / "4" / "ckpt.json").read_text())
    assert ckpt.sync.load(source)["config"] == {"lr": 0.1}


def test_no_byte_of_the_arrays_is_read(tmp_path: Path) -> None:
    """Ten files of 10 GiB, of which the disk has the headers only."""
    listed = {}
    for number in range(10):
        shape = [5 << 14, 1 << 16]
        head = json.dumps(
            {f"w{number}": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 10 << 30]}}
        ).encode()
        file = tmp_path / f"m-{number}.safetensors"
        with file.open("wb") as made:
            made.write(struct.pack("<Q", len(head)) + head)
            made.truncate(8 + len(head) + (10 << 30))
        listed[f"w{number}"] = file.name
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    before = read_so_far()
    info = ckpt.sync.adopt(tmp_path, tmp_path / "ours")
    assert info.nbytes == 100 << 30
    assert read_so_far() - before < MIB
    array = ckpt.sync.open_array(tmp_path / "ours", "w9")
    assert not array[-1, -5:].astype(np.float32).any()


def read_so_far() -> int:
    """Return how many bytes this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def test_before_it_is_verified_a_changed_source_is_refused(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    change(model)
    with pytest.raises(errors.CorruptCheckpointError, match="was changed after this step") as told:
        ckpt.sync.load(tmp_path / "ours")
    assert str(model) in str(told.value)
    for deep in (False, True):
        report = ckpt.sync.verify(tmp_path / "ours", deep=deep)
        assert not report.ok
        assert not report.first_digests
        assert str(model) in str(report)
    # It cannot be known which bytes are right, so that none get a digest.
    with pytest.raises(errors.CorruptCheckpointError, match="was changed"):
        ckpt.sync.load(tmp_path / "ours")
    ckpt.sync.adopt(model, tmp_path / "ours", if_exists="replace")
    assert ckpt.sync.verify(tmp_path / "ours").ok


def test_once_it_is_verified_a_changed_byte_is_never_returned(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    ckpt.sync.verify(tmp_path / "ours")
    found = model.stat()
    change(model)
    # Not even if it does not show.
    os.utime(model, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(errors.CorruptCheckpointError, match="not what was saved") as told:
        ckpt.sync.load(tmp_path / "ours")
    assert told.value.leaf == "model.embed.weight"
    assert str(model) in str(told.value)
    assert ckpt.sync.load(tmp_path / "ours", at="model.norm")["weight"].shape == (7,)
    [problem] = ckpt.sync.verify(tmp_path / "ours").problems
    assert problem.leaf == "model.embed.weight"
    assert str(model) in problem.message


def test_once_it_is_verified_the_time_of_a_file_does_not_matter(
    model: Path, tmp_path: Path
) -> None:
    """As after a copy back from a backup."""
    ckpt.sync.adopt(model, tmp_path / "ours")
    ckpt.sync.verify(tmp_path / "ours")
    os.utime(model, ns=(5, 5))
    assert ckpt.sync.verify(tmp_path / "ours").ok
    assert ckpt.sync.verify(tmp_path / "ours", deep=False).ok
    assert ckpt.sync.load(tmp_path / "ours")["head"]["bias"] == 3


@pytest.mark.parametrize("verified", [False, True])
def test_a_source_that_is_gone_is_named(model: Path, tmp_path: Path, verified: bool) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    if verified:
        ckpt.sync.verify(tmp_path / "ours")
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(errors.CorruptCheckpointError, match="is missing; put it back") as told:
        ckpt.sync.load(tmp_path / "ours")
    assert str(model) in str(told.value)
    # What describes it needs no source.
    assert "model.norm.weight" in ckpt.sync.metadata(tmp_path / "ours").leaves["default"]
    report = ckpt.sync.verify(tmp_path / "ours", deep=False)
    assert {problem.leaf for problem in report.problems} >= {"model.norm.weight", "head.bias"}
    (tmp_path / "elsewhere").rename(model)
    assert ckpt.sync.load(tmp_path / "ours")["head"]["bias"] == 3


def test_a_source_that_was_cut_is_found(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    ckpt.sync.verify(tmp_path / "ours")
    found = model.stat()
    os.truncate(model, found.st_size - 2000)
    with pytest.raises(errors.CorruptCheckpointError, match="was changed"):
        ckpt.sync.load(tmp_path / "ours")
    for deep in (False, True):
        assert not ckpt.sync.verify(tmp_path / "ours", deep=deep).ok


@pytest.mark.parametrize("call", ["verify", "load"])
def test_a_source_that_changes_while_it_is_read_is_refused(
    call: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a download goes on: what was read is not what was adopted."""
    ckpt.sync.adopt(model, tmp_path / "ours")
    plain, reads = LocalStorage.read_block, []

    async def changed(self: Any, step_dir: str, path: str, *given: Any) -> None:
        await plain(self, step_dir, path, *given)
        if path == model.name:
            reads.append(1)
            if len(reads) == 1:
                change(model, 2_000_000)

    monkeypatch.setattr(LocalStorage, "read_block", changed)
    if call == "verify":
        report = ckpt.sync.verify(tmp_path / "ours")
        assert not report.ok
        assert not report.first_digests
    else:
        with pytest.raises(errors.CorruptCheckpointError, match="was changed after this step"):
            ckpt.sync.load(tmp_path / "ours")


def test_two_that_verify_at_once_agree(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")
    barrier = threading.Barrier(2)

    def verify() -> Any:
        barrier.wait()
        return ckpt.sync.verify(tmp_path / "ours")

    assert all(report.ok for report in together(verify, verify))
    assert not ckpt.sync.verify(tmp_path / "ours").first_digests
    assert ckpt.sync.load(tmp_path / "ours")["head"]["bias"] == 3


def test_digests_that_cannot_be_kept_are_said(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ckpt.sync.adopt(model, tmp_path / "ours")

    async def begin(self: object, step_dir: str) -> None:
        raise errors.StorageError("a read-only file system")

    monkeypatch.setattr("ckpt.storage._local.storage.LocalStorage.begin", begin)
    with caplog.at_level(logging.WARNING, "ckpt"):
        report = ckpt.sync.verify(tmp_path / "ours")
    assert report.ok
    assert (report.first_digests, report.without_digests) == (0, 3)
    assert "could not be kept" in caplog.text
    assert "a read-only file system" in caplog.text


def test_a_manager_that_may_not_write_says_what_has_no_digests(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "run", step=1)
    before = (tmp_path / "run" / "1" / "ckpt.json").read_bytes()
    with ckpt.sync.CheckpointManager(tmp_path / "run", mode="r") as mgr:
        report = mgr.verify(1)
    assert report.ok
    assert "no digests yet: 3 arrays" in str(report)
    assert "no digests yet" in str(ckpt.sync.verify(tmp_path / "run" / "1", deep=False))
    assert (tmp_path / "run" / "1" / "ckpt.json").read_bytes() == before


def test_all_processes_of_a_job_read_it(model: Path, tmp_path: Path) -> None:
    ckpt.sync.adopt(model, tmp_path / "run", step=4)
    mgrs = managers(tmp_path / "run", 2)
    try:
        for found in together(*(mgr.restore for mgr in mgrs)):
            assert np.asarray(found["model"]["norm"]["weight"]).tolist() == [1.5] * 7
    finally:
        closed(mgrs)


def test_processes_share_what_they_read_of_it_and_verify_it_at_once(tmp_path: Path) -> None:
    rows = np.arange(3000 * 700, dtype=np.float32).reshape(3000, 700)
    save_file({"w": rows}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "run", step=0)
    for told in run_processes(2, "restore_virtual.py", tmp_path / "run"):
        assert told.value == {"same": True, "whole": True}
    assert not ckpt.sync.verify(tmp_path / "run" / "0").without_digests


def test_sources_and_steps_in_stores(tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    spec = {"driver": "memory", "path": "models/"}
    kv = ts.KvStore.open(spec, context=_memory_of(name)).result()
    kv.write("m.safetensors", save({"w": np.arange(6, dtype=np.int32)})).result()
    for target in (f"memory://{name}/ours", tmp_path / "ours"):
        ckpt.sync.adopt(f"memory://{name}/models/m.safetensors", target)
        assert ckpt.sync.load(target)["w"].tolist() == [0, 1, 2, 3, 4, 5]
        assert ckpt.sync.verify(target).first_digests == 1
        assert ckpt.sync.verify(target).ok
    ckpt.sync.adopt(f"memory://{name}/models/m.safetensors", tmp_path / "more")
    kv.write("m.safetensors", save({"w": np.arange(1, 7, dtype=np.int32)})).result()
    with pytest.raises(errors.CorruptCheckpointError, match="was changed after this step"):
        ckpt.sync.load(tmp_path / "more")
    with pytest.raises(errors.CorruptCheckpointError, match=r"memory://.*m\.safetensors"):
        ckpt.sync.load(tmp_path / "ours")
    kv.delete_range(ts.KvStore.KeyRange()).result()
    with pytest.raises(errors.CorruptCheckpointError, match="is missing; put it back"):
        ckpt.sync.load(tmp_path / "ours")


def test_what_cannot_be_adopted_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "own", {"a": jnp.ones(3)})
    with pytest.raises(errors.InvalidArgumentError, match="is a checkpoint of this library"):
        ckpt.sync.adopt(tmp_path / "own", tmp_path / "x")
    with pytest.raises(errors.InvalidArgumentError, match="or a part of one"):
        ckpt.sync.adopt(tmp_path / "own" / "default", tmp_path / "x")
    with pytest.raises(errors.NotACheckpointError, match="there is no directory"):
        ckpt.sync.adopt(tmp_path / "nothing", tmp_path / "x")
    with pytest.raises(errors.StepExistsError, match="pass if_exists='replace'"):
        ckpt.sync.adopt(model, tmp_path / "own")
    with pytest.raises(errors.InvalidArgumentError, match="step=-1"):
        ckpt.sync.adopt(model, tmp_path / "run", step=-1)
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(errors.CorruptCheckpointError, match="shorter"):
        ckpt.sync.adopt(model, tmp_path / "x")
    np.savez(tmp_path / "theirs" / "z.npz", w=np.ones(3, np.float32))
    (tmp_path / "theirs" / "z.msgpack").write_bytes(to_bytes({"w": jnp.ones(3)}))
    for name, library in (("z.npz", "numpy"), ("z.msgpack", "flax")):
        with pytest.raises(errors.UnsupportedFormatError, match=f"of {library}.*Convert the file"):
            ckpt.sync.adopt(tmp_path / "theirs" / name, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert ckpt.sync.load(tmp_path / "own")["a"].tolist() == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "theirs"]


@pytest.mark.parametrize(
    ("root", "folder", "place"),
    [("/", "", "/"), ("/", "srv", "/srv"), ("/a", "", "/a"), ("s3://b", "x/y", "s3://b/x/y")],
)
def test_a_file_is_named_from_the_top(root: str, folder: str, place: str, tmp_path: Path) -> None:
    """Models often lie directly below the root of a container."""
    storage: Any = SimpleNamespace(location=root)
    found = FileLocation(storage, folder, "m.safetensors")
    assert found.place == place
    assert found.location == SourceFile(place, "m.safetensors", 1, "").location
    assert found.location == f"{place.rstrip('/')}/m.safetensors"


def test_steps_have_the_names_that_the_manager_gives(model: Path, tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt", 8)
    ckpt.sync.adopt(model, tmp_path, step=12, step_names=names)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as mgr:
        assert mgr.all_steps() == [12]


def test_it_can_be_awaited(model: Path, tmp_path: Path) -> None:
    async def adopt() -> None:
        info = await ckpt.adopt(model, tmp_path / "ours")
        assert info.nbytes == sum(np.asarray(each).nbytes for each in TENSORS.values())
        report = await ckpt.verify(tmp_path / "ours")
        assert "had no digests yet" in str(report)

    asyncio.run(adopt())
