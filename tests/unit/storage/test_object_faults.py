"""A store that fails at any one request: nothing half is seen, nothing committed is lost."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from ckpt._format.manifest_head import FILE_NAME
from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, StepExistsError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._object import attempts as object_attempts
from ckpt.storage._object.config import Memory
from ckpt.storage._object.connection import connect
from ckpt.storage._object.listing import GONE, gone
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import assert_whole, publish, read_all, write
from tests.unit.storage.failing_store import KINDS, FailingStore, RefusingStore

LEASE_S = 0.05
# Where the store answers, every request is waited for. Where it does not, it is given up soon.
REQUEST_S = 5.0
SILENCE_S = 0.05
PATIENCE_S = 120


class Place:
    """One root in memory, opened with and without failures."""

    def __init__(self, kind: str = "hangs") -> None:
        seconds = SILENCE_S if "gone" in kind or kind == "hangs" else REQUEST_S
        self.config = Memory(f"memory://{uuid.uuid4().hex}/run", request_timeout=seconds)

    def opened(self, at: int | None = None, kind: str = "") -> tuple[ObjectStorage, FailingStore]:
        store = FailingStore(connect(self.config).open()[0], at, kind)
        opened = ObjectStorage(
            self.config, Timeouts(lease=LEASE_S), open_store=lambda: (store, store)
        )
        return opened, store

    def keys(self) -> list[str]:
        store = connect(self.config).open()[0]
        return sorted(key.decode().removeprefix("run/") for key in store.list().result())


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except CheckpointError as error:
        return error


async def save(storage: Storage) -> Any:
    return await publish(storage, "5", "new")


async def overwrite(storage: Storage) -> Any:
    return await publish(storage, "5", "new", overwrite=True)


async def delete(storage: Storage) -> Any:
    return await storage.remove("5")


async def sweep(storage: Storage) -> Any:
    swept = await storage.sweep()
    while not swept:
        await anyio.sleep(LEASE_S / 2)
        swept = await storage.sweep()
    return swept


async def nothing(place: Place) -> None:
    pass


async def an_old_one(place: Place) -> None:
    await publish(place.opened()[0], "5", "old")


async def a_committed_one(place: Place) -> None:
    """Its writer died before it could remove its record."""
    storage, _ = place.opened()
    attempt = await write(storage, "5", "old")
    await object_attempts.publish(storage._keys, attempt, overwrite=False, replacing=None)  # type: ignore[arg-type]


async def a_dead_writer(place: Place) -> None:
    await an_old_one(place)
    await write(place.opened()[0], "5", "dead")


SCENES: dict[str, tuple[Callable[[Place], Awaitable[None]], Any, set[str | None]]] = {
    "save": (nothing, save, {None, "new"}),
    "save onto one": (an_old_one, save, {"old"}),
    "overwrite": (an_old_one, overwrite, {"old", "new"}),
    "delete": (an_old_one, delete, {"old", None}),
    "sweep": (a_dead_writer, sweep, {"old"}),
    "overwrite a dead one's": (a_committed_one, overwrite, {"old", "new"}),
    "delete a dead one's": (a_committed_one, delete, {"old", None}),
}


async def seed_of(storage: Storage) -> str | None:
    """Return what is there, whole; None where nothing is."""
    if await read_all(storage, "5") is None:
        assert not await storage.exists("5")
        return None
    for seed in ("old", "new"):
        try:
            await assert_whole(storage, "5", seed)
        except AssertionError:
            continue
        return seed
    raise AssertionError("neither the old one nor the new one")


def check(result: Any, scene: str, kind: str, seen: str | None) -> None:
    """What the call said is true."""
    if scene == "save onto one":
        assert isinstance(result, CheckpointError)
    elif isinstance(result, StepExistsError):
        assert seen == "old"
    elif scene.startswith(("save", "overwrite")) and not isinstance(result, CheckpointError):
        assert seen == "new"
    elif scene.startswith("delete") and result is True:
        assert seen is None
    elif scene.startswith("delete") and "gone" not in kind and "denied" not in kind:
        assert seen == "old", "what was deleted was refused"


async def quiet(place: Place) -> None:
    """Clean up until nothing changes any more."""
    cleaner, _ = place.opened()
    with anyio.fail_after(PATIENCE_S):
        while True:
            before = place.keys()
            await cleaner.sweep()
            # Longer than a lease, so that all that was seen before has run out.
            await anyio.sleep(LEASE_S * 1.5)
            await cleaner.sweep()
            if place.keys() == before:
                return


async def run_one(scene: str, at: int | None, kind: str) -> int:
    """Run a scene that fails at one request; return how many requests it took."""
    before, act, allowed = SCENES[scene]
    place = Place(kind)
    await before(place)
    storage, store = place.opened(at, kind)
    with anyio.fail_after(PATIENCE_S):
        result = await outcome(act(storage))
    if at is None:
        assert not isinstance(result, CheckpointError) or scene == "save onto one", result
    looker, _ = place.opened()
    seen = await seed_of(looker)
    assert seen in allowed
    check(result, scene, kind, seen)
    count = store.count
    # What was given up may still be carried out, at any later time.
    store.let_go()
    assert await seed_of(looker) in allowed
    await quiet(place)
    after = await seed_of(looker)
    assert after in allowed
    if kind != "hangs":
        assert after == seen, "cleaning up has changed what is there"
    check_left(place, after)
    # Whatever was left, the step can be saved again, and then it is that.
    assert await outcome(overwrite(looker)) is not None
    await assert_whole(looker, "5", "new")
    return count


def check_left(place: Place, seen: str | None) -> None:
    """Nothing lies there that nothing needs, but what a writer left whose outcome is unknown."""
    keys = place.keys()
    records = [key for key in keys if key.startswith(".ckpt-attempts/")]
    # What was surely committed is never left.
    assert not any(key.endswith(".later") for key in records), keys
    unknown = {key.rsplit(".", 1)[1] for key in records}
    inside = {key.split("/")[1] for key in keys if key.startswith("5/")}
    names = {key.rsplit(".", 1)[1] for key in keys if key.startswith(".ckpt-steps/")}
    assert (FILE_NAME in inside) is (seen is not None), "a tombstone is left"
    assert len(inside - unknown - {FILE_NAME}) == (seen is not None), keys
    assert names <= inside | unknown, keys


def test_every_scene_ends_well_without_failures() -> None:
    for scene in SCENES:
        assert anyio.run(run_one, scene, None, "") > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scene", SCENES)
def test_a_failure_at_any_request_leaves_a_whole_step_or_none(
    scene: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those who are waited for are dead.
    monkeypatch.setattr("ckpt.storage._object.removal._PAUSE_SECONDS", 0.001)

    async def main() -> None:
        count = await run_one(scene, None, "")
        assert count > 3
        async with anyio.create_task_group() as tasks:
            for at in range(count):
                tasks.start_soon(run_one, scene, at, kind)

    anyio.run(main)


def test_an_outcome_that_is_not_known_is_said_and_nothing_is_removed() -> None:
    async def main() -> None:
        place = Place()
        storage, _ = place.opened()
        attempt = await write(storage, "5", "new")
        # The store is gone while the manifest is put, after the name and the record.
        _, store = place.opened()
        client: Any = storage._keys
        client._opened = (store, store)  # the same writer, from now on
        store.kind, store.at = "lost and gone", 2
        with pytest.raises(StorageError, match="it is unknown whether") as caught:
            await storage.publish(attempt, overwrite=False)
        assert "its data was kept" in str(caught.value)
        await storage.discard(attempt)
        looker, _ = place.opened()
        await assert_whole(looker, "5", "new")

    anyio.run(main)


def test_a_renewal_whose_answer_was_lost_does_not_end_a_live_save() -> None:
    async def main() -> None:
        place = Place()
        storage, store = place.opened()
        for at_end in ("publish", "discard"):
            attempt = await write(storage, "5", "new")
            store.kind, store.at = "lost and gone", store.count
            with pytest.raises(StorageError):
                await storage.renew(attempt)
            store.at = None
            if at_end == "discard":
                await storage.discard(attempt)
                left = place.keys()
                assert not any(attempt.id in key for key in left)
                continue
            await storage.renew(attempt)
            store.kind, store.at = "lost and gone", store.count
            with pytest.raises(StorageError):
                await storage.renew(attempt)
            store.at = None
            await storage.publish(attempt, overwrite=False)
            await assert_whole(storage, "5", "new", attempt)

    anyio.run(main)


def test_what_a_writer_writes_after_it_was_taken_for_dead_goes_when_it_gives_up() -> None:
    async def main() -> None:
        place = Place()
        storage, _ = place.opened()
        attempt = await write(storage, "5", "slow", manifest=False)
        await quiet(place)
        assert place.keys() == []
        await storage.write_block(attempt, "item/d/1", memoryview(b"late"))
        with pytest.raises(StorageError, match="removed by a cleaner"):
            await storage.renew(attempt)
        await storage.discard(attempt)
        assert place.keys() == []

    anyio.run(main)


def test_what_others_left_beside_the_records_is_swept_or_left_alone() -> None:
    async def main() -> None:
        place = Place()
        raw = connect(place.config).open()[0]
        foreign = [".ckpt-attempts/x.later", ".ckpt-attempts/y"]
        for key in (*foreign, ".ckpt-probe/0"):
            raw.write(key, b"-").result()
        cleaner, _ = place.opened()
        await cleaner.sweep()
        assert place.keys() == [*foreign, ".ckpt-probe/0"], "not old yet"
        await quiet(place)
        assert place.keys() == foreign

    anyio.run(main)


@pytest.mark.parametrize(
    "deleter", [gone("0" * 32), GONE + b"of who knows whom"], ids=["named", "unnamed"]
)
def test_a_tombstone_that_nobody_removes_costs_the_next_save_nothing(deleter: bytes) -> None:
    async def main() -> None:
        config = Memory(f"memory://{uuid.uuid4().hex}/run", request_timeout=600.0)
        store = FailingStore(connect(config).open()[0])
        storage = ObjectStorage(config, Timeouts(), open_store=lambda: (store, store))
        store.write("5/ckpt.json", deleter).result()
        with anyio.fail_after(PATIENCE_S):
            await publish(storage, "5", "new")
        await assert_whole(storage, "5", "new")

    anyio.run(main)


def test_data_stay_while_an_earlier_try_to_commit_may_still_come_true() -> None:
    async def main() -> None:
        place = Place()
        key, raw = "5/ckpt.json", connect(place.config).open()[0]
        raw.write(key, GONE + b"of who knows whom").result()
        storage, _ = place.opened()
        attempt = await write(storage, "5", "new")
        # The first try of the manifest hangs, the second one is refused.
        _, store = place.opened()
        refusing = RefusingStore(store, key, 2)
        client: Any = storage._keys
        client._opened = (refusing, refusing)
        store.kind, store.at = "hangs", 2
        with pytest.raises(StorageError):
            await storage.publish(attempt, overwrite=False)
        assert refusing.writes == 2
        await storage.discard(attempt)
        # Whoever left the tombstone removes it, and then the first one is carried out.
        raw.write(key, None).result()
        store.let_go()
        await assert_whole(place.opened()[0], "5", "new")

    anyio.run(main)


def test_who_removes_a_damaged_step_dooms_nobody_who_is_about_to_replace_it() -> None:
    async def main() -> None:
        place = Place()
        await an_old_one(place)
        writer, _ = place.opened()
        attempt = await write(writer, "5", "new")
        assert isinstance(attempt, object_attempts.ObjectAttempt)
        assert attempt.record is not None
        # From here on its manifest may come at any moment.
        assert await attempt.record.change(writer._keys, "committing")
        connect(place.config).open()[0].write("5/ckpt.json", b"damaged").result()
        assert await place.opened()[0].remove("5")
        await quiet(place)
        await writer.publish(attempt, overwrite=False)
        await assert_whole(writer, "5", "new", attempt)

    anyio.run(main)
