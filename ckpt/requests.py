"""Arguments of the public calls, checked and put into one form. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.engine.restore import Wanted
from ckpt.engine.saving import SaveRequest
from ckpt.errors import InvalidArgumentError
from ckpt.layout.adapt import Adapt
from ckpt.manifest import Manifest
from ckpt.policies.checks import shown
from ckpt.stepinfo import ItemInfo
from ckpt.steps import check_item_name

__all__ = [
    "UNNAMED_ITEM",
    "check_broadcast",
    "make_request",
    "plain_json",
    "result_of",
    "wanted_items",
]

# The name Orbax's v1 API gives, and looks for, where the caller names no item.
UNNAMED_ITEM = "state"


# Less would be exchanged in more rounds than anybody wants to wait for.
_LEAST_BROADCAST_BYTES = 1 << 20


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


def plain_json(metadata: Any, step: int | None = None) -> Any:
    """Return a copy of `metadata` made of plain JSON values; tuples become lists.

    Raises:
        InvalidArgumentError: There are values that JSON has not, or a key that is no text.
    """
    try:
        copied = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"metadata={shown(metadata, 120)}: expected JSON values only ({error})", step=step
        ) from error
    # Written as JSON they would be texts, and nobody would find them again.
    within = [metadata]
    while within:
        each = within.pop()
        if isinstance(each, dict):
            for key in each:
                if not isinstance(key, str):
                    raise InvalidArgumentError(
                        f"metadata={shown(metadata, 120)}: the key {shown(key)} is no text; "
                        "expected texts as keys, as JSON has no others",
                        step=step,
                    )
            within.extend(each.values())
        elif isinstance(each, list | tuple):
            within.extend(each)
    return copied


def wanted_items(
    manifest: Manifest,
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
) -> dict[str, Wanted]:
    """Return the items to load, each with its target and what may differ from it.

    Raises:
        InvalidArgumentError: `like` and `items` are both given, or `like` does not say which of
            several items it is for, or `adapt` is for an item that is not loaded.
    """
    # What metadata() says of an item that is no tree is no target, so that all of it can be one.
    likes = {
        name: None if isinstance(each, ItemInfo) else each
        for name, each in _likes(manifest, like, items).items()
    }
    given: object = adapt
    if given is None or isinstance(given, Adapt):
        return {name: Wanted(each, given or Adapt()) for name, each in likes.items()}
    if not isinstance(given, Mapping) or not all(isinstance(a, Adapt) for a in given.values()):
        raise InvalidArgumentError(
            f"adapt={shown(given, 120)}: expected a ckpt.Adapt, or a dict of item names to them",
            step=manifest.step,
        )
    unknown = sorted(set(given) - set(likes))
    if unknown:
        raise InvalidArgumentError(
            f"adapt={{{shown(unknown[0])}: ...}}: the items loaded are {', '.join(likes)}",
            step=manifest.step,
        )
    return {name: Wanted(each, given.get(name) or Adapt()) for name, each in likes.items()}


def _likes(
    manifest: Manifest, like: Any, items: Mapping[str, Any] | Iterable[str] | None
) -> dict[str, Any]:
    if items is not None:
        if like is not None:
            raise InvalidArgumentError(
                "give like= for a whole checkpoint, or items={name: like}, and not both",
                step=manifest.step,
            )
        if isinstance(items, str):
            raise InvalidArgumentError(
                f"items={shown(items)}: expected a list of item names, such as [{shown(items)}]",
                step=manifest.step,
            )
        given: object = items
        if not isinstance(given, Iterable):
            raise InvalidArgumentError(
                f"items={shown(items)}: expected item names, or a dict of item names to targets",
                step=manifest.step,
            )
        return dict(items) if isinstance(items, Mapping) else dict.fromkeys(items)
    if like is None:
        return dict.fromkeys(manifest.items)
    if manifest.unnamed:
        return dict.fromkeys(manifest.items, like)
    if isinstance(like, Mapping) and set(like) <= set(manifest.items):
        return dict(like)
    raise InvalidArgumentError(
        f"the step has named items ({', '.join(manifest.items)}): like= must be a dict of item "
        "names to targets",
        step=manifest.step,
    )


def result_of(manifest: Manifest, loaded: Mapping[str, Any], *, named: bool) -> Any:
    """Return what a load gives back: the tree of one unnamed item, else a dict by item name."""
    if manifest.unnamed and not named:
        return loaded[next(iter(manifest.items))]
    return dict(loaded)


def check_broadcast(nbytes: object, *, own_disks: bool) -> None:
    """Check how much memory a restore may use to share what is read.

    Raises:
        InvalidArgumentError: It is no number of bytes, or there is nothing in common to read.
    """
    if nbytes is None:
        return
    if type(nbytes) is not int or nbytes < _LEAST_BROADCAST_BYTES:
        raise InvalidArgumentError(
            f"broadcast_bytes={nbytes!r:.80}: expected a whole number of bytes, at least "
            f"{_LEAST_BROADCAST_BYTES} (1 MiB), or None where every process reads what it needs"
        )
    if own_disks:
        raise InvalidArgumentError(
            "broadcast_bytes=: every process has a disk of its own here (OwnDisks), on which no "
            "other one has anything; leave it out"
        )
