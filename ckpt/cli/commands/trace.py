"""`ckpt trace`: how recorded saves overlapped with training."""

from __future__ import annotations

from collections.abc import Iterator

import click
from msgspec import Struct

from ckpt._inspection.followed_run import RecordedTrace, read_trace
from ckpt.cli import options
from ckpt.cli.output import count_text, fields, seconds_text, show
from ckpt.errors import InvalidArgumentError
from ckpt.observers._tracing.timeline import Timeline, measure
from ckpt.observers._tracing.trace import write_chrome


class _Overlap(Struct, frozen=True):
    """The output of the command.

    Attributes:
        events: Number of events.
        spans: Number of spans of the program.
        unreadable: Number of lines of the file that could not be read.
        steps: The steps of the events.
        saves: Number of saves.
        blocked_seconds: Sum of the times for which the saves blocked.
        background_seconds: Sum of the times for which they continued in the background.
        overlap_ratio: Share of the background time during which a span was running; None without
            spans.
        staging_overlap_ratio: Share of the staging time during which data was written.
        files: The written files.
    """

    events: int
    spans: int
    unreadable: int
    steps: list[int]
    saves: int
    blocked_seconds: float
    background_seconds: float
    overlap_ratio: float | None
    staging_overlap_ratio: float | None
    files: list[str]


@click.command()
@click.argument("file", type=options.PATH)
@click.option("--to", multiple=True, type=options.PATH, help="A .json for ui.perfetto.dev.")
@click.option("--step", type=click.IntRange(min=0), help="Only what is about this step.")
@click.option(
    "--operation",
    type=click.Choice(["save", "restore", "verify", "delete", "drain"]),
    help="Only operations of this kind.",
)
@options.as_json
def trace(
    file: str, to: tuple[str, ...], step: int | None, operation: str | None, as_json: bool
) -> None:
    """Tell how recorded saves overlapped with training, and write them for Perfetto.

    FILE is what ckpt.observers.JsonLines(FILE, phases=True) has written.
    """
    for each in to:
        if not each.lower().endswith(".json"):
            raise InvalidArgumentError(f"--to {each}: expected a name that ends in .json")
    found = read_trace(file)
    timeline = found.timeline.only(step, operation)
    if not timeline.events:
        steps = ", ".join(map(str, found.timeline.steps[-10:]))
        raise InvalidArgumentError(f"{file} holds nothing of that; its last steps are {steps}")
    for target in to:
        write_chrome(timeline, target)
    show(_overlap(found, timeline, to), _view, as_json=as_json)


def _overlap(found: RecordedTrace, timeline: Timeline, to: tuple[str, ...]) -> _Overlap:
    saves = timeline.saves()
    return _Overlap(
        events=len(timeline.events),
        spans=len(timeline.spans),
        unreadable=found.unreadable,
        steps=list(timeline.steps),
        saves=len(saves),
        blocked_seconds=sum(measure([each.blocked]) for each in saves) / 1e9,
        background_seconds=measure(each.background for each in saves) / 1e9,
        # Without spans, it is unknown what the program did meanwhile.
        overlap_ratio=timeline.overlap_ratio if found.timeline.spans else None,
        staging_overlap_ratio=timeline.staging_overlap_ratio,
        files=list(to),
    )


def _view(found: _Overlap) -> Iterator[str]:
    steps = ""
    if found.steps:
        steps = f", steps {found.steps[0]} to {found.steps[-1]}"
        if len(found.steps) == 1:
            steps = f", step {found.steps[0]}"
    unknown = "not known: no spans of the program (JsonLines.span) are in the file"
    shown = None if found.overlap_ratio is None else f"{found.overlap_ratio:.3f} of that"
    yield from fields(
        [
            ("events", f"{found.events:,}{steps}"),
            ("spans", f"{found.spans:,}" if found.spans else ""),
            ("unreadable", count_text(found.unreadable, "line") if found.unreadable else ""),
            ("saves", f"{found.saves:,}" if found.saves else ""),
            ("blocked", seconds_text(found.blocked_seconds) if found.saves else ""),
            ("in the background", seconds_text(found.background_seconds) if found.saves else ""),
            ("overlap with spans", (shown or unknown) if found.saves else ""),
            ("staged beside writes", _share(found.staging_overlap_ratio)),
            *(("written", each) for each in found.files),
        ]
    )


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f} of the staging"
