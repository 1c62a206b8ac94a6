"""A save in parts that fails, is ended early, or is cancelled publishes nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._api.partial import PartialSave
from tests.behaviour.saving.partial_saves import (
    BACKENDS,
    PATIENCE_S,
    STAGING,
    fails,
    in_parts,
    names,
    on,
    plain,
)
from tests.reliability import faults
from tests.reliability.scenarios import Scenario, items_of
from tests.support.faults import Fail, FaultyFiles, named


def named_items(items: dict[str, Any]) -> Callable[[Any], None]:
    return lambda part: part.save(items=items)


def test_an_error_in_the_block_discards_all(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        kept: list[Any] = []
        with pytest.raises(ZeroDivisionError) as caught:
            in_parts(mgr, 1, kept.append, {"a": jnp.ones(3)}, fails)
        assert not hasattr(caught.value, "__notes__")
        assert names(tmp_path) == set()
        (part,) = kept
        with pytest.raises(errors.CheckpointError, match="not published"):
            _ = part.info
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
        assert caught.value.item == "default"
        assert names(tmp_path) == set()


def test_an_item_of_another_kind_cannot_come_twice(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for first, second in [("text", "more"), ({"a": 1}, "text"), ("text", {"a": 1})]:
            with pytest.raises(errors.InvalidArgumentError, match="only trees of") as caught:
                in_parts(mgr, 1, named_items({"x": first}), named_items({"x": second}))
            assert caught.value.item == "x"
        assert names(tmp_path) == set()


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
        with mgr.partial(1, if_exists="replace") as part:
            part.save({"new": 2})
            assert mgr.restore(1) == {"old": 1}
        assert mgr.restore(1) == {"new": 2}
        assert names(tmp_path) == {"1"}
    with (
        plain(tmp_path, mode="r") as reader,
        pytest.raises(errors.ReadOnlyError),
    ):
        reader.partial(2)


def test_a_step_that_came_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with pytest.raises(errors.StepExistsError):
            in_parts(mgr, 1, {"a": 1}, lambda _: mgr.save(1, {"b": 1}).result())
        assert mgr.restore(1) == {"b": 1}
        assert names(tmp_path) == {"1"}


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
        while not mgr._service.run.loop.closed:
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
    with mgr.partial(1, custom_metadata=1) as part:
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
            arena = mgr._service.engine.arena
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
