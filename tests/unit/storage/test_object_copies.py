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
from ckpt.storage._object.sharing.copies import LARGEST_BYTES, SMALLEST_BYTES
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
