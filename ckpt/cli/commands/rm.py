"""`ckpt rm`: deletion of steps, by path or by the keep policies of the library."""

from __future__ import annotations

import re
from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.kept_steps import forget_steps
from ckpt._inspection.locations import root_at
from ckpt._inspection.removals import Removal, RemovedStep, delete_steps
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import Duration, age_text, count_text, printable, show, table
from ckpt.keep._keep_policies import Any as AnyOf
from ckpt.keep._keep_policies import EverySeconds, EverySteps, KeepPolicyLike, Latest, Newer, Steps
from ckpt.keep._ranking import Best, Mode

_BEST = re.compile(r"^(.+):(min|max)(?::([1-9][0-9]{0,8}))?\Z", re.DOTALL)
_PERIODS = {"hourly": 3600, "daily": 86_400, "weekly": 604_800}


def _best(text: str) -> Best:
    found = _BEST.match(text)
    if found is None:
        what = "METRIC:min:N or METRIC:max:N, such as loss:min:3"
        raise click.BadParameter(f"{text!r}: expected {what}")
    mode: Mode = "min" if found[2] == "min" else "max"
    return Best(int(found[3] or 1), found[1], mode)


_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("paths", metavar="PATH...", type=options.PATH, nargs=-1, required=True)
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N steps.")
@click.option(
    "--keep-every", type=_COUNT, metavar="N", multiple=True, help="Keep the multiples of N."
)
@click.option(
    "--keep-best",
    type=_best,
    metavar="METRIC:min[:N]",
    multiple=True,
    help="Keep the N best steps by a metric (min or max is best), and those without it.",
)
@click.option("--keep-hourly", is_flag=True, help="Keep the first step of every hour.")
@click.option("--keep-daily", is_flag=True, help="Keep the first step of every day.")
@click.option("--keep-weekly", is_flag=True, help="Keep the first step of every week.")
@click.option(
    "--keep-within",
    type=Duration(),
    metavar="DURATION",
    help="Keep steps that are not older, such as 7d.",
)
@click.option(
    "--keep-step", type=click.IntRange(min=0), metavar="N", multiple=True, help="Keep step N."
)
@options.trash
@options.for_good
@options.dry_run
@options.as_json
def rm(
    paths: tuple[str, ...],
    keep_last: int | None,
    keep_every: tuple[int, ...],
    keep_best: tuple[Best, ...],
    keep_hourly: bool,
    keep_daily: bool,
    keep_weekly: bool,
    keep_within: float | None,
    keep_step: tuple[int, ...],
    trash: str | None,
    for_good: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete steps: those at the paths, or with --keep options the others of a root.

    If one of the given steps is pinned, none is deleted. With --keep options, the latest step,
    pinned steps and those of Orbax stay in any case; if the latest is unhealthy, the last healthy
    one, too.
    """
    members: list[KeepPolicyLike] = [Latest(keep_last)] if keep_last else []
    members += [EverySteps(each) for each in keep_every]
    members += keep_best
    chosen = {"hourly": keep_hourly, "daily": keep_daily, "weekly": keep_weekly}
    members += [EverySeconds(_PERIODS[name]) for name, wanted in chosen.items() if wanted]
    members += [Newer(keep_within)] if keep_within else []
    members += [Steps(keep_step)] if keep_step else []
    if members and len(paths) > 1:
        raise click.UsageError("--keep options are for one root of steps.")

    async def act() -> Removal:
        if not members:
            return await delete_steps(paths, trash, for_good=for_good, dry_run=dry_run)
        place = await root_at(paths[0])
        policy = AnyOf(*members)
        return await forget_steps(place, policy, trash, for_good=for_good, dry_run=dry_run)

    show(anyio.run(act), _view, as_json=as_json)


def _view(found: Removal) -> Iterator[str]:
    going = [each for each in found.steps if each.goes]
    rows = [
        (
            str(each.step),
            age_text(each.age_seconds),
            "-" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            "goes" if each.goes else "stays",
            f"none of: {each.reasons[0]}" if each.goes else "; ".join(each.reasons),
        )
        for each in found.steps
        if each.reasons
    ]
    if rows:
        yield from table(("step", "age", "size", "", "why"), rows, right=("step", "age", "size"))
    for each in () if rows else going:
        size = "" if each.stored_bytes is None else f" ({format_bytes(each.stored_bytes)})"
        yield printable(f"{_done(found, each)}: {each.path}{size}")
    if found.root is None:
        return
    what = "nothing to delete"
    if going:
        size = format_bytes(sum(each.stored_bytes or 0 for each in going))
        what = f"{count_text(len(going), 'step')} ({size}) {_done(found, going[0])}"
    yield printable(f"{found.root}: {what}")


def _done(found: Removal, step: RemovedStep) -> str:
    done = "deleted" if step.trash is None else f"moved to {step.trash}"
    return done if found.done else f"would be {done}"
