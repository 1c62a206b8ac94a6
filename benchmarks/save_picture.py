"""The picture of a timeline, a PNG through matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from benchmarks.save_chart import LEFT, RIGHT, Chart, chart
from ckpt.observers._tracing.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The colours of Okabe and Ito, which colour-blind people can tell apart, each with the colour of
# the text on it.
_LIGHT, _DARK = "#ffffff", "#1b1b1b"
_OTHER = ("#7a7a7a", _LIGHT)
_COLOURS = {
    "span": ("#009e73", _LIGHT),
    "blocked": ("#d55e00", _LIGHT),
    "snapshot": ("#f0e442", _DARK),
    "stage": ("#e69f00", _DARK),
    "encode": ("#cc79a7", _DARK),
    "digest": ("#56b4e9", _DARK),
    "write": ("#0072b2", _LIGHT),
    "merge": ("#cc79a7", _DARK),
    "record": ("#cc79a7", _DARK),
    "publish": ("#d55e00", _LIGHT),
    "fetch": ("#0072b2", _LIGHT),
    "exchange": ("#cc79a7", _DARK),
    "read": ("#0072b2", _LIGHT),
    "place": ("#e69f00", _DARK),
}
_BANDS = {"blocked": "#d55e00", "overlap": "#009e73"}
_STRONG, _MUTED, _GRID = "#1b1b1b", "#5c5c5c", "#d9d9d9"
# Narrower bars have no gap to their neighbours, since it would leave nothing of them.
_THIN = 3.0

# Options of matplotlib for every kind of rectangle and text.
_RECTS: dict[str, dict[str, Any]] = {
    "grid": {"linewidth": 0, "zorder": 0},
    "band": {"alpha": 0.16, "linewidth": 0, "zorder": 1},
    "hatch": {"alpha": 0.35, "linewidth": 0, "zorder": 1, "hatch": "////"},
    "bar": {"edgecolors": "white", "linewidth": 0.6, "zorder": 2},
    "thin": {"linewidth": 0, "zorder": 2},
}
_TEXTS: dict[str, dict[str, Any]] = {
    "title": {"fontsize": 12, "fontweight": "bold", "color": _STRONG},
    "label": {"fontsize": 8.5, "color": _STRONG},
    "muted": {"fontsize": 8.5, "color": _MUTED},
    "tick": {"fontsize": 8, "color": _MUTED},
    "in": {"fontsize": 7, "zorder": 3},
}
_ALIGNMENTS = {"start": "left", "middle": "center", "end": "right"}


class _Rect(Struct, frozen=True):
    """A rectangle. `kind` is a key of `_RECTS`."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    colour: str


class _Text(Struct, frozen=True):
    """A line of text with its baseline at `y`. `kind` is a key of `_TEXTS`."""

    kind: str
    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str | None = None


def draw_png(timeline: Timeline, path: Path) -> None:
    """Draw a timeline, best that of a single save or restore, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
        InvalidArgumentError: The timeline has no events.
    """
    # Without pyplot, so the windows, backend and figures of the caller are not touched.
    from matplotlib.figure import Figure

    drawn = chart(timeline)
    # 100 pixels to the inch, so that a pixel is 0.72 points.
    figure = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    _paint(axes, list(_shapes(drawn)))
    figure.savefig(path, format="png")


def _shapes(drawn: Chart) -> Iterator[_Rect | _Text]:
    """Yield the shapes of a chart, from the back to the front."""
    yield _Text("title", 16, 30, drawn.title)
    yield _Text("muted", 16, 52, drawn.subtitle)
    x = LEFT
    for role, meaning in drawn.legend:
        yield from _band(role, x, 68, 18, 12)
        yield _Text("muted", x + 24, 78, meaning)
        x += 60 + 6.4 * len(meaning)
    for tick in drawn.ticks:
        yield _Rect("grid", tick.x - 0.5, drawn.top, 1, drawn.bottom + 5 - drawn.top, _GRID)
        yield _Text("tick", tick.x, drawn.bottom + 20, tick.text, "middle")
    yield _Text("tick", LEFT, drawn.bottom + 40, drawn.note)
    for band in drawn.bands:
        height = drawn.bottom - drawn.top
        yield from _band(band.role, band.x, drawn.top, band.width, height)
    for row in drawn.rows:
        base = row.y + row.height / 2 + 4
        yield _Text("label", LEFT - 10, base, row.label, "end")
        yield _Text("muted", RIGHT + 10, base, row.sum)
        for bar in row.bars:
            fill, ink = _COLOURS.get(bar.role, _OTHER)
            kind = "thin" if bar.width < _THIN else "bar"
            yield _Rect(kind, bar.x, row.y, bar.width, row.height, fill)
            if bar.text:
                yield _Text("in", bar.x + bar.width / 2, base, bar.text, "middle", ink)


def _band(role: str, x: float, y: float, width: float, height: float) -> Iterator[_Rect]:
    yield _Rect("band", x, y, width, height, _BANDS[role])
    if role == "blocked":
        # Hatched too, so that it differs from the other band by more than its colour.
        yield _Rect("hatch", x, y, width, height, _BANDS[role])


def _paint(axes: Axes, shapes: list[_Rect | _Text]) -> None:
    from matplotlib.collections import PolyCollection

    for kind, options in _RECTS.items():
        # One collection for all of a kind: there may be thousands.
        rects = [each for each in shapes if isinstance(each, _Rect) and each.kind == kind]
        colours = [rect.colour for rect in rects]
        filled = {"facecolors": "none", "edgecolors": colours} if kind == "hatch" else {}
        corners = [
            [(left, top), (left, bottom), (right, bottom), (right, top)]
            for left, right, top, bottom in (
                (rect.x, rect.x + rect.width, rect.y, rect.y + rect.height) for rect in rects
            )
        ]
        axes.add_collection(
            PolyCollection(corners, **{"facecolors": colours, **options, **filled}),
            autolim=False,
        )
    for text in (each for each in shapes if isinstance(each, _Text)):
        options = _TEXTS[text.kind] | ({} if text.colour is None else {"color": text.colour})
        aligned = _ALIGNMENTS[text.anchor]
        # Names from the caller may hold a $, which would begin a formula.
        axes.text(text.x, text.y, text.text, ha=aligned, parse_math=False, **options)
