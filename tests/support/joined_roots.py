"""Jobs whose processes have saved on disks of their own, and the root in which their parts meet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import ckpt
from ckpt._format.manifest import Manifest
from ckpt._runtime.loop import call_once
from ckpt._tiers.drains import join_notes
from ckpt._tiers.drains.drain import DrainResult
from ckpt._tiers.drains.drainer import Drainer, DrainRoute, draining
from ckpt._tiers.drains.join_notes import PARTS, STATES
from ckpt._tiers.drains.leader import transfer_of
from ckpt.storage._manifests import read_manifest
from ckpt.storage._resolve import open_root
from ckpt.testing.compare import differences
from tests.support.simulated_job import FAR, closed, managers, together
from tests.support.stateful_objects import Reservoir

__all__ = [
    "Agents",
    "assert_joined",
    "assert_whole",
    "made_parts",
    "no_notes",
    "notes_of",
    "quick_notes",
]

_ITEMS = 4
_PATIENCE_S = 120


def _model(step: int) -> dict[str, Any]:
    return {"w": np.arange(100_000.0) + step, "step": step}


def _items(process: int, step: int) -> dict[str, Any]:
    """The same model in all processes, and files of 800 kB that each has for itself."""
    rng = np.random.default_rng([process, step])
    readers = {f"reader_{n}": Reservoir(rng.bytes(800_000)) for n in range(_ITEMS)}
    return {"model": _model(step), **readers}


def made_parts(root: Path, count: int, *steps: int) -> list[Path]:
    """Save steps in a job of that many processes; return the root of each."""
    mgrs = managers(root, count, own_disks=True, seconds=FAR)
    for step in steps:
        for commit in together(
            *(
                lambda m=m, n=n, s=step: m.save(s, items=_items(n, s)).result(FAR)
                for n, m in enumerate(mgrs)
            )
        ):
            assert not isinstance(commit, Exception), commit
    closed(mgrs)
    return [root / str(process) for process in range(count)]


def assert_joined(root: Any, parts: list[Path], *steps: int) -> None:
    """Assert that a root has exactly these steps, and every byte of all parts."""
    assert assert_whole(root, parts) == list(steps)


def assert_whole(root: Any, parts: list[Path]) -> list[int]:
    """Assert that the steps of a root have every byte of all parts; return their numbers.

    Agents may publish further steps meanwhile.
    """
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        steps = mgr.all_steps()
        for step in steps:
            report = mgr.verify(step)
            assert report.ok, str(report)
            found = mgr.restore(step, items={"model": None})
            assert not differences(found["model"], _model(step))

    async def look() -> None:
        for step in steps:
            joined = await read_manifest(open_root(root), str(step), step=step)
            for process, path in enumerate(parts):
                part = await read_manifest(open_root(path), str(step), step=step)
                assert joined.save == part.save
                own = _readers(part)
                assert len(own) == _ITEMS
                assert own.items() <= _readers(joined).items(), f"part {process} of step {step}"
            assert len(_readers(joined)) == _ITEMS * len(parts)

    call_once(look)
    return steps


def _readers(manifest: Manifest) -> dict[str, str]:
    return {path: file.digest for path, file in manifest.files.items() if path.endswith(".bin")}


async def notes_of(root: Any) -> tuple[list[str], list[str]]:
    """The notes of leaders and those of parts."""
    storage = open_root(root)
    leads, parts = [sorted(await storage.notes(folder)) for folder in (STATES, PARTS)]
    return leads, parts


def no_notes(root: Any) -> None:
    """Assert that no part has left a note."""

    async def look() -> None:
        assert (await notes_of(root))[1] == []

    call_once(look)


@pytest.fixture
def quick_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents look at notes, and renew them, without long pauses."""
    monkeypatch.setattr(join_notes, "FIRST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(join_notes, "LONGEST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(join_notes, "SIGN_SECONDS", 0.05)
    monkeypatch.setattr(join_notes, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(join_notes, "LOOK_SECONDS", 0.3)


class Agents:
    """The agents of a job, and what each has told."""

    def __init__(self, parts: list[Path], far: Any) -> None:
        self.parts, self.far = parts, far
        self.told: list[list[DrainResult]] = [[] for _ in parts]

    @property
    def outcomes(self) -> list[list[tuple[int, str]]]:
        return [[(each.step, each.outcome) for each in told] for told in self.told]

    @contextlib.asynccontextmanager
    async def agent(self, process: int, **options: Any) -> AsyncIterator[Drainer]:
        """Be the agent of a process while the body runs; it dies with the body."""
        route = DrainRoute(open_root(self.parts[process]), open_root(self.far))
        strategy = transfer_of(process, len(self.parts))
        async with draining(
            route, self.told[process].append, strategy=strategy, **options
        ) as drainer:
            yield drainer

    async def drain(self, process: int, *steps: int, **options: Any) -> None:
        """Be the agent of a process until all these steps have ended."""
        async with self.agent(process, **options) as drainer:
            for step in steps:
                await drainer.request(step)
            assert await drainer.finish() == []

    def all_drain(self, *steps: int) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                for process in range(len(self.parts)):
                    # Each has its own order.
                    own = steps[process % len(steps) :] + steps[: process % len(steps)]
                    tasks.start_soon(self.drain, process, *own)

        self.run(main)

    def run(self, main: Callable[[], Any]) -> None:
        async def bounded() -> None:
            with anyio.fail_after(_PATIENCE_S):
                await main()

        call_once(bounded)
