"""`ckpt pin`: protection of a step from deletion, and its end."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.kept_steps import PinChange, pin_at, unpin_at
from ckpt.cli import options
from ckpt.cli.output import printable, show


@click.command()
@options.path
@click.argument("name", default="keep")
@click.option("--remove", is_flag=True, help="Remove the pin; of a root, from all steps with it.")
@options.as_json
def pin(path: str, name: str, remove: bool, as_json: bool) -> None:
    """Keep a step from being deleted until the pin is removed; of a root, its latest step.

    A step can have several pins. NAME tells them apart; the default is 'keep'.
    """
    show(anyio.run(unpin_at if remove else pin_at, path, name), _view, as_json=as_json)


def _view(change: PinChange) -> Iterator[str]:
    for step in change.steps:
        done = f"pinned {step} as" if change.pinned else f"unpinned {step}, which was"
        yield printable(f"{change.root}: {done} {change.name}")
