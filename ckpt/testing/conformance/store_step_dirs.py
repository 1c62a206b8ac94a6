"""Checks of stores with one writer at a time: files, names, listings.

`ckpt.testing.conformance.stores` uses this module.
"""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable
from random import Random

from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES
from ckpt._settings import Timeouts
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)
from ckpt.storage._base import UNKNOWN_SIZE, Attempt, fingerprint
from ckpt.testing.conformance.store_cases import (
    DATA,
    SMALL,
    StoreCase,
    assert_whole,
    content,
    files_of,
    manifest_of,
    opened,
    publish,
    read_all,
    refused,
    write,
)

__all__ = ["CHECKS"]

_MIB = 1 << 20
# Names that have a meaning for some stores.
_NAMES = (
    *("0", "1", "10", "100", "1000", "step_00000007", "a b", "ü", "a+b", "a%2Fb", "100%", "a=b&c"),
    *("a#b?c", "~a", "a.b", "a,b;c", "'a'", "(a)", "a@b", "a$b", "x" * 180),
)
_PATHS = ("item/d/0", "item/d/ocdbt.process_0/x", "item/a%20b", "item/a b+c=d&e#f?g", "item/ü")
_MOST_BUILT_BYTES = 1 << 33


async def it_says_what_it_is(case: StoreCase) -> None:
    """The store reports its location, lease and largest file, and an empty root has no steps."""
    async with opened(case, lease=1234.5) as [storage]:
        assert isinstance(storage.location, str)
        assert storage.location, "no location"
        assert storage.traits.lease_seconds == 1234.5
        assert storage.traits.largest_file_bytes >= 64 * _MIB
        await storage.prepare()
        assert await storage.step_dirs() == []
        assert await storage.attempts() == []
        assert await storage.sweep() == []
        assert await files_of(storage, "1") == []
        assert await storage.read("1", FILE_NAME, MAX_BYTES) is None
        assert not await storage.exists("1")
        assert not await storage.remove("1")
        assert not await storage.remove("1", attempt="0" * 32)


async def an_attempt_is_invisible(case: StoreCase) -> None:
    """An attempt becomes visible when it is published: all at once, to every process."""
    async with opened(case, 2) as [storage, other]:
        attempt = await write(storage, "7")
        assert attempt.step_dir == "7"
        assert len(attempt.id) == 32
        assert attempt.folder in ("", attempt.id)
        for each in (storage, other):
            assert await each.step_dirs() == []
            assert not await each.exists("7")
            assert await each.read("7", FILE_NAME, MAX_BYTES) is None
            assert await each.stamps(["7"], FILE_NAME) == [None]
        await storage.publish(attempt, overwrite=False)
        for each in (storage, other):
            assert await each.step_dirs() == ["7"]
            assert await each.exists("7")
            await assert_whole(each, "7", attempt=attempt)
            found = await each.files("7")
            start = f"{attempt.folder}/" if attempt.folder else ""
            assert found.keys() == {FILE_NAME, f"{start}{SMALL}", f"{start}{DATA}"}
            assert found[f"{start}{DATA}"] in (5000, UNKNOWN_SIZE)


async def a_discarded_attempt_leaves_nothing(case: StoreCase) -> None:
    """A discarded attempt leaves no files and cannot be published, and others are untouched."""
    async with opened(case, 2) as [storage, other]:
        await publish(storage, "1")
        attempt, second = await write(storage, "1", 1), await write(other, "1", 2)
        await storage.discard(attempt)
        await storage.discard(attempt)
        with refused(StorageError, "publish a discarded attempt"):
            await storage.publish(attempt, overwrite=True)
        await assert_whole(other, "1", 0)
        await other.publish(second, overwrite=True)
        await assert_whole(storage, "1", 2, second)


async def a_step_dir_is_not_replaced_unless_asked(case: StoreCase) -> None:
    """A refused attempt still exists, and can be published with `overwrite`."""
    async with opened(case, 2) as [storage, other]:
        first = await publish(storage, "5", "first")
        attempt = await write(other, "5", "second")
        with refused(StepExistsError, "publish over a step", "5"):
            await other.publish(attempt, overwrite=False)
        await assert_whole(other, "5", "first", first)
        await other.publish(attempt, overwrite=True)
        for each in (storage, other):
            await assert_whole(each, "5", "second", attempt)
        gone = [path for path in await storage.files("5") if first.id in path]
        assert not gone, f"the files of the old step are left: {gone}"


