"""`ckpt stats`: durations of saves."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.locations import Checkpoint, locate
from ckpt._inspection.save_times import (
    NAMES,
    SaveStatisticsReport,
    StepTimes,
    summaries,
    times_of,
    times_of_root,
)
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import (
    count_text,
    fields,
    printable,
    rate_text,
    seconds_text,
    show,
    table,
    time_text,
)

_MEANINGS = {
    "blocked": "the caller of save() waited",
    "waited": "for earlier saves",
    "staged": "until everything was in host memory",
    "written": "until all data was durable",
}
# Line below a table with a trend.
_TREND = "trend: the median of the later half of the steps, compared with that of the earlier half"


@click.command()
@options.path
@click.option("--last", type=click.IntRange(min=1), help="Only so many of the latest steps.")
@options.as_json
def stats(path: str, last: int | None, as_json: bool) -> None:
    """Show where the time of saves went.

    Of a root step by step, with medians, the worst and the trend; or of one step.
    """
    found, is_root = anyio.run(_report, path, last)
    show(found, _many if is_root else _view_one_step, as_json=as_json)


async def _report(path: str, last: int | None) -> tuple[SaveStatisticsReport, bool]:
    found = await locate(path)
    if not isinstance(found, Checkpoint):
        return await times_of_root(found, last), True
    steps = [times_of(found.opened)]
    return SaveStatisticsReport(found.location, steps, summaries(steps), []), False


def _many(found: SaveStatisticsReport) -> Iterator[str]:
    rows = [(str(each.step), _size(each), *_cells(each)) for each in found.steps]
    known = {each.name: each for each in found.summary}
    if len(rows) > 1:
        medians, worst, changes = (
            {name: getattr(each, figure) for name, each in known.items()}
            for figure in ("median", "worst", "change")
        )
        rows.append(("median", "", *(_text(name, medians.get(name)) for name in NAMES)))
        rows.append(("worst", "", *(_text(name, worst.get(name)) for name in NAMES)))
        if any(each is not None for each in changes.values()):
            trend = (changes.get(name) for name in NAMES)
            rows.append(("trend", "", *("" if c is None else f"{c:+.0%}" for c in trend)))
    headers = ("step", "size", *NAMES)
    if rows:
        yield from table(headers, rows, right=headers)
    if any(each.change is not None for each in found.summary):
        yield click.style(_TREND, dim=True)
    where = f"{printable(found.path)}: {count_text(len(found.steps), 'step')}"
    if found.unreadable:
        where += f", {len(found.unreadable)} more cannot be read"
    yield click.style(where, dim=True)


def _view_one_step(found: SaveStatisticsReport) -> Iterator[str]:
    (step,) = found.steps
    times = (
        (name, f"{seconds_text(seconds)}, {meaning}" if seconds is not None else "")
        for name, meaning in _MEANINGS.items()
        for seconds in (getattr(step, name),)
    )
    return fields(
        [
            ("path", found.path),
            ("step", "" if step.step is None else str(step.step)),
            ("begun", time_text(step.created)),
            ("files", _size(step)),
            *times,
            ("rate", "" if step.rate is None else f"{rate_text(step.rate)}, without the waiting"),
        ]
    )


def _size(step: StepTimes) -> str:
    return "" if step.stored_bytes is None else format_bytes(step.stored_bytes)


def _cells(step: StepTimes) -> list[str]:
    return [_text(name, getattr(step, name)) for name in NAMES]


def _text(name: str, value: float | None) -> str:
    return rate_text(value) if name == "rate" else seconds_text(value)
