"""`ckpt du`: bytes by step, item, leaf pattern or dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

import click

from ckpt._inspection.locations import locate
from ckpt._inspection.usage import OTHER, StorageUsage, UsageKey, UsageShare, usage_of
from ckpt._runtime.loop import call_once
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import count_text, printable, show, table


@click.command()
@options.path
@click.option(
    "--by",
    type=click.Choice(get_args(UsageKey)),
    help="What to add up; by default the steps of a root, and leaf patterns of a checkpoint.",
)
@options.as_json
def du(path: str, by: UsageKey | None, as_json: bool) -> None:
    """Tell what takes the bytes, the largest first.

    That is steps, items, leaf patterns or dtypes. In a pattern, numbers are '*', so that all layers
    are one row. A file that several steps share by hard links is counted once, for the first of
    them. Counted are committed steps, and those that Orbax has not finished.
    """
    show(call_once(partial(_usage, path, by)), _view, as_json=as_json)


async def _usage(path: str, by: UsageKey | None) -> StorageUsage:
    return await usage_of(await locate(path), by)


def _view(found: StorageUsage) -> Iterator[str]:
    rows = [_cells(each, found) for each in found.shares]
    if rows:
        count = "files" if found.by in ("step", "item") else "leaves"
        headers = (found.by, "size", "share", count, "shared")
        yield from table(headers, rows, right=headers[1:])
    parts = [format_bytes(found.nbytes)]
    if found.steps != 1:
        parts.insert(0, count_text(found.steps, "step"))
    if found.shared:
        parts.append(f"{format_bytes(found.shared)} shared by steps and counted once")
    if found.linked:
        parts.append(f"{format_bytes(found.linked)} with links elsewhere")
    yield click.style(f"{printable(found.path)}: {', '.join(parts)}", dim=True)


def _cells(each: UsageShare, found: StorageUsage) -> tuple[str, str, str, str, str]:
    share = 100 * each.nbytes / found.nbytes if found.nbytes else 0.0
    hides_count = each.name == OTHER and found.by in ("pattern", "dtype")
    return (
        each.name,
        format_bytes(each.nbytes),
        f"{share:.1f}%",
        "" if hides_count else f"{each.count:,}",
        format_bytes(each.shared) if each.shared else "",
    )
