"""Draws a timeline: as a page that needs nothing else, or as a PNG through matplotlib."""

from __future__ import annotations

import io
from html import escape
from string import Template
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointError
from ckpt.observers._tracing.chart import (
    LEFT,
    RIGHT,
    Bar,
    Chart,
    chart,
)
from ckpt.observers._tracing.files import PathLike, write_file
from ckpt.observers._tracing.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_html", "draw_png"]

# Okabe and Ito's colours, which people who do not see all colours can tell apart; each with the
# colour of the text on it.
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
# Bars narrower than this have no gap to their neighbours, which would leave nothing of them.
_THIN = 3.0

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
.grid { stroke: var(--grid); stroke-width: 1; }
.band { fill-opacity: var(--shade); }
.bar { stroke: var(--back); stroke-width: 1; }
.thin { stroke: none; }
.in { font-size: 11px; pointer-events: none; }
.bar:hover { stroke: var(--strong); stroke-width: 1.5; }
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


def draw_html(timeline: Timeline, path: PathLike) -> None:
    """Draw a timeline as one page that loads nothing else; hover over a bar for its numbers.

    Args:
        timeline: What to draw, best a single save or restore: `trace.timeline(step)`.
        path: The file to write, usually `*.html`; replaced if it is there.

    Raises:
        InvalidArgumentError: The timeline has no events.
        StorageError: The file cannot be written.
    """
    write_file(path, _page(chart(timeline)).encode())


def draw_png(timeline: Timeline, path: PathLike) -> None:
    """Draw a timeline as a PNG, through matplotlib: `pip install ckpt-jax[pictures]`.

    Args:
        timeline: What to draw, best a single save or restore: `trace.timeline(step)`.
        path: The file to write, usually `*.png`; replaced if it is there.

    Raises:
        CheckpointError: matplotlib is not installed.
        InvalidArgumentError: The timeline has no events.
        StorageError: The file cannot be written.
    """
    drawn = chart(timeline)
    try:
        # Without pyplot, so no window, no backend and no figure of the caller's is touched.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError(
            "draw_png() needs matplotlib, which is not installed: pip install ckpt-jax[pictures]. "
            "draw_html() draws the same picture without it"
        ) from error
    # 100 pixels to the inch, so that a pixel is 0.72 points.
    figure = Figure(figsize=(drawn.width / 100, drawn.height / 100), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawn.width), ylim=(drawn.height, 0))
    axes.set_axis_off()
    _paint(axes, drawn)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_file(path, data.getvalue())


def _page(drawn: Chart) -> str:
    body = [
        _svg_text(16, 30, drawn.title, "title"),
        _svg_text(16, 52, drawn.subtitle, "muted"),
    ]
    x = LEFT
    for role, meaning in drawn.legend:
        body += [*_svg_band(x, 68, 18, 12, role, meaning), _svg_text(x + 24, 78, meaning, "muted")]
        x += 60 + 6.4 * len(meaning)
    for tick in drawn.ticks:
        body.append(
            f'<line class="grid" x1="{tick.x:.2f}" x2="{tick.x:.2f}" y1="{drawn.top:g}" '
            f'y2="{drawn.bottom + 5:g}"/>'
        )
        body.append(_svg_text(tick.x, drawn.bottom + 20, tick.text, "tick", "middle"))
    height = drawn.bottom - drawn.top
    for band in drawn.bands:
        body += _svg_band(band.x, drawn.top, band.width, height, band.role, band.tip)
    for row in drawn.rows:
        base = row.y + row.height / 2 + 4
        body.append(_svg_text(LEFT - 10, base, row.label, "", "end"))
        body.append(_svg_text(RIGHT + 10, base, row.sum, "muted"))
        for bar in row.bars:
            body.append(_svg_bar(bar, row.y, row.height))
            if bar.text:
                ink = _COLOURS.get(bar.role, _OTHER)[1]
                middle = bar.x + bar.width / 2
                body.append(_svg_text(middle, base, bar.text, "in", "middle", ink))
    return _PAGE.substitute(
        title=escape(drawn.title),
        width=f"{drawn.width:g}",
        height=f"{drawn.height:g}",
        blocked=_BANDS["blocked"],
        body="\n".join(body),
    )


