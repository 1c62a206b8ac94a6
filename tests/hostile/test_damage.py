"""Promise 7: whatever happens to a file, a restore is right or is an error, and `verify` tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckpt.sync
from ckpt.errors import CorruptCheckpointError
from tests.reliability.damage import damage, flips
from tests.reliability.tally import Tally
from tests.support.damage import Cut, damaged, files_of


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "count"), [(damage, 260), (flips, 140)])
def test_damage_is_never_silent(tmp_path: Path, campaign: Callable[..., Tally], count: int) -> None:
    campaign(tmp_path, count).check(faults=count)


def test_a_file_that_ends_early_names_a_leaf_that_lay_there(tmp_path: Path) -> None:
    """Leaves that lie side by side are read at once; those before the end are sound."""
    ckpt.sync.save(tmp_path / "x", {f"leaf {n}": np.full(40, n) for n in range(8)})
    [file] = [
        name for name in files_of(tmp_path / "x") if "/d/" in name and has_chunks(tmp_path, name)
    ]
    with (
        damaged(tmp_path / "x", Cut(file, 7 * 320 + 10)),
        pytest.raises(CorruptCheckpointError) as caught,
    ):
        ckpt.sync.load(tmp_path / "x")
    assert caught.value.leaf == "leaf 7"


def has_chunks(root: Path, name: str) -> bool:
    return np.full(40, 7).tobytes() in (root / "x" / name).read_bytes()
