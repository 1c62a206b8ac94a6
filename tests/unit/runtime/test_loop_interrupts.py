"""An interrupt that comes while the library's thread begins leaves nothing that waits for ever."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from ckpt._runtime import loop as module
from ckpt._runtime.loop import EngineLoop


def test_a_loop_that_nobody_saw_begin_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[Any]):
        asked = 0

        def result(self, timeout: float | None = None) -> Any:
            found = super().result(timeout)
            Interrupted.asked += 1
            if Interrupted.asked == 1:
                raise KeyboardInterrupt
            return found

    monkeypatch.setattr(module, "Future", Interrupted)

    async def nothing() -> None:
        pass

    loop = EngineLoop()
    with pytest.raises(KeyboardInterrupt):
        loop.call(nothing)
    assert loop.close(timeout=30)