async def only_what_was_meant_is_replaced(case: StoreCase) -> None:
    """With `replacing`, a step of another attempt stays, and a removed step stays removed."""
    async with opened(case, 2) as [storage, other]:
        first = await publish(storage, "5", "first")
        attempt = await write(storage, "5", "next")
        second = await publish(other, "5", "second", overwrite=True)
        with refused(StepDeletedError, "replace what another writer has replaced"):
            await storage.publish(attempt, overwrite=True, replacing=first.id)
        await assert_whole(storage, "5", "second", second)
        await storage.publish(attempt, overwrite=False, replacing=second.id)
        await assert_whole(other, "5", "next", attempt)
        late = await write(other, "5", "late")
        assert await storage.remove("5")
        with refused(StepDeletedError, "replace what was removed"):
            await other.publish(late, overwrite=True, replacing=attempt.id)
        assert not await storage.exists("5")
        await other.discard(late)


async def a_step_dir_is_removed_whole(case: StoreCase) -> None:
    """A step is removed once, and its name is free; with `attempt`, only a step of that attempt."""
    async with opened(case, 2) as [storage, other]:
        first = await publish(storage, "1", "first")
        await publish(storage, "10", "ten")
        assert not await other.remove("1", attempt="0" * 32)
        await assert_whole(storage, "1", "first")
        assert await other.remove("1", attempt=first.id)
        for each in (storage, other):
            assert not await each.exists("1")
            assert await files_of(each, "1") == []
            assert await each.step_dirs() == ["10"]
            assert not await each.remove("1")
        await publish(storage, "1", "again")
        await assert_whole(other, "1", "again")
        assert await storage.remove("1")
        await assert_whole(other, "10", "ten")


async def every_name_is_kept_apart(case: StoreCase) -> None:
    """Names of steps and files are kept exactly, even odd ones and prefixes of each other."""
    async with opened(case, 2) as [storage, other]:
        for name in _NAMES:
            await publish(storage, name, name, nbytes=10)
        assert sorted(await other.step_dirs()) == sorted(_NAMES)
        for name in _NAMES:
            await assert_whole(other, name, name)
        assert await storage.remove("10")
        assert sorted(await other.step_dirs()) == sorted(set(_NAMES) - {"10"})
        attempt = await storage.begin("paths")
        files = {path: content(path, 100) for path in _PATHS}
        for number, (path, data) in enumerate(files.items()):
            if number % 2:
                await storage.write(attempt, path, data)
            else:
                await storage.write_block(attempt, path, memoryview(data))
        await storage.write(attempt, FILE_NAME, manifest_of(attempt, files))
        await storage.publish(attempt, overwrite=False)
        start = f"{attempt.folder}/" if attempt.folder else ""
        for path, data in files.items():
            assert await other.read("paths", start + path, 100) == data, path
        assert (await other.files("paths")).keys() == {FILE_NAME, *(start + path for path in files)}


async def its_listing_is_always_true(case: StoreCase) -> None:
    """A process that listed before sees at once what another one publishes and removes."""
    async with opened(case, 2) as storages:
        random, there = Random(7), dict[str, Attempt]()
        for turn in range(30):
            writer, reader = random.sample(storages, 2)
            name = str(random.choice([1, 2, 9, 10, 11, 19, 100]))
            if name in there and random.random() < 0.6:
                assert await writer.remove(name)
                del there[name]
            else:
                there[name] = await publish(writer, name, turn, overwrite=True, nbytes=10)
            for each in (reader, writer):
                assert sorted(await each.step_dirs()) == sorted(there), f"after {turn} changes"
            # Attempts and notes are not step directories.
            if turn % 10 == 0:
                await writer.begin("5")
                await writer.put_note(".ckpt-notes/x", b"", replace=True)


async def a_change_is_told_by_the_stamp(case: StoreCase) -> None:
    """The stamp of a file changes when the file is replaced, and only then."""
    async with opened(case, 2) as [storage, other]:
        for name in ("1", "2", "3"):
            await publish(storage, name, name)
        before = await other.stamps(["1", "2", "4", "3"], FILE_NAME)
        assert None not in (before[0], before[1], before[3])
        assert before[2] is None
        assert await other.stamps(["1", "2", "4", "3"], FILE_NAME) == before
        # The same bytes from another attempt are another step.
        await publish(storage, "2", "2", overwrite=True)
        await storage.remove("3")
        after = await other.stamps(["1", "2", "4", "3"], FILE_NAME)
        assert after[0] == before[0]
        assert after[1] not in (before[1], None)
        assert after[2:] == [None, None]


