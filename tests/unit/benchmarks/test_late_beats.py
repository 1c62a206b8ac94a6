"""The beats of an event loop that is kept waiting."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks import late_beats
from benchmarks.late_beats import Lag, beats_during, late


def test_a_loop_that_is_held_beats_late() -> None:
    async def hold() -> None:
        await asyncio.sleep(0)
        time.sleep(0.5)

    lags = asyncio.run(beats_during(hold))
    assert max(lag.seconds for lag in lags) > 0.4
    assert max(lag.held for lag in lags) > 0.4
    assert all(lag.held <= lag.seconds for lag in lags if lag.seconds > 0)


def test_the_table_has_the_worst_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([[0.001] * 3, [0.009] * 3, [0.004] * 3, [0.03, 0.02, 0.01]])

    def run(*_: object) -> dict[str, list[Lag]]:
        return {"save, first": [Lag(seconds, seconds / 2) for seconds in next(runs)]}

    monkeypatch.setattr(late_beats, "in_new_process", run)
    text = late(tmp_path, rounds=2, beside=1, smoke=True)
    assert "| save, first | 9 ms | 9 ms | 4.5 ms | 30 ms | 30 ms | 15 ms |" in text
    assert "1 of 1 flows alone, 0 beside them" in text
