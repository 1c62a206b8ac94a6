"""Two who change one step: one does all it does between any two requests of the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, StorageError
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._object.config import Memory
from ckpt.storage._object.connection import connect
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import assert_whole, publish, write
from tests.unit.storage.failing_store import FailingStore, MeetingStore
from tests.unit.storage.test_object_faults import LEASE_S, PATIENCE_S, Place, check_left, quiet

Act = Callable[[Storage, Attempt], Awaitable[Any]]


async def save(storage: Storage, _: Attempt) -> Any:
    return (await publish(storage, "5", "saved")).id


async def overwrite(storage: Storage, _: Attempt) -> Any:
    return (await publish(storage, "5", "overwritten", overwrite=True)).id


async def delete(storage: Storage, _: Attempt) -> Any:
    return await storage.remove("5")


async def finish(storage: Storage, attempt: Attempt) -> Any:
    """Its writer publishes what was slow, and was not renewed for longer than its lease."""
    try:
        await storage.publish(attempt, overwrite=True)
    except CheckpointError:
        await storage.discard(attempt)
        raise
    return attempt.id


async def sweep(storage: Storage, _: Attempt) -> Any:
    return await storage.sweep()


ACTS: dict[str, Act] = {
    "save": save,
    "overwrite": overwrite,
    "delete": delete,
    "finish": finish,
    "sweep": sweep,
}


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except CheckpointError as error:
        return error


def patient(place: Place, store: Any = None) -> ObjectStorage:
    """A writer waits for a deletion for as long as a request may take, here in vain."""
    config = Memory(place.config.url, request_timeout=0.2)
    store = store or connect(config).open()[0]
    return ObjectStorage(config, Timeouts(lease=LEASE_S), open_store=lambda: (store, store))


async def meet(first: str, second: str, at: int | None) -> int:
    """Run both on a step that is there; return how many requests the first one took."""
    place = Place()
    await publish(patient(place), "5", "old")
    writer = patient(place)
    slow = await write(writer, "5", "slow")
    results: dict[str, Any] = {}

    def storage_of(name: str, fallback: ObjectStorage) -> ObjectStorage:
        return writer if name == "finish" else fallback

    # Those who clean up have seen the record of the slow one for long enough.
    cleaners = [patient(place), patient(place)]
    for cleaner in cleaners:
        await cleaner.sweep()
    await anyio.sleep(LEASE_S * 1.5)

    def meanwhile() -> None:
        async def act() -> None:
            storage = storage_of(second, cleaners[1])
            # Its semaphores belong to the other loop.
            client: Any = storage._keys
            client._slots = None
            results["second"] = await outcome(ACTS[second](storage, slow))

        anyio.run(act)

    store = MeetingStore(connect(place.config).open()[0], at, meanwhile)
    one = storage_of(first, cleaners[0])
    client: Any = one._keys
    client._opened = (store, store)
    with anyio.fail_after(PATIENCE_S):
        results["first"] = await outcome(ACTS[first](one, slow))
    await check(place, first, second, results)
    return store.count


async def check(place: Place, first: str, second: str, results: dict[str, Any]) -> None:
    looker = patient(place)
    before = await seed_of(looker)
    await quiet(place)
    after = await seed_of(looker)
    assert before == after, "cleaning up has changed what is there"
    made = {"save": "saved", "overwrite": "overwritten", "finish": "slow"}
    done = [
        name
        for name, key in ((first, "first"), (second, "second"))
        if isinstance(results.get(key), str)
    ]
    deleted = any(results.get(key) is True for key in ("first", "second"))
    seeds = {made[name] for name in done}
    if not deleted:
        # What was published last is there; nothing that was refused, and the old one only if
        # nothing was published.
        assert after in (seeds or {"old"}), (after, results)
    else:
        assert after in {*seeds, None}, (after, results)
    check_left(place, after)


async def seed_of(storage: Storage) -> str | None:
    if not await storage.exists("5"):
        return None
    for seed in ("old", "saved", "overwritten", "slow"):
        try:
            await assert_whole(storage, "5", seed)
        except AssertionError:
            continue
        return seed
    raise AssertionError("no bytes that anybody wrote")


@pytest.mark.parametrize("second", ACTS)
@pytest.mark.parametrize("first", ACTS)
def test_two_who_meet_at_any_request_leave_one_whole_step(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other one cannot go on in the meantime.
    monkeypatch.setattr("ckpt.storage._object.removal._PAUSE_SECONDS", 0.001)
    if first == second == "finish":
        pytest.skip("an attempt has one writer")

    async def main() -> None:
        count = await meet(first, second, None)
        async with anyio.create_task_group() as tasks:
            for at in range(count):
                tasks.start_soon(meet, first, second, at)

    anyio.run(main)


def test_data_stay_while_their_writer_does_not_know_that_it_has_committed() -> None:
    """It may put its manifest again, and that must find them."""

    async def main() -> None:
        place = Place()
        writer, _ = place.opened()
        attempt = await write(writer, "5", "new")
        store = FailingStore(connect(place.config).open()[0], 2, "lost and gone")
        client: Any = writer._keys
        client._opened = (store, store)
        with pytest.raises(StorageError, match="it is unknown whether"):
            await writer.publish(attempt, overwrite=False)
        looker, _ = place.opened()
        await assert_whole(looker, "5", "new")
        assert await looker.remove("5")
        assert not await looker.exists("5")
        await publish(looker, "5", "other")
        await looker.remove("5")
        # The network is back, and what was put last is tried again.
        store.at = None
        await writer.publish(attempt, overwrite=False)
        await assert_whole(looker, "5", "new")

    anyio.run(main)
