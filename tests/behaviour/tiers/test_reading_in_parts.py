"""What is damaged at the nearest place is read from the next one, and only that."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest import Manifest, decode
from ckpt._format.manifest_head import FILE_NAME
from ckpt.errors import CorruptCheckpointError
from ckpt.storage._local.storage import LocalStorage
from ckpt.testing.compare import differences
from ckpt.tiers import SharedMemory, Tier
from tests.support.damage import Cut, Damage, Delete, FlipBit
from tests.support.faults import Fail, FaultyFiles, every, named
from tests.support.numbered_states import state_of
from tests.support.snapshots import PATIENCE_S, shared_memory

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


class Asked:
    """How many bytes of files each root was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        for name in ("read_block", "map_block", "read"):
            patch.setattr(LocalStorage, name, self._counting(getattr(LocalStorage, name), name))

    def _counting(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        async def call(storage: LocalStorage, *args: Any, **named: Any) -> Any:
            sizes = {"read_block": lambda: len(args[3]), "map_block": lambda: args[3]}
            place = Path(storage.location).name
            self.nbytes[place] += sizes.get(name, lambda: 0)()
            self.calls[place] += 1
            return await real(storage, *args, **named)

        return call


def manager(base: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(base / "root", tiers=[Tier(base / "disk")], **options)


def saved(base: Path, step: int, state: Any = None, **options: Any) -> None:
    """Save a step, and copy it to the disk as a prefetch or a drain would."""
    with ckpt.sync.CheckpointManager(base / "root") as mgr:
        state = state_of(step) if state is None and not options else state
        mgr.save(step, state, **options).result()
    shutil.copytree(base / "root" / str(step), base / "disk" / str(step))


def manifest_of(step: Path) -> Manifest:
    return decode((step / FILE_NAME).read_bytes(), where=str(step))


def data_file_of(step: Path, number: int = 0) -> str:
    """Return a data file of a step by number: the largest is the first."""
    files = [
        f"{name}/{path}"
        for name, item in manifest_of(step).items.items()
        for path in item.data_files
    ]
    return sorted(files, key=lambda path: -(step / path).stat().st_size)[number]


def place_of(step: Path, leaf: str) -> tuple[str, int]:
    """Return the file of the first chunk of a leaf, and the offset there."""
    for name, item in manifest_of(step).items.items():
        for each in item.leaves:
            if each.name == leaf:
                file = item.data_files[each.files[0] if each.files else 0]
                return f"{name}/{file}", each.offsets[0]
    raise AssertionError(leaf)


def flip(step: Path, leaf: str) -> None:
    """Flip a bit of a leaf."""
    file, offset = place_of(step, leaf)
    FlipBit(file, 8 * offset + 3).apply(step)


def warnings_in(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [each for each in found if text in each]


@pytest.mark.parametrize("kind", ["jax", "files", "buffers"])
@pytest.mark.parametrize("leaf", ["params.kernel", "small.bias_3", "device"])
def test_only_the_array_that_is_damaged_is_read_from_the_root(
    leaf: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    saved(tmp_path, 1)
    flip(tmp_path / "disk/1", leaf)
    asked = Asked(monkeypatch)
    with manager(tmp_path) as mgr:
        mgr.latest_step()
        asked.nbytes.clear()
        found = mgr.restore(1, memory=kind)
    assert differences(state_of(1), found) == []
    nbytes = np.asarray(_leaf(state_of(1), leaf)).nbytes
    # Small arrays are read with their neighbours, of which only the damaged one is read again.
    assert asked.nbytes["root"] == nbytes
    (said,) = warnings_in(caplog, "is damaged; read instead")
    assert f"read instead: {leaf} from {tmp_path / 'root'}" in said


def _leaf(state: Any, name: str) -> Any:
    for key in name.split("."):
        state = state[key]
    return state


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: Delete(file),
        lambda file: Cut(file, 4 * MIB),
        lambda file: FlipBit(file, 100),
    ],
    ids=["lost", "cut", "flipped"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_any_file_may_be_damaged(
    number: int, damage: Callable[[str], Damage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    file = data_file_of(tmp_path / "disk/1", number)
    damage(file).apply(tmp_path / "disk/1")
    blank, expected = (jax.tree.map(lambda each: each, state_of(step)) for step in (2, 1))
    asked = Asked(monkeypatch)
    with manager(tmp_path) as mgr:
        for restore in (lambda: mgr.restore(like=blank), lambda: mgr.restore(1, like=blank)):
            asked.nbytes.clear()
            assert differences(expected, restore()) == []
            assert asked.nbytes["root"] <= (tmp_path / "root/1" / file).stat().st_size
        start, found = mgr.resume(blank)
        assert start == 2
        assert differences(expected, found) == []
        assert differences(expected["small"], mgr.restore(1, at="small")) == []


def test_items_and_their_files(tmp_path: Path, caplog: Any) -> None:
    items = {"model": {"w": jnp.arange(8.0)}, "config": {"depth": 2}, "notes": {"text": "x" * 99}}
    saved(tmp_path, 3, items=items)
    near = tmp_path / "disk/3"
    for path in near.glob("config/*"):
        if path.is_file() and path.name not in ("_METADATA", "_sharding"):
            path.unlink()
    FlipBit(data_file_of(near), 5).apply(near)
    with manager(tmp_path) as mgr:
        assert differences(items, mgr.restore(3)) == []
        assert differences(items["model"], mgr.restore(items=["model"])["model"]) == []
    assert any("model/w" in each for each in warnings_in(caplog, "read instead"))


def test_a_disk_that_cannot_be_read(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    file = data_file_of(tmp_path / "disk/1")
    with manager(tmp_path) as mgr:
        mgr.latest_step()
        fails = every(1, Fail(errno.EIO), named("pread", "preadv"))
        with FaultyFiles(tmp_path / "disk/1" / Path(file).parent, fails) as files:
            found = mgr.restore(1)
        assert files.met
    assert differences(state_of(1), found) == []


def test_sound_places_are_asked_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    asked = Asked(monkeypatch)
    with manager(tmp_path) as mgr:
        mgr.restore(1)
        asked.calls.clear()
        asked.nbytes.clear()
        mgr.restore(1)
    # One manifest, which tells where the step was saved last.
    assert asked.calls["root"] == 1
    assert asked.nbytes["root"] == 0


def test_a_step_that_is_deleted_near_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    saved(tmp_path, 1)
    real, near = LocalStorage.read_block, tmp_path / "disk/1"

    async def read_block(storage: LocalStorage, *args: Any) -> None:
        shutil.rmtree(near, ignore_errors=True)
        await real(storage, *args)

    monkeypatch.setattr(LocalStorage, "read_block", read_block)
    with manager(tmp_path) as mgr:
        assert differences(state_of(1), mgr.restore(1)) == []
    assert warnings_in(caplog, "was deleted while it was read; read instead")


def test_each_place_may_lack_something_else(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for place, leaf in (("disk", "params.kernel"), ("root", "params.embed")):
        flip(tmp_path / place / "1", leaf)
    with manager(tmp_path) as mgr:
        assert differences(state_of(1), mgr.restore(1)) == []


def test_what_is_damaged_everywhere_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for place in ("disk", "root"):
        for leaf in ("params.kernel", "params.embed"):
            if (place, leaf) != ("root", "params.embed"):
                flip(tmp_path / place / "1", leaf)
    with manager(tmp_path) as mgr:
        with pytest.raises(CorruptCheckpointError) as caught:
            mgr.restore(1)
        assert caught.value.leaf == "params.kernel"
        with pytest.raises(CorruptCheckpointError, match=r"params\.kernel"):
            mgr.restore()


def test_another_save_of_the_same_step_is_never_mixed_in(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    near = tmp_path / "disk/1"
    shutil.copytree(near, tmp_path / "kept")
    shutil.rmtree(near)
    shutil.rmtree(tmp_path / "root/1")
    saved(tmp_path, 1, state_of(2))
    shutil.rmtree(near)
    # The disk has the older one.
    shutil.move(tmp_path / "kept", near)
    with manager(tmp_path) as mgr:
        assert differences(state_of(2), mgr.restore(1)) == []
        flip(tmp_path / "root/1", "params.kernel")
        assert differences(state_of(1), mgr.restore(1)) == []
        Delete(data_file_of(near)).apply(near)
        with pytest.raises(CorruptCheckpointError):
            mgr.restore(1)


def test_memory_and_a_save_of_the_same_values(tmp_path: Path, memory: Path) -> None:
    """Two saves have other files; what they hold is the same."""
    tier = SharedMemory(directory=str(memory), flush=False)
    with ckpt.sync.CheckpointManager(tmp_path / "root", tiers=[tier]) as mgr:
        mgr.snapshot(1, state_of(1)).result()
        mgr.save(1, state_of(1)).result()
        near = Path(mgr.metadata(1).info.path)
        assert str(near).startswith(str(memory))
        FlipBit(data_file_of(near), 9).apply(near)
        shutil.rmtree(tmp_path / "root/1/default/array_metadatas")
        assert differences(state_of(1), mgr.restore(1)) == []


def test_a_damaged_file_is_not_taken_over_by_the_next_save(tmp_path: Path) -> None:
    state = state_of(1)
    saved(tmp_path, 1, state)
    near = tmp_path / "disk/1"
    flip(near, "params.kernel")
    with manager(tmp_path, keep=ckpt.keep.Latest(3)) as mgr:
        _, found = mgr.resume(state_of(2))
        mgr.save(2, found).in_root.result(PATIENCE_S)
        assert mgr.verify(2).ok
    assert ckpt.sync.verify(tmp_path / "disk/2").ok
    assert ckpt.sync.verify(tmp_path / "root/2").ok


def test_verify_finds_what_the_nearest_place_lacks(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    near = tmp_path / "disk/1"
    Delete(data_file_of(near)).apply(near)
    with manager(tmp_path) as mgr:
        report = mgr.verify(1)
        assert not report.ok
        assert str(tmp_path / "disk") in str(report)
        assert mgr.metadata(1).info.tiers == (str(tmp_path / "root"),)
