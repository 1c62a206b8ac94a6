"""Metrics of a step: numbers by name, in groups or not, as a manifest and JSON have them. Pure.

`{"train": {"loss": 0.5}}` stays as it is in the manifest, and Orbax finds it so. Everything that
compares or shows metrics sees one level, with the name `train/loss`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ckpt._arguments import shown
from ckpt.errors import InvalidArgumentError

# JSON has no NaN and no infinities.
Number = float | Literal["nan", "inf", "-inf"]
# Of bounded depth, so that a file that somebody made up cannot nest without end.
_Third = dict[str, Number]
_Second = dict[str, Number | _Third]
_First = dict[str, Number | _Second]
Metrics = dict[str, Number | _First]
_MOST_LEVELS = 4
_NOT_FINITE = ("nan", "inf", "-inf")


def flat_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics by their names, with `/` between those of groups.

    Values that are not numbers, which only files of other programs have, are left out.

    Example:
        ```python
        flat = ckpt.manifest.flat_metrics({"train": {"loss": 0.5}, "seen": "nan"})
        assert flat["train/loss"] == 0.5
        ```
    """
    found: dict[str, float] = {}
    for name, value in _leaves(metrics or {}, "", _MOST_LEVELS):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or value in _NOT_FINITE:
            with contextlib.suppress(OverflowError):
                found[name] = float(value)
    return found


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as a manifest has them; waits for jax scalars that are being computed.

    Raises:
        InvalidArgumentError: One is not a number, two have the same name, or groups are nested too
            deeply.
    """
    plain = _plain(metrics, "", _MOST_LEVELS)
    names: set[str] = set()
    for name, _ in _leaves(plain, "", _MOST_LEVELS):
        if name in names:
            raise InvalidArgumentError(
                f"metrics: two of them have the name {shown(name)}, since groups and their names "
                "are joined by '/'"
            )
        names.add(name)
    return plain


def copied_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, groups included, of metrics that are not yet checked."""
    return {
        name: copied_metrics(value) if isinstance(value, Mapping) else value
        for name, value in metrics.items()
    }


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of a manifest with numbers alone, as Python's `json` writes and reads them."""
    return {
        name: json_metrics(value) if isinstance(value, Mapping) else float(value)
        for name, value in metrics.items()
    }


def grouped_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return metrics of a manifest as they were passed, if some are in groups; else None."""
    if metrics is None or not any(isinstance(each, Mapping) for each in metrics.values()):
        return None
    return json_metrics(metrics)


def _plain(metrics: Mapping[str, Any], above: str, levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        path = f"{above}{name}"
        if str(name) in found:
            raise InvalidArgumentError(f"metrics: two of them have the name {shown(path)}")
        if isinstance(value, Mapping):
            if levels == 1:
                raise InvalidArgumentError(
                    f"metrics[{shown(path)}]: groups are nested in more than {_MOST_LEVELS} levels"
                )
            found[str(name)] = _plain(value, f"{path}/", levels - 1)
            continue
        try:
            number = float(value)
        except Exception as error:
            # Of jax, too: an array that was donated has no value any more.
            what = f"{type(value).__name__}: {error!s:.200}"
            with contextlib.suppress(Exception):
                what = shown(value)
            raise InvalidArgumentError(
                f"metrics[{shown(path)}]={what}: expected a number, or a dict of numbers"
            ) from error
        finite = number - number == 0
        found[str(name)] = number if finite else repr(number)
    return found


def _leaves(metrics: Mapping[str, Any], above: str, levels: int) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if not isinstance(value, Mapping):
            yield f"{above}{name}", value
        elif levels > 1:
            yield from _leaves(value, f"{above}{name}/", levels - 1)
