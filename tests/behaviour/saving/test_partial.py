"""Saves in parts: several calls that make one step, published at once or not at all."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._api.partial import PartialSave
from ckpt._engine.plan_cache import PlanCache
from ckpt._format.manifest import FILE_NAME, ItemEntry, decode
from ckpt._format.ocdbt import KeyValue
from ckpt._plan.item_reports import (
    ItemReport,
    PlannedTree,
    fill_entry,
    key_values,
    merge_reports,
    report_chunks,
)
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.merged_parts import TreeParts, merge_parts
from ckpt._tree.flatten import describe
from ckpt.policies import FixedInterval, LatestN
from ckpt.testing.faults import Fail, FaultyFiles, named
from ckpt.testing.strategies import keys, python_scalars
from tests.reliability import faults
from tests.reliability.scenarios import Scenario, items_of, leftovers
from tests.support.trees import assert_same, sharded

PATIENCE_S = 60
# Little enough that a part of a megabyte has several chunks and files, and does not fit.
STAGING = ckpt.Staging(budget_bytes=1 << 20)
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def plain(root: Path, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **options)


def in_parts(mgr: ckpt.sync.CheckpointManager, step: int, *parts: Any) -> Any:
    """Save trees as parts of a step, or do what functions do with it."""
    with mgr.partial(step) as part:
        for each in parts:
            each(part) if callable(each) else part.save(each)
    return part


def named_items(items: dict[str, Any]) -> Callable[[Any], None]:
    return lambda part: part.save(items=items)


def fails(*_: Any) -> None:
    raise ZeroDivisionError


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) - {"metadata"} if root.exists() else set()


def on(backend: str, main: Callable[[], Any]) -> None:
    async def limited() -> None:
        with anyio.fail_after(PATIENCE_S):
            await main()

    anyio.run(limited, backend=backend)


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


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    def add(into: dict[Any, Any], part: dict[Any, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                empty = copy.copy(value)
                empty.clear()
                add(into.setdefault(key, empty), value)
            else:
                into[key] = value

    whole: dict[str, Any] = type(parts[0])()
    for part in parts:
        add(whole, part)
    return whole


# --- An ordinary checkpoint -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 saved in parts, step 2 at once."""
    root = tmp_path_factory.mktemp("parts") / "run"
    with plain(root, staging=STAGING) as mgr:
        with mgr.partial(1, metrics={"loss": 0.5}, metadata={"git": "abc"}) as part:
            for each in parts_of_state():
                part.save(each)
        mgr.save(2, merged(parts_of_state()))
    return root


