"""Archives of many arrays in a store are opened with few requests one after the other."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.storage._object.storage import ObjectStorage
from tests.interop.test_numpy_archives import archive, in_memory


def test_the_members_of_an_archive_in_a_store_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store takes as long for one request as for many."""
    arrays = {f"layer_{number}": np.full((300, 2), number, np.float32) for number in range(300)}
    under_way, most, read = 0, 0, ObjectStorage.read_block

    async def watched(*args: Any, **options: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await anyio.lowlevel.checkpoint()
        await read(*args, **options)
        under_way -= 1

    monkeypatch.setattr(ObjectStorage, "read_block", watched)
    path = in_memory("x.npz", archive(**arrays))
    assert len(ckpt.sync.metadata(path).leaves["default"]) == 300
    assert most == 16
    found = ckpt.sync.load(path)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
