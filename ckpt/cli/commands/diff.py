"""`ckpt diff`: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import click

from ckpt._inspection.differences import ChangedText, CheckpointDifferences, ComparedArray, compare
from ckpt._inspection.places import checkpoint_at
from ckpt._inspection.values.read_differences import compare_values
from ckpt._runtime.loop import call_once
from ckpt.cli import exit_status, options
from ckpt.cli.output import printable, show
from ckpt.cli.tables import table
from ckpt.cli.text import count_text


@click.command()
@click.argument("before", metavar="A", type=options.PATH)
@click.argument("after", metavar="B", type=options.PATH)
@click.option("--values", is_flag=True, help="Read the arrays that differ, and say how much.")
@options.as_json
def diff(before: str, after: str, values: bool, as_json: bool) -> int:
    """Compare two checkpoints, without reading arrays.

    Leaves, values, items, metrics and metadata are compared, and arrays by the digests of their
    chunks. Where two arrays are cut into other chunks, or another library has written one of them,
    digests do not tell: with --values such arrays are read. Two steps of a run: ckpt diff runs/a/10
    runs/a/20. How arrays lie on devices is not compared.

    Exit status: 0 if the two are known to be the same, 1 if not.
    """
    found = call_once(partial(_differences, before, after, values))
    show(found, _view, as_json=as_json)
    return exit_status.OK if found.is_same else exit_status.FOUND


async def _differences(before: str, after: str, values: bool) -> CheckpointDifferences:
    first, second = await checkpoint_at(before), await checkpoint_at(after)
    return await compare_values(first, second) if values else compare(first, second)[0]


def _view(found: CheckpointDifferences) -> Iterator[str]:
    rows = [
        *(("removed", _path(each.item, each.path), each.type_text, "") for each in found.removed),
        *(("added", _path(each.item, each.path), "", each.type_text) for each in found.added),
        *_texts("type", found.types),
        *_texts("value", found.values),
        *_texts("item", found.items),
        *_texts("metric", found.metrics),
        *_texts("metadata", found.metadata),
    ]
    if rows:
        yield from table(("what", "name", "before", "after"), rows)
    if rows and found.contents:
        yield ""
    if found.contents:
        yield from _values(found.contents) if found.values_read else _chunks(found.contents)
    if found.not_compared and (rows or found.contents):
        yield ""
    if found.not_compared:
        yield from _chunks(found.not_compared)
    yield click.style(_summary(found), dim=True)


def _path(item: str, path: str) -> str:
    return ": ".join(filter(None, (item, path)))


def _texts(what: str, changes: Sequence[ChangedText]) -> Iterator[tuple[str, str, str, str]]:
    for each in changes:
        yield what, _path(each.item, each.name), each.before or "-", each.after or "-"


def _chunks(arrays: Sequence[ComparedArray]) -> Iterator[str]:
    rows = [
        (
            _path(each.leaf.item, each.leaf.path),
            each.leaf.type_text,
            "not compared"
            if each.chunks_changed is None
            else f"{each.chunks_changed:,} of {count_text(each.chunks, 'chunk')} "
            + ("differs" if each.chunks_changed == 1 else "differ"),
        )
        for each in arrays
    ]
    return table(("array", "type", "contents"), rows)


def _values(arrays: Sequence[ComparedArray]) -> Iterator[str]:
    rows = []
    for each in arrays:
        change = each.change
        assert change is not None
        notes = [
            f"{number:,} {what}"
            for number, what in (
                (change.nan, "NaN in one alone"),
                (change.inf, "infinite in one alone"),
                (change.bits, "equal with other bits"),
            )
            if number
        ]
        rows.append(
            (
                _path(each.leaf.item, each.leaf.path),
                each.leaf.type_text,
                _number(change.max),
                _number(change.mean),
                "" if change.ulps is None else f"{change.ulps:,}",
                f"{change.different:,} of {change.size:,}",
                ", ".join(notes),
            )
        )
    headers = ("array", "type", "max", "mean", "ulps", "differ", "notes")
    return table(headers, rows, right=("max", "mean", "ulps", "differ"))


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _summary(found: CheckpointDifferences) -> str:
    changed = len(found.types) + len(found.values) + len(found.contents)
    numbers = (
        (len(found.removed), "removed"),
        (len(found.added), "added"),
        (changed, "changed"),
        (found.same, "the same"),
        (len(found.not_compared), "not compared (--values reads them)"),
    )
    parts = [f"{number:,} {what}" for number, what in numbers if number]
    places = f"{printable(found.before)} and {printable(found.after)}"
    if found.is_same:
        return f"{places} are the same: {count_text(found.same, 'leaf', 'leaves')}"
    return f"{places}: {', '.join(parts) or 'no leaves'}"
