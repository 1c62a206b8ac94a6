"""Metrics, as a Prometheus server would read them."""

from __future__ import annotations

import math
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ckpt.sync
from ckpt.errors import InvalidArgumentError
from ckpt.observers import Prometheus
from ckpt.observers._names import PROMETHEUS
from tests.unit.observers.examples import a_whole_save, end, event


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_save_is_counted_and_measured_once(registry: CollectorRegistry) -> None:
    observer = Prometheus(registry)
    for each in a_whole_save(7):
        observer(each)
    save = {"operation": "save"}
    write = save | {"phase": "write"}
    assert value(registry, "ckpt_operations_total", outcome="ok", **save) == 1
    assert value(registry, "ckpt_operation_seconds_count", **save) == 1
    assert value(registry, "ckpt_operation_seconds_sum", **save) == pytest.approx(325e-6)
    assert value(registry, "ckpt_operation_seconds_bucket", le="0.001", **save) == 1
    assert value(registry, "ckpt_phase_seconds_count", **write) == 1
    assert value(registry, "ckpt_phase_seconds_sum", **write) == pytest.approx(190e-6)
    assert value(registry, "ckpt_phase_bytes_total", **write) == 8 << 20
    assert value(registry, "ckpt_phase_seconds_count", phase="preserve", **save) == 1
    assert value(registry, "ckpt_phase_bytes_total", phase="plan", **save) is None


def test_what_was_not_done_is_counted_and_not_measured(registry: CollectorRegistry) -> None:
    observer = Prometheus(registry)
    observer(event("write", 0, 10, nbytes=5))
    observer(end(0, 20, "failed", reason="no space left"))
    for _ in range(3):
        observer(end(0, 20, "skipped"))
    for outcome, count in [("failed", 1), ("skipped", 3), ("ok", None)]:
        labels = {"operation": "save", "outcome": outcome}
        assert value(registry, "ckpt_operations_total", **labels) == count
    assert value(registry, "ckpt_operation_seconds_count", operation="save") is None
    assert value(registry, "ckpt_phase_seconds_count", operation="save", phase="write") is None
    assert math.isnan(value(registry, "ckpt_last_committed_step") or 0)


def test_the_last_committed_step_is_the_one_of_the_last_save_and_no_number_before(
    registry: CollectorRegistry,
) -> None:
    observer = Prometheus(registry)
    gauges = ["ckpt_last_committed_step", "ckpt_last_committed_timestamp_seconds"]
    assert all(math.isnan(value(registry, name) or 0) for name in gauges)
    now = time.perf_counter_ns() // 1000
    observer(end(now - 5, now, step=9))
    # A run went back, and saves step 3 again.
    observer(end(now - 5, now, step=3))
    observer(end(now - 5, now, step=5, operation="restore"))
    observer(end(now - 5, now, step=None))
    assert value(registry, gauges[0]) == 3
    assert value(registry, gauges[1]) == pytest.approx(time.time(), abs=60)


def test_two_managers_share_one(registry: CollectorRegistry, tmp_path: Path) -> None:
    observer = Prometheus(registry)
    with (
        ckpt.sync.CheckpointManager(tmp_path / "a", observers=[observer]) as a,
        ckpt.sync.CheckpointManager(tmp_path / "b", observers=[observer]) as b,
    ):
        for step in range(2):
            a.save(step, {"w": jnp.full((256, 1024), step)})
            b.save(step + 10, {"w": jnp.full((256, 1024), step)})
        b.wait_until_finished()
        a.save(5, {"w": jnp.full((256, 1024), 5)})
        a.wait_until_finished()
    assert value(registry, "ckpt_operations_total", operation="save", outcome="ok") == 5
    assert value(registry, "ckpt_last_committed_step") == 5
    written = value(registry, "ckpt_phase_bytes_total", operation="save", phase="write")
    assert written is not None
    assert written >= 5 << 20


def test_a_server_reads_the_documented_names_and_no_others(registry: CollectorRegistry) -> None:
    observer = Prometheus(registry, prefix="training_ckpt")
    for each in a_whole_save():
        observer(each)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    # Beside them prometheus-client tells when it made each.
    told = {f.name: f for f in families if not f.name.endswith("_created")}
    assert set(told) == {f"training_ckpt_{name}".removesuffix("_total") for name in PROMETHEUS}
    for name, known in PROMETHEUS.items():
        family = told[f"training_ckpt_{name}".removesuffix("_total")]
        assert (family.type, family.documentation) == (known.kind, known.meaning)
        assert set(family.samples[0].labels) - {"le"} == set(known.labels)


def test_a_second_one_on_a_registry_is_refused_and_changes_nothing(
    registry: CollectorRegistry,
) -> None:
    observer = Prometheus(registry)
    with pytest.raises(InvalidArgumentError, match="Make one Prometheus and give it to every"):
        Prometheus(registry)
    observer(end(0, 9))
    assert value(registry, "ckpt_operations_total", operation="save", outcome="ok") == 1
    Prometheus(registry, prefix="other")
    Prometheus(CollectorRegistry())


def test_where_one_name_is_taken_none_is_registered(registry: CollectorRegistry) -> None:
    taken = Counter("ckpt_phase_bytes", "of somebody else", registry=registry)
    with pytest.raises(InvalidArgumentError, match="ckpt_phase_bytes"):
        Prometheus(registry)
    registry.unregister(taken)
    assert list(registry.collect()) == []
    Prometheus(registry)


def test_the_global_registry_is_taken_unless_there_is_another() -> None:
    # Under a name that no other test uses: it stays there.
    Prometheus(prefix="ckpt_test_global")(end(0, 9))
    from prometheus_client import REGISTRY

    labels = {"operation": "save", "outcome": "ok"}
    assert value(REGISTRY, "ckpt_test_global_operations_total", **labels) == 1


@pytest.mark.parametrize("prefix", ["", "my-run", "9", "a b", None])
def test_a_prefix_can_begin_a_name(prefix: object, registry: CollectorRegistry) -> None:
    with pytest.raises(InvalidArgumentError, match="letters, digits and underscores"):
        Prometheus(registry, prefix)  # type: ignore[arg-type]


def test_a_registry_is_one() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Prometheus\(registry='http://"):
        Prometheus("http://localhost:9090")  # type: ignore[arg-type]
