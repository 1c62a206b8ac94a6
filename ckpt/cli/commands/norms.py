"""`ckpt norms`: the norms of layers over steps."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import click

from ckpt._inspection.locations import root_at
from ckpt._inspection.norms import DEPTH, LEAST_STEPS, LayerNorms, NormReader, NormTable
from ckpt._steps.opened import shortened
from ckpt.cli import options
from ckpt.cli.output import count_text, printable, show, table

# Number of layers with non-finite values that are named.
_MOST_TOLD = 8


@click.command()
@options.root
@click.option("--select", multiple=True, metavar="PATTERN", help="Only leaves that fit.")
@click.option(
    "--depth",
    default=DEPTH,
    show_default=True,
    type=click.IntRange(1),
    help="How many keys of leaf paths a layer has, numbers not counted.",
)
@click.option(
    "--steps",
    default=8,
    show_default=True,
    type=click.IntRange(LEAST_STEPS),
    help="How many steps, evenly chosen; and the first with values that are not finite.",
)
@options.as_json
def norms(root: str, select: tuple[str, ...], depth: int, steps: int, as_json: bool) -> None:
    """Show the norms of layers over the steps of a run, without reading arrays.

    Steps have them that were saved with extensions=[ckpt.extensions.VitalSigns()]. A * marks
    values that are not finite.
    """
    show(anyio.run(_norms, root, select, depth, steps), _view, as_json=as_json)


async def _norms(root: str, select: tuple[str, ...], depth: int, steps: int) -> NormTable:
    opened = await root_at(root)
    found = await NormReader(opened, most=steps, depth=depth, select=select).read()
    if not found.total:
        raise opened.index.no_step()
    return found


def _view(found: NormTable) -> Iterator[str]:
    known = [step for step in found.steps if step not in found.unknown]
    places = [found.steps.index(step) for step in known]
    headers = tuple(map(str, known))
    if known:
        rows = [(layer.name, *(_cell(layer, at) for at in places)) for layer in found.layers]
        yield from table(("layer", *headers), rows, right=headers)
    told = [
        f"step {step}: {layer.name} has {count_text(count, 'value')} that "
        f"{'is' if count == 1 else 'are'} not finite"
        for at, step in enumerate(found.steps)
        for layer in found.layers
        if (count := layer.nonfinite[at])
    ]
    yield from map(printable, told[:_MOST_TOLD])
    if len(told) > _MOST_TOLD:
        yield f"{len(told) - _MOST_TOLD:,} more such layers and steps"
    if found.nonfinite:
        yield f"steps with values that are not finite: {shortened(found.nonfinite)}"
    if found.unknown:
        yield f"steps without vital signs: {shortened(found.unknown)}"
    if found.unreadable:
        yield f"steps that cannot be read: {shortened(found.unreadable)}"
    layers = count_text(len(found.layers), "layer")
    which = f"{len(found.steps):,} of {count_text(found.total, 'step')}"
    yield click.style(printable(f"{found.path}: {layers}, {which}"), dim=True)


def _cell(layer: LayerNorms, at: int) -> str:
    norm = layer.norms[at]
    mark = "*" if layer.nonfinite[at] else ""
    return "-" if norm is None else f"{norm:.4g}{mark}"
