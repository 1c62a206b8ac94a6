"""`ckpt bisect`: the step at which two runs diverge."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.divergence import Divergence, find_run_divergence
from ckpt._inspection.locations import root_at
from ckpt._steps.opened import shortened
from ckpt.cli import exit_status, options
from ckpt.cli.changes import NORMS, difference_lines
from ckpt.cli.output import count_text, fields, printable, show

_MOST_REASONS = 8
_ASSUMPTION = "steps between those are assumed to be like their neighbours; see --in-order"


@click.command()
@click.argument("run_a", metavar="RUN_A", type=options.PATH)
@click.argument("run_b", metavar="RUN_B", type=options.PATH)
@click.option("--in-order", is_flag=True, help="Look at one step after the other.")
@options.as_json
def bisect(run_a: str, run_b: str, in_order: bool, as_json: bool) -> int:
    """Find the first step at which two runs differ that should be equal.

    Steps that both runs have are compared as by ckpt diff, without reading arrays; metrics and
    metadata are not compared. Of more than 32 steps a few are looked at, by halving: that assumes
    that runs that have diverged stay different. With --in-order, no step up to the first that
    differs is left out.

    Exit status: 0 if the runs are the same at the last step that both have, and every step that was
    looked at could be compared; 1 if not.
    """
    found = anyio.run(_find_divergence, run_a, run_b, in_order)
    show(found, _view, as_json=as_json)
    return exit_status.OK if found.is_same else exit_status.FOUND


async def _find_divergence(run_a: str, run_b: str, in_order: bool) -> Divergence:
    return await find_run_divergence(await root_at(run_a), await root_at(run_b), in_order=in_order)


def _view(found: Divergence) -> Iterator[str]:
    yield from fields(
        (
            ("last same step", _step(found.last_same)),
            ("first different", _step(found.first_different)),
            (f"only in {found.first}", shortened(found.only_first)),
            (f"only in {found.second}", shortened(found.only_second)),
        )
    )
    for each in found.skipped[:_MOST_REASONS]:
        yield printable(f"step {each.step} is not known: {each.reason}")
    if len(found.skipped) > _MOST_REASONS:
        yield f"{len(found.skipped) - _MOST_REASONS:,} more steps are not known"
    if found.differences is not None:
        yield ""
        yield from difference_lines(found.differences)
        if any(each.signs is not None for each in found.differences.contents):
            yield click.style(NORMS, dim=True)
    yield click.style(printable(_summary(found)), dim=True)
    if not found.in_order:
        yield click.style(_ASSUMPTION, dim=True)


def _step(step: int | None) -> str:
    return "none" if step is None else str(step)


def _summary(found: Divergence) -> str:
    if found.first_different is not None:
        told = "diverge"
    else:
        told = "are the same" if found.is_same else "are not known to differ"
    common = count_text(found.common, "step")
    return f"{found.first} and {found.second} {told}: {found.looked_at:,} of {common} looked at"
