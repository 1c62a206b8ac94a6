"""`ckpt undelete`: listing of the trash, and recovery of steps from it."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.removals import TrashedEntry, trashed_steps, undelete_step
from ckpt.cli import options
from ckpt.cli.output import age_text, printable, show, table


@click.command()
@options.root
@click.argument("step", type=click.IntRange(min=0), required=False)
@options.trash
@options.as_json
def undelete(root: str, step: int | None, trash: str | None, as_json: bool) -> None:
    """Take STEP back from the trash of a root; without STEP, list what is in the trash."""
    if step is None:
        show(anyio.run(trashed_steps, root, trash), _view, as_json=as_json)
    else:
        path = anyio.run(undelete_step, root, step, trash)
        text = printable(f"undeleted: {path}")
        show({"step": step, "path": path}, lambda _: [text], as_json=as_json)


def _view(trashed: list[TrashedEntry]) -> Iterator[str]:
    if not trashed:
        yield "the trash is empty"
        return
    rows = [(str(each.step), age_text(each.age_seconds), each.path) for each in trashed]
    yield from table(("step", "deleted", "path"), rows, right=("step", "deleted"))
