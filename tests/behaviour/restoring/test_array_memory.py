"""`restore(memory=...)`: whose memory the arrays have, for programs that donate nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ckpt
import ckpt.sync
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from ckpt.storage._local import data_files
from tests.support.snapshots import shared_memory
from tests.support.trees import assert_same

DEVICES = jax.devices()
MEMORIES = ["jax", "buffers", "files"]
LARGE = (3, 1 << 18)
maps = Path("/proc/self/maps")
needs_proc = pytest.mark.skipif(not maps.exists(), reason="there is no /proc")


def state() -> dict[str, Any]:
    """What is one chunk and what is several, packed, placed, encoded; numpy and scalars."""
    large = jnp.arange(3 << 18, dtype=jnp.float32).reshape(LARGE)
    mesh = jax.make_mesh((len(DEVICES),), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return {
        "large": large,
        "several chunks": jnp.arange(5 << 20, dtype=jnp.int16).reshape(5, -1),
        "rows": jax.device_put(large.reshape(len(DEVICES), -1), rows),
        "everywhere": jax.device_put(large, NamedSharding(mesh, PartitionSpec())),
        "last device": jax.device_put(large, SingleDeviceSharding(DEVICES[-1])),
        "small": [jnp.full((n, 7), n, jnp.bfloat16) for n in range(1, 9)],
        "key": jax.random.key(3),
        "truth": jnp.arange(1 << 20) % 3 == 1,
        "empty": jnp.zeros((8, 0)),
        "scalar": jnp.float32(2),
        "numpy": np.arange(1 << 19, dtype=np.float64),
        "small numpy": np.arange(7),
        "step": 4,
    }


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["key"].dtype == wanted["key"].dtype
    trees = [{**tree, "key": jax.random.key_data(tree["key"])} for tree in (found, wanted)]
    assert_same(*trees)


def saved(path: Path) -> dict[str, Any]:
    found = state()
    ckpt.sync.save(path, found)
    return found


@pytest.mark.parametrize("like", [False, True], ids=["as saved", "like"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_same_bits_come_back(tmp_path: Path, memory: Any, like: bool) -> None:
    wanted = saved(tmp_path / "a")
    for _ in range(2):
        found = ckpt.sync.load(tmp_path / "a", wanted if like else None, memory=memory)
        assert_alike(found, wanted)


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_differs_from_the_files_is_copied(tmp_path: Path, memory: Any) -> None:
    wanted = saved(tmp_path / "a")
    adapt = ckpt.Adapt(cast={"large": "bfloat16"}, resize={"numpy": "pad"}, extra="ignore")
    like = {
        "large": wanted["large"],
        "numpy": np.zeros(2 << 19),
        "rows": wanted["large"].reshape(len(DEVICES), -1),
    }
    found = ckpt.sync.load(tmp_path / "a", like, adapt=adapt, memory=memory)
    assert np.array_equal(found["large"], wanted["large"].astype(jnp.bfloat16))
    assert np.array_equal(found["numpy"][: 1 << 19], wanted["numpy"])
    assert not found["numpy"][1 << 19 :].any()
    assert np.array_equal(found["rows"], wanted["rows"])


@pytest.mark.parametrize("memory", MEMORIES)
def test_compressed_arrays(tmp_path: Path, memory: Any) -> None:
    wanted = state()
    formats = {"**": ckpt.ArrayFormat(compression="zstd")}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        mgr.save(1, wanted).result()
        assert_alike(mgr.restore(1, wanted, memory=memory), wanted)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_later_restore_leaves_arrays_alone(tmp_path: Path, memory: Any) -> None:
    """Also small ones, and neighbours in a file of which one is a part of it and one is not."""

    def tree(factor: int) -> dict[str, Any]:
        # Those that are weakly typed, or of less than 100 KiB, take over no memory.
        small = {f"small {n}": jnp.full((200, 200), n * factor, jnp.int32) for n in range(60)}
        for n in range(5):
            small[f"one chunk {n}"] = jnp.full((75, 1024), n + factor, jnp.int32)
            small[f"two chunks {n}"] = jnp.full((256, 1024), n - factor, jnp.int32)
        return small

    formats = {"*chunk*": ckpt.ArrayFormat(chunk_bytes=512 << 10)}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        for step in (1, 2):
            mgr.save(step, tree(step)).result()
        found = {step: mgr.restore(step, memory=memory) for step in (1, 2)}
        for step in (1, 2):
            assert_same(found[step], tree(step))


@needs_proc
def test_arrays_of_files_lie_in_the_files(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "a")
    found = ckpt.sync.load(tmp_path / "a", wanted, memory="files")
    places = mapped_below(tmp_path / "a")
    for name in ("large", "everywhere", "last device", "truth"):
        for shard in found[name].addressable_shards:
            address = shard.data.unsafe_buffer_pointer()
            assert any(start <= address < end for start, end in places), name
    assert any(start <= found["numpy"].ctypes.data < end for start, end in places)
    del found, shard
    gc.collect()
    assert not mapped_below(tmp_path / "a")


@needs_proc
def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    found = ckpt.sync.load(tmp_path / "a", wanted, memory="files")
    assert mapped_below(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) <= before
    assert_alike(found, wanted)


def mapped_below(path: Path) -> list[tuple[int, int]]:
    lines = [line for line in maps.read_text().splitlines() if f"{path}/" in line]
    return [
        (int(start, 16), int(end, 16))
        for start, _, end in (line.split()[0].partition("-") for line in lines)
    ]


def test_writing_to_a_mapped_array_changes_no_file(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "a")
    found = ckpt.sync.load(tmp_path / "a", wanted, memory="files")
    found["numpy"][...] = 0
    assert ckpt.sync.verify(tmp_path / "a").ok
    assert_alike(ckpt.sync.load(tmp_path / "a", wanted, memory="files"), wanted)


def test_mapped_arrays_outlive_their_step(tmp_path: Path) -> None:
    wanted = state()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, wanted).result()
        found = mgr.restore(1, wanted, memory="files")
        mgr.delete(1)
        mgr.save(1, jax.tree.map(lambda leaf: leaf, {"other": jnp.zeros(1 << 20)})).result()
        assert_alike(found, wanted)
    assert_alike(found, wanted)


def test_buffers_are_used_again(tmp_path: Path) -> None:
    wanted = {"large": state()["large"]}
    addresses = []
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, wanted).result()
        for _ in range(6):
            found = mgr.restore(1, wanted, memory="buffers")
            assert_same(found, wanted)
            addresses.append(found["large"].unsafe_buffer_pointer())
            # jax lets go of the memory soon, in a thread of its own.
            del found
            gc.collect()
    assert len(set(addresses)) < len(addresses)


def test_mapped_arrays_outlive_their_snapshot(tmp_path: Path) -> None:
    wanted = state()
    with shared_memory() as memory:
        tiers = [ckpt.tiers.SharedMemory(directory=str(memory))]
        with ckpt.sync.CheckpointManager(tmp_path, tiers=tiers) as mgr:
            mgr.snapshot(1, wanted).result()
            found = mgr.restore(1, wanted, memory="files")
            if maps.exists():
                assert mapped_below(memory)
            # Donated, and so used again by jax as far as that can be: not the file.
            add = jax.jit(lambda large: large + 1, donate_argnums=0)
            assert (add(mgr.restore(1, wanted, memory="files")["large"]) != found["large"]).all()
            assert mgr.verify(1).ok
            for step in (2, 3):
                mgr.snapshot(step, {"other": jnp.full(1 << 20, step)}).result()
            mgr.wait_until_finished()
            assert mgr.all_steps() == [3]
            assert_alike(found, wanted)
        assert_alike(found, wanted)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with shared_memory() as memory:
            yield memory


@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "a link", "small ones changed"])
def test_damage_is_found_before_anything_is_returned(place: Path, harm: str) -> None:
    wanted = saved(place / "a")
    files = sorted((place / "a").rglob("d/*"), key=lambda path: path.stat().st_size)
    path = files[0] if harm.startswith("small") else files[-1]
    data = path.read_bytes()
    if harm == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "gone":
        path.unlink()
    elif harm == "a link":
        path.rename(place / "elsewhere")
        path.symlink_to(place / "elsewhere")
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(CorruptCheckpointError) as raised:
        ckpt.sync.load(place / "a", wanted, memory="files")
    assert raised.value.leaf


@pytest.mark.disk
def test_pages_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """They end behind the end of the file, as those of a bad sector do in the middle."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Input/output error"):
            data_files._mapped(fd, 0, 1 << 20)
    finally:
        os.close(fd)


