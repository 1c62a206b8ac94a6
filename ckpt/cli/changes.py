"""Views of the differences between checkpoints, for the commands that show them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckpt._inspection.differences import ChangedText, CheckpointDifferences, ComparedArray
from ckpt._tree.leaf_names import leaf_of_item
from ckpt.cli.output import count_text, table

# Line below a table with norms.
NORMS = "norms are of each array by itself; the norm of the difference may be larger or smaller"


def difference_lines(found: CheckpointDifferences) -> Iterator[str]:
    """Yield the tables of the differences."""
    rows = [
        *(("removed", each.name, each.type_text, "") for each in found.removed),
        *(("added", each.name, "", each.type_text) for each in found.added),
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
        contents = found.contents
        yield from (
            _values(contents) if found.values_read else _chunks(contents, "another fingerprint")
        )
    if found.not_compared and (rows or found.contents):
        yield ""
    if found.not_compared:
        yield from _chunks(found.not_compared, "not compared")


def _texts(what: str, changes: Sequence[ChangedText]) -> Iterator[tuple[str, str, str, str]]:
    for each in changes:
        yield what, leaf_of_item(each.item, each.name), each.before or "-", each.after or "-"


def _chunks(arrays: Sequence[ComparedArray], without_digests: str) -> Iterator[str]:
    rows = [
        (
            each.leaf.name,
            each.leaf.type_text,
            _contents(each, without_digests),
            *_signs(each),
        )
        for each in arrays
    ]
    return table(("array", "type", "contents", "norm", "change", "absmax", "notes"), rows)


def _contents(array: ComparedArray, without_digests: str) -> str:
    if array.chunks_changed is not None:
        verb = "differs" if array.chunks_changed == 1 else "differ"
        return f"{array.chunks_changed:,} of {count_text(array.chunks, 'chunk')} {verb}"
    return without_digests


def _signs(array: ComparedArray) -> tuple[str, str, str, str]:
    """Return the norm before and after, its change, the largest value, and notes."""
    if array.signs is None:
        return "", "", "", ""
    before, after = array.signs
    change = array.norm_change
    assert change is not None
    notes = ""
    if before.nonfinite or after.nonfinite:
        notes = f"not finite: {_before_after(before.nonfinite, after.nonfinite)}"
    return (
        _before_after(before.norm, after.norm),
        "from 0" if math.isinf(change) and not before.norm else f"{100 * change:+.3g}%",
        _before_after(before.absmax, after.absmax),
        notes,
    )


def _before_after(before: float | int, after: float | int) -> str:
    # A largest value of -0.0 is shown as 0.
    texts = _number(abs(before)), _number(abs(after))
    return texts[0] if before == after else f"{texts[0]} -> {texts[1]}"


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
                each.leaf.name,
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