async def a_change_is_told_by_the_fingerprint(case: StoreCase) -> None:
    """The fingerprint of a file is the same for every reader, until the file is replaced."""
    async with opened(case, 2) as [storage, other]:
        attempt = await publish(storage, "1", "one")
        place = f"1/{attempt.folder}" if attempt.folder else "1"
        before = await fingerprint(storage, place, DATA)
        about = await fingerprint(storage, "1", FILE_NAME)
        assert before is not None
        assert about is not None
        assert await fingerprint(other, place, DATA) == before
        assert await fingerprint(other, "", f"1/{FILE_NAME}") == about
        assert await fingerprint(other, "1", "x") is None
        assert await fingerprint(other, "2", FILE_NAME) is None
        await publish(storage, "1", "two", overwrite=True)
        assert await fingerprint(other, place, DATA) != before
        assert await fingerprint(other, "1", FILE_NAME) not in (about, None)


async def small_files_are_read_within_limits(case: StoreCase) -> None:
    """A file that is too large raises an error in `read`, and gives None in `read_each`."""

    def sizes(data: bytes, size: int) -> int | None:
        assert data.startswith(b'{"format"')
        assert size >= len(data) >= min(size, 10)
        # A part of the file determines no result.
        return size if len(data) == size else None

    async with opened(case) as [storage]:
        attempts = {name: await publish(storage, name, name) for name in ("1", "2")}
        folder = attempts["1"].folder
        path = f"{folder}/{SMALL}" if folder else SMALL
        data = content("1 small", 100)
        assert await storage.read("1", path, 100) == data
        with refused(CorruptCheckpointError, "read a file larger than the limit", SMALL):
            await storage.read("1", path, 99)
        for missing in ("item/none", "item/small.json/x", "none"):
            assert await storage.read("1", missing, 10**6) is None, missing
        assert await storage.read("none", path, 10**6) is None
        many = await storage.read_each(["2", "none", "1"], FILE_NAME, MAX_BYTES, 100, sizes)
        assert many[1] is None
        assert many[0] == len(await storage.read("2", FILE_NAME, MAX_BYTES) or b"")
        assert many[2] is not None
        assert await storage.read_each(["1", "2"], FILE_NAME, 10, 10, sizes) == [None, None]
        assert await storage.read_each([], FILE_NAME, 10, 10, sizes) == []


async def a_file_that_is_cut_is_told(case: StoreCase) -> None:
    """A truncated file is reported, or none ever is if that would take a request for every file."""
    async with opened(case) as [storage]:
        attempt = await publish(storage, "1", "data", nbytes=1000)
        path = f"{attempt.folder}/{DATA}" if attempt.folder else DATA
        assert await storage.cut_files({"1": {path: 1000}, "none": {}}) == {}
        assert await storage.cut_files({}) == {}
        for found in (
            await storage.cut_files({"1": {path: 1001}}),
            await storage.cut_files({"1": {path: 1000, f"{path}x": 0}}),
            await storage.cut_files({"1": {path: 999}, "none": {}}),
        ):
            assert not found or DATA in found.pop("1"), "the text names the file"
            assert not found, "and only the step directory that has it"


async def every_range_is_read(case: StoreCase) -> None:
    """Blocks are read byte for byte from any offset, and missing bytes raise an error."""
    size = 9 * _MIB + 77
    async with opened(case) as [storage]:
        attempt = await publish(storage, "1", "data", nbytes=size)
        path = f"{attempt.folder}/{DATA}" if attempt.folder else DATA
        data = memoryview(content("data", size))
        edges = (0, 1, 4095, 4096, _MIB - 1, _MIB, 4 * _MIB, 8 * _MIB + 1, size - 1, size)
        ranges = [(start, stop) for start in edges for stop in edges if start <= stop]
        # The memory around the target must stay unchanged.
        for start, stop in [*Random(1).sample(ranges, 25), (0, size), (size, size)]:
            block = bytearray(b"\x55") * (stop - start + 2)
            with memoryview(block) as whole:
                await storage.read_block("1", path, start, whole[1:-1])
            assert memoryview(block)[1:-1] == data[start:stop], (start, stop)
            assert block[:1] + block[-1:] == b"\x55\x55", (start, stop)
        for start, count in ((0, size + 1), (size, 1), (size + 5000, 10), (1 << 40, 1)):
            with refused(CorruptCheckpointError, f"read {count} bytes from {start} on"):
                await storage.read_block("1", path, start, memoryview(bytearray(count)))
        for missing in (("1", f"{path}x"), ("none", path)):
            with refused(CorruptCheckpointError, "read a file that is not there"):
                await storage.read_block(*missing, 0, memoryview(bytearray(10)))


