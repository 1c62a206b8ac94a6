"""Checks of stores with several writers: races, leases, notes and cancellation.

`ckpt.testing.conformance.stores` uses this module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from ckpt._format.manifest import decode
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepExistsError,
    StorageError,
)
from ckpt.storage._base import Attempt, Storage
from ckpt.testing.conformance.store_cases import (
    DATA,
    StoreCase,
    assert_whole,
    content,
    files_of,
    manifest_of,
    opened,
    publish,
    read_all,
    refused,
    together,
    write,
)

__all__ = ["CHECKS"]

_WRITERS, _ROUNDS = 6, 4
_PATIENCE_S = 60


async def of_many_writers_one_wins(case: StoreCase) -> None:
    """One of several writers publishes. The others get `StepExistsError` and leave no file."""
    async with opened(case, _WRITERS) as storages:
        for turn in range(_ROUNDS):
            step_dir = str(turn)
            attempts = [await write(each, step_dir, n) for n, each in enumerate(storages)]
            results = await together(
                *(
                    partial(storage.publish, attempt, overwrite=False)
                    for storage, attempt in zip(storages, attempts, strict=True)
                )
            )
            won = [number for number, error in enumerate(results) if error is None]
            lost = [error for error in results if error is not None]
            assert len(won) == 1, f"{len(won)} writers of one step won: {results}"
            assert all(isinstance(error, StepExistsError) for error in lost), lost
            [winner] = won
            for number, (storage, attempt) in enumerate(zip(storages, attempts, strict=True)):
                if number != winner:
                    await storage.discard(attempt)
            for storage in storages:
                await assert_whole(storage, step_dir, winner, attempts[winner])


async def of_many_who_replace_the_last_stays(case: StoreCase) -> None:
    """With `overwrite`, all writers succeed in turn, and the step is always a whole one."""
    async with opened(case, _WRITERS) as storages:
        await publish(storages[0], "1", "first")
        attempts = [await write(each, "1", n) for n, each in enumerate(storages)]
        results = await together(
            *(
                partial(storage.publish, attempt, overwrite=True)
                for storage, attempt in zip(storages, attempts, strict=True)
            )
        )
        assert results == [None] * _WRITERS, results
        found = await read_all(storages[0], "1")
        assert found is not None
        ids = [attempt.id for attempt in attempts]
        assert found[0].attempt in ids, "none of them is there"
        await assert_whole(storages[1], "1", ids.index(found[0].attempt))


async def of_many_who_replace_one_attempt_one_wins(case: StoreCase) -> None:
    """One of several writers that replace an attempt wins; the others get `StepDeletedError`."""
    async with opened(case, _WRITERS) as storages:
        old = await publish(storages[0], "1", "first")
        attempts = [await write(each, "1", n) for n, each in enumerate(storages)]
        results = await together(
            *(
                partial(storage.publish, attempt, overwrite=False, replacing=old.id)
                for storage, attempt in zip(storages, attempts, strict=True)
            )
        )
        won = [number for number, error in enumerate(results) if error is None]
        assert len(won) == 1, f"{len(won)} writers replaced one attempt: {results}"
        assert all(error is None or isinstance(error, StepDeletedError) for error in results)
        await assert_whole(storages[1], "1", won[0], attempts[won[0]])


async def of_many_notes_of_one_name_one_is_made(case: StoreCase) -> None:
    """Exactly one process makes a note, and the note has its content."""
    async with opened(case, _WRITERS) as storages:
        for turn in range(_ROUNDS):
            name = f".ckpt-notes/{turn}"
            results = await together(
                *(
                    partial(storage.put_note, name, str(number).encode(), replace=False)
                    for number, storage in enumerate(storages)
                )
            )
            assert sorted(results) == [False] * (_WRITERS - 1) + [True], results
            found = await storages[0].read("", name, 10)
            assert found == str(results.index(True)).encode()


async def readers_see_whole_steps_only(case: StoreCase) -> None:
    """While a step is replaced, removed and written again, it is whole or does not exist."""
    async with opened(case, 2) as [writer, reader]:
        ended, looks = anyio.Event(), 0

        async def change() -> None:
            for turn in range(10):
                await publish(writer, "1", turn, overwrite=True, nbytes=200_000)
                if turn % 3 == 2:
                    await writer.remove("1")
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(change)
            while not ended.is_set() or not looks:
                data = await reader.read("1", FILE_NAME, MAX_BYTES)
                if data is not None:
                    before = decode(data, where="1").attempt
                    try:
                        await read_all(reader, "1")
                    except CorruptCheckpointError:
                        # If the step was replaced or removed during the read, the manifest has
                        # changed.
                        now = await reader.read("1", FILE_NAME, MAX_BYTES)
                        assert now is None or decode(now, where="1").attempt != before
                looks += 1
                await anyio.lowlevel.checkpoint()
        await assert_whole(reader, "1", 9)


async def what_replaced_it_is_not_removed(case: StoreCase) -> None:
    """The removal of an attempt's step directory does not remove its successor."""
    async with opened(case, 2) as [storage, other]:
        for turn in range(_ROUNDS):
            old = await publish(storage, "1", f"old {turn}", overwrite=True)
            attempt = await write(other, "1", turn)
            removed, published = await together(
                partial(storage.remove, "1", attempt=old.id),
                partial(other.publish, attempt, overwrite=True),
            )
            assert published is None, published
            assert removed in (True, False), removed
            await assert_whole(storage, "1", turn, attempt)


