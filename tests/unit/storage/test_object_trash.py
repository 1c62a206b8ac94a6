"""The trash of an object store: whatever fails, a deleted step is a step or can be taken back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from ckpt._format.manifest import decode, encode
from ckpt._format.manifest_head import FILE_NAME
from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, CorruptCheckpointError, StepExistsError, StepNotFoundError
from ckpt.storage._base import Storage
from ckpt.storage._object import leases
from ckpt.storage._object.connection import connect
from ckpt.storage._object.removal import finish
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import assert_whole, publish, read_all
from tests.unit.storage.failing_store import KINDS, MeetingStore
from tests.unit.storage.test_object_faults import PATIENCE_S, Place, outcome, quiet

TRASH = "trash"


async def a_step(place: Place) -> None:
    await publish(place.opened()[0], "5", "old")


async def a_trashed_one(place: Place) -> None:
    await a_step(place)
    await place.opened()[0].move("5", TRASH)


async def a_trashed_one_and_another(place: Place) -> None:
    await a_trashed_one(place)
    await publish(place.opened()[0], "5", "new")


async def move(storage: Storage) -> Any:
    return await storage.move("5", TRASH)


async def undelete(storage: Storage) -> Any:
    for entry in await storage.trashed(TRASH):
        await storage.undelete(TRASH, entry.name, entry.step_dir)


async def purge(storage: Storage) -> Any:
    for entry in await storage.trashed(TRASH):
        await storage.purge(TRASH, entry.name)


async def save_over(storage: Storage) -> Any:
    return await publish(storage, "5", "new", overwrite=True)


async def remove(storage: Storage) -> Any:
    return await storage.remove("5")


# What is there before; what is done; whether the old step must survive, as one or in the trash.
SCENES: dict[str, tuple[Callable[[Place], Awaitable[None]], Any, bool]] = {
    "move": (a_step, move, True),
    "move beside one": (a_trashed_one_and_another, move, True),
    "undelete": (a_trashed_one, undelete, True),
    "undelete onto one": (a_trashed_one_and_another, undelete, True),
    "save over it": (a_trashed_one, save_over, True),
    "overwrite beside it": (a_trashed_one_and_another, save_over, True),
    "remove beside it": (a_trashed_one_and_another, remove, True),
    "purge": (a_trashed_one, purge, False),
    "purge beside one": (a_trashed_one_and_another, purge, False),
}


async def old_is_whole(place: Place) -> bool:
    """Whether the old step is there, or comes back from the trash; what comes back is whole."""
    storage, _ = place.opened()
    try:
        await assert_whole(storage, "5", "old")
    except AssertionError:
        if await read_all(storage, "5") is not None:
            await assert_whole(storage, "5", "new")
            await storage.remove("5")
        # What was deleted last comes back first.
        for entry in sorted(await storage.trashed(TRASH), key=lambda each: each.deleted_ns):
            await storage.undelete(TRASH, entry.name, entry.step_dir)
            try:
                await assert_whole(storage, "5", "old")
            except AssertionError:
                await assert_whole(storage, "5", "new")
                await storage.remove("5")
                continue
            return True
        return False
    return True


def steps_of(keys: list[str]) -> list[str]:
    return [key for key in keys if not key.startswith(".ckpt-")]


async def run_one(scene: str, at: int | None, kind: str) -> int:
    before, act, survives = SCENES[scene]
    place = Place(kind)
    await before(place)
    storage, store = place.opened(at, kind)
    with anyio.fail_after(PATIENCE_S):
        result = await outcome(act(storage))
    if at is None:
        expected = StepExistsError if scene == "undelete onto one" else object
        assert isinstance(result, expected)
        assert isinstance(result, StepExistsError) or not isinstance(result, CheckpointError)
    count = store.count
    store.let_go()
    await quiet(place)
    listed = await place.opened()[0].trashed(TRASH)
    found = await old_is_whole(place)
    assert found or not survives
    if not survives and not found:
        assert listed == []
        keys = place.keys()
        assert not [key for key in keys if key.startswith((".ckpt-attempts/", ".ckpt-trash/"))]
    return count


def test_every_scene_ends_well_without_failures() -> None:
    for scene in SCENES:
        assert anyio.run(run_one, scene, None, "") > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scene", SCENES)
def test_a_failure_at_any_request_loses_nothing(
    scene: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.storage._object.removal._PAUSE_SECONDS", 0.001)

    async def main() -> None:
        count = await run_one(scene, None, "")
        async with anyio.create_task_group() as tasks:
            for at in range(count):
                tasks.start_soon(run_one, scene, at, kind)

    anyio.run(main)


def test_emptying_leaves_nothing() -> None:
    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        await purge(storage)
        assert place.keys() == []

    anyio.run(main)


def test_a_step_of_a_disk_goes_and_comes_back_with_all_its_objects() -> None:
    async def main() -> None:
        place = Place()
        await a_step(place)
        storage, _ = place.opened()
        raw = connect(place.config).open()[0]
        # As copied from a disk: not in a folder.
        keys = place.keys()
        folder = next(key for key in keys if key.startswith("5/") and "/d/" in key).split("/")[1]
        manifest = raw.read(f"5/{FILE_NAME}").result().value
        plain = replace(decode(manifest, where="5"), folder="", requires=[])
        raw.write(f"5/{FILE_NAME}", encode(plain)).result()
        for key in [each for each in keys if each.startswith(f"5/{folder}/")]:
            raw.write(key.replace(f"{folder}/", ""), raw.read(key).result().value).result()
            raw.write(key, None).result()
        before = steps_of(place.keys())
        await storage.move("5", TRASH)
        assert await read_all(storage, "5") is None
        await undelete(storage)
        assert steps_of(place.keys()) == before
        await storage.move("5", TRASH)
        await purge(storage)
        assert place.keys() == []

    anyio.run(main)


def test_what_lost_an_object_is_not_taken_back() -> None:
    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        (entry,) = await storage.trashed(TRASH)
        raw = connect(place.config).open()[0]
        keys = place.keys()
        lost = next(key for key in keys if "/d/" in key)
        raw.write(lost, None).result()
        with pytest.raises(CorruptCheckpointError, match=r"are missing \(1\)") as caught:
            await storage.undelete(TRASH, entry.name, entry.step_dir)
        assert lost.removeprefix("5/") in str(caught.value)
        assert await storage.trashed(TRASH) == [entry]
        assert await read_all(storage, "5") is None

    anyio.run(main)


def test_an_entry_that_is_gone_is_said_to_be() -> None:
    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        (entry,) = await storage.trashed(TRASH)
        await storage.purge(TRASH, entry.name)
        with pytest.raises(StepNotFoundError, match="not in the trash any more"):
            await storage.undelete(TRASH, entry.name, entry.step_dir)
        await storage.purge(TRASH, entry.name)

    anyio.run(main)


def test_deleting_a_step_of_orbax_leaves_what_is_in_the_trash() -> None:
    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        raw = connect(place.config).open()[0]
        for name, data in (("commit_success.txt", b"at /runs/a/5"), ("default/d/x", b"1")):
            raw.write(f"5/{name}", data).result()
        assert await storage.remove("5")
        assert not {"5/commit_success.txt", "5/default/d/x"} & set(place.keys())
        await undelete(storage)
        await assert_whole(storage, "5", "old")

    anyio.run(main)


@pytest.mark.parametrize("at", range(6))
def test_a_cleaner_and_one_who_undeletes_do_not_lose_the_data(at: int) -> None:
    """A cleaner that took the one who undeletes for dead meets the rest of what that one does."""

    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        (entry,) = await storage.trashed(TRASH)
        raw = connect(place.config).open()[0]
        manifest = raw.read(f".ckpt-trash/{entry.name}").result().value.partition(b"\n")[2]

        def go_on() -> None:
            raw.write(f"5/{FILE_NAME}", manifest).result()
            raw.write(f".ckpt-trash/{entry.name}", None).result()

        meeting = MeetingStore(connect(place.config).open()[0], at, go_on)
        cleaner = ObjectStorage(
            place.config, Timeouts(lease=60.0), open_store=lambda: (meeting, meeting)
        )
        attempt = entry.name.removeprefix("5.")
        record = await leases.make(storage._keys, "5", attempt, 60.0, "deleting")
        assert record is not None
        await finish(cleaner._keys, record)
        if meeting.count <= at:
            go_on()
        await assert_whole(storage, "5", "old")

    anyio.run(main)


@pytest.mark.parametrize("data", [b"", b"12", b"no time\n{}", b"1\n{}", b"9" * 40 + b"\n{}"])
def test_an_entry_that_somebody_made_up_is_none(data: bytes) -> None:
    async def main() -> None:
        place = Place()
        await a_trashed_one(place)
        storage, _ = place.opened()
        (entry,) = await storage.trashed(TRASH)
        raw = connect(place.config).open()[0]
        raw.write(f".ckpt-trash/{entry.name}", data).result()
        assert await storage.trashed(TRASH) == []
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            await storage.undelete(TRASH, entry.name, "5")

    anyio.run(main)


def test_a_step_that_is_back_is_back_whatever_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """Once the manifest is in its place the store may fail: the step was undeleted."""

    async def main() -> None:
        dry = Place()
        await a_trashed_one(dry)
        storage, store = dry.opened()
        await undelete(storage)
        # The last two requests remove the record, and the note for cleaners.
        for at in (store.count - 2, store.count - 1):
            place = Place("refused")
            await a_trashed_one(place)
            storage, _ = place.opened(at, "refused")
            caplog.clear()
            assert await outcome(undelete(storage)) is None
            assert [each.message for each in caplog.records if "was left" in each.message]
            await assert_whole(place.opened()[0], "5", "old")
            assert await place.opened()[0].trashed(TRASH) == []

    anyio.run(main)
