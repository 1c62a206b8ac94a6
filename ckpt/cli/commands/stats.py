"""`ckpt stats`: durations of saves, and the norms of layers."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.locations import Checkpoint, locate, root_at
from ckpt._inspection.norms import DEPTH, LEAST_STEPS, LayerNorms, NormReader, NormTable
from ckpt._inspection.save_times import (
    NAMES,
    SaveStatisticsReport,
    StepTimes,
    summaries,
    times_of,
    times_of_root,
)
from ckpt._steps.opened import shortened
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
# How many steps have their norms shown.
_NORM_STEPS = 8
# Number of layers with non-finite values that are named.
_MOST_TOLD = 8


@click.command()
@options.path
@click.option("--last", type=click.IntRange(min=1), help="Only so many of the latest steps.")
@click.option("--norms", is_flag=True, help="Show the norms of layers over the steps.")
@click.option("--select", multiple=True, metavar="PATTERN", help="The norms of leaves that fit.")
@click.option(
    "--depth",
    type=click.IntRange(1),
    help=f"How many keys of leaf paths a layer has, numbers not counted [{DEPTH}].",
)
@click.option(
    "--steps",
    type=click.IntRange(LEAST_STEPS),
    help=f"The norms of so many steps, evenly chosen [{_NORM_STEPS}].",
)
@options.as_json
def stats(
    path: str,
    last: int | None,
    norms: bool,
    select: tuple[str, ...],
    depth: int | None,
    steps: int | None,
    as_json: bool,
) -> None:
    """Show where the time of saves went.

    Of a root step by step, with medians, the worst and the trend; or of one step.

    With --norms: the norms of layers over the steps of a run, without reading arrays. Steps have
    them that were saved with extensions=[ckpt.extensions.VitalSigns()]. A * marks values that are
    not finite; the first step that has any is always shown.
    """
    norms = norms or bool(select or depth or steps)
    if norms and last:
        raise click.UsageError("--norms goes without --last.")
    if norms:
        show(anyio.run(_norms, path, select, depth, steps), _norms_view, as_json=as_json)
    else:
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


async def _norms(
    root: str, select: tuple[str, ...], depth: int | None, steps: int | None
) -> NormTable:
    opened = await root_at(root)
    most, keys = steps or _NORM_STEPS, depth or DEPTH
    found = await NormReader(opened, most=most, depth=keys, select=select).read()
    if not found.total:
        raise opened.index.no_step()
    return found


def _norms_view(found: NormTable) -> Iterator[str]:
    known = [step for step in found.steps if step not in found.unknown]
    places = [found.steps.index(step) for step in known]
    headers = tuple(map(str, known))
    if known:
        rows = [(layer.name, *(_cell(layer, at) for at in places)) for layer in found.layers]
        yield from table(("layer", *headers), rows, right=headers)
    told = [
        f"step {step}: {layer.name} has {count_text(count, 'value')} that "
        f"{'is' if count == 1 else 'are'} not finite"
        for at, step in enumerate(found.steps)
        for layer in found.layers
        if (count := layer.nonfinite[at])
    ]
    yield from map(printable, told[:_MOST_TOLD])
    if len(told) > _MOST_TOLD:
        yield f"{len(told) - _MOST_TOLD:,} more such layers and steps"
    if found.nonfinite:
        yield f"steps with values that are not finite: {shortened(found.nonfinite)}"
    if found.unknown:
        yield (
            f"steps without vital signs: {shortened(found.unknown)}; save with "
            "extensions=[ckpt.extensions.VitalSigns()] to have them"
        )
    if found.unreadable:
        yield f"steps that cannot be read: {shortened(found.unreadable)}"
    layers = count_text(len(found.layers) if known else 0, "layer")
    which = f"{len(known):,} of {count_text(found.total, 'step')}"
    yield click.style(printable(f"{found.path}: {layers}, {which}"), dim=True)


def _cell(layer: LayerNorms, at: int) -> str:
    norm = layer.norms[at]
    mark = "*" if layer.nonfinite[at] else ""
    return "-" if norm is None else f"{norm:.4g}{mark}"
