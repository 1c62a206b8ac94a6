"""Make a `SaveRequest` from the arguments of a save. Pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, get_args

from ckpt._arguments import invalid, number_of_seconds, one_of, plain_json
from ckpt._engine.save.save_request import SaveRequest
from ckpt._format.metrics import copied_metrics
from ckpt._format.step_files.item_file_names import check_item_name
from ckpt._settings import IfExists, IfTaken
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError

logger = logging.getLogger("ckpt")

# Larger metadata gets a warning: a list of the steps reads the metadata of every step.
_LARGE_METADATA_BYTES = 1 << 20
# Orbax's v0 manager looks for the one item of an unnamed save under this name; see
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
    if_exists: IfExists,
    timeout: float | None = None,
) -> SaveRequest:
    """Return the request of a save.

    Raises:
        InvalidArgumentError: Neither or both of `state` and `items` are given, the name of an item
            or `if_exists` is invalid, `metrics` or `metadata` cannot be written as JSON, or
            `timeout` is not a number of seconds above 0.
    """
    # Only loops come to the same step again, so a one-shot save has fewer choices.
    one_of("if_exists", if_exists, get_args(IfTaken if step is None else IfExists))
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
    plain = plain_json("custom_metadata", metadata, step=step)
    size = 0 if plain is None else len(json.dumps(plain))
    if size > _LARGE_METADATA_BYTES:
        logger.warning(
            "step %s has %s of metadata, which every list of the steps reads: save it as an item "
            "instead",
            step,
            format_bytes(size),
        )
    return SaveRequest(
        step_dir=step_dir,
        step=step,
        items=named,
        unnamed=items is None,
        metrics=None if metrics is None else copied_metrics(metrics),
        metadata=plain,
        if_exists=if_exists,
        timeout=None if timeout is None else number_of_seconds("timeout", timeout),
    )
