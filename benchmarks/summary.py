"""The few figures that a reader wants first: what a save and a restore cost, beside Orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import overlap
from benchmarks.captions import machine, rounds, state
from benchmarks.figures import table, times, value
from benchmarks.labels import label
from benchmarks.tables import BASELINE
from benchmarks.targets import OURS

if TYPE_CHECKING:
    from benchmarks.results import Results, Sample, Scenario

# A decoder with its optimizer, as most people train one.
_RESTORED = "transformer"
# Who is in the short table, and what it compares: a scenario, a measure and its name there.
_SHORT_PEERS = (OURS, BASELINE, "safetensors")
SHORT_ROWS = (
    (overlap.NAME, "lost", "training loses per save, {state}"),
    (overlap.NAME, "blocked", "`save()` blocks for, in that loop"),
    (_RESTORED, "save", "a save until it is done, {state}"),
    (_RESTORED, "restore", "a restore of the same"),
    ("small", "save", "a save until it is done, {state}"),
    ("small", "restore", "a restore of the same"),
    ("first_restore", "first_restore", "the first restore of a process, {state}"),
)


def markdown(run: Results) -> str:
    """Returns a table of four lines and what it is about; nothing without such scenarios.

    The three about saves come from the train loop that the pictures beside it show.
    """
    training, restored = run.scenario(overlap.NAME), run.scenario(_RESTORED)
    rows = []
    if training is not None:
        rows += [
            _row(training, "`save()` blocks for", "blocked"),
            _row(training, "the save is durable after", "committed"),
            _row(training, "training loses, in all", "lost"),
        ]
    if restored is not None:
        rows.append(_first_row(restored, "a restore takes, the first / a later one", "restore"))
    found = [row for row in rows if row is not None]
    if not found:
        return ""
    parts = [
        f"{what}: {state(each)}, medians of {rounds([each])}"
        for what, each in (("Saves, while training", training), ("Restores, cached", restored))
        if each is not None
    ]
    head = ("", OURS, label(BASELINE), f"times as fast as {label(BASELINE)}")
    return f"{table(head, found)}\n\n{'. '.join(parts)}. Measured on {machine(run)}."


def short(run: Results) -> str:
    """Returns the table of the README: a few figures of several libraries, and their date."""
    rows = []
    for name, measure, text in SHORT_ROWS:
        scenario = run.scenario(name)
        if scenario is None:
            continue
        samples = (scenario.sample(peer, measure) for peer in _SHORT_PEERS)
        cells = ["-" if each is None else value(each.median) for each in samples]
        rows.append((text.format(state=state(scenario)), *cells))
    head = ("less is better", *(label(peer) for peer in _SHORT_PEERS))
    return f"{table(head, rows)}\n\nMedians of {run.date}, measured on {machine(run)}."


def _samples(scenario: Scenario, measure: str) -> tuple[Sample, Sample] | None:
    ours, theirs = scenario.sample(OURS, measure), scenario.sample(BASELINE, measure)
    return None if ours is None or theirs is None else (ours, theirs)


def _row(scenario: Scenario, name: str, measure: str) -> tuple[str, ...] | None:
    samples = _samples(scenario, measure)
    if samples is None:
        return None
    ours, theirs = (each.median for each in samples)
    return name, value(ours), value(theirs), times(theirs / ours)


def _first_row(scenario: Scenario, name: str, measure: str) -> tuple[str, ...] | None:
    """A row of which the first round is told, too."""
    row, samples = _row(scenario, name, measure), _samples(scenario, measure)
    if row is None or samples is None or samples[0].first is None or samples[1].first is None:
        return row
    ours, theirs = samples[0].first, samples[1].first
    first = (value(ours), value(theirs), times(theirs / ours))
    return name, *(f"{a} / {b}" for a, b in zip(first, row[1:], strict=True))
