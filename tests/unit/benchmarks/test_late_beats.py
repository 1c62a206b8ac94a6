"""The detector of what keeps an event loop waiting."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.late_beats import Beats


def test_what_holds_the_loop_is_named(tmp_path: Path) -> None:
    async def hold() -> None:
        await asyncio.sleep(0)
        time.sleep(0.5)

    async def main() -> tuple[list[float], str]:
        return await Beats(0.05, tmp_path / "stacks").during(hold)

    lags, stacks = asyncio.run(main())
    assert max(lags) > 0.4
    assert "in hold" in stacks
