"""`ckpt ls`: the steps of a root, their origin and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import get_args

import anyio
import click

from ckpt._format.manifest_head import digest
from ckpt._inspection.listed_steps import (
    Ancestor,
    ListedAttempt,
    ListedStep,
    RootListing,
    list_steps,
)
from ckpt._inspection.locations import Checkpoint, locate
from ckpt._inspection.usage import OTHER, StorageUsage, UsageKey, UsageShare
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.exit_status import FOUND, OK
from ckpt.cli.output import age_text, count_text, metric_text, printable, show, table, time_text

# Libraries that the other ones are built on.
_BELOW = ("python", "numpy", "tensorstore")


@click.command()
@click.argument("path", type=options.PATH, default=".")
@click.option("--long", "is_long", is_flag=True, help="Tell when and by what steps were written.")
@click.option("--by-size", is_flag=True, help="Tell what uses the space, the largest first.")
@click.option(
    "--by",
    type=click.Choice(get_args(UsageKey)),
    help="With --by-size: what to add up [steps of a root, leaf patterns of a checkpoint].",
)
@options.as_json
def ls(path: str, is_long: bool, by_size: bool, by: UsageKey | None, as_json: bool) -> int:
    """List the steps of a root: age, size, metrics and pins; and those that are being saved.

    Without a path, the root is the current directory. With --long, it also names the checkpoints
    that the run and its parents began from. With --by-size, a file that several steps share by hard
    links is counted once, for the first of them; numbers in leaf patterns are '*', so that all
    layers are one row.
    """
    listing = anyio.run(_listing, path, is_long, by_size, by)
    show(listing, partial(_view, is_long), as_json=as_json)
    return FOUND if _none_readable(listing) else OK


async def _listing(path: str, is_long: bool, by_size: bool, by: UsageKey | None) -> RootListing:
    place = await locate(path)
    if by is None and by_size:
        by = "pattern" if isinstance(place, Checkpoint) else "step"
    return await list_steps(place, by, origins=is_long)


def _view(is_long: bool, listing: RootListing) -> Iterator[str]:
    if listing.usage is None:
        yield from _steps(listing, is_long)
    else:
        yield from _shares(listing.usage)
    for ancestor in listing.ancestors or ():
        yield printable(_ancestor(ancestor))
    keeps = "" if listing.keeps is None else f"; keeps: {listing.keeps}"
    total = ", ".join(_total(listing))
    yield click.style(printable(f"{listing.root}: {total}{keeps}"), dim=True)


def _steps(listing: RootListing, is_long: bool) -> Iterator[str]:
    steps = listing.steps
    metrics = sorted({name for each in steps for name in each.metrics})
    health = ["health"] if any(map(_health, steps)) else []
    origin = ["committed", "written by"] if is_long else []
    rows = [
        (
            "" if each.step is None else str(each.step),
            age_text(each.age_seconds),
            "-" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            *(metric_text(each.metrics[name]) if name in each.metrics else "" for name in metrics),
            *(_health(each) for _ in health),
            *((time_text(each.committed) or "-", _writer(each)) if is_long else ()),
            _notes(each, listing.keeps),
        )
        for each in steps
    ]
    rows += [
        (
            str(each.step),
            age_text(each.age_seconds),
            "-" if each.nbytes is None else format_bytes(each.nbytes),
            *("" for _ in (*metrics, *health, *origin)),
            _attempt(each),
        )
        for each in listing.attempts
    ]
    if rows:
        headers = ("step", "age", "size", *metrics, *health, *origin, "notes")
        yield from table(headers, rows, right=("step", "age", "size", *metrics))


def _shares(found: StorageUsage) -> Iterator[str]:
    rows = [_share_cells(each, found) for each in found.shares]
    if rows:
        count = "files" if found.by in ("step", "item") else "leaves"
        headers = (found.by, "size", "share", count, "shared")
        yield from table(headers, rows, right=headers[1:])


def _share_cells(each: UsageShare, found: StorageUsage) -> tuple[str, str, str, str, str]:
    share = 100 * each.nbytes / found.nbytes if found.nbytes else 0.0
    hides_count = each.name == OTHER and found.by in ("pattern", "dtype")
    return (
        each.name,
        format_bytes(each.nbytes),
        f"{share:.1f}%",
        "" if hides_count else f"{each.count:,}",
        format_bytes(each.shared) if each.shared else "",
    )


def _total(listing: RootListing) -> Iterator[str]:
    if _none_readable(listing):
        yield f"{count_text(len(listing.unreadable), 'step')}, none readable"
    elif any(each.step is not None for each in listing.steps):
        yield count_text(len(listing.steps), "step")
    elif not listing.steps:
        yield "no steps"
    if listing.stored_bytes:
        yield format_bytes(listing.stored_bytes)
    usage = listing.usage
    if usage is not None and usage.shared:
        yield f"{format_bytes(usage.shared)} shared by steps and counted once"
    if usage is not None and usage.linked:
        yield f"{format_bytes(usage.linked)} with links elsewhere"
    if listing.ancestors is not None:
        ancestors = count_text(len(listing.ancestors), "ancestor")
        yield ancestors if listing.ancestors else "begun from scratch"


def _writer(step: ListedStep) -> str:
    shown = {name: version for name, version in step.versions.items() if name not in _BELOW}
    text = ", ".join(f"{library} {version}" for library, version in shown.items())
    return f"{text}, {step.process_count} processes" if (step.process_count or 1) > 1 else text


def _ancestor(ancestor: Ancestor) -> str:
    text = f"begun from {ancestor.path}"
    if ancestor.reason:
        return f"{text} ({ancestor.reason})"
    time = time_text(ancestor.committed)
    return f"{text}, committed {time}" if time else text


def _none_readable(listing: RootListing) -> bool:
    return bool(listing.unreadable) and not listing.steps


def _health(step: ListedStep) -> str:
    """Return notes on non-finite and unequal values of a step; empty if there are none."""
    reasons = []
    if step.nonfinite_leaves:
        reasons.append(f"{count_text(step.nonfinite_leaves, 'leaf', 'leaves')} not finite")
    if step.unequal_leaves:
        reasons.append(f"{count_text(step.unequal_leaves, 'leaf', 'leaves')} unequal")
    return ", ".join(reasons) or ("" if step.nonfinite_leaves is None else "healthy")


def _attempt(attempt: ListedAttempt) -> str:
    owner = attempt.owner or "an unknown process"
    if attempt.state == "saving":
        return f"being saved by {owner}"
    if attempt.state == "silent":
        return f"{owner} began to save it and may be dead"
    return f"left by {owner}, which is dead"


def _notes(step: ListedStep, keeps: str | None) -> str:
    notes = [f"pinned: {', '.join(step.pins)}"] if step.pins else []
    if step.goes_next:
        notes.append(f"goes with the next save: none of {keeps}")
    if step.drops_next:
        notes.append(f"loses {', '.join(step.drops_next)} with the next save")
    if step.dropped:
        notes.append(f"without {', '.join(step.dropped)}")
    if step.contract is not None:
        # The beginning of its digest tells it from that of other steps.
        notes.append(f"contract {digest(repr(step.contract).encode())[:8]}")
    if step.writer != "ckpt":
        notes.append(f"written by {step.writer.capitalize()}")
    if step.step is not None and not step.name.isdecimal():
        notes.append(step.name)
    return printable("; ".join(notes))
