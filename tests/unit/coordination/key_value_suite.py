"""What every `KeyValues` has to do; also run by real processes."""

from __future__ import annotations

import os

import anyio

from ckpt.coordination._base import KeyValues

# Longer than one part of the service, compressible and not.
LONG = {
    "plain": os.urandom(1500 << 10),
    "zeros": bytes(3 << 20),
    "empty": b"",
    "short": b"\x00\xff",
}


async def check_key_values(values: KeyValues, folder: str) -> None:
    assert await values.wait(f"{folder}/a", 0) is None
    assert await values.wait(f"{folder}/a", 0.05) is None
    assert await values.list(folder) == {}
    # The first wins, and nothing is changed.
    assert await values.put(f"{folder}/a", b"one")
    assert not await values.put(f"{folder}/a", b"two")
    assert await values.wait(f"{folder}/a", 0) == b"one"
    assert await values.wait(f"{folder}/a", 10) == b"one"
    # A sign of life may change.
    await values.touch(f"{folder}/life", b"1")
    await values.touch(f"{folder}/life", b"2")
    assert await values.wait(f"{folder}/life", 0) == b"2"
    for name, value in LONG.items():
        assert await values.put(f"{folder}/long/{name}", value)
    assert not await values.put(f"{folder}/long/short", LONG["plain"])
    assert await values.list(f"{folder}/long") == LONG
    assert await values.wait(f"{folder}/long/plain", 10) == LONG["plain"]
    # A folder is no beginning of a name.
    assert await values.put(f"{folder}/longer", b"x")
    assert sorted(await values.list(folder)) == [
        "a",
        "life",
        *(f"long/{name}" for name in sorted(LONG)),
        "longer",
    ]
    await values.drop(f"{folder}/long")
    assert sorted(await values.list(folder)) == ["a", "life", "longer"]
    await values.drop(f"{folder}/nothing")
    # Each caller gets a count of its own.
    counts: list[int] = []

    async def count() -> None:
        counts.append(await values.add(f"{folder}/count"))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(count)
    assert sorted(counts) == list(range(1, 9))
    await _check_waiting(values, folder)
    await values.drop(folder)
    assert await values.list(folder) == {}
    assert await values.add(f"{folder}/count") == 1
    await values.drop(folder)


async def _check_waiting(values: KeyValues, folder: str) -> None:
    """All who wait for a value get it as soon as it is there; who has given up holds up nobody."""
    got: list[bytes | None] = []

    async def wait() -> None:
        got.append(await values.wait(f"{folder}/late", 30))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            with anyio.move_on_after(0.05) as given_up:
                await values.wait(f"{folder}/late", 30)
            assert given_up.cancelled_caught
            assert await values.wait(f"{folder}/late", 0.05) is None
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.sleep(0.05)
            assert got == []
            assert await values.put(f"{folder}/late", b"here")
    assert got == [b"here"] * 3
