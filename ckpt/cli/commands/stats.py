"""`ckpt stats`: durations and costs of saves, and the norms of layers."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click
from msgspec import Struct

from ckpt._inspection.locations import Checkpoint, locate, root_at
from ckpt._inspection.norms import DEPTH, LEAST_STEPS, LayerNorms, NormReader, NormTable
from ckpt._inspection.save_costs import (
    FACTOR,
    NAMES,
    SaveCosts,
    SavePoint,
    SaveStatisticsReport,
    StepTimes,
    Suggestion,
    save_costs,
    summaries,
    times_of,
    times_of_root,
)
from ckpt._steps.opened import shortened
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import (
    Duration,
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
# Each assumption is one line.
_ASSUMPTIONS = [
    "only steps that still exist are counted, and only the time that save() blocked",
    "steps that are slower while a save is written are not seen",
    f"a gap {FACTOR:g} times as long as usual is an interruption; a long evaluation looks like one",
    "lost seconds are steps computed again, and the time until the run was back",
    "failures come at random; Young (1974): sqrt(2 x cost of a save x mtbf); Daly (2006) is closer",
]


@click.command()
@options.path
@click.option("--last", type=click.IntRange(min=1), help="Only so many of the latest steps.")
@click.option("--goodput", is_flag=True, help="Estimate the costs of saving, and how often to.")
@click.option("--mtbf", type=Duration(), help="The same, with this mean time between failures.")
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
    goodput: bool,
    mtbf: float | None,
    norms: bool,
    select: tuple[str, ...],
    depth: int | None,
    steps: int | None,
    as_json: bool,
) -> None:
    """Show where the time of saves went.

    Of a root step by step, with medians, the worst and the trend; or of one step.

    With --goodput: what saving costs a run, and how often it should save. Interruptions show as
    gaps between the steps. It says what it assumes.

    With --norms: the norms of layers over the steps of a run, without reading arrays. Steps have
    them that were saved with extensions=[ckpt.extensions.VitalSigns()]. A * marks values that are
    not finite; the first step that has any is always shown.
    """
    goodput = goodput or mtbf is not None
    norms = norms or bool(select or depth or steps)
    if norms and (goodput or last):
        raise click.UsageError("--norms goes without --last, --goodput and --mtbf.")
    if norms:
        show(anyio.run(_norms, path, select, depth, steps), _norms_view, as_json=as_json)
    elif goodput:
        show(anyio.run(_goodput, path, last, mtbf), _goodput_view, as_json=as_json)
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


class _Report(Struct, frozen=True):
    """The JSON output with `--goodput`."""

    root: str
    costs: SaveCosts
    assumptions: list[str]


async def _goodput(root: str, last: int | None, mtbf: float | None) -> _Report:
    found = await times_of_root(await root_at(root), last)
    points = [
        SavePoint(
            each.step,
            each.created.timestamp(),
            each.committed.timestamp(),
            each.blocked,
            each.written,
        )
        for each in found.steps
        if each.step is not None and each.created is not None and each.committed is not None
    ]
    return _Report(found.path, save_costs(points, mtbf), _ASSUMPTIONS)


def _goodput_view(report: _Report) -> Iterator[str]:
    found = report.costs
    if not found.saves:
        yield click.style(f"{printable(report.root)}: no steps", dim=True)
        return
    saves = f"{count_text(found.saves, 'save')}, steps {found.first_step} to {found.last_step}"
    yield from fields(
        [
            ("root", report.root),
            ("saves", f"{saves}, in {seconds_text(found.seconds)}"),
            ("blocked", _blocked(found)),
            ("a step", _seconds_with(found.step_seconds, "the usual time, saves included")),
            ("interval", _seconds_with(found.interval_seconds, "from save to save")),
            ("interrupted", _interrupted(found)),
            ("mtbf", _mtbf(found)),
            *_advice(found.suggestion),
        ]
    )
    if found.interruptions:
        yield ""
        yield from table(
            ("after step", "before step", "gap", "lost, estimated", "steps redone, at most"),
            [
                (
                    str(each.after_step),
                    str(each.before_step),
                    seconds_text(each.seconds),
                    seconds_text(each.lost_seconds),
                    str(each.most_lost_steps),
                )
                for each in found.interruptions
            ],
        )
    yield ""
    yield click.style("What this assumes:", dim=True)
    for text in report.assumptions:
        yield click.style(f"- {text}", dim=True)


def _blocked(found: SaveCosts) -> str:
    if found.save_seconds is None:
        return "not known: the steps do not tell"
    each = f"{seconds_text(found.save_seconds)} a save (median)"
    return f"{seconds_text(found.blocked_seconds)} in all, {found.blocked_share:.2%}; {each}"


def _seconds_with(seconds: float | None, what: str) -> str:
    return "" if seconds is None else f"{seconds_text(seconds)}, {what}"


def _interrupted(found: SaveCosts) -> str:
    if not found.interruptions:
        return "never, as far as can be seen"
    times = count_text(len(found.interruptions), "time")
    return f"{times}, {seconds_text(found.lost_seconds)} lost (an estimate)"


def _mtbf(found: SaveCosts) -> str:
    if found.mtbf_seconds is None:
        return "not known; give it with --mtbf"
    how = "given" if found.mtbf_given else "seen"
    return f"{seconds_text(found.mtbf_seconds)}, {how}"


def _advice(found: Suggestion | None) -> Iterator[tuple[str, str]]:
    if found is None:
        return
    steps = "" if found.steps is None else f" ({count_text(found.steps, 'step')})"
    young = f"Young: {seconds_text(found.young_seconds)}, Daly: {seconds_text(found.daly_seconds)}"
    yield "suggestion", f"save every {seconds_text(found.seconds)}{steps}; {young}"
    now = "" if found.loss_now is None else f"{found.loss_now:.2%} now, "
    yield "expected loss", f"{now}{found.loss_then:.2%} with that interval"


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
