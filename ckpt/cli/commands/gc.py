"""`ckpt gc`: removal of leftovers of dead writers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio
import click

from ckpt._inspection.removals import Collection, Leftover, collect
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import Duration, age_text, count_text, printable, show, table


@click.command()
@options.root
@click.option(
    "--wait",
    type=Duration(zero=True),
    metavar="DURATION",
    default="0s",
    help="Watch the writers and readers of an object store so long, to learn which are dead.",
)
@click.option(
    "--orbax",
    is_flag=True,
    help="Also remove steps that Orbax has begun, and not written to for a day.",
)
@options.dry_run
@options.as_json
def gc(root: str, wait: float, orbax: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what crashed runs left in a root. Saves that are being made are left alone."""
    act = partial(collect, root, wait=wait, orbax=orbax, dry_run=dry_run)
    show(anyio.run(act), _view, as_json=as_json)


_KINDS = {
    "attempt": "unfinished save",
    "removal": "unfinished deletion",
    "lease": "lease of a dead process",
    "orbax": "begun by Orbax",
    "other": "of a dead writer",
}


def _view(found: Collection) -> Iterator[str]:
    rows = [
        (
            each.name,
            age_text(each.age_seconds),
            "-" if each.nbytes is None else format_bytes(each.nbytes),
            _describe_leftover(each, found),
        )
        for each in found.found
    ]
    if rows:
        yield from table(("name", "age", "size", "what"), rows, right=("name", "age", "size"))
    nbytes = format_bytes(sum(each.nbytes or 0 for each in found.found))
    done = "removed" if found.done else "would be removed"
    what = f"{nbytes} {done}" if rows else "nothing to remove"
    if found.unsure:
        what += f"; {count_text(found.unsure, 'save')} may be dead: watch with --wait 11min"
    yield printable(f"{found.root}: {what}")


def _describe_leftover(each: Leftover, found: Collection) -> str:
    what = _KINDS[each.kind] + (f" of {each.owner}" if each.owner else "")
    return what if each.removed or not found.done else f"{what}: it could not be removed"
