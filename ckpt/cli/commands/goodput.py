"""`ckpt goodput`: costs of saving for a run, and the best interval between saves."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click
from msgspec import Struct

from ckpt._inspection.locations import root_at
from ckpt._inspection.save_costs import (
    FACTOR,
    SaveCosts,
    SavePoint,
    Suggestion,
    save_costs,
    times_of_root,
)
from ckpt.cli import options
from ckpt.cli.output import Duration, count_text, fields, printable, seconds_text, show, table

# Each assumption is one line.
_ASSUMPTIONS = [
    "only steps that still exist are counted, and only the time that save() blocked",
    "steps that are slower while a save is written are not seen",
    f"a gap {FACTOR:g} times as long as usual is an interruption; a long evaluation looks like one",
    "lost seconds are steps computed again, and the time until the run was back",
    "failures come at random; Young (1974): sqrt(2 x cost of a save x mtbf); Daly (2006) is closer",
]


class _Report(Struct, frozen=True):
    """The JSON output of the command."""

    root: str
    costs: SaveCosts
    assumptions: list[str]


@click.command()
@click.argument("root", type=options.PATH)
@click.option("--mtbf", type=Duration(), help="Mean time between failures, such as 6h.")
@options.as_json
def goodput(root: str, mtbf: float | None, as_json: bool) -> None:
    """Estimate what saving costs, and how often to save.

    Interruptions show as gaps between the steps. It says what it assumes.
    """
    show(anyio.run(_report, root, mtbf), _view, as_json=as_json)


async def _report(root: str, mtbf: float | None) -> _Report:
    found = await times_of_root(await root_at(root))
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


def _view(report: _Report) -> Iterator[str]:
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
