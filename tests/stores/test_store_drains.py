"""Drains into buckets, also while requests fail.

By default on memory and the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) on all servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from ckpt._runtime.loop import call_once
from ckpt._tiers.drains import drainer as drainer_module
from ckpt._tiers.drains.drain import DrainResult, missing
from ckpt._tiers.drains.drainer import DrainRoute, draining
from ckpt.errors import StorageError
from ckpt.storage._resolve import open_root
from tests.stores.fault_proxy import FAULTS, Fault, Seen
from tests.stores.places import Place
from tests.support.drained_roots import assert_whole, drained, made

ALL = "CKPT_ALL_STORES" in os.environ
KINDS = ["gcs", "moto"] if ALL else ["gcs"]
SECONDS = 1.0
PATIENCE_S = 120
# Of a copy into a bucket, about so many requests apart.
STRIDE = 20 if ALL else 40


@pytest.fixture(params=KINDS)
def faulty(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    return make_place(request.param)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return Path(made(tmp_path / "near", 1, 2))


def root(place: Place, name: str) -> Any:
    return place.root(name, retries=1, request_timeout=SECONDS)


def test_steps_are_drained_into_a_bucket_and_back(place: Place, near: Path, tmp_path: Path) -> None:
    told: list[DrainResult] = []

    async def drain(source: Any, target: Any) -> None:
        route = DrainRoute(open_root(source), open_root(target))
        async with draining(route, told.append) as drainer:
            for step in await missing(route.source, route.target):
                await drainer.request(step)
            assert await drainer.finish() == []
        assert await missing(route.source, route.target) == []

    far = place.root("run")
    call_once(partial(drain, near, far))
    assert [(each.step, each.outcome) for each in told] == [(2, "copied"), (1, "copied")]
    assert_whole(far, 1, 2)
    assert drained(near, far, 2).outcome == "there"
    call_once(partial(drain, far, tmp_path / "back"))
    assert_whole(tmp_path / "back", 1, 2)


def test_one_fault_at_any_request(faulty: Place, near: Path) -> None:
    """A drain ends well or with an error, shows nothing by halves, and the next one finishes."""
    proxy = faulty.proxy
    assert proxy is not None
    proxy.forget()
    drained(near, faulty.root("dry"), 1)
    requests = len(proxy.log)
    every = [(number, fault) for fault in FAULTS for number in range(requests)]
    failed = 0
    for number, fault in every[::STRIDE]:
        if fault == "hung" and number % 5:
            continue
        name, what = f"run-{fault}-{number}".replace(" ", "-"), (fault, number)

        def plan(seen: Seen, number: int = number, fault: Fault = fault) -> Fault | None:
            return fault if seen.number == number else None

        proxy.forget()
        proxy.plan = plan
        try:
            assert drained(near, root(faulty, name), 1).outcome == "copied", what
        except StorageError:
            failed += 1
        finally:
            proxy.forget()
        assert drained(near, faulty.root(name), 1).outcome in ("copied", "there"), what
        assert_whole(faulty.root(name), 1)
    assert failed < len(every[::STRIDE]) / 2


def test_a_bucket_that_is_away_for_a_while(
    faulty: Place, near: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drainer_module, "pause_after", lambda failures: 0.01)
    proxy = faulty.proxy
    assert proxy is not None
    proxy.forget()
    told: list[DrainResult] = []
    refused = 0

    def plan(seen: Seen) -> Fault | None:
        nonlocal refused
        # In the middle of the first copy it goes away, and comes back after some tries.
        away = seen.number > 30 and refused < 25
        refused += away
        return "reset" if away else None

    async def main() -> None:
        route = DrainRoute(open_root(near), open_root(root(faulty, "run")))
        with anyio.fail_after(PATIENCE_S):
            async with draining(route, told.append) as drainer:
                await drainer.request(1)
                await drainer.request(2)
                assert await drainer.finish() == []

    proxy.plan = plan
    try:
        call_once(main)
    finally:
        proxy.forget()
    assert refused == 25
    assert sorted((each.step, each.outcome) for each in told) == [(1, "copied"), (2, "copied")]
    assert_whole(faulty.root("run"), 1, 2)
    assert sum("steps cannot be copied from" in text for text in caplog.messages) == 1
