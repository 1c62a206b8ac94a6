"""Items that are dropped from a step while it is read: what is left is read, and nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.storage import Memory
from tests.support.trees import assert_same

SMALL = ckpt.Staging(budget_bytes=1 << 20)


def part(number: int) -> dict[str, jnp.ndarray]:
    """Many batches: the first are read, and the others not yet, when something happens."""
    return {f"w{n}": jnp.full((512, 256), number * 10 + n, jnp.float32) for n in range(12)}


ITEMS = {"params": part(1), "opt_state": part(2), "ema": part(3)}
LEFT = {"params": ITEMS["params"]}


@pytest.fixture(params=["disk", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A root with the steps 1 and 2. A disk shares the files that are left, a store copies them."""
    place = tmp_path if request.param == "disk" else Memory(f"memory://{tmp_path.name}/run")
    with ckpt.sync.CheckpointManager(place) as mgr:
        for step in (1, 2):
            mgr.save(step, items=ITEMS).result()
    return place


def drop(root: Any) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(1, item="opt_state")
        mgr.delete(1, item="ema")


def reader(
    root: Any, meanwhile: Callable[[Any], object], operation: str = "restore"
) -> ckpt.sync.CheckpointManager:
    """A manager that does `meanwhile` when it has read the first part of a step."""
    happened: list[ckpt.types.Event] = []

    def observe(event: ckpt.types.Event) -> None:
        if event.operation == operation and event.phase == "read" and not happened:
            happened.append(event)
            meanwhile(root)

    return ckpt.sync.CheckpointManager(root, mode="r", staging=SMALL, observers=[observe])


def test_a_restore_of_everything_gives_what_is_left(
    root: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with reader(root, drop) as mgr:
        found = mgr.restore(1)
        # With all, where it had read them by then.
        assert_same(found, {name: ITEMS[name] for name in found})
        assert set(found) in ({*ITEMS}, {"params"})
        if set(found) == {"params"}:
            assert "step 1 was restored without some items: item 'opt_state'" in caplog.text
        assert mgr.metadata(1).info.items == ("params",)


def test_a_restore_of_what_stays_is_not_disturbed(root: Any) -> None:
    with reader(root, drop) as mgr:
        assert_same(mgr.restore(1, items=["params"]), LEFT)
    with reader(root, drop_latest) as mgr:
        assert_same(mgr.restore(items=["params"]), LEFT)


def drop_latest(root: Any) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.delete(2, item="ema")


def test_a_restore_of_what_goes_says_that_it_went(root: Any) -> None:
    with reader(root, drop) as mgr:
        try:
            found = mgr.restore(1, items=["ema"])
        except errors.ItemDroppedError as error:
            assert "steps that still have it: 2" in str(error)  # noqa: PT017
        else:
            assert_same(found, {"ema": ITEMS["ema"]})


def test_a_step_that_is_replaced_is_another_one_still(root: Any) -> None:
    def drop_and_replace(root: Any) -> None:
        drop(root)
        with ckpt.sync.CheckpointManager(root) as mgr:
            mgr.save(1, items={"params": part(7)}, if_exists="replace").result()

    with (
        reader(root, drop_and_replace) as mgr,
        pytest.raises(errors.StepDeletedError, match="was replaced while"),
    ):
        mgr.restore(1)

    def drop_and_delete(root: Any) -> None:
        with ckpt.sync.CheckpointManager(root) as mgr:
            mgr.delete(2, item="ema")
            mgr.delete(2)

    with (
        reader(root, drop_and_delete) as mgr,
        pytest.raises(errors.StepDeletedError, match="was deleted while"),
    ):
        mgr.restore(2)


def test_a_verification_goes_on_with_what_is_left(root: Any) -> None:
    with reader(root, drop, "verify") as mgr:
        report = mgr.verify(1)
    assert report.ok, report
