"""A run goes on where it stopped, with two lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt._steps.index import PassedOver
from ckpt.storage._local import posix
from ckpt.testing.compare import differences
from tests.behaviour.opening.damaged_roots import (
    flip_array,
    flip_rest,
    make_root,
    state,
    warnings_of,
)
from tests.support.stateful_objects import Counter


class Init:
    """Returns a fresh state, and counts how often it was made for real."""

    def __init__(self) -> None:
        self.made = 0

    def state(self) -> dict[str, Any]:
        fresh = {"w": jnp.zeros((8, 4)), "step": jnp.int32(0)}
        self.made += not isinstance(fresh["w"], jax.core.Tracer)
        return fresh


def train(root: Path, init: Any, until: int) -> tuple[int, dict[str, Any]]:
    with ckpt.sync.CheckpointManager(root) as mgr:
        start, found = mgr.resume(init)
        for step in range(start, until):
            found = {"w": found["w"] + 1, "step": found["step"] + 1}
            mgr.save(step, found)
    return start, found


def test_a_run_that_is_started_again_and_again(tmp_path: Path) -> None:
    init = Init()

    def make() -> dict[str, Any]:
        return init.state()

    assert train(tmp_path, make, 1)[0] == 0
    assert init.made == 1
    # Step 0 is a step like any other.
    assert train(tmp_path, make, 3)[0] == 1
    start, found = train(tmp_path, make, 7)
    assert start == 3
    assert init.made == 1, "the state of a run that goes on is not made"
    assert int(found["step"]) == 7
    assert (np.asarray(found["w"]) == 7).all()
    # Nothing is left to train.
    start, found = train(tmp_path, make, 7)
    assert (start, int(found["step"])) == (7, 7)


def test_a_state_serves_as_well_as_a_function_also_a_donated_one(tmp_path: Path) -> None:
    fresh = Init().state()
    train(tmp_path, fresh, 2)
    for leaf in jax.tree.leaves(fresh):
        leaf.delete()
    start, found = train(tmp_path, fresh, 2)
    assert (start, int(found["step"])) == (2, 2)


def test_in_asyncio_and_trio(tmp_path: Path) -> None:
    async def main(backend: str) -> None:
        async with ckpt.CheckpointManager(tmp_path / backend) as mgr:
            start, found = await mgr.resume(state(5))
            assert start == 0
            await mgr.save(0, found)
            await mgr.wait_until_finished()
            start, found = await mgr.resume(state(0))
            assert start == 1
            assert found["w"][0] == 5

    for backend in ("asyncio", "trio"):
        anyio.run(main, backend, backend=backend)


def test_shardings_come_from_like(tmp_path: Path) -> None:
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    train(tmp_path, lambda: Init().state(), 1)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        target = ckpt.abstract(lambda: Init().state(), {"w": rows, "step": None})
        _, found = mgr.resume(lambda: Init().state(), like=target)
        assert found["w"].sharding == rows
        assert found["step"].sharding != rows


def test_several_items_and_objects_with_a_state(tmp_path: Path) -> None:
    def items(data: Counter) -> dict[str, Any]:
        return {"model": lambda: Init().state(), "data": data, "config": {"lr": 0.5}}

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        data = Counter()
        start, found = mgr.resume(items=items(data))
        assert start == 0
        assert found["data"] is data
        assert found["model"]["w"].shape == (8, 4)
        data.count = 17
        mgr.save(4, items={**found, "model": {"w": jnp.ones((8, 4)), "step": jnp.int32(4)}})
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        data = Counter()
        start, found = mgr.resume(items=items(data))
        assert start == 5
        assert found["data"] is data
        assert data.count == 17
        assert int(found["model"]["step"]) == 4
        assert found["config"] == {"lr": 0.5}


def test_a_new_run_needs_objects_and_no_classes(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with pytest.raises(
            errors.InvalidArgumentError, match=r"item 'data' is the class Counter.*Counter\("
        ):
            mgr.resume(items={"model": {"n": 1}, "data": Counter})
        with pytest.raises(errors.InvalidArgumentError, match="init is the class Counter"):
            mgr.resume(Counter)
        assert mgr.all_steps() == []


@pytest.mark.parametrize("damage", [flip_array, flip_rest])
def test_a_damaged_newest_step_does_not_end_the_run(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run")
    damage(root / "3")
    with ckpt.sync.CheckpointManager(root) as mgr:
        with pytest.raises(errors.CorruptCheckpointError, match=r"^step 3"):
            mgr.resume(state(0), fallback=False)
        caplog.clear()
        start, found = mgr.resume(state(0))
        assert (start, int(found["step"])) == (3, 2)
        (warning,) = warnings_of(caplog)
        assert "step 3 is passed over" in warning
        mgr.save(3, state(3.5), durable=True)
        (warning,) = warnings_of(caplog)
        assert "step 3 is saved anew" in warning
        assert str(root / "damaged" / "3") in warning
        # Once: what is there now is whole.
        with pytest.raises(errors.StepExistsError):
            mgr.save(3, state(4))
    assert not ckpt.sync.verify(root / "damaged" / "3").ok
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.resume(state(0))[0] == 4


@pytest.mark.parametrize("damage", [flip_array, flip_rest])
def test_damaged_steps_are_passed_over_one_by_one(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_root(tmp_path / "run")
    damage(root / "3")
    damage(root / "2")
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        assert mgr.restore(fallback=True)["w"][0] == 1
        first, second = warnings_of(caplog)
        assert "step 3 is passed over" in first
        assert "step 2 is passed over" in second
        damage(root / "1")
        with pytest.raises(errors.CorruptCheckpointError, match=r"^step 3"):
            mgr.restore(fallback=True)
        with pytest.raises(errors.CorruptCheckpointError, match=r"^step 3"):
            mgr.resume(state(0))


def test_in_a_store_a_step_whose_manifest_was_changed_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ckpt.sync.CheckpointManager("memory://resume/changed") as mgr:
        for step in (1, 2):
            mgr.save(step, state(step), durable=True)
        storage: Any = mgr._service.storage
        data = bytearray(anyio.run(storage.read, "2", "ckpt.json", 1 << 20))
        data[data.index(b',"head":"') + 80] ^= 4
        anyio.run(storage._keys.put, storage._key("2", "ckpt.json"), bytes(data))
        assert mgr.all_steps() == [1, 2]
        caplog.clear()
        assert mgr.resume(state(0))[0] == 2
        assert any("step 2 is passed over" in each for each in warnings_of(caplog))
        with pytest.raises(errors.StepExistsError, match=r"is damaged .*if_exists='replace'"):
            mgr.save(2, state(2))
        mgr.save(2, state(2), if_exists="replace", durable=True)
        assert mgr.restore(2)["w"][0] == 2


def test_in_a_store_a_damaged_step_is_replaced_when_that_is_asked_for() -> None:
    with ckpt.sync.CheckpointManager("memory://resume/run") as mgr:
        mgr.save(1, state(1), durable=True)
        index = mgr._service.root.index
        attempt = anyio.run(index.refresh)[1].attempt
        index.passed_over[1] = PassedOver(attempt, "its data is damaged")
        with pytest.raises(errors.StepExistsError, match=r"is damaged .*if_exists='replace'"):
            mgr.save(1, state(2))
        mgr.save(1, state(2), if_exists="replace", durable=True)
        assert mgr.restore(1)["w"][0] == 2


def test_a_whole_root_is_resumed_without_reading_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_root(tmp_path / "run", tuple(range(1, 21)))
    read: Any = posix.read_regular
    seen: list[str] = []

    def counted(top: Path, path: str, limit: int) -> Any:
        seen.append(path)
        return read(top, path, limit)

    monkeypatch.setattr(posix, "read_regular", counted)
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.resume(state(0))[0] == 21
    assert {path.split("/")[0] for path in seen if path.endswith("ckpt.json")} == {"20"}


@pytest.mark.parametrize("healthy", [False, True])
def test_a_step_that_goes_while_the_target_is_made_is_not_resumed(
    tmp_path: Path, healthy: bool
) -> None:
    """It is looked for before the function is called, and restored afterwards."""
    with ckpt.sync.CheckpointManager(
        tmp_path / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, state(step))

    def fresh() -> dict[str, Any]:
        with ckpt.sync.CheckpointManager(tmp_path / "run") as other:
            other.delete(3)
        return state(0)

    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        begin, found = mgr.resume(fresh, healthy=healthy)
    assert begin == 3
    assert found["w"][0] == 2


def test_a_step_that_is_replaced_while_the_target_is_made_is_the_new_one(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run")

    def fresh() -> dict[str, Any]:
        with ckpt.sync.CheckpointManager(root) as other:
            other.save(3, {"w": jnp.full(4096, 7.0), "step": jnp.int32(7)}, if_exists="replace")
        return state(0)

    with ckpt.sync.CheckpointManager(root) as mgr:
        begin, found = mgr.resume(fresh)
    assert begin == 4
    assert found["w"][0] == 7


def test_a_step_that_was_replaced_since_is_not_moved_aside(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run")
    flip_array(root / "3")
    with (
        ckpt.sync.CheckpointManager(root) as mgr,
        ckpt.sync.CheckpointManager(root) as other,
    ):
        assert mgr.resume(state(0))[0] == 3
        other.save(3, state(3), if_exists="replace", durable=True)
        with pytest.raises(errors.StepExistsError):
            mgr.save(3, state(4))
        assert not (root / "damaged").exists()


def test_a_function_of_a_state_with_other_things_than_arrays_is_resumed(tmp_path: Path) -> None:
    """What comes back is what a new run has: functions, numbers and numpy arrays stay such."""
    calls: list[int] = []

    def init() -> dict[str, Any]:
        calls.append(1)
        # A state that is made in memory would be a concrete array here.
        w = jnp.ones(3) * 2
        assert len(calls) == 1 or isinstance(w, jax.core.Tracer)
        return {"act": jax.nn.relu, "host": np.arange(4), "n": 5, "none": None, "w": w, "x": 0.5}

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        _, fresh = mgr.resume(init)
        mgr.save(0, fresh)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        start, found = mgr.resume(init)
    assert (start, len(calls)) == (1, 2)
    assert differences(fresh, found) == []
    assert found["act"] is jax.nn.relu
    assert [type(found[name]) for name in ("n", "x", "host")] == [int, float, np.ndarray]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "adapt", [ckpt.Adapt(select="w"), ckpt.Adapt(missing="keep", extra="ignore")]
)
def test_values_that_a_resumed_state_keeps_are_those_of_the_function(
    tmp_path: Path, adapt: ckpt.Adapt, named: bool
) -> None:
    """A state in which nothing stands for a value that was to be kept."""

    def init() -> dict[str, Any]:
        return {"w": jnp.zeros(3), "opt": {"mu": jnp.full(3, 0.5)}}

    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        old = {"w": jnp.ones(3), "opt": {"trace": jnp.full(3, 7.0)}}
        if adapt.select is not None:
            old["opt"] = {"mu": jnp.full(3, 7.0)}
        mgr.save(0, items={"m": old}) if named else mgr.save(0, old)
    wanted = {"w": jnp.ones(3), "opt": {"mu": jnp.full(3, 0.5)}}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for how in (adapt, {"m": adapt}):
            if named:
                found = mgr.resume(items={"m": init}, adapt=how)[1]["m"]
            else:
                found = mgr.resume(init, adapt=adapt)[1]
            assert differences(jax.tree.map(jnp.asarray, wanted), found) == []

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            _, again = await mgr.resume(
                **({"items": {"m": init}} if named else {"init": init}), adapt=adapt
            )
            assert differences(found, again["m"] if named else again) == []

    anyio.run(main)


def test_a_function_that_cannot_be_traced_is_called_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def untraceable() -> dict[str, Any]:
        return {"w": jnp.ones(2) * float(jnp.ones(1)[0])}

    for start in (0, 1):
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            step, found = mgr.resume(untraceable)
            assert step == start
            mgr.save(start, found)
        told = "untraceable is called for a target" in caplog.text
        assert told == bool(start)
    assert "cannot be traced by jax.eval_shape" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mgr: mgr.resume(), "pass the fresh state"),
        (lambda mgr: mgr.resume(state(0), items={"a": 1}), "and not both"),
        (lambda mgr: mgr.resume(items={}), "expected a dict of item names"),
        (lambda mgr: mgr.resume(items=[state(0)]), "expected a dict of item names"),
        (lambda mgr: mgr.resume(items={"state": state(0)}, like=3), "expected a dict of targets"),
        (lambda mgr: mgr.resume(state(0), fallback=1), "expected True or False"),
    ],
)
def test_wrong_arguments(call: Any, message: str, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(make_root(tmp_path / "run", (1,))) as mgr:
        with pytest.raises(errors.InvalidArgumentError, match=message):
            call(mgr)
        assert mgr.all_steps() == [1]


def test_a_reader_resumes_as_well(tmp_path: Path) -> None:
    root = make_root(tmp_path / "run")
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        start, found = mgr.resume(state(0))
        assert (start, int(found["step"])) == (4, 3)
