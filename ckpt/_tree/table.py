"""Tables of leaves for terminals and notebooks, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from ckpt._format.manifest import ShardingEntry

_SHOWN = 40
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class LeafRow(Struct, frozen=True):
    """One leaf.

    Attributes:
        what: Dtype and shape, or the value.
        nbytes: Logical bytes, or None if it is not an array.
        place: Sharding, as text.
    """

    path: str
    what: str
    nbytes: int | None
    place: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        size = "" if self.nbytes is None else format_bytes(self.nbytes)
        return self.path, self.what, size, self.place


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes for people to read, such as `1.5 GiB`."""
    value, unit = float(nbytes), _UNITS[0]
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    # With `g`, 1,000 of a unit would be 1e+03.
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def sharding_text(entry: ShardingEntry | None) -> str:
    if entry is None:
        return ""
    kind = "" if entry.memory_kind is None else f" in {entry.memory_kind:.40}"
    if entry.kind == "single":
        return f"{entry.text or 'one device':.60}{kind}"
    if entry.kind != "named":
        return f"{entry.text or '':.80}{kind}"
    axes = ", ".join(
        f"{name:.40}={size}" for name, size in zip(entry.axis_names, entry.axis_sizes, strict=False)
    )
    parts = ("+".join(part) if isinstance(part, list) else part for part in entry.spec)
    spec = ", ".join("-" if part is None else f"{part:.40}" for part in parts)
    return f"P({spec}) over {axes}{kind}"


def text_table(title: str, rows: Sequence[LeafRow]) -> str:
    """Return rows as aligned columns below `title`; only the first ones if there are many."""
    cells = [row.cells for row in rows[:_SHOWN]]
    widths = [max((len(row[place]) for row in cells), default=0) for place in range(4)]
    lines = [title]
    for path, what, size, place in cells:
        line = f"  {path:<{widths[0]}}  {what:<{widths[1]}}  {size:>{widths[2]}}  {place}"
        lines.append(line.rstrip())
    lines.extend(_count_rest(rows))
    return "\n".join(lines)


def html_table(title: str, rows: Sequence[LeafRow]) -> str:
    """Return rows as an HTML table that can be folded; only the first ones if there are many."""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"right" if place == 2 else "left"}">{html.escape(cell)}</td>'
            for place, cell in enumerate(row.cells)
        )
        + "</tr>"
        for row in rows[:_SHOWN]
    )
    rest = "".join(f"<p>{html.escape(line.strip())}</p>" for line in _count_rest(rows))
    head = "<tr><th>leaf</th><th>what</th><th>size</th><th>sharding</th></tr>"
    return (
        f"<details open><summary>{html.escape(title)}</summary>"
        f"<table>{head}{body}</table>{rest}</details>"
    )


def _count_rest(rows: Sequence[LeafRow]) -> Iterable[str]:
    if len(rows) > _SHOWN:
        more = sum(row.nbytes or 0 for row in rows[_SHOWN:])
        yield f"  ... and {len(rows) - _SHOWN} more leaves, {format_bytes(more)}"
