"""Items with preservation policies of their own: what stays, what is told, and what never goes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.reliability.scenarios import leftovers
from tests.support.faults import FaultyFiles
from tests.support.trees import assert_same

LATEST = ckpt.keep.Any(ckpt.keep.Latest(2), ckpt.keep.EverySteps(200))
BY_ITEM: dict[str, Any] = {"params": LATEST, "*": ckpt.keep.Latest(2)}
BOTH = ("params", "opt_state")


def plain(root: Path, policy: Any = BY_ITEM, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, keep=policy, **options)


def items_of(step: int) -> dict[str, Any]:
    return {
        "params": {"w": jnp.full((4, 5), step, jnp.float32)},
        "opt_state": {"mu": np.full((600,), step, np.int64), "count": step},
    }


def save(mgr: ckpt.sync.CheckpointManager, *steps: int) -> None:
    for step in steps:
        mgr.save(step, items=items_of(step), metrics={"loss": float(step)}).result()
        mgr.wait_until_finished()


def left(mgr: ckpt.sync.CheckpointManager) -> dict[int, tuple[str, ...]]:
    return {step: mgr.metadata(step).info.items for step in mgr.all_steps()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the steps 200 to 600, of which 200 has only its params."""
    root = tmp_path / "run"
    with FaultyFiles(tmp_path, sync=False), plain(root) as mgr:
        save(mgr, 100, 200, 300, 400, 500, 600)
    return root


def test_each_item_stays_as_long_as_its_policy_keeps_it(root: Path) -> None:
    with plain(root, None) as mgr:
        assert left(mgr) == {200: ("params",), 400: ("params",), 500: BOTH, 600: BOTH}
        for step in (200, 400):
            info = mgr.metadata(step).info
            assert_same(mgr.restore(step), {"params": items_of(step)["params"]})
            (dropped,) = info.dropped
            assert (dropped.item, dropped.policy) == ("opt_state", "Latest(2)")
            assert dropped.nbytes > 600 * 8
            assert dropped.dropped > info.committed
            assert info.metrics == {"loss": step}
            assert mgr.verify(step)
        assert mgr.metadata(500).info.dropped == ()
    assert leftovers(root) == []
    assert not (root / "200" / "opt_state").exists()


def test_in_asynchronous_code(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path, keep=BY_ITEM) as mgr:
            for step in (0, 10, 20, 30):
                await (await mgr.save(step, items=items_of(step)))
                await mgr.wait_until_finished()
            assert await mgr.all_steps() == [0, 20, 30]
            assert (await mgr.metadata(0)).info.items == ("params",)
            with pytest.raises(errors.ItemDroppedError):
                await mgr.restore(0, items=["opt_state"])

    anyio.run(main)


def test_a_mapping_that_is_changed_later_changes_nothing(tmp_path: Path) -> None:
    policies: dict[str, Any] = {"*": ckpt.keep.Latest(2)}
    with plain(tmp_path, policies) as mgr:
        policies["params"] = ckpt.keep.Latest(1)
        save(mgr, 1, 2, 3)
        assert left(mgr) == {2: BOTH, 3: BOTH}


def test_items_that_no_policy_is_for_stay(tmp_path: Path) -> None:
    with plain(tmp_path, {"opt_*": ckpt.keep.Latest(1)}) as mgr:
        save(mgr, 1, 2, 3)
        assert left(mgr) == {1: ("params",), 2: ("params",), 3: BOTH}


def test_an_unnamed_state_is_the_item_default(tmp_path: Path) -> None:
    for name in ("default", "*"):
        with plain(tmp_path / name[:1].replace("*", "s"), {name: ckpt.keep.Latest(2)}) as mgr:
            for step in range(4):
                mgr.save(step, {"n": step}).result()
                mgr.wait_until_finished()
            assert mgr.all_steps() == [2, 3]
            assert mgr.restore(2) == {"n": 2}


def test_the_policies_of_items_rank_steps(tmp_path: Path) -> None:
    best = ckpt.keep.Best(1, "loss", "min")
    with plain(tmp_path, {"params": best, "*": ckpt.keep.Latest(1)}) as mgr:
        save(mgr, 1, 2, 3)
        assert left(mgr) == {1: ("params",), 3: BOTH}
        assert mgr.best_step() == 1