async def attempts_are_listed(case: StoreCase) -> None:
    """An attempt is listed from `begin` until it is published or discarded; listing is harmless."""

    async def listed(storage: Storage) -> dict[str, str]:
        found = [each for each in await storage.attempts() if not each.is_removal]
        assert all(each.is_live is not False for each in found), f"taken for dead: {found}"
        return {each.id: each.step_dir for each in found}

    async with opened(case, 2) as [storage, other]:
        first = await write(storage, "1", "first")
        second = await storage.begin("1")
        both = {first.id: "1", second.id: "1"}
        assert await listed(storage) == both
        assert await listed(other) == both
        assert await other.step_dirs() == []
        for each in await other.attempts():
            assert each.age_seconds is None or 0 <= each.age_seconds < _PATIENCE_S
        await storage.discard(second)
        assert await listed(other) == {first.id: "1"}
        await storage.publish(first, overwrite=False)
        assert await listed(other) == {}
        await assert_whole(other, "1", "first", first)


async def a_live_writer_is_left_alone(case: StoreCase) -> None:
    """Sweeps by others never harm an attempt whose lease is renewed; its step is whole."""
    async with opened(case, 2, case.lease_seconds) as [writer, cleaner]:
        attempt = await write(writer, "1", "live")
        until = anyio.current_time() + 3 * case.lease_seconds
        async with anyio.create_task_group() as group:
            group.start_soon(_renew, writer, attempt)
            while anyio.current_time() < until:
                await cleaner.sweep()
                await anyio.sleep(case.lease_seconds / 8)
            await writer.publish(attempt, overwrite=False)
            group.cancel_scope.cancel()
        await assert_whole(cleaner, "1", "live", attempt)
        await cleaner.sweep()
        await assert_whole(cleaner, "1", "live", attempt)


async def _renew(storage: Storage, attempt: Attempt) -> None:
    while True:
        await storage.renew(attempt)
        await anyio.sleep(storage.traits.lease_seconds / 6)


async def a_dead_writer_is_cleaned_up_after(case: StoreCase) -> None:
    """A dead writer's attempt is removed once its lease has expired, and is never published."""
    async with opened(case, 2, case.lease_seconds) as [writer, cleaner]:
        kept = await publish(cleaner, "1", "kept")
        dead = [await write(writer, step_dir, "dead") for step_dir in ("1", "2")]
        for attempt in dead:
            case.abandon(attempt)
        await _all_dead(cleaner, dead)
        swept = await _sweep_until(cleaner, writer, dead)
        for attempt in dead:
            assert any(attempt.id in name for name in swept), f"said to be removed: {swept}"
        assert await cleaner.attempts() == []
        for attempt in dead:
            with refused(StorageError, "publish an attempt that was removed"):
                await writer.publish(attempt, overwrite=True)
            left = [
                path for path in await files_of(cleaner, attempt.step_dir) if attempt.id in path
            ]
            assert not left, f"files of a dead writer are left: {left}"
        await assert_whole(cleaner, "1", "kept", kept)
        assert await cleaner.step_dirs() == ["1"]
        assert await cleaner.sweep() == []


