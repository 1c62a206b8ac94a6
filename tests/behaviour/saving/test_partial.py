"""Saves in parts: several calls that make one step, published at once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._format.manifest import decode
from ckpt._format.manifest_head import FILE_NAME
from tests.behaviour.saving.partial_saves import (
    BACKENDS,
    PATIENCE_S,
    STAGING,
    fails,
    in_parts,
    merged,
    names,
    on,
    plain,
)
from tests.reliability.scenarios import leftovers
from tests.support.faults import FaultyFiles
from tests.support.trees import assert_same, sharded, structure


def parts_of_state() -> list[dict[str, Any]]:
    """Parts of a state; the keys are neither added in their order nor at one level."""
    same = jnp.arange(4.0)
    return [
        {"z": {"kernel": sharded(np.arange(64.0).reshape(8, 8), "data", "model"), "tied": same}},
        {"a": {"layers": [jnp.ones(3), (np.arange(200_000, dtype=np.int32), None)]}},
        {"z": {"again": same, "more": same}, "key": jax.random.key(7), "empty": {}},
        {"a": {"table": sharded(np.arange(1 << 19, dtype=np.float32).reshape(1024, -1), "data")}},
        {"ordered": OrderedDict(y=1, x=2.5), "count": 3, "text": "x", "big": 1 << 70},
        {"ordered": OrderedDict(w=jnp.int8(1)), "empty": {"inner": {}}},
        {"default": defaultdict(list, y=jnp.ones(2))},
        {"default": defaultdict(list, x=jnp.zeros(5))},
    ]


# --- An ordinary checkpoint -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 saved in parts, step 2 at once."""
    root = tmp_path_factory.mktemp("parts") / "run"
    with plain(root, staging=STAGING) as mgr:
        with mgr.partial(1, metrics={"loss": 0.5}, custom_metadata={"git": "abc"}) as part:
            for each in parts_of_state():
                part.save(each)
        mgr.save(2, merged(parts_of_state()))
    return root


def test_it_is_the_step_that_saving_at_once_gives(run: Path) -> None:
    whole = merged(parts_of_state())
    with plain(run, mode="r") as mgr:
        found = mgr.restore(1)
        for tree in (found, onto := mgr.restore(1, whole), wanted := dict(whole)):
            assert (jax.random.key_data(tree.pop("key")) == jnp.array([0, 7])).all()
        assert_same(found, wanted)
        assert_same(onto, wanted)
        report = mgr.verify(1)
        assert report, report
        one, two = mgr.metadata(1), mgr.metadata(2)
    assert one.info.metrics == {"loss": 0.5}
    assert one.info.custom_metadata == {"git": "abc"}
    assert one.unnamed
    # Arrays that several parts have are stored with each.
    assert one.info.nbytes == two.info.nbytes + jnp.arange(4.0).nbytes
    assert found["z"]["again"] is found["z"]["more"]
    entries = [
        decode((run / str(step) / FILE_NAME).read_bytes(), where="").items["default"]
        for step in (1, 2)
    ]
    assert entries[0].nodes == entries[1].nodes
    assert [each.name for each in entries[0].leaves] == [each.name for each in entries[1].leaves]
    assert entries[0].shardings == entries[1].shardings
    files = {path.relative_to(run / "1").as_posix() for path in (run / "1").rglob("*")}
    listed = decode((run / "1" / FILE_NAME).read_bytes(), where="").files
    assert {f for f in files if (run / "1" / f).is_file()} == {*listed, FILE_NAME}


def test_orbax_reads_it(run: Path) -> None:
    whole = merged(parts_of_state())
    for step in (1, 2):
        found = ocp.load(run / str(step))
        assert_same(found["z"]["kernel"], whole["z"]["kernel"])
        assert_same(found["a"]["table"], whole["a"]["table"])
        assert_same(found["a"]["layers"][1][0], whole["a"]["layers"][1][0])
        assert found["ordered"] == {"y": 1, "x": 2.5, "w": 1}
        assert (found["count"], found["text"]) == (3, "x")
    shown = [ocp.metadata(run / str(step)).metadata for step in (1, 2)]
    assert structure(shown[0]) == structure(shown[1])


