"""Joins of the parts of steps in a bucket.

By default on memory and the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) on all servers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.places import Place
from tests.support.joined_roots import Agents, assert_joined, made_parts, no_notes, quick_notes

__all__ = ["quick_notes"]

pytestmark = pytest.mark.usefixtures("quick_notes")


def test_parts_are_joined_in_a_bucket(place: Place, tmp_path: Path) -> None:
    parts = made_parts(tmp_path, 2, 1, 2)
    agents = Agents(parts, place.root("run"))
    agents.all_drain(1, 2)
    agents.all_drain(2)
    for outcomes in agents.outcomes:
        assert sorted(outcomes[:2]) == [(1, "copied"), (2, "copied")]
        assert outcomes[2][1] in ("there", "copied")
    assert_joined(agents.far, parts, 1, 2)
    with_new = Agents(parts, place.root("other"))
    with_new.all_drain(2)
    no_notes(with_new.far)
