"""Rare turns of single operations, one step after the other, in made-up time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from ckpt._job.agreement.failures import DeadlineKeyValues
from ckpt._job.agreement.operation import Operation
from ckpt.coordination._jobs import MemoryKeyValues
from ckpt.errors import CheckpointError, CoordinationError, CoordinationTimeoutError, StorageError
from tests.support.virtual_time import LIMIT, Silent, in_made_up_time


def pair(values: Any) -> list[Operation]:
    return [Operation(values, index, 2, "op", "a save", LIMIT) for index in range(2)]


def test_who_hears_its_own_failure_raises_what_it_met() -> None:
    async def main() -> None:
        first, second = pair(MemoryKeyValues())
        error = StorageError("no room")
        assert await first.fail(error)
        for operation in (first, second):
            with pytest.raises(StorageError, match="process 0 of 2"):
                await operation.lead(None if operation is second else b"")
        assert await first.settle(error) is error
        heard = await second.settle(CoordinationError("what comes of it"))
        assert isinstance(heard, StorageError)

    in_made_up_time(main)


def test_who_is_cancelled_is_cancelled_whatever_others_have_met() -> None:
    async def main() -> None:
        first, second = pair(MemoryKeyValues())
        await first.fail(StorageError("no room"))
        with pytest.raises(StorageError):
            await second.lead(None)
        told: list[BaseException] = []
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.sleep(1.0)
            except BaseException as error:
                told += [error, await second.settle(error)]
                raise
        assert told[0] is told[1]

    in_made_up_time(main)


def test_a_primary_gives_no_outcome_to_what_has_failed() -> None:
    async def main() -> None:
        first, second = pair(MemoryKeyValues())
        await second.fail(StorageError("no room"))
        with pytest.raises(StorageError, match="process 1 of 2"):
            await first.conclude(b"done")

    in_made_up_time(main)


def test_a_primary_that_gives_up_leaves_no_request_behind() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        first, _ = pair(values)
        with pytest.raises(CoordinationTimeoutError) as caught:
            await first.report(b"")
        await first.fail(caught.value)
        # What it has asked for is there, so that nobody waits for it any more.
        assert await values.wait("op/report/0/1", 0) is not None

    in_made_up_time(main)


@pytest.mark.parametrize("error", [None, CoordinationError("gone")])
@pytest.mark.parametrize("index", [0, 1])
def test_who_is_missing_is_named_also_where_its_host_cannot_be_learnt(
    index: int, error: Exception | None
) -> None:
    async def main() -> None:
        operation = pair(Silent(MemoryKeyValues(), "processes/", error))[index]
        with pytest.raises(CoordinationTimeoutError, match="never came to it") as caught:
            await (operation.lead(None) if index else operation.report(b""))
        assert caught.value.missing == (1 - index,)
        assert anyio.current_time() <= LIMIT * 7 / 6 + 2

    in_made_up_time(main)


def test_values_that_do_not_answer_are_those_of_the_primary() -> None:
    async def main() -> None:
        for operation in pair(Silent(MemoryKeyValues(), "op")):
            with pytest.raises(CoordinationTimeoutError, match="no answer for 60 s") as caught:
                await operation.report(b"")
            assert caught.value.missing == (0,)
            # Where a group was left, its first error is meant.
            assert isinstance(caught.value, CheckpointError)

    in_made_up_time(main)


def test_only_what_processes_of_the_job_say_is_read() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        for name in ("0", "1", "2", "17", "-1", "x", "1/0", "²"):
            await values.put(f"op/life/{name}", name.encode())
        assert await DeadlineKeyValues(values, "op", "a save", LIMIT).numbered("life", 2) == {
            0: b"0",
            1: b"1",
        }

    in_made_up_time(main)
