"""`frozen` leaves: what devices find unchanged is not copied from them, and never stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
from ckpt._vitals.extension import device_pass
from ckpt.errors import InvalidArgumentError
from tests.behaviour.saving.test_signs_on_devices import compiled_once, flipped
from tests.support.trees import assert_same

__all__ = ["compiled_once"]

# It is not packed.
BASE = np.random.default_rng(0).standard_normal((1024, 432)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _small_arrays_too() -> Iterator[None]:
    """Devices take the signs of shards below a megabyte, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_pass, "_LEAST_BYTES", BASE.nbytes // 4)
        yield


def whole(value: Any) -> jax.Array:
    return jax.device_put(
        value, NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    )


def state(step: int, base: Any = None) -> dict[str, Any]:
    # New objects in every step, as a compiled train step returns them.
    kept = whole(BASE) if base is None else base
    return {
        "base": {"w": kept, "b": whole(BASE + 1)},
        "adapter": jnp.full((300, 1000), step, jnp.float32),
    }


@pytest.fixture
def staged() -> list[ckpt.types.Event]:
    return []


@pytest.fixture
def mgr(tmp_path: Path, staged: list[ckpt.types.Event]) -> Iterator[ckpt.sync.CheckpointManager]:
    with ckpt.sync.CheckpointManager(
        tmp_path,
        extensions=[ckpt.extensions.VitalSigns("device", frozen="base")],
        observers=[staged.append],
    ) as mgr:
        yield mgr


def staged_bytes(events: list[ckpt.types.Event], step: int) -> int:
    return sum(each.nbytes for each in events if each.phase == "stage" and each.step == step)


def test_what_is_equal_is_not_copied_and_not_written(
    mgr: ckpt.sync.CheckpointManager,
    staged: list[ckpt.types.Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (1, 2, 3):
        info = mgr.save(step, state(step)).result()
        assert (info.statistics.shared_bytes >= 2 * BASE.nbytes) == (step > 1)
        assert info.nonfinite_leaves == 0
    assert staged_bytes(staged, 1) > 2 * BASE.nbytes
    for step in (2, 3):
        assert staged_bytes(staged, step) < BASE.nbytes
        assert mgr.verify(step).ok
        assert_same(mgr.restore(step, check_devices=True), state(step))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("position", range(4))
def test_one_other_bit_is_written_and_named(
    mgr: ckpt.sync.CheckpointManager, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    mgr.save(1, state(1)).result()
    changed = flipped(whole(BASE), position)
    mgr.save(2, state(2, changed)).result()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "'base.w'" in warning
    assert "'base.b'" not in warning
    assert_same(mgr.restore(2), state(2, changed))
    mgr.save(3, state(3, flipped(whole(BASE), position))).result()
    assert_same(mgr.restore(3), state(3, changed))
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


@given(st.lists(st.sampled_from(["same", "equal", "changed", "nan", "back", "reopen"]), max_size=6))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_sequence_of_saves_gives_a_stale_byte(
    tmp_path_factory: pytest.TempPathFactory, moves: list[str]
) -> None:
    root = tmp_path_factory.mktemp("run")

    def opened() -> ckpt.sync.CheckpointManager:
        return ckpt.sync.CheckpointManager(
            root, extensions=[ckpt.extensions.VitalSigns("device", frozen=["base"])]
        )

    mgr, value = opened(), whole(BASE)
    try:
        for step, move in enumerate(["equal", *moves]):
            if move == "reopen":
                mgr.close()
                mgr = opened()
                value = mgr.restore(like=state(0))["base"]["w"]
            elif move == "equal":
                value = whole(np.asarray(value))
            elif move == "changed":
                value = flipped(value, step % 4, word=step, bit=31)
            elif move == "nan":
                value = value.at[step, step].set(jnp.nan)
            elif move == "back":
                value = whole(BASE)
            mgr.save(step, state(step, value)).result()
            found = mgr.restore(step)
            np.testing.assert_array_equal(
                np.asarray(found["base"]["w"]).view(np.uint32), np.asarray(value).view(np.uint32)
            )
            assert mgr.verify(step).ok
    finally:
        mgr.close()


def test_a_pattern_that_covers_nothing_is_an_error(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns(frozen=["base", "bse.w"])]
    ) as mgr:
        with pytest.raises(InvalidArgumentError, match=r"frozen: 'bse.w' covers no leaf .is it"):
            mgr.save(1, state(1)).result()
        assert mgr.all_steps() == []


def test_without_devices_that_take_signs_nothing_can_be_proved() -> None:
    with pytest.raises(InvalidArgumentError, match="on='auto' or on='device'"):
        ckpt.extensions.VitalSigns("host", frozen="base")


@pytest.mark.parametrize("wrong", [3, [3], b"base", {"base": 1, 2: 3}])
def test_what_is_not_a_pattern_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="frozen"):
        ckpt.extensions.VitalSigns(frozen=wrong)


def test_on_cpus_the_digests_tell_what_is_equal(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns(frozen="base")]
    ) as mgr:
        shared = [mgr.save(step, state(step)).result().statistics.shared_bytes for step in (1, 2)]
    assert shared[0] == 0
    assert shared[1] >= 2 * BASE.nbytes