def test_a_disk_that_fails_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = saved(tmp_path / "a")

    def failing(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(data_files, "_mapped", failing)
    with pytest.raises(StorageError, match=r"cannot read .*Input/output error"):
        ckpt.sync.load(tmp_path / "a", wanted, memory="files")


def test_wrong_values(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match=r"memory='disk'.*'jax', 'buffers', 'files'"):
        ckpt.sync.load(tmp_path / "a", memory="disk")  # type: ignore[arg-type]
    with ckpt.sync.CheckpointManager("memory://arrays/run") as mgr:
        mgr.save(1, {"w": jnp.zeros(3)}).result()
        with pytest.raises(InvalidArgumentError, match=r"memory='files'.*memory://arrays/run"):
            mgr.restore(1, memory="files")
        assert mgr.restore(1, memory="buffers")["w"].shape == (3,)


PROGRAM = """
import resource, sys
import jax, numpy as np
import ckpt.sync

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = ckpt.sync.load(sys.argv[1], memory=sys.argv[2])
jax.block_until_ready(found)
kinds = {}
for line in open("/proc/self/status"):
    name, _, value = line.partition(":")
    if name in ("RssAnon", "RssFile"):
        kinds[name] = int(value.split()[0]) >> 10
print(kinds["RssAnon"])
"""


@needs_proc
def test_arrays_of_files_take_no_memory_of_the_process(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {str(n): np.full(4 << 20, n, np.float32) for n in range(12)})
    anonymous = {
        memory: int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, str(tmp_path / "a"), memory],
                check=True,
                capture_output=True,
                text=True,
                timeout=100,
            ).stdout
        )
        for memory in ("jax", "files")
    }
    # 192 MiB of arrays.
    assert anonymous["jax"] - anonymous["files"] > 150, anonymous
