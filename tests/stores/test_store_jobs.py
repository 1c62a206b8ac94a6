"""Jobs of several processes that start on a bucket: what is the same for all is asked for once.

By default on the fake of GCS; with CKPT_ALL_STORES (`nox -s stores`) on servers that speak S3, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.stores.job_starts import ALONE, DAMAGED, OPENING, Asked, read_twice, starts_of
from tests.stores.places import Place

COUNTS = (1, 2, 4)
KINDS = ("gcs", "moto", "seaweed") if "CKPT_ALL_STORES" in os.environ else ("gcs",)
# So much between two ranges is read over, to save a request.
GAP_BYTES = 4096
NOTHING = (0, 0, 0)
# The other request asks whether a run ever went back there.
ONE_OF_EACH = (1, 1, 1)

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("kind", KINDS)]


@pytest.fixture(scope="module")
def known() -> dict[str, dict[int, dict[str, list[Asked]]]]:
    return {}


@pytest.fixture
def starts(
    kind: str,
    make_place: Callable[[str], Place],
    known: dict[str, dict[int, dict[str, list[Asked]]]],
) -> dict[int, dict[str, list[Asked]]]:
    """By number of processes and call, what each process has asked for."""
    if kind not in known:
        known[kind] = {count: starts_of(make_place(kind), count) for count in COUNTS}
    return known[kind]


@pytest.mark.parametrize("call", ["resume()", "restore()", "restore(broadcast_bytes=...)"])
def test_a_job_lists_the_root_once_and_reads_one_manifest_once(
    starts: dict[int, dict[str, list[Asked]]], call: str
) -> None:
    for count in COUNTS:
        first, *others = (asked.common for asked in starts[count][call])
        assert first == ONE_OF_EACH
        assert others == [NOTHING] * (count - 1)


@pytest.mark.parametrize("call", [OPENING, "resume(healthy=True)"])
def test_a_job_asks_as_often_as_one_process_does(
    starts: dict[int, dict[str, list[Asked]]], call: str
) -> None:
    alone = starts[1][call][0].common
    assert alone[0] == 1
    for count in COUNTS:
        first, *others = (asked.common for asked in starts[count][call])
        assert first == alone
        assert others == [NOTHING] * (count - 1)


def test_processes_that_share_their_reads_read_each_byte_once(
    starts: dict[int, dict[str, list[Asked]]],
) -> None:
    """Also small leaves, compressed ones, and those that each process has for itself."""
    call = "restore(broadcast_bytes=...)"
    alone = starts[1][call][0].nbytes
    for count in COUNTS:
        every = starts[count][call]
        assert read_twice(every) <= GAP_BYTES
        assert abs(sum(asked.nbytes for asked in every) - alone) <= GAP_BYTES
        # And none reads much more than the others.
        assert max(asked.nbytes for asked in every) < 1.1 * alone / count + GAP_BYTES


def test_without_that_each_process_reads_what_its_devices_need(
    starts: dict[int, dict[str, list[Asked]]],
) -> None:
    for count in COUNTS[1:]:
        assert read_twice(starts[count]["restore()"]) > GAP_BYTES


@pytest.mark.parametrize("call", ["latest_step()", "all_steps()", "best_step()", "metadata()"])
def test_a_process_that_looks_on_its_own_asks_on_its_own(
    starts: dict[int, dict[str, list[Asked]]], call: str
) -> None:
    for count in COUNTS:
        assert [asked.listings for asked in starts[count][call]] == [1] * count


def test_one_process_may_look_without_the_others(
    starts: dict[int, dict[str, list[Asked]]],
) -> None:
    for count in COUNTS:
        assert [asked.listings for asked in starts[count][ALONE]] == [1] + [0] * (count - 1)


def test_a_damaged_step_is_passed_over_by_one_more_list(
    starts: dict[int, dict[str, list[Asked]]],
) -> None:
    for count in COUNTS:
        first, *others = starts[count][DAMAGED]
        assert first.listings == 2
        assert [asked.listings for asked in others] == [0] * (count - 1)
        # Who finds damage looks whether the step has been deleted.
        assert all(asked.manifests <= 1 for asked in others)
