"""The detector of what keeps an event loop waiting."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks import late_beats
from benchmarks.late_beats import Beats, Found, Lag, compared


def test_what_holds_the_loop_is_named(tmp_path: Path) -> None:
    async def hold() -> None:
        await asyncio.sleep(0)
        time.sleep(0.5)

    async def main() -> tuple[list[Lag], str]:
        return await Beats(0.05, tmp_path / "stacks").during(hold)

    lags, stacks = asyncio.run(main())
    assert max(lag.held for lag in lags) > 0.4
    assert "in hold" in stacks


def test_no_stacks_are_written_for_the_table(tmp_path: Path) -> None:
    async def hold() -> None:
        await asyncio.sleep(0)
        time.sleep(0.1)

    async def main() -> tuple[list[Lag], str]:
        return await Beats(None, tmp_path / "stacks").during(hold)

    lags, stacks = asyncio.run(main())
    assert max(lag.seconds for lag in lags) > 0.05
    assert stacks == ""


def test_the_table_has_the_worst_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([[0.001] * 3, [0.009] * 3, [0.004] * 3, [0.03, 0.02, 0.01]])

    def run(*_: object) -> dict[str, Found]:
        return {"save, first": Found([Lag(seconds, seconds / 2) for seconds in next(runs)])}

    monkeypatch.setattr(late_beats, "in_new_process", run)
    text = compared(2, 1, True, tmp_path)
    assert "| save, first | 9 ms | 9 ms | 4.5 ms | 30 ms | 30 ms | 15 ms |" in text
    assert "1 of 1 flows alone, 0 beside them" in text
