"""Every fault at every request of a save and of a restore: it succeeds, or says what failed.

By default a small sample on the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) a large one,
and one on S3. With CKPT_ALL_FAULTS it is all of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import CheckpointError, SaveSkippedError, StepExistsError, StorageError
from ckpt.testing.compare import differences
from tests.stores.fault_proxy import FAULTS, Fault, Refusal, Seen
from tests.stores.places import Place
from tests.support.conditions import until

ALL = "CKPT_ALL_STORES" in os.environ
KINDS = ["gcs", "moto"] if ALL else ["gcs"]
SECONDS = 1.0
# Of the whole call: some requests one after the other, each within its own limit.
DEADLINE_S = 30
STATE = {"large": np.arange(60_000.0), "small": [np.full(3, n) for n in range(20)], "text": "x"}
UNKNOWN = "it is unknown whether"


@pytest.fixture(params=KINDS)
def faulty(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    return make_place(request.param)


def root(place: Place, name: str) -> Any:
    return place.root(name, retries=1, request_timeout=SECONDS)


def save(place: Place, name: str, step: int = 1, **options: Any) -> None:
    with ckpt.sync.CheckpointManager(root(place, name)) as mgr:
        mgr.save(step, STATE, **options).result()


def restore(place: Place, name: str) -> Any:
    with ckpt.sync.CheckpointManager(root(place, name), mode="r") as mgr:
        return mgr.restore()


def once(number: int, fault: Fault) -> Callable[[Seen], Fault | None]:
    return lambda seen: fault if seen.number == number else None


def ever_since(number: int, fault: Fault) -> Callable[[Seen], Fault | None]:
    return lambda seen: fault if seen.number >= number else None


def requests_of(place: Place, act: Callable[[], Any]) -> list[Seen]:
    """The requests of a call without faults."""
    assert place.proxy is not None
    place.proxy.forget()
    act()
    return place.proxy.log


def tried(place: Place, plan: Callable[[Seen], Fault | None], act: Callable[[], Any]) -> Any:
    """Do something while requests fail; return what it gave, or the error of the library."""
    assert place.proxy is not None
    place.proxy.forget()
    place.proxy.plan = plan
    begun = time.monotonic()
    try:
        return act()
    except CheckpointError as error:
        return error
    finally:
        place.proxy.forget()
        assert time.monotonic() - begun < DEADLINE_S, "it took too long"


def sample(place: Place, requests: list[Seen]) -> list[tuple[int, Fault]]:
    """Which faults are tried where: all where there is time, or what is worst and some others."""
    every: list[tuple[int, Fault]] = []
    for fault in FAULTS:
        # A request that hangs takes its time.
        step = 5 if fault == "hung" else 1
        every += [(number, fault) for number in range(0, len(requests), step)]
    step = {"gcs": 4, "moto": 8}[place.kind] if ALL else 50
    if "CKPT_ALL_FAULTS" in os.environ:
        return every
    worst = 1 if ALL else 3
    return [
        (number, fault)
        for turn, (number, fault) in enumerate(every)
        if (fault == "lost" and number % worst == 0) or turn % step == 0
    ]


def check_saved(place: Place, name: str, error: Any, what: object) -> None:
    """What a save has said is true, and the root can be used as before."""
    # Nothing fails now, and a busy machine may take its time.
    with ckpt.sync.CheckpointManager(place.root(name)) as mgr:
        steps = mgr.all_steps()
        if error is None:
            assert steps == [1], f"{what}: saved, and not there"
        elif UNKNOWN not in str(error):
            assert steps == [], f"{what}: there, although it failed: {error}"
        if steps:
            assert differences(STATE, mgr.restore(1)) == [], what
            assert mgr.verify(1).ok, what
        mgr.save(2, STATE).result()
        assert mgr.all_steps() == [*steps, 2], what


def assert_bearable(failed: list[tuple[str, str, str, str]]) -> None:
    """One fault is what retries are for; but who hangs uses up the time of them all.

    So may a store that is down for a while. A flipped bit may look like an answer, such as that
    something is not there, and without an ETag it is none.
    """
    unbearable = ("flipped", "hung", "lost and down", "bare")
    assert [each for each in failed if each[0] not in unbearable] == []


def test_one_fault_in_a_save(faulty: Place) -> None:
    requests = requests_of(faulty, lambda: save(faulty, "dry"))
    failed: list[tuple[str, str, str, str]] = []
    for number, fault in sample(faulty, requests):
        name, what = f"run-{fault}-{number}", (fault, number, requests[number])
        found = tried(faulty, once(number, fault), partial(save, faulty, name))
        check_saved(faulty, name, found, what)
        if found is not None:
            assert isinstance(found, StorageError), what
            failed.append((fault, requests[number].method, requests[number].path, str(found)))
    assert_bearable(failed)


def test_a_store_that_fails_from_some_moment_on(faulty: Place) -> None:
    requests = requests_of(faulty, lambda: save(faulty, "dry"))
    faults: tuple[Fault, ...] = ("503", "lost", "reset") if ALL else ("lost",)
    for number in range(0, len(requests), 5 if ALL else 15):
        for fault in faults:
            name, what = f"run-{fault}-{number}", (fault, number, requests[number])
            found = tried(faulty, ever_since(number, fault), partial(save, faulty, name))
            assert found is None or isinstance(found, StorageError), what
            check_saved(faulty, name, found, what)


def is_commit(seen: Seen) -> bool:
    key = seen.query.get("name", seen.path)
    return seen.method in ("PUT", "POST") and key.endswith("/1/ckpt.json")


def test_a_lost_answer_of_the_commit_is_a_commit(faulty: Place) -> None:
    seen: list[Seen] = []

    def plan(each: Seen) -> Fault | None:
        if is_commit(each):
            seen.append(each)
            return "lost" if len(seen) == 1 else None
        return None

    assert tried(faulty, plan, lambda: save(faulty, "run")) is None
    assert seen, "no commit was seen"
    check_saved(faulty, "run", None, "lost")


def test_lost_answers_while_a_step_is_replaced(faulty: Place) -> None:
    """It is the new one if the save says so, and one of the two, whole, if it could not tell."""
    new = STATE | {"text": "new"}

    def act() -> None:
        with ckpt.sync.CheckpointManager(root(faulty, "run")) as mgr:
            mgr.save(1, new, if_exists="replace").result()

    for number in range(3):
        save(faulty, "run", if_exists="replace")
        seen: list[Seen] = []

        def plan(each: Seen, number: int = number, seen: list[Seen] = seen) -> Fault | None:
            if is_commit(each):
                seen.append(each)
                return "lost" if len(seen) == number + 1 else None
            return None

        found = tried(faulty, plan, act)
        assert found is None or isinstance(found, StorageError), found
        there = restore(faulty, "run")
        assert differences(new, there) == [] or (found and differences(STATE, there) == [])


@pytest.mark.parametrize("fault", ["500", "reset", "hung"])
def test_a_commit_that_never_arrived_is_none(faulty: Place, fault: Fault) -> None:
    found = tried(
        faulty, lambda seen: fault if is_commit(seen) else None, lambda: save(faulty, fault)
    )
    assert isinstance(found, StorageError)
    with ckpt.sync.CheckpointManager(root(faulty, fault)) as mgr:
        assert mgr.all_steps() == []


def test_a_commit_whose_place_somebody_took_is_none(faulty: Place) -> None:
    """Another writer commits the step in the moment in which the answer of ours is lost."""
    begun = threading.Event()

    def act() -> None:
        with contextlib.suppress(StepExistsError, SaveSkippedError):
            save(faulty, "run")

    other = threading.Thread(target=act)

    def plan(seen: Seen) -> Fault | None:
        if is_commit(seen) and not begun.is_set():
            begun.set()
            # It does not arrive, and another one does.
            other.start()
            return "reset"
        return None

    found = tried(faulty, plan, lambda: save(faulty, "run"))
    other.join()
    # Both have the same state.
    assert found is None or isinstance(found, StepExistsError | SaveSkippedError)
    assert differences(STATE, restore(faulty, "run")) == []


def test_one_fault_in_a_restore(faulty: Place) -> None:
    save(faulty, "run")
    requests = requests_of(faulty, lambda: restore(faulty, "run"))
    failed: list[tuple[str, str, str, str]] = []
    for number, fault in sample(faulty, requests):
        found = tried(faulty, once(number, fault), lambda: restore(faulty, "run"))
        if isinstance(found, CheckpointError):
            failed.append((fault, requests[number].method, requests[number].path, str(found)))
        else:
            assert differences(STATE, found) == [], (fault, requests[number])
    assert_bearable(failed)


def test_a_restore_from_a_store_that_is_down(faulty: Place) -> None:
    save(faulty, "run")
    faults: tuple[Fault, ...] = ("500", "503", "reset", "hung", "truncated") if ALL else ("503",)
    for fault in faults:
        found = tried(faulty, ever_since(0, fault), lambda: restore(faulty, "run"))
        assert isinstance(found, CheckpointError), (fault, found)
        assert differences(STATE, restore(faulty, "run")) == []


@pytest.mark.parametrize("fault", ["500", "lost", "hung"])
def test_faults_while_a_step_is_deleted(faulty: Place, fault: Fault) -> None:
    def act(name: str) -> None:
        with ckpt.sync.CheckpointManager(root(faulty, name)) as mgr:
            mgr.delete(1)

    save(faulty, "dry")
    requests = requests_of(faulty, lambda: act("dry"))
    for number in range(1, len(requests), 4 if ALL else 15):
        name = f"run-{number}"
        save(faulty, name)
        save(faulty, name, 2)
        found = tried(faulty, once(number, fault), partial(act, name))
        with ckpt.sync.CheckpointManager(root(faulty, name)) as mgr:
            steps = mgr.all_steps()
            assert steps in ([2], [1, 2])
            assert found is not None or steps == [2], (fault, number)
            for step in steps:
                assert differences(STATE, mgr.restore(step)) == []


def test_a_bucket_that_begins_to_refuse_is_heard_of(
    faulty: Place, caplog: pytest.LogCaptureFixture
) -> None:
    proxy, refuses = faulty.proxy, threading.Event()
    assert proxy is not None

    def refused(seen: Seen) -> Refusal | None:
        return "403" if refuses.is_set() and seen.method != "GET" else None

    proxy.plan = refused
    place = root(faulty, "run")
    mgr = ckpt.sync.CheckpointManager(place)
    mgr.save(1, STATE, durable=True)
    refuses.set()
    raised: list[StorageError] = []
    for step in range(2, 40):
        try:
            commit = mgr.save(step, STATE)
        except StorageError as error:
            raised.append(error)
            break
        until(commit.done)
    # In its own call if the snapshot was not complete, else in the next one.
    (failure,) = raised
    assert failure.step == 2
    if "an earlier save" in str(failure):
        assert f"step 2 of {mgr.directory} was NOT saved: " in caplog.text
        assert "the newest durable step is 1" in caplog.text
    refuses.clear()
    mgr.save(40, STATE, durable=True)
    mgr.close()
    assert differences(STATE, restore(faulty, "run")) == []
