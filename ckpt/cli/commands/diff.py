"""`ckpt diff`: differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import click
from msgspec.structs import replace

from ckpt._inspection.differences import CheckpointDifferences, compare, largest_first
from ckpt._inspection.locations import checkpoint_at
from ckpt._inspection.values.read_differences import compare_values
from ckpt._runtime.loop import call_once
from ckpt.cli import exit_status, options
from ckpt.cli.changes import NORMS, difference_lines
from ckpt.cli.output import count_text, printable, show


@click.command()
@click.argument("before", metavar="A", type=options.PATH)
@click.argument("after", metavar="B", type=options.PATH)
@click.option("--values", is_flag=True, help="Read the arrays that differ, and say how much.")
@options.as_json
def diff(before: str, after: str, values: bool, as_json: bool) -> int:
    """Compare two checkpoints, without reading arrays.

    Leaves, values, items, metrics and metadata are compared, and arrays by the digests of their
    chunks. Where two arrays are cut into other chunks, or another library has written one of them,
    digests do not tell: then the fingerprints of vital signs do, if both were saved with them, and
    with --values such arrays are read. Two steps of a run: ckpt diff runs/a/10 runs/a/20. How
    arrays lie on devices is not compared.

    Exit status: 0 if the two are known to be the same, 1 if not.
    """
    found = call_once(partial(_differences, before, after, values))
    show(found, _view, as_json=as_json)
    return exit_status.OK if found.is_same else exit_status.FOUND


async def _differences(before: str, after: str, values: bool) -> CheckpointDifferences:
    first, second = await checkpoint_at(before), await checkpoint_at(after)
    if values:
        return await compare_values(first, second)
    found, _ = compare(first, second)
    return replace(found, contents=largest_first(found.contents))


def _view(found: CheckpointDifferences) -> Iterator[str]:
    yield from difference_lines(found)
    yield click.style(_summary(found), dim=True)
    if not found.values_read and any(each.signs is not None for each in found.contents):
        yield click.style(NORMS, dim=True)


def _summary(found: CheckpointDifferences) -> str:
    changed = len(found.types) + len(found.values) + len(found.contents)
    by_fingerprint = len(found.same_by_fingerprint)
    alike = f", {by_fingerprint:,} of them by fingerprint" if by_fingerprint else ""
    numbers = (
        (len(found.removed), "removed"),
        (len(found.added), "added"),
        (changed, "changed"),
        (found.same, f"the same{alike}"),
        (len(found.not_compared), "not compared (--values reads them)"),
    )
    parts = [f"{number:,} {what}" for number, what in numbers if number]
    places = f"{printable(found.before)} and {printable(found.after)}"
    if found.is_same:
        return f"{places} are the same: {count_text(found.same, 'leaf', 'leaves')}{alike}"
    return f"{places}: {', '.join(parts) or 'no leaves'}"
