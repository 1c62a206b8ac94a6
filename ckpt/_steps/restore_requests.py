"""The arguments of a restore, checked: which items, with which targets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt._arguments import shown
from ckpt._engine.restore.pipeline import ItemTarget
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._steps.step_metadata import ItemInfo
from ckpt.errors import InvalidArgumentError

__all__ = [
    "check_broadcast",
    "result_of",
    "wanted_items",
]


# Less would be exchanged in more rounds than anybody wants to wait for.
_LEAST_BROADCAST_BYTES = 1 << 20


def wanted_items(
    manifest: Manifest,
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
) -> dict[str, ItemTarget]:
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
        return {name: ItemTarget(each, given or Adapt()) for name, each in likes.items()}
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
    return {name: ItemTarget(each, given.get(name) or Adapt()) for name, each in likes.items()}


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
