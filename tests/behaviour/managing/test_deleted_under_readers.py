"""A step that is deleted or replaced while it is read is told apart from one that is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from tests.support.trees import assert_same

SMALL = ckpt.Staging(budget_bytes=1 << 20)


def state(number: int) -> dict[str, jnp.ndarray]:
    """Many batches: the first are read, and the others not yet, when something happens."""
    return {f"w{n}": jnp.full((512, 256), number * 10 + n, jnp.float32) for n in range(20)}


def reader(root: Path, meanwhile: Callable[[], object]) -> ckpt.sync.CheckpointManager:
    """A manager that does `meanwhile` when it has read the first part of a step."""
    happened: list[ckpt.types.Event] = []

    def observe(event: ckpt.types.Event) -> None:
        if event.operation == "restore" and event.phase == "read" and not happened:
            happened.append(event)
            meanwhile()

    return ckpt.sync.CheckpointManager(root, mode="r", staging=SMALL, observers=[observe])


def test_a_step_deleted_while_it_is_read(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state(1))
        mgr.save(2, state(2)).result()
        with (
            reader(tmp_path, lambda: mgr.delete(2)) as other,
            pytest.raises(ckpt.errors.StepDeletedError, match="was deleted while") as caught,
        ):
            other.restore(2)
        assert mgr.all_steps() == [1]
        assert caught.value.step == 2
        assert isinstance(caught.value, ckpt.errors.StepNotFoundError)


def test_the_latest_step_deleted_while_it_is_read_is_another_one_then(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state(1))
        mgr.save(2, state(2)).result()
        with reader(tmp_path, lambda: mgr.delete(2)) as other:
            assert_same(other.restore(items=iter(["default"]))["default"], state(1))


def test_a_step_replaced_while_it_is_read(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state(1)).result()

        def replace() -> None:
            mgr.save(1, state(2), if_exists="replace").result()

        with (
            reader(tmp_path, replace) as other,
            pytest.raises(ckpt.errors.StepDeletedError, match="was replaced while"),
        ):
            other.restore(1)
        # Without a step the new one is as good.
        with reader(tmp_path, replace) as other:
            assert_same(other.restore(), state(2))


@pytest.mark.parametrize("step", [1, None])
def test_a_step_damaged_while_it_is_read_was_not_deleted(tmp_path: Path, step: int | None) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state(1)).result()
    damage = partial(shutil.rmtree, tmp_path / "1" / "default")
    with (
        reader(tmp_path, damage) as other,
        pytest.raises(ckpt.errors.CorruptCheckpointError, match="No such file"),
    ):
        other.restore(step)


def test_a_one_shot_checkpoint_deleted_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted between its manifest and its data: there is nothing to observe in a load."""
    from ckpt._steps import opened

    ckpt.sync.save(tmp_path / "x", state(1))
    real = opened.read_sized  # type: ignore[attr-defined]

    async def read_and_delete(*args: object, **named: object) -> object:
        manifest = await real(*args, **named)  # type: ignore[arg-type]
        shutil.rmtree(tmp_path / "x")
        return manifest

    monkeypatch.setattr(opened, "read_sized", read_and_delete)
    with pytest.raises(ckpt.errors.StepDeletedError, match="was deleted while"):
        ckpt.sync.load(tmp_path / "x")
