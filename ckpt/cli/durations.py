"""Durations and rates: parsing of user input, and text for people."""

from __future__ import annotations

import re

import click

from ckpt._tree.table import format_bytes

_SECONDS = {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_WRITTEN = re.compile(r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|min|m|h|d|w)?\Z")


class Duration(click.ParamType[float]):
    """A click type for durations such as `90`, `90s`, `1.5h`, converted to seconds."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        """Accept durations above 0; with `zero`, also 0."""
        self._zero = zero

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of seconds."""
        if isinstance(value, float):
            return value
        found = _WRITTEN.match(str(value).strip())
        seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else -1.0
        if seconds < 0 or (seconds == 0 and not self._zero):
            self.fail(
                f"expected a time such as 90s, 20min, 6h or 2d, not {value!r:.60}.", param, ctx
            )
        return seconds


def seconds_text(seconds: float | None) -> str:
    """Return a duration in a suitable unit; `-` for None."""
    if seconds is None:
        return "-"
    for unit, least in (("d", 2 * 86_400), ("h", 2 * 3600), ("min", 120), ("s", 1)):
        if abs(seconds) >= least:
            return f"{_digits(seconds / _SECONDS[unit])} {unit}"
    return f"{_digits(seconds * 1e3)} ms"


def _digits(value: float) -> str:
    """Return a number with three digits, never with an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def rate_text(rate: float | None) -> str:
    """Return a rate in bytes per second as text; `-` for None."""
    return "-" if rate is None else f"{format_bytes(round(rate))}/s"


_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{unit}ib": 1 << (10 * n) for n, unit in enumerate("kmgt", 1)},
    **{f"{unit}b": 1000**n for n, unit in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\Z")


class ByteSize(click.ParamType[int]):
    """A click type for numbers of bytes such as `1GiB` or `500MB`."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        found = _SIZE.match(str(value).strip())
        unit = _SIZES.get(found[2].lower()) if found else None
        if found is None or unit is None or not float(found[1]) or len(found[1]) > 20:
            self.fail(f"{value!r} is no size such as 512MiB or 1GiB.", param, ctx)
        return round(float(found[1]) * unit)
