"""A flipped bit is found with its leaf: on a device, in host memory, and on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reliability.bit_flips import passes, replicas, staged, stored
from tests.reliability.tally import Tally


@pytest.mark.parametrize(
    ("campaign", "count"), [(replicas, 30), (passes, 60), (staged, 30), (stored, 60)]
)
def test_every_flipped_bit_is_found_with_its_leaf(
    tmp_path: Path, campaign: Callable[..., Tally], count: int
) -> None:
    found = campaign(tmp_path, count)
    found.check(faults=count)
    assert found.faults == count
