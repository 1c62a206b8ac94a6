"""How much of a save overlapped with what."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt.observers import Span, Timeline, Trace
from tests.unit.observers.examples import (
    TIMELINES,
    US,
    a_save,
    a_whole_save,
    end,
    event,
    span,
    spans,
)


def test_the_overlap_is_the_share_of_background_time_with_a_span() -> None:
    # In the background from 100 to 300; the spans cover 150 to 200 twice over, and 280 to 300.
    spans = (span("train step", 150, 190), span("other", 160, 200), span("train step", 280, 400))
    timeline = Timeline(a_save(), spans)
    assert timeline.overlap_ratio == pytest.approx((50 + 20) / 200)
    assert timeline.overlapped() == [(150 * US, 200 * US), (280 * US, 300 * US)]


def test_blocked_time_is_no_background_time() -> None:
    # The call took from -5 to 140; what ran before it returned does not count.
    blocked = span("blocked", -5, 140)
    timeline = Timeline(a_save(), (blocked, span("train step", 100, 180)))
    (save,) = timeline.saves()
    assert save.blocked == (-5 * US, 140 * US)
    assert save.background == (140 * US, 300 * US)
    assert timeline.overlap_ratio == pytest.approx(40 / 160)


def test_a_call_that_waits_for_an_earlier_save_belongs_to_the_later_one() -> None:
    first, second = a_save(1), a_save(2, at=350)
    timeline = Timeline(first + second, (span("blocked", 200, 460), span("train step", 460, 650)))
    one, two = timeline.saves()
    assert one.blocked == (0, 100 * US)
    assert two.blocked == (200 * US, 460 * US)
    assert timeline.overlap_ratio == pytest.approx(190 / (200 + 190))


def test_snapshots_and_staging_end_before_a_save_returns() -> None:
    snapshot = event("snapshot", 90, 130)
    assert Timeline((*a_save(), snapshot)).saves()[0].returned_ns == 130 * US
    assert Timeline(a_save()).saves()[0].returned_ns == 100 * US
    unstaged = tuple(e for e in a_save() if e.phase != "stage")
    assert Timeline(unstaged).saves()[0].returned_ns == 10 * US


def test_without_background_time_there_is_no_overlap_to_tell() -> None:
    failed = tuple(e for e in a_save() if e.phase not in ("publish", "preserve"))
    work = span("train step", 0, 500)
    assert Timeline(failed, (work,)).overlap_ratio is None
    assert Timeline(failed).saves()[0].published_ns is None
    assert Timeline(a_save(), (span("blocked", -1, 301), work)).overlap_ratio is None
    assert Timeline((event("read", 0, 9, operation="restore"),), (work,)).overlap_ratio is None
    assert Timeline().overlap_ratio is None
    assert Timeline(a_save()).overlap_ratio == 0.0


def test_staging_overlap_is_the_share_of_staging_with_a_write() -> None:
    # Staging from 20 to 100, writing from 60.
    assert Timeline(a_save()).staging_overlap_ratio == pytest.approx(40 / 80)
    assert Timeline((event("write", 0, 10, lane=0),)).staging_overlap_ratio is None


def test_a_step_that_is_saved_again_counts_as_two_saves() -> None:
    timeline = Timeline(a_save(1) + a_save(1, at=1000))
    assert [save.background for save in timeline.saves()] == [
        (100 * US, 300 * US),
        (1100 * US, 1300 * US),
    ]


def test_items_that_are_planned_one_after_the_other_are_one_save() -> None:
    second = (event("plan", 100, 105), event("stage", 105, 120))
    (save,) = Timeline(a_save() + second).saves()
    assert save.returned_ns == 120 * US


def test_the_end_of_a_save_moves_none_of_its_instants() -> None:
    (save,) = Timeline(a_whole_save()).saves()
    # It was asked for where it began to wait.
    assert (save.began_ns, save.returned_ns, save.published_ns) == (-20 * US, 100 * US, 300 * US)


def test_what_was_nearly_lost_is_no_part_of_a_save() -> None:
    lost = event("preempted", -5000, 290)
    early, beside = span("train step", -4000, -3000), span("train step", 120, 200)
    plain = Timeline(a_whole_save(), (early, beside))
    preempted = Timeline((*a_whole_save(), lost), (early, beside))
    assert preempted.saves() == plain.saves()
    assert preempted.overlap_ratio == plain.overlap_ratio == pytest.approx(80 / 200)
    assert preempted.only(1).spans == (beside,)
    assert Timeline((lost,)).saves() == ()


def test_a_save_that_failed_and_was_tried_again_is_two() -> None:
    failed = tuple(e for e in a_save() if e.phase not in ("publish", "preserve"))
    told = (*failed, end(0, 260, "failed"), *a_save(at=300), end(300, 601))
    first, second = Timeline(told).saves()
    assert (first.began_ns, first.published_ns) == (0, None)
    assert (second.began_ns, second.published_ns) == (300 * US, 600 * US)


def test_a_save_that_was_turned_down_is_none() -> None:
    skipped = end(0, 1, "skipped", reason="every 100 steps")
    assert Timeline((skipped,)).saves() == ()
    later = Timeline((skipped, *a_save(at=10))).saves()
    assert [save.began_ns for save in later] == [10 * US]


def test_a_refusal_amid_a_save_of_the_same_step_does_not_part_it() -> None:
    refused = end(30, 40, "failed", reason="this step is being saved at the moment")
    second_item = (event("plan", 100, 105), event("stage", 105, 120))
    (save,) = Timeline((*a_save(), *second_item, refused)).saves()
    assert (save.began_ns, save.returned_ns) == (0, 120 * US)


def test_only_one_step_with_the_spans_beside_it() -> None:
    early, beside = span("train step", -50, -10), span("train step", 310, 340)
    late = span("train step", 341, 999)
    everything = Timeline(a_save(1) + a_save(2, at=2000), (early, beside, late))
    assert everything.only(1) == Timeline(a_save(1), (beside,))
    assert everything.only(1, "restore") == Timeline()
    assert everything.only() == everything
    assert everything.steps == (1, 2)


@given(TIMELINES)
def test_the_ratios_are_shares(timeline: Timeline) -> None:
    ratios = timeline.overlap_ratio, timeline.staging_overlap_ratio
    assert all(ratio is None or 0 <= ratio <= 1 for ratio in ratios)


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 9)), unique_by=lambda each: each[1]),
    st.lists(spans(), max_size=10),
    st.randoms(use_true_random=False),
)
def test_the_order_of_events_and_spans_does_not_matter(
    saves: list[tuple[int, int]], spans: list[Span], rng: random.Random
) -> None:
    events = [each for step, at in saves for each in a_save(step, at * 1000)]
    timeline = Timeline(tuple(sorted(events, key=lambda e: e.began_ns)), tuple(spans))
    rng.shuffle(events)
    rng.shuffle(spans)
    shuffled = Timeline(tuple(events), tuple(spans))
    assert shuffled.saves() == timeline.saves()
    assert len(timeline.saves()) == len(saves)
    assert shuffled.overlap_ratio == timeline.overlap_ratio
    assert shuffled.staging_overlap_ratio == timeline.staging_overlap_ratio


@given(TIMELINES)
def test_more_work_never_lowers_the_overlap(timeline: Timeline) -> None:
    before = timeline.overlap_ratio
    always = Span("train step", 0, 10**9)
    busier = replace(timeline, spans=(*timeline.spans, Span("train step", 5_000_000, 6_000_000)))
    full = replace(timeline, spans=(*timeline.spans, always))
    if before is None:
        assert busier.overlap_ratio is full.overlap_ratio is None
    else:
        assert before <= (busier.overlap_ratio or 0) <= (full.overlap_ratio or 0) == 1


def test_the_engine_says_when_save_returned(tmp_path: Path) -> None:
    """Also where arrays are staged after the return, so the last stage is no sign of it."""
    trace = Trace()
    staging = ckpt.Staging(mode="device")
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, observers=[trace]) as mgr:
        mgr.save(0, {"w": jnp.ones((512, 1024))}).result()
    [save] = trace.timeline().saves()
    events = [event for event in trace.timeline().events if event.step == 0]
    phases = {event.phase: event for event in events}
    assert save.blocked == (min(event.began_ns for event in events), phases["blocked"].ended_ns)
    assert phases["stage"].ended_ns > save.returned_ns
