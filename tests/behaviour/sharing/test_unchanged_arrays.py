"""Promise: arrays that did not change since the step before are not written again, and still every
step is a whole checkpoint by itself."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest import decode
from ckpt.storage._local import attempts
from tests.support.conditions import until
from tests.support.databases import in_database
from tests.support.trees import assert_same, sharded

State = dict[str, Any]


def values(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def base() -> State:
    """A base of 6 MiB: arrays that are written alone, on a mesh, and packed with others."""
    return {
        "kernel": jnp.array(values(1, 512, 1024)),
        "tiles": sharded(values(2, 512, 1024), "data", "model"),
        "copies": sharded(values(3, 256, 1024)),
        "bias": {f"b{n}": jnp.array(values(n, 1000)) for n in range(100)},
        "half": jnp.array(values(4, 256, 1024)).astype(jnp.bfloat16),
    }


def adapter(seed: int) -> State:
    return {
        "a": jnp.array(values(seed, 64, 64)),
        "b": sharded(values(seed + 1, 64, 64), "data"),
        "step": seed,
    }


def again(tree: State) -> State:
    """The same values in other arrays, as a train step that returns its whole state makes them."""
    return jax.tree.map(lambda x: jnp.copy(x), tree)


def stored(root: Path, step: int) -> tuple[int, int]:
    """Bytes of the data files of a step: those it shares, and those it has written."""
    files = decode((root / str(step) / "ckpt.json").read_bytes(), where="").files
    data = [each for path, each in files.items() if "/d/" in path]
    return sum(f.size for f in data if f.shared), sum(f.size for f in data if not f.shared)


MAKERS: dict[str, Callable[[State], State]] = {
    "the same arrays": lambda frozen: frozen,
    "arrays with the same values": again,
}


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_what_did_not_change_is_not_written_again(
    tmp_path: Path, made: Callable[[State], State]
) -> None:
    frozen, kept = base(), {}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(4):
            kept[step] = {"base": made(frozen), "adapter": adapter(step)}
            info = mgr.save(step, kept[step]).result()
            shared, written = stored(tmp_path, step)
            assert info.statistics.shared_bytes == shared
            assert mgr.metadata(step).info.statistics.shared_bytes == shared
            if step:
                assert shared > 6_000_000
                assert written < 200_000
            else:
                assert (shared, written > 6_000_000) == (0, True)
        for step, state in kept.items():
            assert_same(mgr.restore(step), state)
            assert mgr.verify(step).ok
        # Any step may go first.
        for step in (0, 2):
            mgr.delete(step)
        for step in (1, 3):
            assert_same(mgr.restore(step), kept[step])
            assert mgr.verify(step).ok


def test_arrays_that_are_the_same_objects_are_not_copied_either(tmp_path: Path) -> None:
    frozen = base()
    seen: dict[str, int] = {}

    def count(event: Any) -> None:
        seen[event.phase] = seen.get(event.phase, 0) + event.nbytes

    with ckpt.sync.CheckpointManager(tmp_path, observers=[count]) as mgr:
        mgr.save(0, {"base": frozen, "adapter": adapter(0)}).result()
        assert min(seen["stage"], seen["write"]) > 6_000_000
        seen.clear()
        commit = mgr.save(1, {"base": frozen, "adapter": adapter(1)})
        commit.result()
    assert seen["stage"] < 200_000
    assert seen["write"] < 300_000
    progress = commit.progress
    assert progress.staged == progress.written == progress.total > 6_000_000


def test_a_change_of_one_bit_is_written(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(3):
            bits = values(1, 512, 1024).view(np.uint32)
            bits[step * 100, 7] ^= 1 << step
            state = {"base": again(frozen) | {"kernel": jnp.array(bits.view(np.float32))}}
            mgr.save(step, state).result()
            found = mgr.restore(step)["base"]["kernel"]
            assert np.array_equal(np.asarray(found).view(np.uint32), bits)
        shared, written = stored(tmp_path, 2)
        # The kernel is written anew each time, and nothing else.
        assert 2 << 20 <= written < 3 << 20
        assert shared > 4 << 20


def test_what_changed_once_shares_again(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, frozen).result()
        other = frozen | {"kernel": jnp.array(values(9, 512, 1024))}
        for step in (1, 2, 3):
            mgr.save(step, again(other)).result()
        assert stored(tmp_path, 1)[1] >= 2 << 20
        # The index of a step is its own.
        assert stored(tmp_path, 3)[1] < 100_000
        for step in (1, 3):
            assert_same(mgr.restore(step), other)


@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_compressed_arrays_share_files_too(
    tmp_path: Path, codec: Any, made: Callable[[State], State]
) -> None:
    frozen = {name: base()[name] for name in ("kernel", "tiles", "bias")}
    formats = {"kernel": ckpt.ArrayFormat(compression=codec)}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        for step in range(3):
            state = made(frozen) | {"a": jnp.array(values(step, 64, 64))}
            mgr.save(step, state).result()
            if step:
                shared, written = stored(tmp_path, step)
                assert shared > 3_500_000
                assert written < 100_000
            assert_same(mgr.restore(step), state)
            assert mgr.verify(step).ok


def test_a_copy_of_one_step_is_a_whole_checkpoint(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in range(3):
            mgr.save(step, {"base": frozen, "adapter": adapter(step)}).result()
    shutil.copytree(tmp_path / "run" / "2", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    assert ckpt.sync.verify(tmp_path / "copy").ok
    assert_same(ckpt.sync.load(tmp_path / "copy"), {"base": frozen, "adapter": adapter(2)})


def test_steps_of_many_saves_under_way_share_with_those_that_are_committed(tmp_path: Path) -> None:
    frozen = base()
    options: dict[str, Any] = {"keep": ckpt.keep.Latest(1)}
    with ckpt.sync.CheckpointManager(tmp_path, **options) as mgr:
        for step in range(12):
            mgr.save(step, {"base": frozen, "adapter": adapter(step)})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [11]
        assert mgr.verify(11).ok
        assert_same(mgr.restore(11), {"base": frozen, "adapter": adapter(11)})


def _gone(root: Path) -> None:
    shutil.rmtree(root / "0")


def _cut(root: Path) -> None:
    for path in (root / "0" / "default" / "d").iterdir():
        os.truncate(path, path.stat().st_size // 2)


def _a_link(root: Path) -> None:
    for path in (root / "0" / "default" / "d").iterdir():
        path.rename(root / path.name)
        path.symlink_to(root / path.name)


@pytest.mark.parametrize("harm", [_gone, _cut, _a_link])
@pytest.mark.parametrize("made", MAKERS.values(), ids=MAKERS)
def test_a_step_before_that_is_gone_or_damaged_is_not_shared(
    tmp_path: Path, made: Callable[[State], State], harm: Callable[[Path], None]
) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, frozen).result()
        harm(tmp_path)
        mgr.save(1, made(frozen)).result()
        assert stored(tmp_path, 1)[0] == 0
        assert mgr.verify(1).ok
        assert_same(mgr.restore(1), frozen)


REFUSALS = ["EXDEV", "EMLINK", "EPERM", "ENOTSUP", "EIO", "EACCES", "ESTALE", "ENOENT"]


@pytest.mark.parametrize("name", REFUSALS)
def test_where_the_file_system_makes_no_links_all_is_written(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen, number = base(), getattr(errno, name)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, frozen).result()
        monkeypatch.setattr(os, "link", refuse)
        for step, state in enumerate((frozen, again(frozen)), 1):
            mgr.save(step, state).result()
            assert stored(tmp_path, step)[0] == 0
            assert mgr.verify(step).ok
    said = [each for each in caplog.messages if "makes no hard links" in each]
    assert len(said) == (name in ("EXDEV", "EPERM", "ENOTSUP"))


def test_sharing_can_be_switched_off(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(ckpt.storage.Local(tmp_path, hard_links=False)) as mgr:
        for step in range(2):
            mgr.save(step, frozen).result()
    assert stored(tmp_path, 1)[0] == 0
    for path in (tmp_path / "1").rglob("*"):
        assert path.is_dir() or path.stat().st_nlink == 1


def test_a_save_that_shares_nothing_does_not_wait_for_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = {"kernel": jnp.array(values(1, 512, 1024))}
    begun, begin = threading.Event(), attempts.begin

    def begin_late(*args: Any) -> Any:
        assert begun.wait(60)
        return begin(*args)

    for shares in (False, True):
        place = ckpt.storage.Local(tmp_path / str(shares), hard_links=shares)
        with ckpt.sync.CheckpointManager(place) as mgr:
            mgr.save(0, frozen).result()
            begun.clear()
            with monkeypatch.context() as patched:
                patched.setattr(attempts, "begin", begin_late)
                # It returns while there is no attempt yet, which a file could be put into.
                commit = mgr.save(1, frozen)
                begun.set()
                commit.result()
            assert mgr.verify(1).ok
            assert_same(mgr.restore(1), frozen)


def test_the_number_of_files_does_not_grow_with_the_number_of_saves(tmp_path: Path) -> None:
    leaves = {f"w{n}": jnp.array(values(n, 2000)) for n in range(300)}
    choice = np.random.default_rng(0)
    counts = []
    with ckpt.sync.CheckpointManager(tmp_path, keep=ckpt.keep.Latest(1)) as mgr:
        for step in range(40):
            for n in choice.choice(300, 6, replace=False):
                leaves[f"w{n}"] = jnp.array(values(1000 * step + n, 2000))
            made = leaves if step % 2 else again(leaves)
            mgr.save(step, made).result()
            folder = tmp_path / str(step) / "default" / "d"
            counts.append(len(list(folder.iterdir())))
        assert mgr.verify(39).ok
        assert_same(mgr.restore(39), leaves)
    # Sixteen small files at most are taken over, and a few written: those, and the index.
    assert max(counts) <= 24


def test_an_index_is_not_written_before_all_places_are_known(tmp_path: Path) -> None:
    """An item that is planned late, while another one already needs all staging memory."""
    staging = ckpt.Staging(budget_bytes=4 << 20)
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as mgr:
        for step in range(3):
            kept = {f"k{n}": jnp.array(values(n, 256, 700)) for n in range(5)}
            changed = {f"c{n}": jnp.array(values(10 * step + n, 256, 700)) for n in range(3)}
            late = kept | changed | {f"s{n}": n for n in range(10_000)}
            large = {f"x{n}": jnp.array(values(100 * step + n, 512, 1024)) for n in range(6)}
            mgr.save(step, items={"large": large, "late": late}).result()
            for name, leaf in (kept | changed).items():
                found = in_database(tmp_path / str(step) / "late", name)
                assert np.array_equal(found, np.asarray(leaf)), (step, name)


def test_a_manager_keeps_no_array_alive(tmp_path: Path) -> None:
    frozen = {"kernel": jnp.array(values(1, 512, 1024))}
    seen = weakref.ref(frozen["kernel"])
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, frozen).result()
        mgr.wait_until_finished()
        del frozen
        until(lambda: seen() is None)


def test_a_step_that_is_replaced_may_share_with_itself(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for seed in range(3):
            state = {"base": frozen, "adapter": adapter(seed)}
            mgr.save(5, state, if_exists="replace").result()
            assert_same(mgr.restore(5), state)
            assert mgr.verify(5).ok
        assert stored(tmp_path, 5)[0] > 6_000_000


def test_a_failed_save_does_no_harm_to_the_step_it_shares_with(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, frozen).result()
        commit = mgr.save(1, {**frozen, "more": jnp.array(values(8, 512, 1024))})
        commit.cancel()
        commit.exception()
        mgr.save(2, frozen).result()
        assert mgr.verify(0).ok
        assert mgr.verify(2).ok
        assert_same(mgr.restore(0), frozen)


def test_several_items_share_each_for_itself(tmp_path: Path) -> None:
    frozen = base()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(3):
            items = {"params": frozen, "opt": adapter(step), "config": {"rate": 0.1}}
            mgr.save(step, items=items).result()
            assert_same(mgr.restore(step)["params"], frozen)
            assert mgr.verify(step).ok
    assert stored(tmp_path, 2)[0] > 6_000_000


def test_random_keys_and_scalars_are_those_of_each_step(tmp_path: Path) -> None:
    key = jax.random.key(3)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(3):
            state = {"frozen": base(), "key": key, "other": jax.random.key(step), "count": step}
            mgr.save(step, state).result()
        for step in range(3):
            found = mgr.restore(step)
            assert found["count"] == step
            assert bool(jnp.all(jax.random.key_data(found["key"]) == jax.random.key_data(key)))
            other = jax.random.key_data(jax.random.key(step))
            assert bool(jnp.all(jax.random.key_data(found["other"]) == other))


@pytest.mark.parametrize("compressed", [False, True])
def test_the_first_save_after_a_restore_shares_with_the_step_that_was_restored(
    tmp_path: Path, compressed: bool
) -> None:
    formats = {"base.kernel": ckpt.ArrayFormat(compression="zstd")} if compressed else None
    first = {"base": base(), "adapter": adapter(0)}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        mgr.save(0, first).result()
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        state = mgr.restore(like=first)
        later = {**state, "adapter": adapter(1)}
        for step in (1, 2):
            mgr.save(step, later).result()
            shared, written = stored(tmp_path, step)
            assert shared > 5_000_000
            assert written < 200_000
        mgr.delete(0)
        for step in (1, 2):
            assert mgr.verify(step).ok
            assert_same(mgr.restore(step), later)


def test_after_a_restore_other_shapes_dtypes_and_formats_are_written(tmp_path: Path) -> None:
    first = {"a": jnp.array(values(1, 512, 1024)), "b": jnp.array(values(2, 512, 1024))}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, first).result()
    formats = {"b": ckpt.ArrayFormat(dtype="bfloat16")}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        found = mgr.restore()
        mgr.save(1, {"a": found["a"].reshape(1024, 512), "b": found["b"]}).result()
        assert stored(tmp_path, 1)[0] == 0
        assert mgr.verify(1).ok
        restored = mgr.restore(1)
        assert restored["a"].shape == (1024, 512)
        assert restored["b"].dtype == jnp.bfloat16


def test_nothing_is_kept_in_mind_where_nothing_can_be_shared(tmp_path: Path) -> None:
    root = ckpt.storage.Local(tmp_path, hard_links=False)
    frozen = {"kernel": jnp.array(values(1, 512, 1024))}
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in range(2):
            mgr.save(step, frozen).result()
            assert_same(mgr.restore(step), frozen)
        assert mgr._service.engine.base_step is None
