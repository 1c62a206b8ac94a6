"""What listeners of jax.monitoring hear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax import monitoring

import ckpt.sync
from ckpt.errors import InvalidArgumentError
from ckpt.observers import JaxMonitoring
from ckpt.observers._names import JAX
from tests.unit.observers.examples import a_whole_save, end, event

Heard = list[tuple[str, str, float]]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Everything that listeners are told under this test's prefix."""
    told: Heard = []

    def take(kind: str, name: str, value: float) -> None:
        if name.startswith("/test-ckpt/"):
            told.append((kind, name.removeprefix("/test-ckpt/"), value))

    def on_event(event: str, **_: str | int) -> None:
        take("event", event, 0)

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        take("duration", event, duration_secs)

    def on_scalar(event: str, value: float, **_: str | int) -> None:
        take("scalar", event, value)

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
    monitoring.register_scalar_listener(on_scalar)
    yield told
    monitoring.unregister_event_listener(on_event)
    monitoring.unregister_event_duration_listener(on_duration)
    monitoring.unregister_scalar_listener(on_scalar)


def test_a_save_is_told_once_whatever_its_size(heard: Heard) -> None:
    observer = JaxMonitoring("/test-ckpt/")
    for each in a_whole_save():
        observer(each)
    values = {name: value for _, name, value in heard}
    assert len(values) == len(heard)
    assert values == {
        "save/ok": 0,
        "save/seconds": pytest.approx(325e-6),
        "save/bytes": 7 << 20,
        "save/wait_seconds": pytest.approx(15e-6),
        "save/blocked_seconds": pytest.approx(105e-6),
        "save/plan_seconds": pytest.approx(10e-6),
        "save/stage_seconds": pytest.approx(80e-6),
        "save/write_seconds": pytest.approx(190e-6),
        "save/written_bytes": 8 << 20,
        "save/publish_seconds": pytest.approx(40e-6),
        "save/preserve_seconds": pytest.approx(10e-6),
    }
    assert all(JAX[name] == kind for kind, name, _ in heard)


PHASES = {
    "save": (
        *("blocked", "wait", "plan", "snapshot", "stage", "encode", "digest", "write"),
        *("record", "publish", "preserve", "preempted"),
    ),
    "restore": ("plan", "read", "fetch", "exchange", "place"),
    "verify": ("plan", "read", "digest"),
    "delete": (),
    "drain": (),
}
BYTES = {
    "save": {"write": "written_bytes"},
    "restore": {"read": "read_bytes", "fetch": "fetched_bytes"},
    "verify": {"read": "read_bytes"},
}


def test_every_name_is_told_with_its_value(heard: Heard) -> None:
    observer = JaxMonitoring("/test-ckpt")
    expected: dict[str, object] = {}
    for operation, phases in PHASES.items():
        moved = BYTES.get(operation, {})
        for took, phase in enumerate(phases, 1):
            observer(event(phase, 0, took, operation=operation, nbytes=100 + took))
            expected[f"{operation}/{phase}_seconds"] = pytest.approx(took * 1e-6)
            if phase in moved:
                expected[f"{operation}/{moved[phase]}"] = 100 + took
        observer(end(0, 50, operation=operation, nbytes=7))
        expected |= {f"{operation}/ok": 0, f"{operation}/seconds": pytest.approx(50e-6)}
        if phases:
            expected[f"{operation}/bytes"] = 7
        for outcome in ("failed", "skipped", "cancelled"):
            observer(end(0, 50, outcome, operation=operation))
            expected[f"{operation}/{outcome}"] = 0
    assert {name: value for _, name, value in heard} == expected
    assert len(heard) == len(expected)


def test_what_was_not_done_is_counted_and_not_measured(heard: Heard) -> None:
    observer = JaxMonitoring("/test-ckpt")
    observer(event("write", 0, 10, nbytes=5))
    observer(end(0, 20, "failed", reason="no space left"))
    observer(end(30, 31, "skipped"))
    observer(end(30, 31, "cancelled", operation="restore"))
    assert [name for _, name, _ in heard] == ["save/failed", "save/skipped", "restore/cancelled"]


def test_the_time_that_was_saved_is_told(heard: Heard) -> None:
    JaxMonitoring("/test-ckpt")(event("preempted", 0, 60_000_000))
    assert heard == [("duration", "save/preempted_seconds", 60.0)]


def test_phases_that_have_no_documented_name_are_not_told(heard: Heard) -> None:
    observer = JaxMonitoring("/test-ckpt")
    for each in (event("something new", 0, 1), end(0, 2), end(0, 2, operation="new")):
        observer(each)
    assert {name for _, name, _ in heard} == {"save/ok", "save/seconds", "save/bytes"}


def test_a_real_save_uses_documented_names(heard: Heard, tmp_path: Path) -> None:
    observer = JaxMonitoring("/test-ckpt")
    with ckpt.sync.CheckpointManager(tmp_path, observers=[observer]) as mgr:
        mgr.save(1, {"w": jnp.ones((256, 1024))})
        mgr.wait_until_finished()
        mgr.delete(1)
    values = {name: value for _, name, value in heard}
    assert {"save/ok", "save/blocked_seconds", "save/written_bytes", "delete/ok"} <= set(values)
    # A deletion moves nothing; there is no number that is always 0.
    assert all(value > 0 for kind, _, value in heard if kind == "scalar")
    assert values["save/bytes"] == 1 << 20
    assert values["save/written_bytes"] >= 1 << 20
    assert 0 < values["save/write_seconds"] <= values["save/seconds"]
    assert set(values) <= set(JAX)


@pytest.mark.parametrize("prefix", ["", "/", None, 3])
def test_a_prefix_is_a_text(prefix: object) -> None:
    with pytest.raises(InvalidArgumentError, match="such as '/ckpt'"):
        JaxMonitoring(prefix)  # type: ignore[arg-type]
