"""`ckpt ls`: the steps of a root."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.listed_steps import ListedAttempt, ListedStep, RootListing, list_root
from ckpt._inspection.locations import root_at
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.exit_status import FOUND, OK
from ckpt.cli.output import age_text, count_text, metric_text, printable, show, table


@click.command()
@click.argument("path", type=options.PATH, default=".")
@options.as_json
def ls(path: str, as_json: bool) -> int:
    """List the steps of a root: age, size, metrics and pins; and those that are being saved.

    Without a path, the root is the current directory.
    """
    listing = anyio.run(_listing, path)
    show(listing, _view, as_json=as_json)
    return FOUND if _none_readable(listing) else OK


async def _listing(path: str) -> RootListing:
    return await list_root(await root_at(path))


def _view(listing: RootListing) -> Iterator[str]:
    steps = listing.steps
    metrics = sorted({name for each in steps for name in each.metrics})
    health = ["health"] if any(map(_health, steps)) else []
    rows = [
        (
            str(each.step),
            age_text(each.age_seconds),
            "-" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            *(metric_text(each.metrics[name]) if name in each.metrics else "" for name in metrics),
            *(_health(each) for _ in health),
            _notes(each, listing.keeps),
        )
        for each in steps
    ]
    rows += [
        (
            str(each.step),
            age_text(each.age_seconds),
            "-" if each.nbytes is None else format_bytes(each.nbytes),
            *("" for _ in (*metrics, *health)),
            _attempt(each),
        )
        for each in listing.attempts
    ]
    if rows:
        headers = ("step", "age", "size", *metrics, *health, "notes")
        yield from table(headers, rows, right=("step", "age", "size", *metrics))
    known = [each.stored_bytes for each in steps if each.stored_bytes is not None]
    total = f", {format_bytes(sum(known))}" if known else ""
    what = f"{count_text(len(steps), 'step')}{total}" if steps else "no steps"
    if _none_readable(listing):
        what = f"{count_text(len(listing.unreadable), 'step')}, none readable"
    what += "" if listing.keeps is None else f"; keeps: {printable(listing.keeps)}"
    yield click.style(f"{printable(listing.root)}: {what}", dim=True)


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
    if step.writer != "ckpt":
        notes.append(f"written by {step.writer.capitalize()}")
    if not step.name.isdecimal():
        notes.append(step.name)
    return printable("; ".join(notes))
