"""`ckpt rm`: deletion of steps by path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio
import click

from ckpt._inspection.removals import DeletedStep, delete_steps
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import printable, show


@click.command()
@click.argument("paths", metavar="STEP_PATH...", type=options.PATH, nargs=-1, required=True)
@options.trash
@options.for_good
@options.dry_run
@options.as_json
def rm(
    paths: tuple[str, ...], trash: str | None, for_good: bool, dry_run: bool, as_json: bool
) -> None:
    """Delete steps, each given by its path. If one of them is pinned, none is deleted."""
    delete = partial(delete_steps, paths, trash, for_good=for_good, dry_run=dry_run)
    show(anyio.run(delete), _view, as_json=as_json)


def _view(deleted: list[DeletedStep]) -> Iterator[str]:
    for each in deleted:
        done = "deleted" if each.done else "would delete"
        if each.trash is not None:
            done = f"{'moved' if each.done else 'would move'} to {each.trash}"
        size = "" if each.stored_bytes is None else f" ({format_bytes(each.stored_bytes)})"
        yield printable(f"{done}: {each.path}{size}")