async def a_block_is_whole_when_it_is_used(case: StoreCase) -> None:
    """The function after a read is called once, with all bytes there, and its error is raised."""
    size = 9 * _MIB + 77
    async with opened(case) as [storage]:
        attempt = await publish(storage, "1", "data", nbytes=size)
        path = f"{attempt.folder}/{DATA}" if attempt.folder else DATA
        data = content("data", size)
        seen: list[bool] = []
        for nbytes in (size, 100):
            block = bytearray(nbytes)

            def compare(block: bytearray = block) -> None:
                seen.append(block == data[: len(block)])

            await storage.read_block("1", path, 0, memoryview(block), compare)
        assert seen == [True, True], seen

        def fail() -> None:
            raise ValueError("this is not about the file")

        with refused(ValueError, "raise the error of what follows a read"):
            await storage.read_block("1", path, 0, memoryview(bytearray(10)), fail)
        with refused(CorruptCheckpointError, "read a file that is not there"):
            await storage.read_block("1", f"{path}x", 0, memoryview(bytearray(10)), fail)


async def files_of_every_size_are_kept(case: StoreCase) -> None:
    """Files may be empty, or of the largest size. A larger file is refused before it is sent."""
    sizes = (0, 1, 64 << 10, _MIB, 5 * _MIB + 1)
    async with opened(case) as [storage]:
        for size in sizes:
            await publish(storage, str(size), size, nbytes=size)
            await assert_whole(storage, str(size), size)
        if storage.traits.largest_file_bytes < _MOST_BUILT_BYTES:
            attempt = await storage.begin("1")
            # This memory is never touched.
            with (
                mmap.mmap(-1, storage.traits.largest_file_bytes + 1) as region,
                memoryview(region) as data,
                refused(CheckpointError, "write a file that is too large"),
            ):
                await storage.write_block(attempt, DATA, data)
            await storage.discard(attempt)


async def a_file_of_the_old_step_dir_is_taken_over(case: StoreCase) -> None:
    """`link` takes a file from a folder or the step directory; the file outlives the old step."""
    async with opened(case) as [storage]:
        old = await publish(storage, "1", "old")
        attempt = await storage.begin("1")
        await storage.link(attempt, DATA, old.folder)
        with refused(CorruptCheckpointError, "link a file that is not there", "item/none"):
            await storage.link(attempt, "item/none", old.folder)
        files = {SMALL: content("old small", 100), DATA: content("old", 5000)}
        await storage.write(attempt, SMALL, files[SMALL])
        await storage.write(attempt, FILE_NAME, manifest_of(attempt, files))
        await storage.publish(attempt, overwrite=False, replacing=old.id)
        await assert_whole(storage, "1", "old", attempt)


async def files_of_another_step_dir_are_shared(case: StoreCase) -> None:
    """`share` gives the attempt whole files only, and each step directory outlives the other.

    A storage need not support it.
    """
    async with opened(case) as [storage]:
        data, small = content("first", _MIB), content("2 small", 100)
        first = await publish(storage, "1", "first", nbytes=_MIB)
        place, gone = _place("1", first), "1"
        for step_dir in ("2", "3"):
            attempt = await storage.begin(step_dir)
            assert list(await storage.share(attempt, place, {DATA: _MIB + 1})) == []
            wanted = {DATA: _MIB, SMALL: 101, "item/none": 2 * _MIB}
            shared = list(await storage.share(attempt, place, wanted))
            if not storage.traits.shares_files:
                await storage.discard(attempt)
                return
            assert shared == [DATA]
            assert list(await storage.share(attempt, "none", {"item/other": _MIB})) == []
            await storage.write(attempt, SMALL, small)
            manifest = manifest_of(attempt, {SMALL: small, DATA: data})
            await storage.write(attempt, FILE_NAME, manifest)
            await storage.publish(attempt, overwrite=False)
            assert await storage.remove(gone)
            place, gone = _place(step_dir, attempt), step_dir
            found = await read_all(storage, step_dir)
            assert found is not None
            assert found[1] == {SMALL: small, DATA: data}
            assert len(await storage.files(step_dir)) == 3, "files that no manifest names"
        # A discarded attempt removes its shared files, which stay in the other step.
        attempt = await storage.begin("4")
        assert list(await storage.share(attempt, place, {DATA: _MIB})) == [DATA]
        await storage.discard(attempt)
        assert await files_of(storage, "4") == []
        assert await read_all(storage, gone) == found