# --- What one resumes from ------------------------------------------------------------------------


def test_the_newest_step_and_the_one_saved_last_stay_whole(tmp_path: Path) -> None:
    none = {"params": ckpt.keep.Steps([]), "*": ckpt.keep.Steps([0])}
    with plain(tmp_path, none) as mgr:
        save(mgr, 0, 30, 11, 12)
        # The run went back from 30 to 11.
        assert left(mgr) == {0: ("opt_state",), 12: BOTH, 30: BOTH}
    with plain(tmp_path, none, trash=ckpt.keep.Deletion(keep_latest=False)) as mgr:
        save(mgr, 13)
        assert left(mgr) == {0: ("opt_state",), 13: BOTH}
        assert mgr.latest_step() == 13


def test_pinned_steps_stay_whole_until_they_are_unpinned(root: Path) -> None:
    with plain(root) as mgr:
        mgr.pin(500, "paper")
        save(mgr, 700, 800)
        assert left(mgr)[500] == BOTH
        mgr.unpin(500, "paper")
        save(mgr, 900)
        assert 500 not in left(mgr)


def test_a_step_that_a_watcher_evaluates_stays_whole(root: Path) -> None:
    found = []
    with plain(root) as mgr:
        for info in ckpt.sync.watch(root, after=500, until=800, timeout=60):
            found.append(info.step)
            if info.step == 600:
                save(mgr, 700, 800)
                assert left(mgr)[600] == BOTH
                assert_same(mgr.restore(600), items_of(600))
    assert found == [600, 700, 800]


def test_a_watcher_gives_no_step_again_because_it_has_lost_items(tmp_path: Path) -> None:
    with plain(tmp_path, {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}) as mgr:
        save(mgr, 1, 2)
        found = []
        for info in ckpt.sync.watch(tmp_path, until=5, timeout=60, pin=False):
            found.append(info.step)
            if info.step == 2:
                # From 2 the item goes, which was given already.
                save(mgr, 3)
                assert left(mgr)[2] == ("params",)
                save(mgr, 4, 5)
        assert found == [1, 2, 3, 4, 5]
        mgr.save(2, items=items_of(7), if_exists="replace", force=True).result()
        again = ckpt.sync.watch(tmp_path, until=5, timeout=60, pin=False)
        assert [info.step for info in again] == [1, 2, 3, 4, 5]


# --- What is told ---------------------------------------------------------------------------------


def test_a_dropped_item_is_told_by_name(root: Path) -> None:
    with plain(root) as mgr:
        when = f"{mgr.metadata(200).info.dropped[0].dropped:%Y-%m-%d %H:%M:%S} UTC"
        text = (
            f"step 200, item 'opt_state': it was dropped on {when} by Latest(2); steps that "
            "still have it: 500, 600"
        )
        for asked in ({"items": ["opt_state"]}, {"items": iter(BOTH)}, {"like": items_of(200)}):
            with pytest.raises(errors.ItemDroppedError) as caught:
                mgr.restore(200, **asked)
            assert str(caught.value) == text
            assert (caught.value.step, caught.value.item) == (200, "opt_state")
        # An item that never was there is another matter.
        with pytest.raises(errors.InvalidArgumentError, match="the step has params"):
            mgr.restore(200, items=["optimizer"])
        with pytest.raises(errors.InvalidArgumentError, match=r"only params; it was dropped on"):
            mgr.delete(200, item="opt_state")
        for step in (500, 600):
            mgr.delete(step, item="opt_state")
        with pytest.raises(errors.ItemDroppedError, match=r"by hand on .*; no step has it now"):
            mgr.restore(500, items=["opt_state"])
    with pytest.raises(errors.ItemDroppedError, match=r"it was dropped on .* by Latest\(2\)$"):
        ckpt.sync.load(root / "200", items=["opt_state"])


def test_a_whole_restore_says_once_what_is_missing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(root) as mgr:
        for _ in range(2):
            assert_same(mgr.restore(200), {"params": items_of(200)["params"]})
            assert mgr.restore(200, items=["params"])
            mgr.restore(500)
        (text,) = (each for each in caplog.messages if "restored without" in each)
        assert text.startswith("step 200 was restored without some items: item 'opt_state' was ")
        assert text.endswith("by Latest(2)")
        caplog.clear()
        assert tuple(ckpt.sync.load(root / "200")) == ("params",)
        assert "200 was loaded without some items: item 'opt_state' was" in caplog.text


