"""Pictures of a timeline: a page that needs nothing else, and a PNG through matplotlib.

A chart is turned into a few kinds of shapes once; each format only says how it draws a shape.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckpt.errors import CheckpointError
from ckpt.observers._tracing.chart import LEFT, RIGHT, Chart, chart
from ckpt.observers._tracing.files import PathLike, write_file
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

# How matplotlib draws rectangles and texts of every kind. A page has a style sheet instead.
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

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; --back: #ffffff; --strong: #1b1b1b; --muted: #5c5c5c;
  --grid: #d9d9d9; --shade: .16; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181b; --strong: #ececec; --muted: #a6a6a6; --grid: #3a3d42; --shade: .26; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 1240px; background: var(--back); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
text { fill: var(--strong); }
.title { font-size: 17px; font-weight: 600; }
.muted, .tick { fill: var(--muted); }
.grid { fill: var(--grid); }
.band { fill-opacity: var(--shade); }
.hatch { opacity: .35; }
.bar { stroke: var(--back); stroke-width: 1; }
.bar, .thin { rx: 2px; }
.in { font-size: 11px; pointer-events: none; }
.bar:hover, .thin:hover { stroke: var(--strong); stroke-width: 1.5; }
</style>
</head>
<body>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" role="img" aria-label="$title">
<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="$blocked"
 stroke-width="1.5"/></pattern></defs>
$body
</svg>
</body>
</html>
""")


class _Rect(Struct, frozen=True):
    """A rectangle. `kind` is a key of `_RECTS`."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    colour: str
    tip: str


class _Text(Struct, frozen=True):
    """A line of text with its baseline at `y`. `kind` is a key of `_TEXTS`."""

    kind: str
    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str | None = None


def draw_html(timeline: Timeline, path: PathLike) -> None:
    """Draw a timeline as one page that loads nothing else. Hover over a bar for its numbers.

    Args:
        timeline: What to draw, best a single save or restore: `trace.timeline(step)`.
        path: The file to write, usually `*.html`. It is replaced if it exists.

    Raises:
        InvalidArgumentError: The timeline has no events.
        StorageError: The file cannot be written.

    Example:
        ```python
        ckpt.observers.draw_html(trace.timeline(100), "save.html")
        ```
    """
    drawn = chart(timeline)
    page = _PAGE.substitute(
        title=escape(drawn.title),
        width=f"{drawn.width:g}",
        height=f"{drawn.height:g}",
        blocked=_BANDS["blocked"],
        body="\n".join(map(_svg, _shapes(drawn))),
    )
    write_file(path, page.encode())


def draw_png(timeline: Timeline, path: PathLike) -> None:
    """Draw a timeline as a PNG, through matplotlib: `pip install 'ckpt-jax[pictures]'`.

    Args:
        timeline: What to draw, best a single save or restore: `trace.timeline(step)`.
        path: The file to write, usually `*.png`. It is replaced if it exists.

    Raises:
        CheckpointError: matplotlib is not installed.
        InvalidArgumentError: The timeline has no events.
        StorageError: The file cannot be written.

    Example:
        ```python
        ckpt.observers.draw_png(trace.timeline(100), "save.png")
        ```
    """
    drawn = chart(timeline)
    try:
        # Without pyplot, so the windows, backend and figures of the caller are not touched.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError(
            "draw_png() needs matplotlib, which is not installed: pip install "
            "'ckpt-jax[pictures]'. draw_html() draws the same picture without it"
        ) from error
    # 100 pixels to the inch, so that a pixel is 0.72 points.
    figure = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    _paint(axes, list(_shapes(drawn)))
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_file(path, data.getvalue())


def _shapes(drawn: Chart) -> Iterator[_Rect | _Text]:
    """Yield the shapes of a chart, those behind others first."""
    yield _Text("title", 16, 30, drawn.title)
    yield _Text("muted", 16, 52, drawn.subtitle)
    x = LEFT
    for role, meaning in drawn.legend:
        yield from _band(role, x, 68, 18, 12, meaning)
        yield _Text("muted", x + 24, 78, meaning)
        x += 60 + 6.4 * len(meaning)
    for tick in drawn.ticks:
        yield _Rect("grid", tick.x - 0.5, drawn.top, 1, drawn.bottom + 5 - drawn.top, _GRID, "")
        yield _Text("tick", tick.x, drawn.bottom + 20, tick.text, "middle")
    yield _Text("tick", LEFT, drawn.bottom + 40, drawn.note)
    for band in drawn.bands:
        height = drawn.bottom - drawn.top
        yield from _band(band.role, band.x, drawn.top, band.width, height, band.tip)
    for row in drawn.rows:
        base = row.y + row.height / 2 + 4
        yield _Text("label", LEFT - 10, base, row.label, "end")
        yield _Text("muted", RIGHT + 10, base, row.sum)
        for bar in row.bars:
            fill, ink = _COLOURS.get(bar.role, _OTHER)
            kind = "thin" if bar.width < _THIN else "bar"
            yield _Rect(kind, bar.x, row.y, bar.width, row.height, fill, bar.tip)
            if bar.text:
                yield _Text("in", bar.x + bar.width / 2, base, bar.text, "middle", ink)


def _band(role: str, x: float, y: float, width: float, height: float, tip: str) -> Iterator[_Rect]:
    yield _Rect("band", x, y, width, height, _BANDS[role], tip)
    if role == "blocked":
        # Hatched too, so that it differs from the other by more than its colour.
        yield _Rect("hatch", x, y, width, height, _BANDS[role], tip)


def _svg(shape: _Rect | _Text) -> str:
    if isinstance(shape, _Text):
        style = f' style="fill:{shape.colour}"' if shape.colour else ""
        return (
            f'<text class="{shape.kind}" x="{shape.x:.2f}" y="{shape.y:.2f}" '
            f'text-anchor="{shape.anchor}"{style}>{escape(shape.text)}</text>'
        )
    fill = "url(#hatch)" if shape.kind == "hatch" else shape.colour
    return (
        f'<rect class="{shape.kind}" x="{shape.x:.2f}" y="{shape.y:.2f}" '
        f'width="{shape.width:.2f}" height="{shape.height:.2f}" fill="{fill}">'
        f"<title>{escape(shape.tip)}</title></rect>"
    )


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
        # Names of the caller's may hold a $, which would begin a formula.
        axes.text(text.x, text.y, text.text, ha=aligned, parse_math=False, **options)
