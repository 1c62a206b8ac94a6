"""Made-up timelines, in microseconds."""

from __future__ import annotations

from hypothesis import strategies as st

from ckpt._events import Event, Outcome
from ckpt.observers import Span, Timeline

US = 1000


def event(
    phase: str,
    began: int,
    ended: int,
    *,
    step: int | None = 1,
    operation: str = "save",
    nbytes: int = 0,
    lane: int | None = None,
) -> Event:
    return Event(operation, phase, step, began * US, ended * US, nbytes, lane)


def end(
    began: int,
    ended: int,
    outcome: Outcome = "ok",
    *,
    step: int | None = 1,
    operation: str = "save",
    nbytes: int = 0,
    reason: str | None = None,
) -> Event:
    return Event(
        operation,
        "end",
        step,
        began * US,
        ended * US,
        nbytes,
        outcome=outcome,
        reason=reason,
    )


def span(name: str, began: int, ended: int, thread: str = "main") -> Span:
    return Span(name, began * US, ended * US, thread)


def a_save(step: int = 1, at: int = 0) -> tuple[Event, ...]:
    """A save that returns at 100 and is published at 300."""
    phases = [
        event("plan", 0, 10, step=step),
        event("stage", 20, 60, step=step, nbytes=4 << 20),
        event("stage", 40, 100, step=step, nbytes=4 << 20),
        event("write", 60, 200, step=step, nbytes=4 << 20, lane=0),
        event("write", 110, 250, step=step, nbytes=4 << 20, lane=1),
        event("publish", 260, 300, step=step),
        event("preserve", 310, 320, step=step),
    ]
    return tuple(
        Event(
            e.operation,
            e.phase,
            e.step,
            e.began_ns + at * US,
            e.ended_ns + at * US,
            e.nbytes,
            e.lane,
        )
        for e in phases
    )


def a_whole_save(step: int = 1) -> tuple[Event, ...]:
    """The same, as it is told: it waits first, ends, and older steps are deleted then."""
    *phases, preserve = a_save(step)
    return (
        event("wait", -20, -5, step=step),
        event("blocked", -5, 100, step=step),
        *phases,
        end(-20, 305, step=step, nbytes=7 << 20),
        preserve,
    )


PHASES = [
    *(
        "wait",
        "end",
        "plan",
        "snapshot",
        "stage",
        "encode",
        "digest",
        "write",
        "merge",
        "record",
        "publish",
        "preserve",
    ),
    *("match", "read", "place", "something new"),
]
TIMES = st.integers(0, 10_000_000)


@st.composite
def events(draw: st.DrawFn) -> Event:
    began = draw(TIMES)
    return Event(
        draw(st.sampled_from(["save", "restore", "verify"])),
        draw(st.sampled_from(PHASES)),
        draw(st.sampled_from([None, 1, 2])),
        began,
        began + draw(st.one_of(st.integers(0, 50), TIMES)),
        draw(st.integers(0, 1 << 40)),
        draw(st.sampled_from([None, 0, 1, 12])),
    )


@st.composite
def spans(draw: st.DrawFn) -> Span:
    began = draw(TIMES)
    name = draw(st.sampled_from(["train step", "evaluation", "blocked"]))
    ended = began + draw(st.one_of(st.integers(0, 50), TIMES))
    return Span(name, began, ended, draw(st.sampled_from(["main", "other"])), {"step": 3})


TIMELINES = st.builds(
    lambda events, spans: Timeline(tuple(events), tuple(spans)),
    st.lists(events(), min_size=1, max_size=25),
    st.lists(spans(), max_size=15),
)