def test_it_is_the_step_that_saving_at_once_gives(run: Path) -> None:
    whole = merged(parts_of_state())
    with plain(run, read_only=True) as mgr:
        found = mgr.restore(1)
        for tree in (found, onto := mgr.restore(1, whole), wanted := dict(whole)):
            assert (jax.random.key_data(tree.pop("key")) == jnp.array([0, 7])).all()
        assert_same(found, wanted)
        assert_same(onto, wanted)
        report = mgr.verify(1)
        assert report, report
        one, two = mgr.metadata(1), mgr.metadata(2)
    assert one.info.metrics == {"loss": 0.5}
    assert one.info.metadata == {"git": "abc"}
    assert one.unnamed
    # Arrays that several parts have are stored with each.
    assert one.info.nbytes == two.info.nbytes + jnp.arange(4.0).nbytes
    assert found["z"]["again"] is found["z"]["more"]
    entries = [
        decode((run / str(step) / FILE_NAME).read_bytes(), where="").items["state"]
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
    assert jax.tree.structure(shown[0]) == jax.tree.structure(shown[1])


def test_tensorstore_reads_it(run: Path) -> None:
    arrays = {"z.kernel": np.arange(64.0).reshape(8, 8), "a.layers.1.0": np.arange(200_000)}
    for name, array in arrays.items():
        spec = {"driver": "zarr3", "kvstore": f"file://{run}/1/state/|ocdbt:{name}/"}
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
        assert [shown.leaves["state"][name].same_as for name in ("z.q", "x")] == [None, "z.q"]
        assert shown.info.nbytes == same.nbytes + other.nbytes + 8
    found = ocp.load(tmp_path / "1")
    assert_same(found["z"]["r"], other)
    assert_same(found["w"], other)


def test_named_items_and_parts_of_them(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save(items={"model": {"a": jnp.ones(3)}, "note": "text"})
            part.save(items={"model": {"b": 2}, "rng": np.random.default_rng(1)})
        assert part.info is not None
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
    assert part.info is not None
    taken = part.info.statistics
    assert taken is not None
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
        arena = mgr._service._engine.arena
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
        assert part.info is not None
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


# --- All or nothing -------------------------------------------------------------------------------


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr, plain(tmp_path) as other:
        part = mgr.partial(1)
        assert names(tmp_path) == set(), "it began before its first call"
        part.save({"a": jnp.ones(1 << 16)})
        part.save({"b": 1})
        assert other.all_steps() == mgr.all_steps() == []
        assert part.info is None
        # Its writer lives, so nobody takes it away.
        with plain(tmp_path):
            assert len(leftovers(tmp_path)) == 2
        info = part.finalize()
        assert info is part.info
        assert info.step == part.step == 1
        assert names(tmp_path) == {"1"}
        assert other.all_steps() == [1]


def test_an_error_in_the_block_discards_all(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        kept: list[Any] = []
        with pytest.raises(ZeroDivisionError) as caught:
            in_parts(mgr, 1, kept.append, {"a": jnp.ones(3)}, fails)
        assert not hasattr(caught.value, "__notes__")
        assert names(tmp_path) == set()
        (part,) = kept
        assert part.info is None
        with pytest.raises(errors.ClosedError, match="step 1: this partial save was discarded"):
            part.save({"b": 1})


def test_it_is_discarded_when_asked_to_be(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": 1})
            part.discard()
            assert names(tmp_path) == set()
            part.discard()
        never = mgr.partial(2)
        never.discard()
        for each in (part, never):
            for call in (lambda: each.save({"a": 1}), each.finalize, each.__enter__):  # noqa: B023
                with pytest.raises(errors.ClosedError, match="discarded"):
                    call()
        assert mgr.all_steps() == []


def test_it_is_over_when_it_is_finalized(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": 1})
            part.finalize()
        for call in (lambda: part.save({"b": 1}), part.finalize, part.discard):
            with pytest.raises(errors.ClosedError, match="finalized already; start another one"):
                call()
        assert mgr.restore(1) == {"a": 1}


CONFLICTS: dict[str, tuple[Any, Any, str]] = {
    "a leaf twice": ({"a": {"b": 1}}, {"a": {"b": 2}}, "leaf 'a.b': a leaf was given where"),
    "a dict for a leaf": ({"a": 1}, {"a": {"b": 2}}, "leaf 'a': a node of kind 'dict' was given"),
    "a leaf for a dict": ({"a": {"b": 1}}, {"a": 1}, "earlier part has a node of kind 'dict'"),
    "a list twice": ({"a": {"x": [1]}}, {"a": {"x": [2]}}, "leaf 'a.x': a node of kind 'list'"),
    "None twice": ({"a": None}, {"a": None}, "leaf 'a': a node of kind 'none'"),
    "a single leaf": (1, {"a": 2}, "a node of kind 'dict' was given where an earlier part has a"),
    "another dict": ({"a": {}}, {"a": OrderedDict()}, "kind 'ordered_dict' was given"),
    "another factory": (
        {"a": defaultdict(list)},
        {"a": defaultdict(int)},
        "'default_dict' (int) was given where an earlier part has a node of kind 'default_dict'",
    ),
    "keys of no order": ({"a": {1: 1}}, {"a": {"b": 2}}, "leaf 'a': its keys cannot stand beside"),
    "one key": ({"a": {1: 1}}, {"a": {True: 2}}, "leaf 'a.1': a leaf was given"),
}


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_what_is_there_already_is_named_and_all_discarded(tmp_path: Path, conflict: str) -> None:
    first, second, message = CONFLICTS[conflict]
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            in_parts(mgr, 1, first, second)
        assert message in str(caught.value)
        assert caught.value.item == "state"
        assert names(tmp_path) == set()


def test_an_item_of_another_kind_cannot_come_twice(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for first, second in [("text", "more"), ({"a": 1}, "text"), ("text", {"a": 1})]:
            with pytest.raises(errors.InvalidArgumentError, match="only trees of") as caught:
                in_parts(mgr, 1, named_items({"x": first}), named_items({"x": second}))
            assert caught.value.item == "x"
        assert names(tmp_path) == set()


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
        for options in ({"metrics": 3}, {"metadata": object()}):
            with pytest.raises(errors.InvalidArgumentError):
                mgr.partial(3, **options)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match="step=-1"):
            mgr.partial(-1)


def test_one_without_parts_is_an_error(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.InvalidArgumentError, match="without any part"):
            in_parts(mgr, 1)
        assert names(tmp_path) == set()


def test_a_part_that_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            late = part._save.check_part({"a": 1}, None)
            with pytest.raises(errors.InvalidArgumentError, match="without any part"):
                part.finalize()
            with pytest.raises(errors.ClosedError, match="discarded already"):
                part._save.add(late)
        assert names(tmp_path) == set()
        with mgr.partial(2) as part:
            part.save({"b": 1})
            late = part._save.check_part({"a": 1}, None)
            part.finalize()
            with pytest.raises(errors.ClosedError, match="finalized already"):
                part._save.add(late)
        assert mgr.restore(2) == {"b": 1}


def test_a_step_without_items_is_never_published(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part._save.loop.submit(part._save._finish)
            with pytest.raises(errors.InvalidArgumentError, match="there is no item to save"):
                part._save.commit.result(PATIENCE_S)
            part.discard()
        assert names(tmp_path) == set()


def test_an_end_beside_parts_gives_a_whole_step_or_none(tmp_path: Path) -> None:
    outcomes: list[str] = []
    with FaultyFiles(tmp_path, sync=False), plain(tmp_path) as mgr:
        for step in range(30):
            part = mgr.partial(step)
            saved: list[str] = []

            def save(part: Any = part, saved: list[str] = saved) -> None:
                for name in ("a", "b", "c"):
                    try:
                        part.save({name: 1})
                    except errors.ClosedError:
                        return
                    saved.append(name)

            saver = threading.Thread(target=save)
            saver.start()
            # It ends at another moment each time.
            for _ in range(step * 40):
                os.sched_yield()
            try:
                info = part.finalize()
            except errors.InvalidArgumentError as error:
                assert "without any part" in str(error)  # noqa: PT017
                info = None
            saver.join(PATIENCE_S)
            outcomes.append("none" if info is None else "".join(saved))
            if info is None:
                assert not saved
                assert step not in mgr.all_steps()
            else:
                # One part more may be in it: its call was told of the end.
                assert set(saved) <= set(mgr.restore(step))
    assert len(set(outcomes)) > 1


def test_a_leaf_that_cannot_be_stored_discards_all(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.UnsupportedLeafError, match=r"leaf 'b\.c'"):
            in_parts(mgr, 1, {"a": jnp.ones(3)}, {"b": {"c": object()}})
        assert names(tmp_path) == set()


def test_an_existing_step_is_refused_at_once_unless_it_is_replaced(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(1, {"old": 1}).result()
        with pytest.raises(errors.StepExistsError):
            in_parts(mgr, 1, fails)
        part = mgr.partial(1)
        for _ in range(2):
            with pytest.raises(errors.StepExistsError):
                part.save({"new": 2})
        with mgr.partial(1, overwrite=True) as part:
            part.save({"new": 2})
            assert mgr.restore(1) == {"old": 1}
        assert mgr.restore(1) == {"new": 2}
        assert names(tmp_path) == {"1"}
    with (
        plain(tmp_path, read_only=True) as reader,
        pytest.raises(errors.ReadOnlyError),
    ):
        reader.partial(2)


def test_a_step_that_came_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.StepExistsError):
            in_parts(mgr, 1, {"a": 1}, lambda _: mgr.save(1, {"b": 1}).result())
        assert mgr.restore(1) == {"b": 1}
        assert names(tmp_path) == {"1"}


def test_policies_do_not_refuse_it_and_delete_after_it(tmp_path: Path) -> None:
    with plain(tmp_path, save_policy=FixedInterval(10), preservation=LatestN(1)) as mgr:
        mgr.save(0, {"a": 1}).result()
        with mgr.partial(7) as part:
            part.save({"a": 1})
        mgr.wait_until_finished()
        assert mgr.all_steps() == [7]


def test_a_write_that_fails_in_the_background_fails_it(tmp_path: Path) -> None:
    written = threading.Event()

    def full(operation: Any) -> Any:
        if named("pwrite")(operation) and "/d/" in operation.path:
            written.set()
            return Fail(errno.ENOSPC)
        return None

    with plain(tmp_path) as mgr:
        part = mgr.partial(1)
        with FaultyFiles(tmp_path, full, sync=False):
            part.save({"a": jnp.ones(1 << 16)})
            assert written.wait(PATIENCE_S)
            with pytest.raises(errors.StorageError) as caught:
                part.finalize()
        assert caught.value.errno == errno.ENOSPC
        assert names(tmp_path) == set()
        with pytest.raises(errors.ClosedError):
            part.finalize()
        part.discard()
        # The failure was heard, so closing the manager does not tell it once more.


def test_a_part_after_a_failed_one_hears_of_it(tmp_path: Path) -> None:
    def many(part: Any) -> None:
        for number in range(1000):
            part.save({f"k{number}": jnp.ones(1 << 16)})

    full = {"on": True}

    def plan(operation: Any) -> Any:
        fails = full["on"] and named("pwrite")(operation) and "/d/" in operation.path
        return Fail(errno.ENOSPC) if fails else None

    with plain(tmp_path) as mgr, FaultyFiles(tmp_path, plan, sync=False):
        with pytest.raises(errors.StorageError):
            in_parts(mgr, 1, many)
        full["on"] = False
        assert names(tmp_path) == set()
        with mgr.partial(1) as part:
            part.save({"a": 1})
        assert mgr.all_steps() == [1]


# --- Nothing is left behind -----------------------------------------------------------------------


def test_closing_the_manager_discards_what_is_open(tmp_path: Path) -> None:
    mgr = plain(tmp_path)
    part = mgr.partial(1)
    part.save({"a": jnp.ones(3)})
    with pytest.raises(errors.ClosedError, match="step 1: the manager was closed before it was"):
        mgr.close()
    assert names(tmp_path) == set()
    mgr.close()
    for call in (lambda: part.save({"b": 1}), part.finalize):
        with pytest.raises(errors.ClosedError, match="closed"):
            call()
    with pytest.raises(errors.ClosedError, match="closed"):
        mgr.partial(2).save({"a": 1})


def test_closing_waits_for_one_that_is_finalized(tmp_path: Path) -> None:
    held = threading.Event()

    def slow(operation: Any) -> None:
        if named("pwrite")(operation) and "/d/" in operation.path:
            held.wait(PATIENCE_S)

    mgr = plain(tmp_path)
    with FaultyFiles(tmp_path, slow, sync=False):
        part = mgr.partial(1)
        part.save({"a": jnp.ones(1 << 16)})
        ends = [threading.Thread(target=part.finalize), threading.Thread(target=mgr.close)]
        ends[0].start()
        while "finalized" not in repr(part):
            os.sched_yield()
        ends[1].start()
        while not mgr._service.loop.closed:
            os.sched_yield()
        held.set()
        for end in ends:
            end.join(PATIENCE_S)
    assert names(tmp_path) == {"1"}


def test_one_that_is_dropped_is_discarded_and_told(tmp_path: Path) -> None:
    mgr = plain(tmp_path)
    part = mgr.partial(1)
    part.save({"a": jnp.ones(3)})
    ended = part._save.ended
    del part
    gc.collect()
    with contextlib.suppress(errors.CheckpointError):
        ended.result(PATIENCE_S)
    assert names(tmp_path) == set()
    assert not mgr.is_saving_in_progress()
    never = mgr.partial(2)
    del never
    with pytest.raises(errors.ClosedError, match=r"dropped without finalize\(\) or discard\(\)"):
        mgr.close()


def test_it_keeps_its_manager(tmp_path: Path) -> None:
    part = plain(tmp_path).partial(1)
    gc.collect()
    part.save({"a": 1})
    gc.collect()
    part.finalize()
    assert names(tmp_path) == {"1"}


CHILD = """
import sys
import numpy as np
import ckpt.sync
mgr = ckpt.sync.CheckpointManager(sys.argv[1])
part = mgr.partial(1)
part.save({"a": np.ones(1 << 16)})
"""


def test_a_program_that_ends_leaves_no_step_and_says_so(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode != 0
    assert "step 1: the manager was closed before it was finalized" in ran.stderr
    assert names(tmp_path) == set()


def act(root: Path, mgr: Any, heard: Callable[[], object]) -> None:
    items = items_of(1)
    state = dict(items["state"])
    with mgr.partial(1, metadata=1) as part:
        part.save(items={"state": {"kernel": state.pop("kernel")}})
        part.save(items={"state": state, "config": items["config"]})
    heard()
    mgr.wait_until_finished()


PARTIAL = Scenario("partial", {"0": 0}, act, [{"0": 0, "1": 1}], [{"0": 0}])


@pytest.mark.parametrize(
    ("campaign", "count"), [(faults.crashes, 12), (faults.transient_errors, 12)]
)
def test_a_fault_at_any_operation_loses_nothing(
    tmp_path: Path, campaign: Callable[..., Any], count: int
) -> None:
    campaign(tmp_path, count, seed=3, scenarios=[PARTIAL]).check(faults=count // 2)


# --- asyncio and trio -----------------------------------------------------------------------------


@BACKENDS
def test_in_asynchronous_code(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            async with mgr.partial(1) as part:
                await part.save({"a": {"x": jnp.ones(3)}})
                await part.save({"a": {"y": 2}})
                assert await mgr.all_steps() == []
            assert part.info is not None
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


@BACKENDS
def test_a_cancelled_call_discards_all(tmp_path: Path, backend: str) -> None:
    """Of `save` while it waits for memory, of `finalize` while it waits for the disk."""

    async def main() -> None:
        held = threading.Event()

        def slow(operation: Any) -> None:
            if named("pwrite")(operation) and "/d/" in operation.path:
                held.wait(PATIENCE_S)

        async def cancelled(part: PartialSave, call: Any, *arguments: Any) -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def cancel() -> None:
                        # It has to be under way.
                        await anyio.sleep(0.05)
                        scope.cancel()
                        held.set()

                    tasks.start_soon(cancel)
                    await call(*arguments)
            assert scope.cancelled_caught
            assert names(tmp_path) == set()
            with pytest.raises((errors.ClosedError, errors.CommitCancelledError)):
                await part.save({"z": 1})
            with pytest.raises((errors.ClosedError, errors.CommitCancelledError)):
                await part.finalize()

        async with ckpt.CheckpointManager(tmp_path, staging=STAGING) as mgr:
            with FaultyFiles(tmp_path, slow, sync=False):
                part = mgr.partial(1)
                await part.save({"a": np.zeros(1 << 16, np.uint8)})
                await cancelled(part, part.save, {"b": np.zeros(4 << 20, np.uint8)})
                held.clear()
                part = mgr.partial(2)
                await part.save({"a": np.zeros(1 << 16, np.uint8)})
                await cancelled(part, part.finalize)
            arena = mgr._service._engine.arena
            assert arena.used == 0

    on(backend, main)


@BACKENDS
def test_a_cancelled_block_discards_all(tmp_path: Path, backend: str) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            with anyio.CancelScope() as scope:
                async with mgr.partial(1) as part:
                    await part.save({"a": 1})
                    scope.cancel()
                    await anyio.sleep(PATIENCE_S)
            assert scope.cancelled_caught
            assert names(tmp_path) == set()
            # It was discarded, and that is no failure that a close would tell.
            await part.discard()

    on(backend, main)


def test_its_lease_is_renewed_while_it_is_open(tmp_path: Path) -> None:
    async def main() -> None:
        timeouts = ckpt.Timeouts(lease=0.2)
        async with (
            ckpt.CheckpointManager(tmp_path, timeouts=timeouts) as mgr,
            mgr.partial(1) as part,
        ):
            await part.save({"a": 1})
            (lease,) = tmp_path.glob(".ckpt-lease-*")
            first = lease.stat().st_mtime_ns
            while lease.stat().st_mtime_ns == first:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await part.save({"b": 1})

    on("asyncio", main)
    assert names(tmp_path) == {"1"}


# --- Merging, purely ------------------------------------------------------------------------------

# Drawn more than once they are one object at several places.
SHARED = [np.arange(5), np.full((20_000, 3), 1, np.int32)]
LEAVES = st.one_of(
    python_scalars(),
    st.sampled_from(SHARED),
    st.builds(
        lambda rows, kind: np.full((rows, 3), 1, kind),
        st.integers(0, 40_000),
        st.sampled_from(["int8", "float32"]),
    ),
    st.lists(st.integers(0, 3), max_size=2),
)
DICTS = st.recursive(
    st.dictionaries(st.one_of(keys(), st.text("ab", max_size=1)), LEAVES, max_size=4),
    lambda children: st.builds(
        lambda make, pairs: make(pairs),
        st.sampled_from([dict, OrderedDict]),
        st.dictionaries(
            st.text("abc", min_size=1, max_size=2), st.one_of(children, LEAVES), max_size=4
        ),
    ),
    max_leaves=8,
)


def splits(draw: st.DrawFn, tree: dict[Any, Any], count: int) -> list[dict[Any, Any]]:
    """Parts that make the tree together, in any order; a part may have empty dicts of it."""
    parts: list[dict[Any, Any]] = [type(tree)() for _ in range(count)]
    for key, value in tree.items():
        if type(value) in (dict, OrderedDict) and draw(st.booleans()):
            for part, below in zip(parts, splits(draw, value, count), strict=True):
                if below or draw(st.booleans()):
                    part[key] = below
            if not any(key in part for part in parts):
                parts[draw(st.integers(0, count - 1))][key] = type(value)()
        else:
            parts[draw(st.integers(0, count - 1))][key] = value
    return parts


def written_of(tree: Any, budget: int) -> tuple[PlannedTree, ItemReport]:
    """A tree that is saved, with a digest that tells whose chunk it is."""
    structure = describe(tree)
    save = PlanCache().plan("state", structure, budget, True, False).save
    ids = [id(leaf) for leaf in structure.leaves]
    digests = [[f"{ids[c.leaf]:016x}{c.number:016x}" for c in g.chunks] for g in save.batches]
    files = [f"d/{number:032x}" for number in range(len(save.batches))]
    report = report_chunks(save.batches, files, digests)
    return PlannedTree(structure.nodes, save.leaves, structure.leaves), report


def entry_of(tree: PlannedTree, reports: Sequence[ItemReport]) -> tuple[ItemEntry, list[KeyValue]]:
    stored = merge_reports(tree.leaves, reports)
    return fill_entry(ItemEntry(handler="pytree"), tree, stored), list(
        key_values(tree.leaves, stored)
    )


@given(st.data(), DICTS, st.integers(1, 4), st.sampled_from([1 << 14, 1 << 20]))
def test_any_split_of_a_tree_merges_to_the_entry_of_the_whole(
    data: st.DataObject, tree: dict[Any, Any], count: int, budget: int
) -> None:
    try:
        describe(tree)
    except errors.UnsupportedLeafError:
        # Such as keys of no common order.
        return
    # Which objects are one is told within a part only.
    check_merging(list(map(copy.deepcopy, splits(data.draw, tree, count))), budget)


@st.composite
def parts_with_ties(draw: st.DrawFn) -> list[dict[Any, Any]]:
    """Parts whose keys come in any order, and of whose leaves many are one array."""
    parts: list[dict[Any, Any]] = [OrderedDict() for _ in range(draw(st.integers(2, 3)))]
    own = [copy.deepcopy(SHARED) for _ in parts]
    for path in draw(st.permutations([f"{outer}{inner}" for outer in "abc" for inner in "xy"])):
        number = draw(st.integers(0, len(parts) - 1))
        array = draw(st.sampled_from(own[number]))
        parts[number].setdefault(path[0], OrderedDict())[path[1]] = array
    return parts


@given(parts_with_ties(), st.sampled_from([1 << 14, 1 << 20]))
def test_what_is_one_array_in_a_part_is_one_in_the_whole(
    parts: list[dict[Any, Any]], budget: int
) -> None:
    check_merging(parts, budget)


def check_merging(parts: list[dict[Any, Any]], budget: int) -> None:
    tree, count = merged(parts), len(parts)
    planned, report = written_of(tree, budget)
    whole, theirs = entry_of(planned, [report])
    written = [written_of(part, budget) for part in parts]
    made = [entry_of(part, [report])[0] for part, report in written]
    work = TreeParts()
    for number, part in enumerate(parts):
        assert work.add(describe(part).nodes) == number
    union = work.merged()
    found, ours = entry_of(*merge_parts(union, *zip(*written, strict=True)))
    check_leaves(found)

    def placeless(entry: ItemEntry) -> ItemEntry:
        blank: dict[str, Any] = {"offsets": [], "files": []}
        leaves = [leaf.model_copy(update=blank) for leaf in entry.leaves]
        return entry.model_copy(update={"leaves": leaves, "data_files": []})

    assert placeless(found) == placeless(whole)
    # Every chunk lies where its part has put it.
    flat = [path for entry in made for path in entry.data_files]
    assert found.data_files == flat
    first_files = [sum(len(e.data_files) for e in made[:part]) for part in range(count)]
    for leaf, (part, number) in zip(found.leaves, union.sources, strict=True):
        own = made[part].leaves[number]
        assert leaf.offsets == own.offsets
        wanted = [first_files[part] + file for file in own.files or [0] * len(own.offsets)]
        assert (leaf.files or [0] * len(leaf.offsets)) == wanted
    # And the index says the same of every key but for the places.
    assert {(e.key, e.inline, e.length) for e in ours} == {
        (e.key, e.inline, e.length) for e in theirs
    }
    assert len(ours) == len(theirs)
    starts = {
        (e.key.rsplit(b"/c", 1)[0], e.file, e.offset) for e in ours if e.inline is None and e.length
    }
    for leaf in found.leaves:
        files = leaf.files or [0] * len(leaf.offsets)
        for file, offset in zip(files, leaf.offsets, strict=True):
            assert (leaf.name.encode(), file, offset) in starts


def test_what_does_not_fit_adds_nothing() -> None:
    work = TreeParts()
    work.add(describe({"a": {"b": 1}}).nodes)
    before = work.merged()
    for wrong in ({"new": 1, "a": {"new": 2, "b": 3}}, [1], 5):
        with pytest.raises(errors.InvalidArgumentError):
            work.add(describe(wrong).nodes)
        assert work.merged() == before
    assert work.add(describe({"a": {"c": 1}}).nodes) == 1
    assert work.merged().names == ["a.b", "a.c"]


def test_a_key_is_marked_beside_one_of_the_same_text_that_comes_later(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": OrderedDict({1: np.arange(3)})})
            part.save({"a": OrderedDict({"1": np.arange(4)})})
        wanted = {"a": OrderedDict({1: np.arange(3), "1": np.arange(4)})}
        assert_same(mgr.restore(1), wanted)
        assert mgr.verify(1)
    names = [leaf["name"] for leaf in manifest(tmp_path / "1")["items"]["state"]["leaves"]]
    assert names == ["a.%k1", "a.1"]
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/1/state/|ocdbt:a.%25k1/"}
    assert ts.open(spec, open=True).result().shape == (3,)


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / FILE_NAME).read_bytes())