def _place(step_dir: str, attempt: Attempt) -> str:
    return f"{step_dir}/{attempt.folder}" if attempt.folder else step_dir


async def another_process_joins_an_attempt(case: StoreCase) -> None:
    """Files of a joined attempt are published with it, and releasing it removes nothing."""
    async with opened(case, 3) as [storage, second, third]:
        attempt = await storage.begin("3")
        joined = await second.join("3", attempt.id)
        gone = await third.join("3", attempt.id)
        assert (joined.step_dir, joined.id, joined.folder) == ("3", attempt.id, attempt.folder)
        files = {SMALL: content("3 small", 100), DATA: content("3", 5000)}
        await second.write_block(joined, DATA, memoryview(files[DATA]))
        await third.write(gone, SMALL, files[SMALL])
        await third.discard(gone)
        await storage.write(attempt, FILE_NAME, manifest_of(attempt, files))
        await storage.publish(attempt, overwrite=False)
        await second.discard(joined)
        await assert_whole(second, "3", "3", attempt)


async def an_attempt_that_is_not_there_cannot_be_joined(case: StoreCase) -> None:
    """A process that sees another root cannot join, and fails before it writes anything."""
    async with opened(case) as [storage], opened(case) as [elsewhere]:
        attempt = await storage.begin("3")
        with refused(StorageError, "join an attempt that is not there", elsewhere.location):
            await elsewhere.join("3", attempt.id)
        await storage.discard(attempt)
        with refused(StorageError, "join an attempt that was removed", storage.location):
            await storage.join("3", attempt.id)


async def a_step_dir_comes_back_from_the_trash(case: StoreCase) -> None:
    """A moved step directory is whole again once it is undeleted, and never replaces another."""
    async with opened(case) as [storage]:
        attempt = await publish(storage, "1", "one")
        assert await storage.move("1", "trash") is not None
        assert not await storage.exists("1")
        assert await storage.move("1", "trash") is None
        [entry] = await storage.trashed("trash")
        await publish(storage, "1", "two")
        with refused(StepExistsError, "undelete onto a step directory", "1"):
            await storage.undelete("trash", entry.name, "1")
        await assert_whole(storage, "1", "two")
        await storage.remove("1")
        await storage.undelete("trash", entry.name, "1")
        await assert_whole(storage, "1", "one", attempt)
        assert await storage.trashed("trash") == []


async def the_trash_is_emptied_for_good(case: StoreCase) -> None:
    """A purged step directory is gone, and a step directory of the same name is not touched."""
    async with opened(case) as [storage]:
        await publish(storage, "1", "one")
        await storage.move("1", "trash")
        await publish(storage, "1", "two")
        [entry] = await storage.trashed("trash")
        await storage.purge("trash", entry.name)
        assert await storage.trashed("trash") == []
        with refused(StepNotFoundError, "undelete what is gone", "trash"):
            await storage.undelete("trash", entry.name, "2")
        await storage.purge("trash", entry.name)
        await assert_whole(storage, "1", "two")


async def a_root_opened_anew_holds_the_same(case: StoreCase) -> None:
    """Published step directories exist for processes that start later."""
    opens = case.fresh()
    first = opens(Timeouts())
    await first.prepare()
    attempt = await publish(first, "1", "one")
    second = opens(Timeouts())
    await second.prepare()
    assert await second.step_dirs() == ["1"]
    await assert_whole(second, "1", "one", attempt)


CHECKS: tuple[Callable[[StoreCase], Awaitable[None]], ...] = (
    it_says_what_it_is,
    an_attempt_is_invisible,
    a_discarded_attempt_leaves_nothing,
    a_step_dir_is_not_replaced_unless_asked,
    only_what_was_meant_is_replaced,
    a_step_dir_is_removed_whole,
    every_name_is_kept_apart,
    its_listing_is_always_true,
    a_change_is_told_by_the_stamp,
    a_change_is_told_by_the_fingerprint,
    small_files_are_read_within_limits,
    a_file_that_is_cut_is_told,
    every_range_is_read,
    a_block_is_whole_when_it_is_used,
    files_of_every_size_are_kept,
    a_file_of_the_old_step_dir_is_taken_over,
    files_of_another_step_dir_are_shared,
    another_process_joins_an_attempt,
    an_attempt_that_is_not_there_cannot_be_joined,
    a_step_dir_comes_back_from_the_trash,
    the_trash_is_emptied_for_good,
    a_root_opened_anew_holds_the_same,
)