def test_a_deletion_by_hand_is_recorded_too(root: Path) -> None:
    with plain(root, None) as mgr:
        mgr.delete(500, item="params")
        (dropped,) = mgr.metadata(500).info.dropped
        assert (dropped.item, dropped.policy) == ("params", None)
        assert str(dropped).startswith("deleted by hand on 20")
        assert "without params" in str(mgr.metadata(500))


def test_a_fallback_passes_over_steps_without_the_wanted_item(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(root) as mgr:
        mgr.delete(600, item="opt_state")
        mgr.delete(500)
        save(mgr, 450)
        with pytest.raises(errors.ItemDroppedError):
            mgr.restore(items=["opt_state"])
        caplog.clear()
        found = mgr.restore(items=["opt_state"], fallback=True)["opt_state"]
        assert_same(found, items_of(450)["opt_state"])
        assert "step 600 is passed over" in caplog.text
        assert "it was deleted by hand on" in caplog.text
        # A step that was passed over for that is not damaged: nothing replaces it.
        with pytest.raises(errors.StepExistsError):
            mgr.save(600, items=items_of(600)).result()
        mgr.delete(450)
        with pytest.raises(errors.ItemDroppedError, match="step 600"):
            mgr.restore(items=["opt_state"], fallback=True)


def test_a_pattern_for_no_item_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain(tmp_path, {"optimizer": ckpt.keep.Latest(1), "*": ckpt.keep.Latest(2)}) as mgr:
        save(mgr, 1, 2, 3)
        texts = [each for each in caplog.messages if "'optimizer'" in each]
        assert len(texts) == 1
        assert "the steps have the items opt_state, params" in texts[0]
        caplog.clear()
    with plain(tmp_path, {"opt_state": ckpt.keep.Latest(1), "*": ckpt.keep.All()}) as mgr:
        save(mgr, 4, 5)
        assert caplog.messages == []


@pytest.mark.parametrize(
    "policy", [{}, {"params": 0}, {"params": "x"}, {"a/b": ckpt.keep.Latest(1)}]
)
def test_a_wrong_mapping_is_refused_at_once(tmp_path: Path, policy: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="keep"):
        plain(tmp_path / "run", policy)
    assert not (tmp_path / "run").exists()


# --- What it costs, and what it leaves alone ------------------------------------------------------


def test_nothing_is_written_again_where_nothing_is_to_go(root: Path) -> None:
    with plain(root) as mgr:
        save(mgr, 700)
        with FaultyFiles(root, sync=False) as files:
            save(mgr, 800)
        assert left(mgr)[600] == ("params",)
    # Each manifest was read once, and is only looked at since.
    done = {each.name for each in files.operations if each.path.startswith(("200/", "400/"))}
    assert done == {"lstat"}
    changed = {each.path.split("/")[0] for each in files.operations if each.may_change}
    assert changed.isdisjoint({"200", "400"})


def test_steps_go_to_the_trash_and_items_do_not(tmp_path: Path) -> None:
    trash = ckpt.keep.Deletion(trash="trash")
    with plain(
        tmp_path, {"params": ckpt.keep.EverySteps(10), "*": ckpt.keep.Latest(1)}, trash=trash
    ) as mgr:
        save(mgr, 10, 11, 12)
        assert left(mgr) == {10: ("params",), 12: BOTH}
        assert [each.step for each in mgr.trash.steps()] == [11]
        mgr.trash.undelete(11)
        assert_same(mgr.restore(11), items_of(11))
        save(mgr, 13)
        assert [each.step for each in mgr.trash.steps()] == [11, 12]


def test_files_of_others_in_a_step_are_kept(root: Path) -> None:
    (root / "500" / "notes.txt").write_text("mine")
    with plain(root, {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}) as mgr:
        save(mgr, 700)
        assert left(mgr)[500] == ("params",)
    (kept,) = (path for path in root.rglob("notes.txt"))
    assert kept.read_text() == "mine"


def test_steps_that_share_files_lose_items_one_by_one(tmp_path: Path) -> None:
    """The files of a step that is left are not those that another one has lost."""
    frozen = {"w": jnp.arange(100_000.0)}
    with plain(tmp_path, {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}) as mgr:
        for step in range(4):
            mgr.save(step, items={"params": frozen, "opt_state": frozen}).result()
            mgr.wait_until_finished()
        shared = mgr.metadata(3).info.statistics.shared_bytes
        assert shared > 0
        for step in range(4):
            assert mgr.verify(step)
            for item in mgr.restore(step).values():
                assert_same(item, frozen)


# --- The note in the root -------------------------------------------------------------------------


def listing(root: Path) -> Mapping[str, Any]:
    from ckpt._inspection.listed_steps import list_root
    from ckpt._inspection.locations import root_at

    async def look() -> Any:
        return await list_root(await root_at(str(root)))

    found: Mapping[str, Any] = {
        "keeps": (listed := anyio.run(look)).keeps,
        "goes": [each.step for each in listed.steps if each.goes_next],
        "drops": {each.step: each.drops_next for each in listed.steps if each.drops_next},
        "without": {each.step: each.dropped for each in listed.steps if each.dropped},
    }
    return found


def test_the_note_tells_what_goes_next(root: Path) -> None:
    assert listing(root) == {
        "keeps": "newest 2, every 200 (params), newest 2 (*)",
        "goes": [500],
        "drops": {},
        "without": {200: ["opt_state"], 400: ["opt_state"]},
    }
    with plain(root, {"params": ckpt.keep.All(), "*": ckpt.keep.Latest(1)}) as mgr:
        save(mgr, 700)
    assert listing(root)["drops"] == {700: ["opt_state"]}


def test_a_note_that_is_damaged_is_not_believed(root: Path) -> None:
    note = root / ".ckpt-run" / "preservation.json"
    written = json.loads(note.read_text())
    assert written["preservation"]["text"].startswith("params: Any(Latest(2)")
    wrong: list[Any] = [{}, {"a/b": {"kind": "all"}}, {"params": {"kind": "?"}}, {"params": 3}, []]
    for items in wrong:
        changed = {**written["preservation"], "items": items}
        note.write_text(json.dumps({**written, "preservation": changed}))
        found = listing(root)
        assert (found["goes"], found["drops"]) == ([], {})
    with plain(root) as mgr:
        save(mgr, 700)
    assert json.loads(note.read_text()) == written


def test_everything_is_kept_without_a_look(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain(root, {"params": ckpt.keep.All(), "*": ckpt.keep.All()}) as mgr:
        with caplog.at_level(logging.DEBUG):
            save(mgr, 700)
        assert mgr.all_steps() == [200, 400, 500, 600, 700]


def test_the_last_healthy_step_keeps_all_its_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = {"w": np.ones(3)}, {"w": np.full(3, np.nan)}
    policies = {"params": ckpt.keep.Latest(3), "*": ckpt.keep.Latest(1)}
    with ckpt.sync.CheckpointManager(
        tmp_path, keep=policies, extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        for step, state in {1: good, 2: good, 3: bad, 4: bad}.items():
            mgr.save(step, items={"params": state, "opt": state}).result()
            mgr.wait_until_finished()
        has = {step: mgr.metadata(step).info.items for step in mgr.all_steps()}
        assert has == {2: ("params", "opt"), 3: ("params",), 4: ("params", "opt")}
        assert "step 2 stays whole" in caplog.text
        assert set(mgr.restore(healthy=True)) == {"params", "opt"}
        mgr.save(5, items={"params": good, "opt": good}).result()
        mgr.wait_until_finished()
        has = {step: mgr.metadata(step).info.items for step in mgr.all_steps()}
        assert has == {3: ("params",), 4: ("params",), 5: ("params", "opt")}


def test_values_that_the_policy_of_an_item_allows_make_no_step_unhealthy(tmp_path: Path) -> None:
    allowing = ckpt.keep.Any(ckpt.keep.Latest(1), ckpt.keep.Healthy(allow=["mask"]))
    masked = {"w": np.ones(3), "mask": np.full(3, -np.inf)}
    with ckpt.sync.CheckpointManager(
        tmp_path, keep={"*": allowing}, extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, items={"params": masked}).result()
            mgr.wait_until_finished()
        assert mgr.all_steps() == [3]