async def _all_dead(cleaner: Storage, dead: list[Attempt]) -> None:
    """Look until all attempts are listed as ones that a sweep would remove."""
    ids = {attempt.id for attempt in dead}
    with anyio.fail_after(_PATIENCE_S):
        # The state changes only with time; there is no event to wait for.
        while True:
            found = {each.id: each.is_live for each in await cleaner.attempts()}
            assert found.keys() == ids, f"looking has changed what is there: {found}"
            if not any(is_live is not False for is_live in found.values()):
                return
            await anyio.sleep(cleaner.traits.lease_seconds / 4)


async def _sweep_until(cleaner: Storage, writer: Storage, dead: list[Attempt]) -> list[str]:
    """Sweep until nothing more is removed."""
    swept: list[str] = []
    with anyio.fail_after(_PATIENCE_S):
        while True:
            swept += await cleaner.sweep()
            if len(swept) >= len(dead) and not await cleaner.sweep():
                return swept
            await anyio.sleep(cleaner.traits.lease_seconds / 4)


async def a_cancelled_write_leaves_its_memory_alone(case: StoreCase) -> None:
    """After a cancelled call the caller's memory is neither read nor written."""
    size = 3 << 20
    async with opened(case) as [storage]:
        attempt = await publish(storage, "1", "data", nbytes=size)
        path = f"{attempt.folder}/{DATA}" if attempt.folder else DATA
        for pause in (0.0, 0.001, 0.01):
            block = bytearray(size)
            with memoryview(block) as target:
                with anyio.move_on_after(pause):
                    await storage.read_block("1", path, 0, target)
                block[:] = bytes(size)
                await anyio.sleep(0.1)
            assert not any(block), "memory was written after the call was cancelled"
            attempt = await storage.begin("2")
            given = bytearray(content("given", size))
            with memoryview(given) as source:
                with anyio.move_on_after(pause) as scope:
                    await storage.write_block(attempt, DATA, source)
                given[:] = bytes(size)
            if scope.cancelled_caught:
                await storage.discard(attempt)
                assert not await storage.exists("2")
            else:
                files = {DATA: content("given", size)}
                await storage.write(attempt, FILE_NAME, manifest_of(attempt, files))
                await storage.publish(attempt, overwrite=True)
                found = await read_all(storage, "2")
                assert found is not None
                assert found[1] == files
                await storage.remove("2")


async def a_cancelled_publish_is_done_or_not(case: StoreCase) -> None:
    """After a cancelled publication the step is whole or missing; an old one is never lost."""
    async with opened(case, 2) as [storage, other]:
        for number, pause in enumerate((0.0, 0.0005, 0.002, 0.005, 0.02)):
            step_dir = str(number)
            old = await publish(other, step_dir, "old") if number % 2 else None
            attempt = await write(storage, step_dir, "new")
            with anyio.move_on_after(pause) as scope:
                await storage.publish(attempt, overwrite=True)
            found = await read_all(other, step_dir)
            if scope.cancelled_caught:
                await storage.discard(attempt)
                again = await read_all(other, step_dir)
                assert (again and again[0].attempt) == (found and found[0].attempt), (
                    "what was there after a cancelled publish has changed"
                )
            if found is None:
                assert old is None, "the old step was lost"
                assert scope.cancelled_caught, "a finished publish left nothing"
                continue
            ours = found[0].attempt == attempt.id
            assert ours or scope.cancelled_caught, "a finished publish is not there"
            await assert_whole(other, step_dir, "new" if ours else "old")


async def a_cancelled_removal_is_done_or_not(case: StoreCase) -> None:
    """After a cancelled removal the step is whole or missing, and can be removed again."""
    async with opened(case, 2) as [storage, other]:
        for number, pause in enumerate((0.0, 0.0005, 0.002, 0.02)):
            step_dir = str(number)
            await publish(storage, step_dir, "x")
            with anyio.move_on_after(pause):
                await storage.remove(step_dir)
            if await other.exists(step_dir):
                await assert_whole(other, step_dir, "x")
                assert await other.remove(step_dir)
            assert not await other.exists(step_dir)
            await publish(storage, step_dir, "y")
            await assert_whole(other, step_dir, "y")


