"""Tracks: everything is on one, and nothing on one overlaps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given

from ckpt._events import Event
from ckpt.observers import Timeline
from ckpt.observers._tracing.trace import tracks
from tests.unit.observers.examples import TIMELINES, US, a_save, a_whole_save, event, span


def labels(timeline: Timeline) -> list[str]:
    return [track.label for track in tracks(timeline)]


@given(TIMELINES)
def test_no_two_of_a_track_overlap_and_nothing_is_lost(timeline: Timeline) -> None:
    found = tracks(timeline)
    for track in found:
        assert all(a.ended_ns <= b.began_ns for a, b in pairwise(track.entries))
    drawn = sorted(
        (entry.name, entry.began_ns, entry.ended_ns, entry.nbytes)
        for track in found
        for entry in track.entries
    )
    # The bytes of a plan are still to be moved.
    given_ = [
        (e.phase, e.began_ns, e.ended_ns, 0 if e.phase == "plan" else e.nbytes)
        for e in timeline.events
    ]
    given_ += [(s.name, s.began_ns, s.ended_ns, 0) for s in timeline.spans]
    assert drawn == sorted(given_)
    assert len({(track.group, track.label) for track in found}) == len(found)


def test_tracks_stand_in_the_order_of_a_save() -> None:
    other = event("something new", 0, 1)
    work = (span("train step", 0, 90), span("blocked", 90, 100))
    assert labels(Timeline((other, *a_save()), work)) == [
        *("train step", "plan", "staging", "staging (2)", "lane 0", "lane 1"),
        *("publish", "preserve", "something new"),
    ]


def test_the_whole_and_the_waiting_come_first_and_what_was_nearly_lost_is_no_track() -> None:
    lost = event("preempted", -(10**9), 300)
    found = tracks(Timeline((lost, *a_whole_save())))
    assert [track.label for track in found[:3]] == ["whole", "wait", "plan"]
    assert found[0].entries[0].args == {"step": 1, "outcome": "ok"}
    assert not any(entry.name == "preempted" for track in found for entry in track.entries)


def test_only_writes_are_told_apart_by_their_lanes() -> None:
    phases = (
        event("digest", 0, 10, nbytes=5, lane=0),
        event("write", 5, 20, nbytes=5, lane=0),
        event("digest", 20, 30, nbytes=7, lane=1),
        event("write", 30, 40, nbytes=7, lane=0),
        event("write", 30, 40, nbytes=9, lane=10),
    )
    digest, *lanes = tracks(Timeline(phases))
    assert (digest.label, digest.nbytes, digest.busy_ns) == ("digest", 12, 20 * US)
    assert [(lane.label, lane.nbytes, lane.busy_ns) for lane in lanes] == [
        ("lane 0", 12, 25 * US),
        ("lane 10", 9, 10 * US),
    ]


def test_spans_of_several_names_and_threads_have_a_track_for_each_thread() -> None:
    spans = (
        span("train step", 0, 10),
        span("evaluation", 10, 20),
        span("forward", 2, 5),
        span("input", 0, 20, thread="loader"),
    )
    assert labels(Timeline((), spans)) == ["spans (main)", "spans (main) (2)", "input (loader)"]


@dataclass(frozen=True)
class _Wider(Event):
    queue: str | None = None


def test_fields_that_events_gain_are_shown() -> None:
    wider = (
        _Wider("save", "write", 3, 0, 5, 9, 1, queue="hot"),
        _Wider("save", "plan", None, 0, 1),
    )
    plan, lane = tracks(Timeline(wider))
    assert lane.entries[0].args == {"step": 3, "lane": 1, "queue": "hot"}
    assert plan.entries[0].args == {}
