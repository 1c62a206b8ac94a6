"""`ckpt trash`: deleted steps of a root, their recovery and their removal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import anyio
import click

from ckpt._inspection.removals import TrashRow, trashed_steps, undelete_step
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import Duration, age_text, printable, show, table


@click.command()
@options.root
@click.option(
    "--restore", "step", type=click.IntRange(min=0), metavar="STEP", help="Take this step back."
)
@click.option(
    "--empty",
    type=Duration(zero=True),
    metavar="DURATION",
    help="Remove the steps that were deleted so long ago, such as 7d; with 0s, all of them.",
)
@options.trash
@options.dry_run
@options.as_json
def trash(
    root: str,
    step: int | None,
    empty: float | None,
    trash: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """List the trash of a root, take a step back from it, or empty it."""
    if step is None:
        act = partial(trashed_steps, root, trash, older_than=empty, dry_run=dry_run)
        show(anyio.run(act), _view, as_json=as_json)
        return
    if empty is not None or dry_run:
        raise click.UsageError("--restore goes without --empty and --dry-run.")
    path = anyio.run(undelete_step, root, step, trash)
    text = printable(f"restored: {path}")
    show({"step": step, "path": path}, lambda _: [text], as_json=as_json)


def _view(trashed: list[TrashRow]) -> Iterator[str]:
    if not trashed:
        yield "the trash is empty"
        return
    rows = [
        (
            str(each.step),
            age_text(each.age_seconds),
            "-" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            each.path,
            ("removed" if each.removed else "would be removed") if each.goes else "",
        )
        for each in trashed
    ]
    right = ("step", "deleted", "size")
    yield from table(("step", "deleted", "size", "path", ""), rows, right=right)
