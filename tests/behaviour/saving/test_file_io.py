"""`Local(io=...)`: who writes the data files changes nothing about them."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from ckpt.storage import Local

pytestmark = pytest.mark.disk

IOS = ["direct", "tensorstore"]
MIB = 1 << 20


def state() -> dict[str, Any]:
    """Arrays above and below what is written past the page cache."""
    large = jax.numpy.arange(MIB // 2 + 7, dtype=jax.numpy.float32)
    return {"large": large, "small": [np.arange(n, dtype=np.int16) for n in range(20)]}


def same(found: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, found, state()))


@pytest.mark.parametrize("reads", IOS)
@pytest.mark.parametrize("writes", IOS)
def test_a_step_of_one_is_read_by_the_other(tmp_path: Path, writes: Any, reads: Any) -> None:
    with ckpt.sync.CheckpointManager(Local(tmp_path, io=writes)) as mgr:
        mgr.save(1, state()).result()
    with ckpt.sync.CheckpointManager(Local(tmp_path, io=reads)) as mgr:
        assert same(mgr.restore(1, like=state()))
        assert mgr.verify(1).ok


def test_orbax_reads_what_tensorstore_wrote(tmp_path: Path) -> None:
    ckpt.sync.save(Local(tmp_path / "1", io="tensorstore"), state())
    with ocp.PyTreeCheckpointer() as orbax:
        assert same(orbax.restore(tmp_path / "1" / "default", item=state()))
    assert same(ckpt.sync.load(Local(tmp_path / "1", io="tensorstore"), like=state()))


def test_a_file_system_in_memory(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Local(Path(directory, "1"), io="tensorstore")
        ckpt.sync.save(path, state())
        assert same(ckpt.sync.load(path, like=state()))


def test_permissions_are_those_asked_for(tmp_path: Path) -> None:
    place = Local(tmp_path / "root", io="tensorstore", permission_mode=0o750)
    with ckpt.sync.CheckpointManager(place) as mgr:
        mgr.save(1, state()).result()
    ckpt.sync.save(Local(tmp_path / "root" / "2", permission_mode=0o750), state())
    files = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


@pytest.mark.parametrize("harm", ["cut", "gone", "link", "changed"])
def test_damage_is_told_with_the_leaf(tmp_path: Path, harm: str) -> None:
    place = Local(tmp_path / "1", io="tensorstore")
    ckpt.sync.save(place, state())
    path = max((tmp_path / "1").rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
    data = path.read_bytes()
    if harm == "cut":
        path.write_bytes(data[:-8192])
    elif harm == "gone":
        path.unlink()
    elif harm == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(data[:100] + b"x" + data[101:])
    with pytest.raises(CorruptCheckpointError, match=r"large"):
        ckpt.sync.load(place, like=state())


def test_a_disk_that_takes_no_more_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ckpt.sync.CheckpointManager(Local(tmp_path, io="tensorstore")) as mgr:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
        try:
            with pytest.raises(StorageError, match=r"cannot write .*/1\."):
                mgr.save(1, state()).result()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert mgr.all_steps() == []
        mgr.save(1, state()).result()
        assert same(mgr.restore(1, like=state()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "fast"), r"Local\(io='fast'\).*direct.*tensorstore"),
        ((3,), r"Local\(path=3\)"),
        ((Local("x"),), r"Local\(path=.*"),
        ((ckpt.storage.S3("s3://bucket/x"),), r"Local\(path=.*"),
        (("s3://bucket/x", "tensorstore"), r"Local\(path='s3://bucket/x'\).*not a URL"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Local(*arguments)
