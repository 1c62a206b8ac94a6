"""`ckpt gc`: what dead writers left goes, and what lives stays."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import anyio
import pytest

from ckpt._inspection.removals import Collection, collect
from ckpt._settings import Timeouts
from ckpt.storage._object.config import Memory
from ckpt.storage._object.storage import ObjectStorage
from tests.cli.savers import saving, without_sizes
from tests.cli.test_tidying import steps, tree
from tests.support.command import check_golden, ckpt_command, settled


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """Return a root of one's own with the steps 10, 20 (pinned) and 30."""
    return Path(shutil.copytree(run_root, tmp_path / "runs" / "a"))


def test_only_what_is_dead_is_removed(root: Path) -> None:
    with saving(root, 50) as live:
        with saving(root, 40) as dead:
            dead.kill()
            dead.wait(60)
        before = tree(root)
        dry = ckpt_command("gc", root, "--dry-run")
        assert (dry.status, dry.err) == (0, "")
        assert tree(root) == before
        ran = ckpt_command("gc", root)
        check_golden("gc", without_sizes(settled(dry.out + ran.out, root=root)))
        found = ckpt_command("ls", root, "--json").json
        assert [each["step"] for each in found["attempts"]] == [50]
        again = ckpt_command("gc", root, "--json")
        check_golden("gc_json", settled(again.out, root=root))
        live.communicate("go on\n", timeout=60)
        assert live.returncode == 0
    assert steps(root) == [10, 20, 30, 50]


def test_there_must_be_a_root(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("x")
        ran = ckpt_command("gc", path)
        assert (ran.status, ran.out) == (2, ""), ran.err
    assert ckpt_command("gc", tmp_path, "--wait", "x").status == 2


def test_the_writers_of_a_store_are_watched_before_they_count_as_dead() -> None:
    async def main() -> None:
        url = f"memory://{uuid.uuid4().hex}/run"

        async def gc(wait: float, *, dry_run: bool) -> Collection:
            return await collect(url, wait=wait, dry_run=dry_run)

        writer = ObjectStorage(Memory(url), Timeouts(lease=0.3))
        await writer.prepare()
        attempt = await writer.begin("1")
        await writer.write(attempt, "x", b"some bytes")
        with anyio.fail_after(60):
            # Time itself is waited for.
            while not (found := await gc(0, dry_run=True)).unsure:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        assert found.found == []
        found = await gc(20, dry_run=True)
        assert [(each.name, each.removed) for each in found.found] == [("1", False)]
        assert (await writer.attempts())[0].id == attempt.id
        found = await gc(20, dry_run=False)
        assert [(each.name, each.removed) for each in found.found] == [("1", True)]
        assert found.unsure == 0
        assert await writer.attempts() == []

    anyio.run(main)
