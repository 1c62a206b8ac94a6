"""Copies of objects inside a store: whatever fails, the attempt has whole files or none of them."""

from __future__ import annotations

import uuid
from typing import Any

import anyio
import pytest

from ckpt._format.manifest_head import FILE_NAME
from ckpt._settings import Timeouts
from ckpt.storage._object.config import Memory
from ckpt.storage._object.connection import connect
from ckpt.storage._object.errors import copy_failed, timed_out
from ckpt.storage._object.server_copies import LARGEST_BYTES, SMALLEST_BYTES, ServerSideCopies
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import DATA, content, manifest_of, publish, read_all
from tests.unit.storage.failing_store import KINDS, FailingStore

SMALL_NEW = content("small", 100)


def opened(config: Memory, at: int | None = None, kind: str = "") -> Any:
    store = FailingStore(connect(config).open()[0], at, kind)
    return ObjectStorage(config, Timeouts(lease=60.0), open_store=lambda: (store, store)), store


def new_place(seconds: float = 5.0) -> Memory:
    return Memory(f"memory://{uuid.uuid4().hex}/run", request_timeout=seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_fails_at_any_request(kind: str) -> None:
    """Sharing never raises; a step that is there is whole, whatever was shared of it."""

    async def run() -> None:
        for at in range(20):
            config = new_place(0.05 if "gone" in kind or kind == "hangs" else 5.0)
            storage, _ = opened(config)
            first = await publish(storage, "1", "first", nbytes=SMALLEST_BYTES)
            storage, store = opened(config)
            attempt = await storage.begin("3")
            # From the first request of the copy on.
            store.at, store.kind = store.count + at, kind
            before = store.count
            shared = await storage.share(attempt, f"1/{first.folder}", {DATA: SMALLEST_BYTES})
            used = store.count - before
            store.at = None
            if used > at:
                assert shared == [] or kind in ("lost", "lost and gone")
            else:
                assert shared == [DATA]
            await storage.discard(attempt)
            store.let_go()
            check, _ = opened(config)
            assert await read_all(check, "1") is not None
            if used <= at:
                return
        raise AssertionError("a copy took twenty requests")

    anyio.run(run)


@pytest.mark.parametrize("kind", ["refused", "lost", "hangs"])
def test_a_late_copy_does_no_harm_to_a_step_that_was_written_instead(kind: str) -> None:
    async def run() -> None:
        config = new_place(0.05 if kind == "hangs" else 5.0)
        storage, _ = opened(config)
        first = await publish(storage, "1", "first", nbytes=SMALLEST_BYTES)
        storage, store = opened(config)
        attempt = await storage.begin("2")
        # The second request is the one that makes the copy.
        store.at, store.kind = store.count + 1, kind
        shared = await storage.share(attempt, f"1/{first.folder}", {DATA: SMALLEST_BYTES})
        assert shared == []
        store.at = None
        data = content("first", SMALLEST_BYTES)
        await storage.write_block(attempt, "item/d/anew", memoryview(data))
        manifest = manifest_of(attempt, {"item/d/anew": data})
        await storage.write(attempt, FILE_NAME, manifest)
        await storage.publish(attempt, overwrite=False)
        store.let_go()
        found = await read_all(storage, "2")
        assert found is not None
        assert found[1] == {"item/d/anew": data}
        # What came late goes with the step.
        await storage.remove("2")
        assert await storage.files("2") == {}

    anyio.run(run)


def test_an_attempt_that_gave_a_copy_up_is_left_to_a_cleaner() -> None:
    async def run() -> None:
        config = new_place(0.05)
        storage, _ = opened(config)
        first = await publish(storage, "1", "first", nbytes=SMALLEST_BYTES)
        storage, store = opened(config)
        attempt = await storage.begin("2")
        store.at, store.kind = store.count + 1, "hangs"
        await storage.share(attempt, f"1/{first.folder}", {DATA: SMALLEST_BYTES})
        store.at = None
        await storage.discard(attempt)
        store.let_go()
        left = connect(config).open()[0].list().result()
        assert any(key.startswith(b".ckpt-attempts/2.") for key in left)

    anyio.run(run)


def test_what_is_written_as_quickly_or_too_large_for_a_copy_is_not_asked_for() -> None:
    async def run() -> None:
        storage, store = opened(new_place())
        await publish(storage, "1", "first", nbytes=SMALLEST_BYTES)
        attempt = await storage.begin("2")
        before = store.count
        files = {"item/small": SMALLEST_BYTES - 1, "item/large": LARGEST_BYTES + 1}
        assert await storage.share(attempt, "1", files) == []
        assert store.count == before
        await storage.discard(attempt)

    anyio.run(run)


class FailingCopier:
    """Copies as the store says, and fails where it is told to.

    Attributes:
        answer: What a copy ends with: a status of the store, `late`, or nothing for success.
        asked: The keys of copies that were asked for.
    """

    def __init__(self) -> None:
        self.answer = ""
        self.asked: list[str] = []

    async def copy(self, source: str, target: str, nbytes: int) -> int:
        self.asked.append(target)
        if self.answer == "late":
            raise timed_out("copy", target, 1.0)
        if self.answer:
            told = f" - Server returned error status code: {self.answer}\n\nDebug source:"
            raise copy_failed(target, OSError(told))
        return nbytes


class Copies:
    """Copies of one file after another, into attempts that are begun here."""

    def __init__(self) -> None:
        self.storage, _ = opened(new_place())
        self.copier = FailingCopier()
        self.copies = ServerSideCopies(self.storage._keys, lambda: self.copier)

    async def share(self, *answers: str) -> list[int]:
        """Share a file for each answer, into one attempt; return how many copies each asked for."""
        attempt, counts = await self.storage.begin("2"), []
        for number, answer in enumerate(answers):
            self.copier.answer, self.copier.asked = answer, []
            path = f"item/d/{number}"
            shared = await self.copies.share(attempt, "1", {path: SMALLEST_BYTES})
            counts.append(len(self.copier.asked))
            assert shared == ([] if answer or not counts[-1] else [path])
        await self.storage.discard(attempt)
        return counts


@pytest.mark.parametrize("failure", ["late", "500", "403"])
def test_after_a_failure_no_more_is_copied_into_the_same_step(failure: str) -> None:
    """Otherwise a store that hangs holds the save up for every item and every array."""

    async def run() -> None:
        copies = Copies()
        assert await copies.share("", failure, "", "") == [1, 1, 0, 0]
        assert await copies.share("", "") == [1, 1]

    anyio.run(run)


def test_of_several_files_that_fail_at_the_same_time_one_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        copies = Copies()
        copies.copier.answer = "500"
        attempt = await copies.storage.begin("2")
        files = {f"item/d/{number}": SMALLEST_BYTES for number in range(20)}
        assert await copies.copies.share(attempt, "1", files) == []
        assert len(copies.copier.asked) < 20
        await copies.storage.discard(attempt)

    anyio.run(run)
    (told,) = caplog.messages
    assert "20 of 20 unchanged files could not be copied" in told


def test_only_refusals_in_two_saves_running_end_copies(caplog: pytest.LogCaptureFixture) -> None:
    expired = "400 Bad Request: <Code>ExpiredToken</Code>"

    async def run() -> None:
        copies = Copies()
        for answers in ((expired,), (), ("",), ("403",), ("", ""), (expired, "")):
            await copies.share(*answers)
            assert copies.copies.are_possible
        assert caplog.text.count("1 of 1 unchanged files could not be copied") == 3
        # A failure in between is neither the one nor the other.
        assert await copies.share("late") == [1]
        assert copies.copies.are_possible
        assert await copies.share("403") == [1]
        assert not copies.copies.are_possible
        assert await copies.share("") == [0]

    anyio.run(run)
    told = [each for each in caplog.messages if "uploaded with every step" in each]
    assert len(told) == 1
    assert told[0].endswith("Pass server_side_copies=False to stop trying")


def test_a_broken_installation_of_obstore_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise OSError("libssl.so: tellNobody")

    async def run() -> None:
        storage, _ = opened(new_place())
        copies = ServerSideCopies(storage._keys, broken)
        attempt = await storage.begin("2")
        for _ in range(2):
            assert await copies.share(attempt, "1", {DATA: SMALLEST_BYTES}) == []
        await storage.discard(attempt)

    anyio.run(run)
    (told,) = caplog.messages
    assert told.endswith("every step: they cannot be copied (OSError)")
