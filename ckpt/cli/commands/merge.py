"""`ckpt merge`: the weighted mean of several checkpoints."""

from __future__ import annotations

import math

import click

from ckpt.cli import options
from ckpt.cli.conversions import written, written_view
from ckpt.cli.output import show


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="PATH=WEIGHT...")
@click.option("--to", "target", type=options.PATH, required=True, help="Where the mean goes.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@options.as_json
def merge(sources: tuple[str, ...], target: str, overwrite: bool, as_json: bool) -> None:
    """Write the weighted mean of checkpoints.

    Such as: ckpt merge runs/a/1=0.25 runs/a/2=0.75 --to mean. Arrays of real and complex numbers
    are added up in float32 or more. Everything else is that of the checkpoint with the largest
    weight.
    """
    weights: dict[str, float] = {}
    for each in sources:
        path, weight = _weighted(each)
        if path in weights:
            raise click.UsageError(f"{path} is given twice.")
        weights[path] = weight
    done = written("merge", weights, target, "ckpt", None, None, overwrite=overwrite)
    show(done, written_view, as_json=as_json)


def _weighted(text: str) -> tuple[str, float]:
    path, equals, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not path or not equals or not math.isfinite(number):
        raise click.UsageError(
            f"{text!r:.200}: expected a path with its weight, such as runs/a/1=0.5."
        )
    return path, number
