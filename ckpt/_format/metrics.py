"""Metrics of a step: values by name, in groups or not, as a manifest and JSON have them. Pure.

`{"train": {"loss": 0.5}}` stays as it is in the manifest, and Orbax finds it so. All code that
compares or shows metrics sees the numbers alone, in one level, with the name `train/loss`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt._arguments import shown
from ckpt.errors import InvalidArgumentError

# JSON has no NaN and no infinities, so they are texts. Other texts, and lists, are kept as they
# are. The depth is bounded, so that a forged file cannot nest without end.
_Row = list[float | str]
_Rows = list[float | str | _Row]
Value = float | str | list[float | str | _Rows]
_Third = dict[str, Value]
_Second = dict[str, Value | _Third]
_First = dict[str, Value | _Second]
Metrics = dict[str, Value | _First]
_MOST_LEVELS = 4
_MOST_LISTS = 3
_NOT_FINITE = ("nan", "inf", "-inf")


def flat_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics by name, with `/` between the names of groups.

    Values that are not numbers are left out.

    Example:
        ```python
        flat = ckpt.manifest.flat_metrics({"train": {"loss": 0.5}, "seen": "nan"})
        assert flat["train/loss"] == 0.5
        ```
    """
    leaves = _leaves(metrics or {}, "", _MOST_LEVELS)
    return {name: float(value) for name, value in leaves if _is_number(value)}


def other_metrics(metrics: Mapping[str, Any] | None) -> list[str]:
    """Return the names of metrics that cannot be kept, which only other programs write."""
    leaves = _leaves(metrics or {}, "", _MOST_LEVELS)
    return [name for name, value in leaves if not _is_kept(value)]


def _is_kept(value: Any) -> bool:
    with contextlib.suppress(InvalidArgumentError):
        _plain_value(value, "", _MOST_LISTS)
        return True
    return False


def _is_number(value: object) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A greater integer is not a float.
        return abs(value) <= sys.float_info.max or not isinstance(value, int)
    return isinstance(value, str) and value in _NOT_FINITE


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as a manifest has them; waits for jax scalars that are being computed.

    Raises:
        InvalidArgumentError: A value is neither a number nor a text nor a list of those, two
            metrics have the same name, or groups or lists are nested too deeply.
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
    """Return a copy, groups and lists included, of metrics that are not yet checked."""
    return {name: _copied(value) for name, value in metrics.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copied_metrics(value)
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of a manifest as they were passed, in the form of Python's `json`.

    Values that only other programs write, such as null, are left out.
    """
    found = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) or _is_kept(value):
            found[name] = _passed(value)
    return found


def _passed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json_metrics(value)
    if isinstance(value, list):
        return [_passed(each) for each in value]
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def grouped_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return metrics of a manifest as they were passed, unless all are numbers in one level."""
    found = json_metrics(metrics or {})
    return None if all(isinstance(each, int | float) for each in found.values()) else found


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
        else:
            found[str(name)] = _plain_value(value, path, _MOST_LISTS)
    return found


def _plain_value(value: Any, path: str, levels: int) -> Any:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple) and levels:
        return [_plain_value(each, path, levels - 1) for each in value]
    try:
        number = float(value)
    except Exception as error:
        # jax may raise anything, too: a donated array has no value.
        what = f"{type(value).__name__}: {error!s:.200}"
        with contextlib.suppress(Exception):
            what = shown(value)
        raise InvalidArgumentError(
            f"metrics[{shown(path)}]={what}: expected a number, a text, or a list or dict of them"
        ) from error
    return number if number - number == 0 else repr(number)


def _leaves(metrics: Mapping[str, Any], above: str, levels: int) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if not isinstance(value, Mapping):
            yield f"{above}{name}", value
        elif levels > 1:
            yield from _leaves(value, f"{above}{name}/", levels - 1)
