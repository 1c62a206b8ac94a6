"""`ckpt pin`: protection of a step from deletion."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.kept_steps import PinChange, pin_at
from ckpt.cli import options
from ckpt.cli.output import printable, show


@click.command()
@options.path
@click.argument("name")
@options.as_json
def pin(path: str, name: str, as_json: bool) -> None:
    """Keep a step from being deleted until it is unpinned; of a root, its latest."""
    show(anyio.run(pin_at, path, name), pin_lines, as_json=as_json)


def pin_lines(change: PinChange) -> Iterator[str]:
    """Yield a line for every step that was pinned or unpinned."""
    for step in change.steps:
        done = f"pinned {step} as" if change.pinned else f"unpinned {step}, which was"
        yield printable(f"{change.root}: {done} {change.name}")
