"""The library as a whole on every store: what was saved comes back, whoever copied it where."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    InvalidArgumentError,
    ItemDroppedError,
    NotACheckpointError,
    StepExistsError,
    StepNotFoundError,
    StepPinnedError,
)
from ckpt.testing.compare import differences
from tests.stores.places import Place
from tests.support.trees import abstract, bits, sharded

STAGING = ckpt.Staging(budget_bytes=8 << 20)


def state(seed: int = 0) -> dict[str, Any]:
    """Large and small arrays, on one device and on many, and leaves of other kinds."""
    random = np.random.default_rng(seed)
    # Sorted, as jax makes every dict it maps.
    return {
        "copied": sharded(np.arange(3000.0) + seed),
        "count": seed,
        "host": random.integers(0, 100, (300, 400)),
        "key": jax.random.key(seed),
        "name": f"ü{seed}",
        "small": [jnp.full((5,), seed, jnp.bfloat16) for _ in range(40)],
        "table": sharded(random.random((512, 1024), np.float32), "data", "model"),
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert not differences(wanted, found)


def plain(place: Place, name: str = "run", **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(place.root(name), staging=STAGING, **options)


def keys_below(place: Place, prefix: str) -> list[str]:
    return sorted(key for key in place.objects() if key.startswith(prefix))


def leftovers(place: Place, *steps: int) -> list[str]:
    """What lies below the root, and belongs to none of these steps."""
    known = ["metadata/"]
    for step in steps:
        known += [f"{step}/", f".ckpt-steps/{step}."]
    return [
        key
        for key in keys_below(place, "run/")
        if not key.removeprefix("run/").startswith(tuple(known))
    ]


def test_a_run_is_saved_and_restored_bit_by_bit(place: Place) -> None:
    with plain(place, keep=ckpt.keep.Latest(2), custom_metadata={"run": 7}) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, state(step), metrics={"loss": 1 / step}, custom_metadata={"at": step})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [2, 3]
        assert_same(mgr.restore(3, abstract(state(3))), state(3))
        with pytest.raises(StepExistsError, match="3"):
            mgr.save(3, state(4)).result()
    with plain(place, mode="r") as reader:
        assert reader.latest_step() == 3
        assert reader.metrics(2) == {"loss": 0.5}
        assert reader.metadata(3).info.custom_metadata == {"at": 3}
        assert reader.root_metadata() == {"run": 7}
        found = reader.restore(2)
        assert found.keys() == state(2).keys()
        assert bits(found["table"]) == bits(state(2)["table"])
        for step in (2, 3):
            report = reader.verify(step)
            assert report.ok, report
        with pytest.raises(StepNotFoundError):
            reader.restore(1)


def test_a_step_is_overwritten_and_deleted(place: Place) -> None:
    with plain(place) as mgr:
        mgr.save(1, state(1)).result()
        mgr.save(1, state(2), if_exists="replace").result()
        assert_same(mgr.restore(1, abstract(state(2))), state(2))
        mgr.save(2, items={"a": state(3), "b": {"x": np.arange(1000)}}).result()
        mgr.delete(2, item="a")
        assert mgr.metadata(2).items.keys() == {"b"}
        assert np.array_equal(mgr.restore(2)["b"]["x"], np.arange(1000))
        assert mgr.verify(2).ok
        mgr.delete(1)
        assert mgr.all_steps() == [2]
        mgr.delete(2)
        assert mgr.all_steps() == []
        mgr.save(1, state(5)).result()
        assert mgr.all_steps() == [1]
    if place.proxy is not None:
        assert not leftovers(place, 1)


def test_items_are_kept_for_different_times(place: Place) -> None:
    policies = {"a": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}
    with plain(place, keep=policies) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, items={"a": state(step), "b": {"x": np.arange(1000)}}).result()
            mgr.wait_until_finished()
        assert [mgr.metadata(step).info.items for step in (1, 2, 3)] == [("a",), ("a",), ("a", "b")]
        for step in (1, 2):
            assert mgr.verify(step).ok
            assert_same(mgr.restore(step, abstract({"a": state(step)})), {"a": state(step)})
            with pytest.raises(ItemDroppedError, match="steps that still have it: 3"):
                mgr.restore(step, items=["b"])
    if place.proxy is not None:
        # What the run keeps is written down for people and tools.
        assert leftovers(place, 1, 2, 3) == ["run/.ckpt-run/preservation.json"]
        assert not [key for key in keys_below(place, "run/1/") if "/b/" in key]


def test_a_pinned_step_is_kept(place: Place) -> None:
    with plain(place, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(1, {"x": 1}).result()
        mgr.pin(1, "release")
        mgr.save(2, {"x": 2}).result()
        mgr.save(3, {"x": 3}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [1, 3]
        with pytest.raises(StepPinnedError, match="release"):
            mgr.delete(1)
    with plain(place) as other:
        assert set(other.pins()) == {1}
        assert other.unpin(1, "release")
        other.delete(1)
        assert other.all_steps() == [3]


def test_a_step_saved_in_parts(place: Place) -> None:
    whole = state(4)
    with plain(place) as mgr:
        with mgr.partial(1) as part:
            part.save({"table": whole["table"]})
            assert mgr.all_steps() == []
            part.save({"host": whole["host"], "name": whole["name"]})
        assert mgr.all_steps() == [1]
        with pytest.raises(ZeroDivisionError), mgr.partial(2) as part:  # noqa: PT012
            part.save({"table": whole["table"]})
            raise ZeroDivisionError
        assert mgr.all_steps() == [1]
        found = mgr.restore(1)
        assert np.array_equal(found["host"], whole["host"])
        assert bits(found["table"]) == bits(whole["table"])
        assert mgr.verify(1).ok


def test_an_evaluator_is_handed_every_step(place: Place) -> None:
    with plain(place, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(1, {"x": np.full(10, 1)}).result()
        with ckpt.sync.watch(place.root("run"), poll_interval=0.05, timeout=60) as watch:
            first = next(watch)
            assert first.step == 1
            mgr.save(2, {"x": np.full(10, 2)}).result()
            mgr.wait_until_finished()
            # It is in somebody's hands.
            assert mgr.all_steps() == [1, 2]
            assert np.array_equal(mgr.restore(1)["x"], np.full(10, 1))
            assert next(watch).step == 2
        mgr.save(3, {"x": np.full(10, 3)}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [3]


def test_one_checkpoint_without_a_manager(place: Place) -> None:
    path = place.root("models/final")
    with pytest.raises(NotACheckpointError):
        ckpt.sync.load(path)
    ckpt.sync.save(path, state(1))
    with pytest.raises(StepExistsError):
        ckpt.sync.save(path, state(2))
    assert_same(ckpt.sync.load(path, abstract(state(1))), state(1))
    ckpt.sync.save(path, state(2), if_exists="replace")
    assert_same(ckpt.sync.load(path, abstract(state(2))), state(2))
    assert ckpt.sync.metadata(path).items.keys() == {"default"}
    assert ckpt.sync.verify(path).ok
    with plain(place, "run") as mgr:
        mgr.save(5, state(5)).result()
    assert_same(ckpt.sync.load(place.root("run/5"), abstract(state(5))), state(5))


def test_saves_and_restores_with_asyncio(place: Place) -> None:
    async def main() -> list[int]:
        async with ckpt.CheckpointManager(place.root("run"), staging=STAGING) as mgr:
            commits = [await mgr.save(step, state(step)) for step in (1, 2)]
            cancelled = await mgr.save(3, state(3))
            cancelled.cancel()
            for commit in commits:
                info = await commit
                assert info is not None
                assert info.step in (1, 2)
            try:
                await cancelled
            except CommitCancelledError:
                wanted = [1, 2]
            else:
                wanted = [1, 2, 3]
            assert await mgr.all_steps() == wanted
            assert_same(await mgr.restore(2, abstract(state(2))), state(2))
            return wanted

    wanted = asyncio.run(main())
    if place.proxy is not None:
        assert not leftovers(place, *wanted)


def test_a_step_copied_to_a_disk_is_one_there(bucket: Place, tmp_path: Path) -> None:
    with plain(bucket) as mgr:
        mgr.save(7, state(7), metrics={"loss": 0.5}).result()
        mgr.save(8, {"x": 1}).result()
    bucket.download("run/7", tmp_path / "copy" / "7")
    assert_same(ckpt.sync.load(tmp_path / "copy" / "7", abstract(state(7))), state(7))
    assert ckpt.sync.verify(tmp_path / "copy" / "7").ok
    with ckpt.sync.CheckpointManager(tmp_path / "copy") as mgr:
        assert mgr.all_steps() == [7]
        assert mgr.metrics(7) == {"loss": 0.5}
        assert_same(mgr.restore(7, abstract(state(7))), state(7))
        mgr.save(9, state(9)).result()
        mgr.delete(7)
        assert mgr.all_steps() == [9]


def test_a_step_copied_from_a_disk_is_one_in_the_bucket(bucket: Place, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run", staging=STAGING) as mgr:
        mgr.save(7, state(7)).result()
    bucket.upload(tmp_path / "run" / "7", "copied/7")
    with plain(bucket, "copied") as mgr:
        assert mgr.all_steps() == [7]
        assert_same(mgr.restore(7, abstract(state(7))), state(7))
        assert mgr.verify(7).ok
        mgr.save(8, state(8)).result()
        mgr.delete(7)
        assert mgr.all_steps() == [8]
    left = keys_below(bucket, "copied/7/")
    assert left == [], "objects of a deleted step are left"


def test_orbax_reads_a_downloaded_attempt(bucket: Place, tmp_path: Path) -> None:
    arrays = {name: state(3)[name] for name in ("table", "copied", "host")}
    with plain(bucket) as mgr:
        mgr.save(3, arrays).result()
    bucket.download("run/3", tmp_path / "3")
    [attempt] = [path for path in (tmp_path / "3").iterdir() if path.is_dir()]
    found = ocp.load(attempt, abstract(arrays))
    for name in arrays:
        assert bits(found[name]) == bits(arrays[name]), name


def test_damage_in_the_bucket_is_found(bucket: Place) -> None:
    with plain(bucket) as mgr:
        mgr.save(1, {"a": np.arange(200_000), "b": np.arange(300_000)}).result()
    data_files = [key for key in keys_below(bucket, "run/1/") if "/d/" in key]
    assert data_files
    for key in data_files:
        data = bytearray(bucket.objects()[key])
        data[len(data) // 2] ^= 1
        bucket.put(key, bytes(data))
    with plain(bucket) as mgr:
        report = mgr.verify(1)
        assert not report.ok
        with pytest.raises(ckpt.errors.CorruptCheckpointError, match=r"a|b"):
            mgr.restore(1)


REFUSED: dict[str, Callable[[Place], Any]] = {
    "trash": lambda place: plain(place, trash="/trash"),
    "mode='r+'": lambda place: plain(place, "nothing", mode="r+").all_steps(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_only_disks_can_do_is_refused(bucket: Place, what: str) -> None:
    kind = CheckpointError if what == "mode='r+'" else InvalidArgumentError
    with pytest.raises(kind) as caught:
        REFUSED[what](bucket)
    assert what.split("=", maxsplit=1)[0] in str(caught.value)
    assert bucket.objects() == {}


def test_a_deleted_step_comes_back_from_the_trash(bucket: Place) -> None:
    with plain(bucket, trash="trash") as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": np.arange(50_000) + step}, durable=True)
        before = bucket.objects()
        mgr.delete(1)
        assert mgr.all_steps() == [2]
        assert [each.step for each in mgr.trash.steps()] == [1]
        mgr.trash.undelete(1)
        assert mgr.verify(1).ok
        assert np.array_equal(mgr.restore(1)["w"], np.arange(50_000) + 1)
        assert bucket.objects() == before
        mgr.delete(1)
        assert mgr.trash.empty() == [1]
        assert not [key for key in bucket.objects() if "/1/" in key or ".ckpt-trash" in key]
        assert mgr.verify(2).ok
