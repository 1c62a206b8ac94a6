"""`ckpt convert`: conversion of a checkpoint to another format."""

from __future__ import annotations

import click

from ckpt._redaction import redact
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.conversions import WrittenCheckpoint, written, written_view
from ckpt.cli.output import printable, show

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
@click.option(
    "--in-place",
    is_flag=True,
    help="Leave the arrays in SOURCE (safetensors, or Orbax), which must stay where it is.",
)
@click.option("--overwrite", is_flag=True, help="Replace what is at TARGET.")
@options.as_json
def convert(
    source: str,
    target: str,
    format: str,
    at: str | None,
    step: int | None,
    in_place: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint in this or another format, within 256 MiB of memory.

    SOURCE is anything that can be loaded: a checkpoint of this library or of Orbax, safetensors, or
    files of numpy and Flax. With --in-place only a manifest is written; the first 'ckpt verify'
    gives digests to the arrays.
    """
    wanted = "ckpt" if format == "orbax" else format
    if not in_place:
        done = written("convert", source, target, wanted, at, step, overwrite=overwrite)
        show(done, written_view, as_json=as_json)
        return
    if wanted != "ckpt" or at is not None:
        raise click.UsageError("--in-place leaves the arrays as they are: omit --to and --at.")
    import ckpt.sync

    info = ckpt.sync.adopt(source, target, step=step, if_exists="replace" if overwrite else "error")
    done = WrittenCheckpoint(redact(info.path), wanted, info.step, None, info.nbytes, None)
    size = format_bytes(done.nbytes)
    text = f"{printable(done.path)}: {size} of arrays stay in {printable(source)}"
    show(done, lambda _: [text], as_json=as_json)
