"""Rehearsals in stores: one leaves nothing, and one that is refused says so before a save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import StorageError
from ckpt.extensions import Rehearsal
from tests.stores.places import Place
from tests.support.conditions import until

STATE = {"w": np.arange(1000.0), "step": 1}


def manager(place: Place, **options: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(place.root("run"), extensions=[Rehearsal()], **options)


def test_a_small_object_is_tried_and_deleted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for step in (1, 2):
        with manager(place) as mgr:
            mgr.save(step, STATE).result()
    assert caplog.messages == []
    with ckpt.sync.CheckpointManager(place.root("run"), mode="r") as mgr:
        assert mgr.all_steps() == [1, 2]
    if place.proxy is not None:
        tried = {
            each.method for each in place.proxy.log if "rehearsal" in f"{each.path}{each.query}"
        }
        assert tried >= {"GET", "DELETE"}
        assert tried & {"PUT", "POST"}
        assert not [key for key in place.objects() if "rehearsal" in key]


@pytest.mark.parametrize("kind", ["moto", "gcs"])
def test_a_store_that_refuses_it_is_heard_while_the_manager_opens(
    make_place: Callable[[str], Place], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What opening a root tries by itself is allowed here."""
    caplog.set_level(logging.ERROR)
    place = make_place(kind)
    assert place.proxy is not None
    place.proxy.plan = lambda seen: (
        "403" if "rehearsal" in f"{seen.path}{seen.query}" and seen.method == "DELETE" else None
    )
    with manager(place) as mgr:
        until(lambda: bool(caplog.messages), 60)
        assert place.bucket in caplog.messages[0]
        assert "could not be deleted" in caplog.messages[0]
        with pytest.raises(StorageError, match="could not be deleted"):
            mgr.save(1, STATE)
        mgr.save(1, STATE).result()
    before = sorted(place.objects())
    with manager(place, mode="r") as mgr:
        assert mgr.all_steps() == [1]
    assert sorted(place.objects()) == before
