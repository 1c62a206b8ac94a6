"""Files that a save takes over from the step before, by batches that do so at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from ckpt._engine.save.session import reuse_files
from ckpt._format.leaf_table import DIGEST_BYTES
from ckpt._format.manifest_head import FileEntry
from ckpt._plan.item_reports import ROW, ItemReport
from ckpt.storage._base import StorageTraits

WANTED = ItemReport(("d/0",), np.zeros(1, ROW), np.zeros((1, DIGEST_BYTES), np.uint8))
KNOWN: Any = SimpleNamespace(files={"d/0": FileEntry(size=7, digest="")})


class Slow:
    """A storage that shares a file once the test says so, if it does."""

    traits = StorageTraits(60.0, 1 << 30, None, shares_files=True, shares_at_once=False)

    def __init__(self, *, does: bool) -> None:
        self.calls: list[Mapping[str, int]] = []
        self.may_go_on = anyio.Event()
        self.does = does

    async def share(
        self, attempt: object, step_dir: str, files: Mapping[str, int]
    ) -> Sequence[str]:
        self.calls.append(files)
        await self.may_go_on.wait()
        return list(files) if self.does else []


@pytest.mark.parametrize("does", [True, False])
def test_two_batches_that_want_one_file_get_it_or_not_together(does: bool) -> None:
    async def run() -> None:
        storage = Slow(does=does)
        session: Any = SimpleNamespace(
            storage=storage,
            last=SimpleNamespace(step_dir="1"),
            begun=anyio.Event(),
            attempt="2",
            files={},
            sharing={},
            engine=SimpleNamespace(damaged=frozenset()),
        )
        session.begun.set()
        taken: list[ItemReport | None] = []

        async def take() -> None:
            taken.append(await reuse_files(session, "item", KNOWN, WANTED))

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
            assert taken == []
            storage.may_go_on.set()
        assert storage.calls == [{"item/d/0": 7}]
        assert [each is not None for each in taken] == [does, does]
        assert session.sharing == {}
        assert list(session.files) == (["item/d/0"] if does else [])

    anyio.run(run)
