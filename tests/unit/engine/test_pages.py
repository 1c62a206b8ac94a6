"""Pages: what is in memory stays, and huge pages are asked for where filling one was quick."""

from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path

import anyio
import numpy as np
import pytest

from ckpt._engine.memory import arena
from ckpt._engine.memory.arena import Arena, Block
from tests.support.conditions import lets_others_run

MIB = 1 << 20
SMAPS = Path("/proc/self/smaps")


def wants_huge_pages(address: int) -> bool:
    """Tell whether the mapping at an address has been advised to use huge pages."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("first", [0, 64, 4095, 2 * MIB - 1])
def test_what_is_in_the_memory_stays(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_QUICK_SECONDS", 1e9)
    memory = np.frombuffer(mmap.mmap(-1, 24 * MIB), np.uint8)
    memory[:] = np.resize(np.arange(251, dtype=np.uint8), len(memory))
    before = memory.copy()
    cuts = [first, first + 4 * MIB, first + 9 * MIB + 3, first + 9 * MIB + 3, 24 * MIB]
    arena.choose_pages([memory[a:b] for a, b in pairwise(cuts)])
    np.testing.assert_array_equal(memory, before)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are no huge pages")
@pytest.mark.parametrize(("limit", "huge"), [(1e9, True), (0.0, False)])
def test_one_page_decides(limit: float, huge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_QUICK_SECONDS", limit)
    regions = [np.frombuffer(mmap.mmap(-1, 8 * MIB), np.uint8) for _ in range(3)]
    arena.choose_pages(regions)
    if not wants_huge_pages(-(-regions[0].ctypes.data // (2 * MIB)) * 2 * MIB):
        pytest.skip("this kernel has no huge pages")
    found = [wants_huge_pages(region.ctypes.data + 4 * MIB) for region in regions]
    assert found == [huge, huge, huge]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are no huge pages")
@pytest.mark.parametrize(("limit", "huge"), [(1e9, True), (0.0, False)])
def test_staging_memory_is_chosen_too(
    limit: float, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_QUICK_SECONDS", limit)

    async def blocks() -> list[Block]:
        arena = Arena(64 * MIB)
        return [await arena.allocate(nbytes) for nbytes in (MIB, 30 * MIB, 20 * MIB)]

    small, *large = anyio.run(blocks)
    if not wants_huge_pages(-(-large[0].memory.ctypes.data // (2 * MIB)) * 2 * MIB):
        pytest.skip("this kernel has no huge pages")
    assert [wants_huge_pages(each.memory.ctypes.data + 10 * MIB) for each in large] == [huge] * 2
    # What a small save needs is touched by itself only.
    assert not wants_huge_pages(small.memory.ctypes.data)


def test_other_threads_go_on_while_pages_are_made() -> None:
    memories = (np.frombuffer(mmap.mmap(-1, 16 * MIB), np.uint8) for _ in range(101))
    if not arena.populate(next(memories)):
        pytest.skip("this kernel does not make pages on demand")
    assert lets_others_run(lambda: arena.populate(next(memories)), times=100)


def test_no_call_keeps_the_address_space_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    fails_at = 10

    def advise(start: int, nbytes: int, _: int) -> bool:
        asked.append((start, nbytes))
        return len(asked) != fails_at

    monkeypatch.setattr(arena, "_advise", advise)
    memory = np.frombuffer(mmap.mmap(-1, 16 * MIB), np.uint8)[: 7 * MIB + 4096]
    assert arena.populate(memory)
    starts = range(memory.ctypes.data, memory.ctypes.data + len(memory), MIB)
    assert asked == [*((start, MIB) for start in starts[:-1]), (starts[-1], 4096)]
    assert not arena.populate(memory)
    assert len(asked) == fails_at


def test_a_small_save_touches_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(arena, "_advise", lambda *advice: asked.append(advice))

    async def blocks() -> list[Block]:
        arena = Arena(64 * MIB)
        return [await arena.allocate(nbytes) for nbytes in (100, MIB, MIB)]

    assert len(anyio.run(blocks)) == 3
    assert not asked


def test_without_large_regions_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(arena, "_advise", lambda *advice: asked.append(advice))
    arena.choose_pages([])
    arena.choose_pages([np.zeros(100, np.uint8), np.zeros(MIB, np.uint8)])
    assert not asked