def test_tensorstore_reads_it(run: Path) -> None:
    arrays = {"z.kernel": np.arange(64.0).reshape(8, 8), "a.layers.1.0": np.arange(200_000)}
    for name, array in arrays.items():
        spec = {"driver": "zarr3", "kvstore": f"file://{run}/1/default/|ocdbt:{name}/"}
        found = ts.open(spec, open=True).result().read().result()
        assert (np.asarray(found) == array).all()


def test_leaves_that_are_one_array_may_change_their_order(tmp_path: Path) -> None:
    same, other = jnp.arange(4.0), np.arange(1 << 17)
    parts = [
        OrderedDict(z={"a": jnp.zeros(2)}, y={"b": 1}),
        OrderedDict(x=same, w=other, y={"c": other}, z={"q": same, "r": other}),
    ]
    with plain(tmp_path) as mgr:
        in_parts(mgr, 1, *parts)
        wanted = OrderedDict(
            z={"a": jnp.zeros(2), "q": same, "r": other}, y={"b": 1, "c": other}, x=same, w=other
        )
        found = mgr.restore(1)
        for tree in (found, mgr.restore(1, wanted)):
            assert_same(tree, wanted)
        assert found["z"]["q"] is found["x"]
        assert found["z"]["r"] is found["y"]["c"] is found["w"]
        assert mgr.verify(1)
        shown = mgr.metadata(1)
        assert [shown.leaves["default"][name].same_as for name in ("z.q", "x")] == [None, "z.q"]
        assert shown.info.nbytes == same.nbytes + other.nbytes + 8
    found = ocp.load(tmp_path / "1")
    assert_same(found["z"]["r"], other)
    assert_same(found["w"], other)


