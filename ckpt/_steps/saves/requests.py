"""From the arguments of a save to its `SaveRequest`. Pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from ckpt._arguments import invalid, number_of_seconds, plain_json
from ckpt._engine.save.request import SaveRequest
from ckpt._format.metrics import copied_metrics
from ckpt._format.step_files.item_file_names import check_item_name
from ckpt._tree.table import size_text
from ckpt.errors import InvalidArgumentError

logger = logging.getLogger("ckpt")

# As much is read of every step when the steps are listed.
_LARGE_METADATA_BYTES = 1 << 20
# So Orbax's v0 manager calls the one item of an unnamed save, and looks for it; see
# docs/design/010-the-unnamed-state.md.
UNNAMED_ITEM = "default"


def make_request(
    step_dir: str,
    step: int | None,
    state: Any,
    items: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
    metadata: Any,
    *,
    overwrite: bool,
    deadline: float | None = None,
) -> SaveRequest:
    """Return the request of a save.

    Raises:
        InvalidArgumentError: Neither or both of `state` and `items` are given, the name of an item
            is invalid, `metrics` or `metadata` cannot be written as JSON, or `deadline` is not a
            number of seconds above 0.
    """
    if state is None and items is None:
        raise InvalidArgumentError(
            "there is nothing to save: pass a state, or items={name: object}", step=step
        )
    if state is not None and items is not None:
        raise InvalidArgumentError(
            "pass either one state or items={name: object}, and not both", step=step
        )
    given: object = items
    if items is not None and not (isinstance(given, Mapping) and given):
        raise invalid("items", items, "a mapping of one name or more to objects", step=step)
    named = {UNNAMED_ITEM: state} if items is None else dict(items)
    for name in named:
        check_item_name(name)
    numbers: object = metrics
    if metrics is not None and not isinstance(numbers, Mapping):
        raise invalid("metrics", metrics, "a mapping of names to numbers", step=step)
    plain = plain_json("metadata", metadata, step=step)
    size = 0 if plain is None else len(json.dumps(plain))
    if size > _LARGE_METADATA_BYTES:
        logger.warning(
            "step %s has %s of metadata, which every list of the steps reads: save it as an item "
            "instead",
            step,
            size_text(size),
        )
    return SaveRequest(
        step_dir=step_dir,
        step=step,
        items=named,
        unnamed=items is None,
        metrics=None if metrics is None else copied_metrics(metrics),
        metadata=plain,
        overwrite=overwrite,
        deadline=None if deadline is None else number_of_seconds("deadline", deadline),
    )
