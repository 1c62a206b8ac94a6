"""`ckpt convert`: conversion of a checkpoint to another format."""

from __future__ import annotations

import click

from ckpt.cli import options
from ckpt.cli.conversions import written, written_view
from ckpt.cli.output import show

_FORMATS = ("ckpt", "orbax", "safetensors", "zarr")


@click.command()
@click.argument("source", type=options.PATH)
@click.argument("target", type=options.PATH)
@click.option(
    "--to",
    "format",
    type=click.Choice(_FORMATS),
    default="ckpt",
    show_default=True,
    help="The new format. What this library writes, Orbax reads, too.",
)
@click.option("--at", metavar="BRANCH", help="Export only this branch, such as 'params'.")
@click.option(
    "--step", type=click.IntRange(0), metavar="NUMBER", help="Make it that step of the root TARGET."
)
@click.option("--overwrite", is_flag=True, help="Replace what is at TARGET.")
@options.as_json
def convert(
    source: str,
    target: str,
    format: str,
    at: str | None,
    step: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint anew, in this or another format, within 256 MiB of memory.

    SOURCE is anything that can be loaded: a checkpoint of this library or of Orbax, safetensors, or
    files of numpy and Flax.
    """
    wanted = "ckpt" if format == "orbax" else format
    done = written("convert", source, target, wanted, at, step, overwrite=overwrite)
    show(done, written_view, as_json=as_json)
