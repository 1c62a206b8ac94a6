"""Power cuts and full disks, on file systems of our own: they need root and loop devices."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
import ckpt.sync
from tests.reliability.kills import attempts
from tests.reliability.power import cuts, cuts_of_the_forgetful
from tests.support.kills import can_watch
from tests.support.numbered_states import state_of
from tests.support.power import can_cut_power, power_supply, small_memory_disk
from tests.support.trees import assert_same

# Programs are started here, which takes its time on a machine that does other things.
pytestmark = pytest.mark.timeout(300)

needs_power = pytest.mark.skipif(
    not can_cut_power() or not can_watch(),
    reason="needs root, loop devices, mkfs.ext4 and system calls that can be watched",
)


@pytest.mark.slow
@needs_power
def test_a_power_cut_loses_nothing_acknowledged_and_shows_nothing_bad(tmp_path: Path) -> None:
    cuts(tmp_path, 4).check(faults=4)


@needs_power
def test_the_campaign_notices_a_save_that_was_not_durable(tmp_path: Path) -> None:
    tally = cuts_of_the_forgetful(tmp_path, 1)
    assert tally.faults == 1
    assert len(tally.losses) == 1


@contextlib.contextmanager
def small_disk(kind: str, directory: Path) -> Iterator[Path]:
    if kind == "tmpfs":
        with small_memory_disk(directory, size_bytes=24 << 20) as root:
            yield root
    else:
        with power_supply(directory, size_bytes=32 << 20) as disk:
            yield disk.root


@needs_power
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_fails_that_save_only(tmp_path: Path, kind: str) -> None:
    with small_disk(kind, tmp_path) as disk, ckpt.sync.CheckpointManager(disk / "run") as mgr:
        failed = None
        saved = 0
        while failed is None:
            assert saved < 10, "the disk was never full"
            try:
                mgr.save(saved, state_of(saved)).result()
                saved += 1
            except ckpt.errors.StorageError as error:
                failed = error
        assert saved >= 1
        assert failed.errno == errno.ENOSPC
        assert failed.step == saved
        assert str(disk) in str(failed)
        assert attempts(disk / "run") == []
        assert mgr.all_steps() == list(range(saved))
        # As often as one likes; a manager opened on the full disk can read, and delete.
        with pytest.raises(ckpt.errors.StorageError):
            mgr.save(saved, state_of(saved)).result()
        with ckpt.sync.CheckpointManager(disk / "run") as other:
            assert other.latest_step() == saved - 1
            assert_same(other.restore(), state_of(saved - 1))
            other.delete(0)
        mgr.save(saved, state_of(saved)).result()
        assert_same(mgr.restore(), state_of(saved))
        assert mgr.all_steps() == list(range(1, saved + 1))
        assert attempts(disk / "run") == []