async def attempts_of_one_step_dir_do_not_meet(case: StoreCase) -> None:
    """Two writers run at once, the second begun during the first, and each reads its own files."""
    async with opened(case, 2) as [storage, other]:
        first, second = await storage.begin("1"), await other.begin("1")
        assert first.id != second.id
        for store, attempt, seed in ((storage, first, "a"), (other, second, "b")):
            await store.write_block(attempt, DATA, memoryview(content(seed, 1000)))
        files = {DATA: content("a", 1000)}
        await storage.write(first, FILE_NAME, manifest_of(first, files))
        await storage.publish(first, overwrite=False)
        await other.discard(second)
        found = await read_all(other, "1")
        assert found is not None
        assert found[1] == files
        with refused(CheckpointError, "publish the same attempt twice"):
            await storage.publish(first, overwrite=False)
        found = await read_all(other, "1")
        assert found is not None
        assert found[1] == files


async def notes_are_small_files_of_the_root(case: StoreCase) -> None:
    """Notes are made or replaced, read within limits, listed by folder, and are not steps."""
    async with opened(case, 2) as [storage, other]:
        assert await storage.notes(".ckpt-notes") == {}
        assert await storage.read("", ".ckpt-notes/a", 10) is None
        assert not await storage.touch_note(".ckpt-notes/a")
        assert not await storage.drop_note(".ckpt-notes/a")
        for durable in (True, False):
            name = f".ckpt-notes/{durable}"
            assert await storage.put_note(name, b"first", replace=False, durable=durable)
            assert not await other.put_note(name, b"second", replace=False, durable=durable)
            assert await other.read("", name, 10) == b"first"
            assert await other.put_note(name, b"third", replace=True)
            assert await storage.read("", name, 5) == b"third"
            with refused(CorruptCheckpointError, "read a note larger than the limit"):
                await storage.read("", name, 4)
        assert await storage.put_note("metadata/_ROOT_METADATA", b"{}", replace=True)
        assert (await other.notes(".ckpt-notes")).keys() == {"True", "False"}
        assert (await other.notes("metadata")).keys() == {"_ROOT_METADATA"}
        assert await other.drop_note(".ckpt-notes/True")
        assert not await storage.drop_note(".ckpt-notes/True", durable=False)
        assert (await storage.notes(".ckpt-notes")).keys() == {"False"}
        assert await storage.step_dirs() in ([], ["metadata"])


async def a_note_is_never_older_than_it_is(case: StoreCase) -> None:
    """The age of a note grows, and is 0 again when the note is touched or replaced."""

    async def age(storage: Storage) -> float:
        return (await storage.notes(".ckpt-notes"))["x"]

    async def older(seconds: float) -> None:
        # The age changes only with time; there is no event to wait for.
        while await age(other) <= seconds:  # noqa: ASYNC110
            await anyio.sleep(0.05)

    async with opened(case, 2) as [storage, other]:
        begun = anyio.current_time()
        await storage.put_note(".ckpt-notes/x", b"x", replace=False)
        with anyio.fail_after(30):
            await older(0.2)
        # The clocks of some stores are no finer than hundredths of a second.
        assert await age(other) <= anyio.current_time() - begun + 0.05
        renewals: tuple[Callable[[], Awaitable[bool]], ...] = (
            lambda: storage.touch_note(".ckpt-notes/x"),
            lambda: storage.put_note(".ckpt-notes/x", b"y", replace=True),
        )
        for renew in renewals:
            begun = anyio.current_time()
            assert await renew()
            assert await age(other) <= anyio.current_time() - begun + 0.05
            with anyio.fail_after(30):
                await older(0.2)
        assert await storage.read("", ".ckpt-notes/x", 10) == b"y"


CHECKS: tuple[Callable[[StoreCase], Awaitable[None]], ...] = (
    of_many_writers_one_wins,
    of_many_who_replace_the_last_stays,
    of_many_who_replace_one_attempt_one_wins,
    of_many_notes_of_one_name_one_is_made,
    notes_are_small_files_of_the_root,
    a_note_is_never_older_than_it_is,
    readers_see_whole_steps_only,
    what_replaced_it_is_not_removed,
    attempts_are_listed,
    a_live_writer_is_left_alone,
    a_dead_writer_is_cleaned_up_after,
    a_cancelled_write_leaves_its_memory_alone,
    a_cancelled_publish_is_done_or_not,
    a_cancelled_removal_is_done_or_not,
    attempts_of_one_step_dir_do_not_meet,
)
