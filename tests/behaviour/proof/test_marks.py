"""Marks: what a run that resumes wrongly is told, and that others are told nothing."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._proof.state_pass import StatePass
from ckpt.errors import NotRepeatedError, ReadOnlyError, UnsupportedLeafError
from ckpt.storage._local.storage import LocalStorage
from tests.behaviour.proof.small_training import (
    SIZE,
    State,
    batch_of,
    first_state,
    mesh_of,
    placed,
    step_of,
)
from tests.support.stateful_objects import Counter, Reservoir

SAVED, END = 5, 9
# Columns of a shard.
SIZE_OF_SHARD = SIZE // 2


def run(
    root: Path,
    *,
    devices: int = 4,
    fault: Callable[[State], State] = lambda state: state,
    step: Callable[..., State] = step_of,
    end: int = END,
    every: int = 1,
    on_difference: Any = "warn",
) -> State:
    """Train from the latest step to `end`; save `SAVED`; marks are as given."""
    mesh = mesh_of(devices)
    marks = ckpt.extensions.Marks(every=every, on_difference=on_difference)
    with ckpt.sync.CheckpointManager(root, extensions=[marks]) as mgr:
        start, state = mgr.resume(lambda: placed(first_state(), mesh))
        state = placed(fault(state) if start else state, mesh)
        for number in range(start, end):
            mgr.mark(number, state)
            state = step(state) if start else step_of(state)
            if number == SAVED:
                mgr.save(number, state)
    return state


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Let all managers of this module use what one of them has compiled for alike states."""
    calls: dict[Any, Any] = {}

    def begin(self: StatePass, step: int, tree: Any) -> Any:
        self._calls = calls
        return begin_alone(self, step, tree)

    begin_alone = StatePass.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatePass, "begin", begin)
        yield


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which a run has saved step 5, and has ended before step 9."""
    root = tmp_path_factory.mktemp("first")
    run(root)
    return root


@pytest.fixture
def root(first_run: Path, tmp_path: Path) -> Path:
    """A copy of that root."""
    return shutil.copytree(first_run, tmp_path / "run")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def changed(path: str, change: Callable[[Any], Any]) -> Callable[[State], State]:
    """Return a fault: the leaves at a path are changed."""

    def fault(state: State) -> State:
        *keys, last = path.split(".")
        node = state = jax.tree.map(lambda leaf: leaf, state)
        for key in keys:
            node = node[key]
        node[last] = jax.tree.map(change, node[last])
        return state

    return fault


def swapped(state: State) -> State:
    m = state["m"]
    return {**state, "m": {**m, "a": m["b"], "b": m["a"]}}


def without_ema(state: State) -> State:
    return {name: leaf for name, leaf in state.items() if name != "ema"}


def without_ema_step(state: State) -> State:
    after = step_of({**state, "ema": state["params"]})
    return without_ema(after)


def one_replica_changed(state: State) -> State:
    """Change one element on one of the two devices that hold one shard of `params.a`."""
    array = state["params"]["a"]
    shards = [shard.data for shard in array.addressable_shards]
    shards[-1] = shards[-1].at[3, 1].add(1.0)
    odd = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return {**state, "params": {**state["params"], "a": odd}}


def same_key(state: State) -> State:
    return {**step_of(state), "rng": state["rng"]}


FIRST = SAVED + 1
# Each: what goes wrong after a restart, the step that is named, the leaf that is named first, and
# words of the cause.
FAULTS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "forgotten key": (
        {"fault": changed("rng", lambda _: jax.random.key(7))},
        FIRST,
        "rng",
        "random key rng differs",
    ),
    "iterator off by one": (
        {"fault": changed("data.position", lambda n: n + 1)},
        FIRST,
        "data.position",
        "only a counter differs (data.position is 7 and was 6)",
    ),
    "batch order": (
        {"step": lambda state: step_of(state, batch=99)},
        FIRST + 1,
        "",
        "the data came in another order",
    ),
    "cast moment": (
        {"fault": changed("m", lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32))},
        FIRST,
        "m.",
        "only some leaves in m differ",
    ),
    "moment of another dtype": (
        {"fault": changed("m.a", lambda leaf: leaf.astype(jnp.bfloat16))},
        FIRST,
        "m.a",
        "m.a is bfloat16[16, 16] and was float32[16, 16]",
    ),
    "stale average": (
        {"fault": changed("ema.b", lambda leaf: leaf * 0.999)},
        FIRST,
        "ema.b",
        "only some leaves in ema.b differ: they were not restored, or are stale",
    ),
    "wrong step count": (
        {"fault": changed("count", lambda _: jnp.int32(0))},
        FIRST,
        "count",
        "only a counter differs (count is 0 and was 6)",
    ),
    "donated buffer read late": (
        {"fault": changed("params.bias", lambda leaf: jnp.full_like(leaf, 3e-7))},
        FIRST,
        "params.bias",
        "only some leaves in params.bias differ",
    ),
    "missing item": (
        {"fault": without_ema, "step": without_ema_step},
        FIRST,
        "ema.a",
        "the state has other leaves: ema.a is missing",
    ),
    "learning rate of another step": (
        {"step": lambda state: step_of(state, rate=1e-2)},
        FIRST + 1,
        "",
        "computed otherwise (such as with another learning rate)",
    ),
    "dropout key used again": (
        {"step": same_key},
        FIRST + 1,
        "rng",
        "random key rng differs",
    ),
    "shuffled leaves": (
        {"fault": swapped},
        FIRST,
        "m.a",
        "leaves have changed places: m.a has the values of m.b",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_after_a_restart_is_named(
    name: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, step, leaf, cause = FAULTS[name]
    run(root, **given)
    (said,) = warnings(caplog)
    assert f"step {step} is not what it was" in said
    assert cause in said
    assert f"Different: {leaf}" in said


def test_an_iterator_that_begins_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for begins_again in (False, True):
        data = Counter()
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            start, found = mgr.resume(items={"state": {"n": 0}, "data": data})
            if begins_again:
                data.set_state(Counter().get_state())
            for step in range(start, 6):
                mgr.mark(step, {"state": found["state"], "data": data})
                data.count += 1
                if step == 2:
                    mgr.save(step, items={"state": found["state"], "data": data})
    (said,) = warnings(caplog)
    assert "step 3 is not what it was" in said
    assert "the iterator data is at another place" in said


def test_one_device_that_differs_from_its_replica_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(root, fault=one_replica_changed)
    assert any(
        f"step {FIRST}: " in said and "params.a" in said and str(jax.devices()[3]) in said
        for said in warnings(caplog)
    )


def test_one_faulty_shard_is_named_with_its_devices(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(root, fault=changed("params.a", lambda leaf: leaf.at[0, SIZE_OF_SHARD].add(1.0)))
    (said,) = warnings(caplog)
    devices = [str(jax.devices()[number]) for number in (1, 3)]
    assert f"only one part of an array differs, which is on {', '.join(devices)}" in said
    assert "Different: params.a" in said


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_run_that_is_repeated_is_told_so_once(
    devices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    run(tmp_path, devices=devices)
    run(tmp_path, devices=devices, end=END + 3)
    assert warnings(caplog) == []
    said = [each.getMessage() for each in caplog.records if " repeated " in each.getMessage()]
    assert said == [f"{tmp_path}: steps {FIRST} to {END - 1} were repeated exactly"]


def test_another_mesh_computes_in_another_order_and_is_said_to_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, devices=1)
    run(tmp_path, devices=8, end=END + 3)
    said = warnings(caplog)
    assert len(said) <= 1
    assert all("differs by rounding alone" in each for each in said)


def test_an_error_is_raised_by_choice(root: Path) -> None:

    def fault(state: State) -> State:
        return changed("count", lambda _: jnp.int32(0))(state)

    with pytest.raises(NotRepeatedError, match=f"step {FIRST} is not what it was") as caught:
        run(root, fault=fault, on_difference="raise", end=END + 1000)
    assert caught.value.step == FIRST


def test_only_every_so_many_steps_are_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    run(tmp_path, every=4)
    run(tmp_path, every=4)
    said = [each.getMessage() for each in caplog.records if " repeated " in each.getMessage()]
    assert said == [f"{tmp_path}: step 8 was repeated exactly"]


def test_what_a_resume_repeats_is_the_run_that_saved(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = changed("count", lambda _: jnp.int32(0))
    run(root, fault=wrong)
    run(root, fault=wrong)
    assert len(warnings(caplog)) == 2, "a fault that is repeated stays a fault"
    caplog.clear()
    run(root)
    assert warnings(caplog) == []


def test_torn_notes_are_passed_over(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (note,) = (root / ".ckpt-marks").iterdir()
    note.write_bytes(note.read_bytes()[:-40])
    run(root)
    (said,) = warnings(caplog)
    assert "marks are passed over" in said
    assert note.name in said


def test_marks_of_a_state_that_gets_other_leaves_are_kept_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    for start in (0, 2):
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            for step in range(start, 6):
                mgr.mark(step, {"a": step} if step % 2 else {"b": step})
    assert warnings(caplog) == []
    assert caplog.records[-1].getMessage() == f"{tmp_path}: steps 2 to 5 were repeated exactly"


def test_marks_that_a_store_is_too_slow_for_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    answers = threading.Event()

    async def put_note(*_: Any, **__: Any) -> bool:
        await anyio.to_thread.run_sync(answers.wait)
        return True

    monkeypatch.setattr(LocalStorage, "put_note", put_note)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        try:
            for step in range(300):
                mgr.mark(step, {"n": step})
        finally:
            answers.set()
    said = [each.getMessage() for each in caplog.records]
    assert said.count(f"{tmp_path}: steps are faster than their marks, and some have none") == 1


def test_marks_of_arrays_that_are_donated_are_those_of_their_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    double = jax.jit(lambda array: array * 2, donate_argnums=0)

    def train(start: int) -> None:
        array = jnp.full((1024, 1024), 2.0**start)
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            for step in range(start, 20):
                mgr.mark(step, {"array": array})
                array = double(array)

    train(0)
    train(10)
    assert warnings(caplog) == []
    assert caplog.records[-1].getMessage() == f"{tmp_path}: steps 10 to 19 were repeated exactly"


def descended(root: Path, start: int, dtype: Any, *, devices: int = 8, data: int = 0) -> None:
    """Mark the steps of a descent without moments, whose steps are small beside the weights."""
    mesh = mesh_of(devices)
    with jax.enable_x64(dtype == np.float64), ckpt.sync.CheckpointManager(root) as mgr:
        weights = placed({"w": jnp.ones((SIZE, SIZE), dtype), "b": jnp.ones(SIZE, dtype)}, mesh)
        for step in range(12):
            if step >= start:
                mgr.mark(step, weights)
            batch = batch_of(step + (data if step >= start > 0 else 0)).astype(dtype)
            weights = descend(weights, batch)


@jax.jit
def descend(weights: State, batch: Any) -> State:
    grads = jax.grad(lambda each: jnp.mean((batch @ each["w"] + each["b"]) ** 2))(weights)
    # A smaller step would not change a short float.
    rate = 1e-3 if weights["w"].dtype.itemsize > 2 else 1e-1
    return jax.tree.map(lambda w, g: w - jnp.asarray(rate, w.dtype) * g, weights, grads)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, jnp.bfloat16])
def test_small_steps_that_are_wrong_are_no_rounding_and_others_are(
    dtype: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    descended(tmp_path, 0, dtype)
    descended(tmp_path, 5, dtype, devices=2)
    assert all("differs by rounding alone" in said for said in warnings(caplog))
    assert len(warnings(caplog)) <= 1
    caplog.clear()
    descended(tmp_path, 5, dtype, data=100)
    (said,) = warnings(caplog)
    assert "step 6 is not what it was" in said
    assert "the data came in another order" in said


def test_a_run_that_begins_anew_repeats_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for first in (1, 2):
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            for step in range(4):
                mgr.mark(step, {"n": first * step})
    assert warnings(caplog) == []


def test_the_state_of_an_iterator_may_have_any_integers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    for start in (0, 2):
        data = np.random.default_rng(3)
        iterator = Reservoir()
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            for step in range(6):
                iterator.data = data.bit_generator.state  # type: ignore[assignment]
                if step >= start:
                    mgr.mark(step, {"data": iterator, "large": 10**30 + step})
                data.normal()
    assert caplog.records[-1].getMessage() == f"{tmp_path}: steps 2 to 5 were repeated exactly"


def test_contexts_of_jax_do_not_hinder_a_mark(tmp_path: Path) -> None:
    one, other = mesh_of(4), mesh_of(8)
    state = placed({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, one)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        with jax.set_mesh(other):
            mgr.mark(0, state)
        with jax.numpy_rank_promotion("raise"):
            mgr.mark(1, {"w": state["w"], "n": jnp.ones((2, 3, 4))})
        with jax.enable_x64(True):
            mgr.mark(2, {"w": jnp.ones((3, 3), jnp.float64)})


def test_only_rows_that_differ_may_be_rows_that_were_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = mesh_of(4)
    for start, used in ((0, 1), (2, 9)):
        with ckpt.sync.CheckpointManager(tmp_path) as mgr:
            table = placed({"table": jnp.ones((4, SIZE)), "w": jnp.ones(4)}, mesh)
            for step in range(6):
                if step >= start:
                    mgr.mark(step, table)
                column = used if step >= 2 else 0
                table = {**table, "table": table["table"].at[0, column].add(1.0)}
                table = placed(table, mesh)
    (said,) = warnings(caplog)
    assert "step 3 is not what it was" in said


def test_bad_calls(tmp_path: Path) -> None:
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="every"):
        ckpt.extensions.Marks(every=0)
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="on_difference"):
        ckpt.extensions.Marks(on_difference="stop")  # type: ignore[arg-type]
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        with pytest.raises(UnsupportedLeafError, match="model"):
            mgr.mark(1, {"model": object()})
        with pytest.raises(ckpt.errors.InvalidArgumentError, match="step"):
            mgr.mark(-1, {})
        mgr.save(1, {"w": jnp.ones(2)})
    with (
        ckpt.sync.CheckpointManager(tmp_path / "run", mode="r") as mgr,
        pytest.raises(ReadOnlyError),
    ):
        mgr.mark(1, {"w": jnp.ones(2)})