def test_named_items_and_parts_of_them(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save(items={"model": {"a": jnp.ones(3)}, "note": "text"})
            part.save(items={"model": {"b": 2}, "rng": np.random.default_rng(1)})
        assert part.info.items == ("model", "note", "rng")
        found = mgr.restore(1)
        assert_same(found["model"], {"a": jnp.ones(3), "b": 2})
        assert found["note"] == "text"
        assert found["rng"].random() == np.random.default_rng(1).random()
        assert mgr.verify(1)


def test_what_is_no_dict_can_be_saved_once(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for step, state in enumerate([jnp.arange(3), [1, 2], {}]):
            with mgr.partial(step) as part:
                part.save(state)
            assert_same(mgr.restore(step), state)
            assert mgr.verify(step)


def test_formats_count_over_all_parts(tmp_path: Path) -> None:
    zeros = np.zeros((256, 1024), np.float32)
    formats = {"b.*": ckpt.ArrayFormat(compression="zstd")}
    with plain(tmp_path, formats=formats) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": {"w": zeros}})
            part.save({"b": {"w": zeros, "v": zeros + 1}})
        assert mgr.verify(1)
        assert_same(mgr.restore(1), {"a": {"w": zeros}, "b": {"w": zeros, "v": zeros + 1}})
        size = sum(path.stat().st_size for path in (tmp_path / "1").rglob("d/*"))
        assert zeros.nbytes < size < 1.5 * zeros.nbytes
        with pytest.raises(errors.InvalidArgumentError, match=r"'b\.\*' covers no leaf"):
            in_parts(mgr, 2, {"a": {"w": zeros}})
        assert mgr.all_steps() == [1]


def test_each_call_reports_how_long_it_was_blocked(tmp_path: Path) -> None:
    events: list[Any] = []
    with plain(tmp_path, observers=[events.append]) as mgr, mgr.partial(1) as part:
        for number in range(3):
            part.save({f"k{number}": number})
    phases = [event.phase for event in events if event.step == 1]
    assert phases.count("blocked") == 3
    assert phases.count("publish") == phases.count("end") == 1
    taken = part.info.statistics
    blocked = [e.ended_ns - e.began_ns for e in events if e.phase == "blocked"]
    assert taken.blocked is not None
    assert taken.blocked >= sum(blocked) / 1e9


# --- Memory ---------------------------------------------------------------------------------------


def test_a_part_is_the_caller_s_again_when_its_call_returns(tmp_path: Path) -> None:
    with plain(tmp_path, staging=STAGING) as mgr:
        with mgr.partial(1) as part:
            for number in range(3):
                host, device = np.full(1 << 18, number), jnp.full((1 << 18,), number)
                part.save({f"k{number}": {"host": host, "device": device}})
                host[...] = -1
                device.delete()
        found = mgr.restore(1)
        for number in range(3):
            for leaf in found[f"k{number}"].values():
                assert (np.asarray(leaf) == number).all()


def test_a_state_larger_than_the_budget_is_never_held(tmp_path: Path) -> None:
    with plain(tmp_path, staging=STAGING) as mgr:
        arena = mgr._service.engine.arena
        with mgr.partial(1) as part:
            for number in range(6):
                layer = np.full(1 << 20, number, np.uint8)
                gone = weakref.ref(layer)
                part.save({f"layer{number}": layer})
                del layer
                # A worker thread may still be about to forget it.
                limit = time.monotonic() + PATIENCE_S
                while gone() is not None and time.monotonic() < limit:
                    os.sched_yield()
                assert gone() is None, "a part is kept after its call"
                assert arena.used <= arena.capacity
        assert arena.capacity < 2 << 20
        assert arena.used == 0
        assert part.info.nbytes == 6 << 20
        assert (mgr.restore(1)["layer5"] == 5).all()


def test_other_saves_go_on_beside_it(tmp_path: Path) -> None:
    rows = np.arange(1 << 19, dtype=np.int32)
    with plain(tmp_path, staging=STAGING) as mgr:
        with mgr.partial(100) as part:
            for number in range(4):
                part.save({f"k{number}": rows + number})
                commit = mgr.save(number, {"w": rows + number})
            commit.result(PATIENCE_S)
            assert mgr.all_steps() == [0, 1, 2, 3]
            mgr.wait_until_finished()
            assert mgr.is_saving_in_progress()
        assert mgr.all_steps() == [0, 1, 2, 3, 100]
        assert (mgr.restore(100)["k3"] == rows + 3).all()
        assert not mgr.is_saving_in_progress()


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr, plain(tmp_path) as other:
        part = mgr.partial(1)
        assert names(tmp_path) == set(), "it began before its first call"
        part.save({"a": jnp.ones(1 << 16)})
        part.save({"b": 1})
        assert other.all_steps() == mgr.all_steps() == []
        with pytest.raises(ckpt.CheckpointError, match="not published yet: read info after"):
            _ = part.info
        # Its writer lives, so nobody takes it away.
        with plain(tmp_path):
            assert len(leftovers(tmp_path)) == 2
        info = part.finalize()
        assert info is part.info
        assert info.step == part.step == 1
        assert names(tmp_path) == {"1"}
        assert other.all_steps() == [1]


def test_it_is_over_when_it_is_finalized(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": 1})
            part.finalize()
        for call in (lambda: part.save({"b": 1}), part.finalize, part.discard):
            with pytest.raises(errors.ClosedError, match="finalized already; start another one"):
                call()
        assert mgr.restore(1) == {"a": 1}


def test_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"state": {"b": 1}, "items": {"x": 1}},
        {"items": {}},
        {"items": {"../x": 1}},
        {"items": {"x": {"b": 1}}},
    ]
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": 1})
            for arguments in wrong:
                with pytest.raises(errors.InvalidArgumentError):
                    part.save(**arguments)
            part.save({"b": 2})
        assert mgr.restore(1) == {"a": 1, "b": 2}
        with mgr.partial(2) as part:
            part.save(items={"x": {"a": 1}})
            with pytest.raises(errors.InvalidArgumentError, match=r"names: give this one as items"):
                part.save({"b": 1})
        for options in ({"metrics": 3}, {"custom_metadata": object()}):
            with pytest.raises(errors.InvalidArgumentError):
                mgr.partial(3, **options)
        with pytest.raises(errors.InvalidArgumentError, match="step=-1"):
            mgr.partial(-1)


def test_policies_do_not_refuse_it_and_delete_after_it(tmp_path: Path) -> None:
    with plain(tmp_path, save_when=ckpt.save_when.EverySteps(10), keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(0, {"a": 1}).result()
        with mgr.partial(7) as part:
            part.save({"a": 1})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [7]


def test_it_keeps_its_manager(tmp_path: Path) -> None:
    part = plain(tmp_path).partial(1)
    gc.collect()
    part.save({"a": 1})
    gc.collect()
    part.finalize()
    assert names(tmp_path) == {"1"}


# --- asyncio and trio -----------------------------------------------------------------------------


@BACKENDS
def test_in_asynchronous_code(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            async with mgr.partial(1) as part:
                await part.save({"a": {"x": jnp.ones(3)}})
                await part.save({"a": {"y": 2}})
                assert await mgr.all_steps() == []
            assert part.info.step == part.step == 1
            assert_same(await mgr.restore(1), {"a": {"x": jnp.ones(3), "y": 2}})
            explicit = mgr.partial(2)
            await explicit.save(items={"a": 1})
            assert (await explicit.finalize()).items == ("a",)
            given_up = mgr.partial(3)
            await given_up.save({"a": 1})
            await given_up.discard()
            with pytest.raises(errors.ClosedError):
                await given_up.save({"b": 1})
            with contextlib.suppress(ZeroDivisionError):
                async with mgr.partial(4) as part:
                    await part.save({"a": 1})
                    fails()
            assert names(tmp_path) == {"1", "2"}

    on(backend, main)


@BACKENDS
def test_tasks_may_save_parts_at_once(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with (
            ckpt.CheckpointManager(tmp_path, staging=STAGING) as mgr,
            mgr.partial(1) as part,
            anyio.create_task_group() as tasks,
        ):
            for number in range(8):
                tasks.start_soon(part.save, {f"k{number}": np.full(1 << 17, number)})
        found = ckpt.sync.load(tmp_path / "1")
        assert sorted(found) == [f"k{number}" for number in range(8)]
        assert all((found[f"k{number}"] == number).all() for number in range(8))

    on(backend, main)


@BACKENDS
def test_tasks_that_save_parts_while_it_is_ended_are_told(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        told: list[BaseException] = []

        async def hear(call: Callable[..., Any], *arguments: Any) -> None:
            with pytest.raises((errors.ClosedError, errors.InvalidArgumentError)) as caught:
                await call(*arguments)
            told.append(caught.value)

        begun, held = threading.Event(), threading.Event()

        def slow(_: Any) -> None:
            begun.set()
            held.wait(PATIENCE_S)

        async with ckpt.CheckpointManager(tmp_path) as mgr:
            part = mgr.partial(1)
            with FaultyFiles(tmp_path, slow, sync=False):
                async with anyio.create_task_group() as tasks:
                    # Nothing can be added to it before it is open.
                    for number in range(10):
                        tasks.start_soon(hear, part.save, {f"k{number}": 1})
                    await anyio.to_thread.run_sync(begun.wait, PATIENCE_S)
                    tasks.start_soon(hear, part.finalize)
                    await anyio.wait_all_tasks_blocked()
                    held.set()
            assert await mgr.all_steps() == []
        assert len(told) == 11
        (ended,) = (each for each in told if isinstance(each, errors.InvalidArgumentError))
        assert "without any part" in str(ended)

    on(backend, main)
    assert names(tmp_path) == set()


def test_its_lease_is_renewed_while_it_is_open(tmp_path: Path) -> None:
    async def main() -> None:
        timeouts = ckpt.Timeouts(lease=0.2)
        async with (
            ckpt.CheckpointManager(tmp_path, timeouts=timeouts) as mgr,
            mgr.partial(1) as part,
        ):
            await part.save({"a": 1})
            # The call returns when its snapshot is safe, and the attempt is opened beside it.
            while not (leases := list(tmp_path.glob(".ckpt-lease-*"))):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            (lease,) = leases
            first = lease.stat().st_mtime_ns
            while lease.stat().st_mtime_ns == first:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await part.save({"b": 1})

    on("asyncio", main)
    assert names(tmp_path) == {"1"}
