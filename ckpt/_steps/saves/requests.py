"""The arguments of a save, checked and made into a `SaveRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt._arguments import plain_json, shown
from ckpt._engine.save.request import SaveRequest
from ckpt.errors import InvalidArgumentError
from ckpt.storage._manifests import check_item_name

__all__ = ["UNNAMED_ITEM", "make_request"]

# The name Orbax's v1 API gives, and looks for, where the caller names no item.
UNNAMED_ITEM = "state"


def make_request(
    entry: str,
    step: int | None,
    state: Any,
    items: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    metadata: Any,
    *,
    overwrite: bool,
) -> SaveRequest:
    """Return the request of a save.

    Raises:
        InvalidArgumentError: Neither or both of `state` and `items` are given, an item may not be
            called so, or metrics or metadata cannot be written as JSON.
    """
    if (state is None) == (items is None):
        raise InvalidArgumentError(
            "give either one state or items={name: object}, and not both", step=step
        )
    given: object = items
    if items is not None and not (isinstance(given, Mapping) and given):
        raise InvalidArgumentError(
            f"items={shown(items, 120)}: expected a mapping of at least one name to an object",
            step=step,
        )
    named = {UNNAMED_ITEM: state} if items is None else dict(items)
    for name in named:
        check_item_name(name)
    numbers: object = metrics
    if metrics is not None and not isinstance(numbers, Mapping):
        raise InvalidArgumentError(
            f"metrics={shown(metrics, 120)}: expected a mapping of names to numbers", step=step
        )
    return SaveRequest(
        entry=entry,
        step=step,
        items=named,
        unnamed=items is None,
        metrics=None if metrics is None else dict(metrics),
        metadata=plain_json(metadata, step),
        overwrite=overwrite,
    )