def _svg_text(
    x: float, y: float, text: str, kind: str, anchor: str = "start", ink: str | None = None
) -> str:
    style = f' style="fill:{ink}"' if ink else ""
    return (
        f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{style}>'
        f"{escape(text)}</text>"
    )


def _svg_bar(bar: Bar, y: float, height: float) -> str:
    kind = "bar thin" if bar.width < _THIN else "bar"
    fill = _COLOURS.get(bar.role, _OTHER)[0]
    return (
        f'<rect class="{kind}" x="{bar.x:.2f}" y="{y:.2f}" width="{bar.width:.2f}" '
        f'height="{height:.2f}" rx="2" fill="{fill}"><title>{escape(bar.tip)}</title></rect>'
    )


def _svg_band(
    x: float, y: float, width: float, height: float, role: str, tip: str
) -> tuple[str, ...]:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    title = f"<title>{escape(tip)}</title>"
    shade = f'<rect class="band {role}" {place} fill="{_BANDS[role]}">{title}</rect>'
    if role != "blocked":
        return (shade,)
    # Hatched too: it is told from the other by more than its colour.
    return shade, f'<rect {place} fill="url(#hatch)" opacity=".35">{title}</rect>'


def _paint(axes: Axes, drawn: Chart) -> None:
    axes.text(16, 30, drawn.title, fontsize=12, fontweight="bold", color=_STRONG)
    axes.text(16, 52, drawn.subtitle, fontsize=8.5, color=_MUTED)
    x = LEFT
    for role, meaning in drawn.legend:
        _paint_band(axes, [(x, 18)], (68, 12), role)
        axes.text(x + 24, 78, meaning, fontsize=8.5, color=_MUTED)
        x += 60 + 6.4 * len(meaning)
    for tick in drawn.ticks:
        axes.plot([tick.x, tick.x], [drawn.top, drawn.bottom + 5], color=_GRID, lw=0.7, zorder=0)
        axes.text(tick.x, drawn.bottom + 20, tick.text, fontsize=8, color=_MUTED, ha="center")
    for role in _BANDS:
        places = [(band.x, band.width) for band in drawn.bands if band.role == role]
        _paint_band(axes, places, (drawn.top, drawn.bottom - drawn.top), role)
    for row in drawn.rows:
        middle = row.y + row.height / 2
        axes.text(LEFT - 10, middle, row.label, fontsize=8.5, ha="right", va="center_baseline")
        axes.text(RIGHT + 10, middle, row.sum, fontsize=8, color=_MUTED, va="center_baseline")
        for thin in (False, True):
            bars = [bar for bar in row.bars if (bar.width < _THIN) == thin]
            axes.broken_barh(
                [(bar.x, bar.width) for bar in bars],
                (row.y, row.height),
                facecolors=[_COLOURS.get(bar.role, _OTHER)[0] for bar in bars],
                edgecolors="none" if thin else "white",
                linewidth=0 if thin else 0.6,
                zorder=2,
            )
        for bar in row.bars:
            ink = _COLOURS.get(bar.role, _OTHER)[1]
            if bar.text:
                centre = bar.x + bar.width / 2
                axes.text(
                    centre,
                    middle,
                    bar.text,
                    fontsize=7,
                    color=ink,
                    ha="center",
                    va="center_baseline",
                    zorder=3,
                )


def _paint_band(
    axes: Axes, places: list[tuple[float, float]], across: tuple[float, float], role: str
) -> None:
    axes.broken_barh(places, across, facecolors=_BANDS[role], alpha=0.16, linewidth=0, zorder=1)
    if role == "blocked":
        axes.broken_barh(
            places,
            across,
            facecolors="none",
            edgecolors=_BANDS[role],
            hatch="////",
            alpha=0.35,
            linewidth=0,
            zorder=1,
        )
