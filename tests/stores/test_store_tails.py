"""The end of a file is read on every store, which need not tell how long the file is."""

from __future__ import annotations

import asyncio

import pytest

from ckpt.storage import open_root
from ckpt.storage._base import UNKNOWN_SIZE
from tests.stores.places import Place


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 70_000])
@pytest.mark.parametrize("most", [10, 66_000])
def test_the_end_of_a_file(store: Place, length: int, most: int) -> None:
    content = bytes(number % 251 for number in range(length))

    async def run() -> None:
        storage = open_root(store.root())
        await storage.prepare()
        await storage.put_note("metadata/file", content, replace=True)
        found = await storage.read_tail("metadata", "file", most)
        assert found is not None
        assert found[0] == content[-most:]
        assert found[1] in (length, UNKNOWN_SIZE)
        assert length >= most or found[1] == length
        assert await storage.read_tail("metadata", "other", most) is None

    asyncio.run(run())
