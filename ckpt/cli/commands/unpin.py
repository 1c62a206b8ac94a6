"""`ckpt unpin`: end of the protection of a step from deletion."""

from __future__ import annotations

import anyio
import click

from ckpt._inspection.kept_steps import unpin_at
from ckpt.cli import options
from ckpt.cli.commands.pin import pin_lines
from ckpt.cli.output import show


@click.command()
@options.path
@click.argument("name")
@options.as_json
def unpin(path: str, name: str, as_json: bool) -> None:
    """Take the pin NAME away from a step; of a root, from all steps that have it."""
    show(anyio.run(unpin_at, path, name), pin_lines, as_json=as_json)
