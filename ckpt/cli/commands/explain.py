"""`ckpt explain`: the dry run of a restore onto a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

import anyio
import click

from ckpt._inspection.locations import checkpoint_at
from ckpt._inspection.restores.explanation import explain_restore
from ckpt._inspection.restores.placements import Spec, TargetMesh
from ckpt._inspection.restores.read_volume import (
    LayoutAdvice,
    LeafReads,
    ProcessReads,
    RestoreExplanation,
)
from ckpt._settings import MIN_BUDGET_BYTES
from ckpt._tree.leaf_names import leaf_of_item
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import ByteSize, count_text, printable, show, table

# Limits of the rows of costly arrays, and of the sentences of advice; JSON has all of them.
_MOST_LEAVES = 10
_MOST_ADVICE = 5
# Sharing reads is advised if each byte would otherwise be read at least this number of times.
_WORTH_SHARING = 1.5
_AXIS = re.compile(r"^\s*([^=\s,+-][^=\s,+]*)\s*=\s*([1-9][0-9]{0,8})\s*\Z")


def _axes(_: click.Context, __: click.Parameter, value: str | None) -> dict[str, int] | None:
    """Return the axes of a mesh, written as `data=4,model=2`."""
    if value is None:
        return None
    found: dict[str, int] = {}
    for part in value.split(","):
        axis = _AXIS.match(part)
        if axis is None or axis[1] in found:
            raise click.BadParameter(
                f"expected axes with their sizes, such as data=4,model=2, not {value!r:.60}."
            )
        found[axis[1]] = int(axis[2])
    return found


def _specs(_: click.Context, __: click.Parameter, values: Sequence[str]) -> list[tuple[str, Spec]]:
    """Return specs by pattern, each written as `PATTERN=data,-,expert+model`."""
    found = []
    for value in values:
        pattern, equals, text = value.rpartition("=")
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        spec = tuple(() if part == "-" else tuple(part.split("+")) for part in parts)
        if not (pattern and equals) or any(not name for over in spec for name in over):
            raise click.BadParameter(
                "expected a pattern and for each dimension an axis, several ('a+b') or none ('-'), "
                f"such as 'params.**=data,-', not {value!r:.60}."
            )
        found.append((pattern, spec))
    return found


def _budget(_: click.Context, __: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < MIN_BUDGET_BYTES:
        raise click.BadParameter(f"expected at least {format_bytes(MIN_BUDGET_BYTES)}.")
    return value


@click.command()
@options.path
@click.option(
    "--mesh", callback=_axes, metavar="AXIS=SIZE,...", help="Restore onto such a mesh of devices."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1, max=1 << 16),
    help="Divide the devices among so many processes [1 with --mesh, else as saved].",
)
@click.option(
    "--shard",
    "specs",
    callback=_specs,
    multiple=True,
    metavar="PATTERN=AXIS,...",
    help="The partition spec of leaves, in place of the stored one; the first that fits counts.",
)
@click.option("--item", "items", multiple=True, metavar="NAME", help="Only this item.")
@click.option("--select", multiple=True, metavar="PATTERN", help="Only leaves that fit.")
@click.option(
    "--budget",
    type=ByteSize(),
    callback=_budget,
    help="Host memory of each process for staging [a quarter of this machine's].",
)
@options.as_json
def explain(
    path: str,
    mesh: dict[str, int] | None,
    processes: int | None,
    specs: list[tuple[str, Spec]],
    items: tuple[str, ...],
    select: tuple[str, ...],
    budget: int | None,
    as_json: bool,
) -> None:
    """Explain a restore before it is made: who would read what.

    Everything follows from the manifest: no array is read, and no device is needed. Without --mesh,
    it is a restore as saved. With it, stored partition specs are kept as far as the mesh has their
    axes. A spec names for each dimension an axis, several ('data+model') or none ('-'); dimensions
    that are left out at the end are not cut.
    """
    if specs and mesh is None:
        raise click.UsageError("--shard needs a --mesh whose axes it names.")
    target = None if mesh is None else TargetMesh(mesh, specs)
    explanation = explain_restore(
        anyio.run(checkpoint_at, path),
        target,
        processes=processes,
        items=items,
        select=select,
        budget=budget,
    )
    show(explanation, _view, as_json=as_json)


def _view(found: RestoreExplanation) -> Iterator[str]:
    yield from _summary(found)
    if not found.arrays:
        return
    headers = ("process", "devices", "arrays", "read", "requests", "of a file")
    same_cells = groupby(found.processes, key=_process_cells)
    rows = [(_numbers(same), *cells) for cells, same in same_cells]
    yield ""
    yield from table(headers, rows, right=headers[1:])
    if found.leaves:
        yield ""
        yield from _leaves(found.leaves)
    sentences = list(_advice(found))
    if sentences:
        yield ""
        yield from sentences
    yield ""
    yield click.style(
        f"planned for {format_bytes(found.budget)} of staging memory and "
        f"{found.concurrent} requests at a time",
        dim=True,
    )


def _summary(found: RestoreExplanation) -> Iterator[str]:
    devices = sum(each.devices for each in found.processes)
    where = "as saved"
    if found.mesh is not None:
        where = "onto " + ", ".join(f"{name}={size}" for name, size in found.mesh.items())
    places = (
        f"{count_text(devices, f'{found.platform} device')} in "
        f"{count_text(len(found.processes), 'process', 'processes')}"
    )
    arrays = f"{count_text(found.arrays, 'array')}, {format_bytes(found.nbytes)}"
    yield f"{printable(found.path)}, {where}: {arrays}, on {places}"
    if found.arrays:
        times = found.read / found.stored if found.stored else 0
        what = f"{format_bytes(found.read)} in {count_text(found.requests, 'request')}"
        once = f"; each byte of the files {times:.3g} times" if len(found.processes) > 1 else ""
        yield f"reads {what}{once}"
    for note in found.notes:
        yield f"note: {printable(note)}"
    for item in found.others:
        yield (
            f"note: the item {printable(item.name)} ({printable(item.handler)}) has no arrays; "
            f"its files, {format_bytes(item.nbytes)}, are not counted"
        )


def _process_cells(each: ProcessReads) -> tuple[str, ...]:
    share = None if each.most_of is None else each.most_of.share
    return (
        str(each.devices),
        format_bytes(each.held),
        format_bytes(each.read),
        f"{each.requests:,}",
        "" if share is None else f"{share:.0%}",
    )


def _numbers(processes: Iterator[ProcessReads]) -> str:
    """Return the numbers of consecutive processes that are alike."""
    numbers = [each.process for each in processes]
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _leaves(leaves: Sequence[LeafReads]) -> Iterator[str]:
    rows = [
        (
            leaf_of_item(each.item, each.path),
            format_bytes(each.needed),
            format_bytes(each.read),
            f"{each.amplification:.3g}",
            str(list(each.chunks)),
            str(list(each.region)),
        )
        for each in leaves[:_MOST_LEAVES]
    ]
    headers = ("leaf", "needed", "read", "times", "chunks", "regions")
    yield from table(headers, rows, right=headers[1:4])
    if len(leaves) > _MOST_LEAVES:
        yield click.style(f"and {len(leaves) - _MOST_LEAVES:,} more, in --json", dim=True)


def _advice(found: RestoreExplanation) -> Iterator[str]:
    for each in found.advice[:_MOST_ADVICE]:
        yield _layout_text(each)
    if len(found.advice) > _MOST_ADVICE:
        more = len(found.advice) - _MOST_ADVICE
        yield click.style(f"and {more:,} more, in --json", dim=True)
    if found.read >= _WORTH_SHARING * found.shared:
        yield (
            "advice: processes need the same; with broadcast_bytes= each of them reads a share, "
            f"{format_bytes(found.shared)} in all"
        )


def _layout_text(each: LayoutAdvice) -> str:
    axes = f"({each.split_axes[0]},)" if len(each.split_axes) == 1 else str(each.split_axes)
    return (
        f"advice: save with formats={{{each.pattern!r}: ckpt.ArrayFormat(chunk_bytes="
        f"{each.chunk_bytes}, split_axes={axes})}}, and {format_bytes(each.wasted)} less is read "
        f"of {count_text(each.arrays, 'array')}"
    )
