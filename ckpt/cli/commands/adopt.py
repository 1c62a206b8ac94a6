"""`ckpt adopt`: a step made from another library's checkpoint, with the data in place."""

from __future__ import annotations

import click

from ckpt._redaction import redact
from ckpt._settings import IfTaken
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.conversions import WrittenCheckpoint
from ckpt.cli.output import printable, show


@click.command()
@click.argument("source", type=options.PATH)
@click.argument("target", type=options.PATH)
@click.option(
    "--step", type=click.IntRange(0), metavar="NUMBER", help="Make it that step of the root TARGET."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint.")
@options.as_json
def adopt(source: str, target: str, step: int | None, overwrite: bool, as_json: bool) -> None:
    """Make a checkpoint of what another library wrote, without copying its arrays.

    The files of SOURCE (safetensors, or a checkpoint of Orbax) must stay where they are. They get
    digests by the first 'ckpt verify'.
    """
    import ckpt.sync

    if_exists: IfTaken = "replace" if overwrite else "error"
    info = ckpt.sync.adopt(source, target, step=step, if_exists=if_exists)
    done = WrittenCheckpoint(redact(info.path), "ckpt", info.step, None, info.nbytes, None)
    text = (
        f"{printable(done.path)}: {format_bytes(done.nbytes)} of arrays stay in {printable(source)}"
    )
    show(done, lambda _: [text], as_json=as_json)
