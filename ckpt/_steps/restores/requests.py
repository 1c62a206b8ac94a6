"""From the arguments of a restore to what the engine needs: items, targets and files. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt._arguments import invalid, shown, whole_number
from ckpt._engine.engine import Engine
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import ItemTarget
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._engine.restore.step_files import OtherCopies, StepFiles
from ckpt._engine.restore.virtual_files import files_of
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._settings import ArrayMemory
from ckpt._steps.opened import OpenedStep
from ckpt._steps.step_metadata import ItemInfo
from ckpt._tree.leaf_specs import is_function
from ckpt.errors import InvalidArgumentError, ItemDroppedError
from ckpt.storage._base import Storage

# Smaller budgets would need too many rounds of exchange.
_LEAST_BROADCAST_BYTES = 1 << 20


def context_of(
    opened: OpenedStep,
    storage: Storage,
    engine: Engine,
    process: int,
    count: int,
    observers: tuple[Observer, ...] = (),
    broadcast: Broadcast | None = None,
    memory: ArrayMemory = "jax",
    *,
    checks_devices: bool = False,
    copies: OtherCopies | None = None,
) -> RestoreContext:
    """Return what a restore of the step needs.

    Args:
        opened: The step.
        storage: Where it is.
        engine: The engine.
        process: Number of this process in its job.
        count: How many processes there are.
        observers: Told of the phases beside those of the engine.
        broadcast: How processes share what they read.
        memory: Whose memory the arrays have.
        checks_devices: Whether what has arrived on devices is compared with the vital signs.
        copies: Other copies of the step, for what is damaged in this one.
    """
    return RestoreContext(
        storage,
        opened.step_dir,
        opened.manifest,
        engine,
        (*engine.observers, *observers),
        process,
        count,
        broadcast,
        memory=memory,
        checks_devices=checks_devices,
        copies=copies,
        foreign=opened.foreign or _virtual(storage, opened),
    )


def _virtual(storage: Storage, opened: OpenedStep) -> StepFiles | None:
    """Return the files of a virtual step; None for any other step, which has all of its own."""
    if not opened.manifest.sources:
        return None
    return files_of(storage, opened.step_dir, opened.manifest)


def wanted_items(
    manifest: Manifest,
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    at: str | None = None,
) -> dict[str, ItemTarget]:
    """Return the items to load, each with its target and what may differ from it.

    With `at`, it is the branch of the one item at that leaf path.

    Raises:
        InvalidArgumentError: `like` and `items` are both given, `like` does not say which of
            several items it is for, or `adapt` names an item that is not loaded.
        ItemDroppedError: A wanted item was taken out of the step.
    """
    # An ItemInfo of metadata() means no target, so that a step's metadata can be passed as `like`.
    likes = {
        name: None if isinstance(each, ItemInfo) else each
        for name, each in _likes(manifest, like, items).items()
    }
    for name, each in likes.items():
        _check_like(each, manifest, name)
    if at is not None:
        adapt = _branch(at, adapt, likes, manifest)
    given: object = adapt
    if given is None or isinstance(given, Adapt):
        return {name: ItemTarget(each, given or Adapt()) for name, each in likes.items()}
    if not isinstance(given, Mapping) or not all(isinstance(a, Adapt) for a in given.values()):
        what = "a ckpt.Adapt, or a dict of one for each item name"
        raise invalid("adapt", given, what, step=manifest.step)
    unknown = sorted(set(given) - set(likes))
    if unknown:
        raise InvalidArgumentError(
            f"adapt={{{shown(unknown[0])}: ...}}: expected names of the items to load: "
            f"{', '.join(likes)}",
            step=manifest.step,
        )
    return {name: ItemTarget(each, given.get(name) or Adapt()) for name, each in likes.items()}


def _branch(at: object, adapt: object, likes: Mapping[str, Any], manifest: Manifest) -> Adapt:
    """Return what makes the branch at a leaf path the whole tree."""
    if not isinstance(at, str) or not at or "*" in at:
        what = "the leaf path of one branch, such as 'params'"
        raise invalid("at", at, what, step=manifest.step)
    if len(likes) != 1:
        raise InvalidArgumentError(
            f"at={shown(at)}: name the one item that has this branch, as in items="
            "{'model': target}",
            step=manifest.step,
        )
    base = adapt if adapt is not None else Adapt()
    if not isinstance(base, Adapt) or base.select is not None or base.rename is not None:
        raise InvalidArgumentError(
            f"at={shown(at)} selects and renames by itself: leave out select and rename of adapt=",
            step=manifest.step,
        )
    return replace(base, select=at, rename={at: ""})


def _check_like(like: Any, manifest: Manifest, item: str) -> None:
    if is_function(like):
        raise InvalidArgumentError(
            f"like= is the function {shown(like, 60)}: pass what it returns, or "
            "jax.eval_shape(function), which allocates nothing",
            step=manifest.step,
            item=item,
        )


def _likes(
    manifest: Manifest, like: Any, items: Mapping[str, Any] | Iterable[str] | None
) -> dict[str, Any]:
    if items is not None:
        if like is not None:
            raise InvalidArgumentError(
                "pass like= for a whole checkpoint, or items={name: like}, and not both",
                step=manifest.step,
            )
        if isinstance(items, str):
            what = f"a list of item names, such as [{shown(items)}]"
            raise invalid("items", items, what, step=manifest.step)
        given: object = items
        if not isinstance(given, Iterable):
            what = "item names, or a dict of item names to targets"
            raise invalid("items", items, what, step=manifest.step)
        likes = dict(items) if isinstance(items, Mapping) else dict.fromkeys(items)
        _refuse_dropped(manifest, likes)
        return likes
    if like is None:
        return dict.fromkeys(manifest.items)
    if manifest.unnamed:
        return dict.fromkeys(manifest.items, like)
    if isinstance(like, Mapping):
        _refuse_dropped(manifest, like)
        if set(like) <= set(manifest.items):
            return dict(like)
    raise InvalidArgumentError(
        f"the step has named items ({', '.join(manifest.items)}): like= must be a dict of item "
        "names to targets",
        step=manifest.step,
    )


def _refuse_dropped(manifest: Manifest, names: Iterable[Any]) -> None:
    dropped = {each.item: each for each in manifest.dropped}
    gone = next((name for name in names if name in dropped), None)
    if gone is not None:
        raise ItemDroppedError(f"it was {dropped[gone]}", step=manifest.step, item=gone)


def what_is_missing(manifest: Manifest) -> str:
    """Return what was dropped from a step, for people; empty if nothing was."""
    return "; ".join(f"item {each.item!r} was {each}" for each in manifest.dropped)


def result_of(manifest: Manifest, loaded: Mapping[str, Any], *, named: bool) -> Any:
    """Return the result of a restore: the tree of one unnamed item, else a dict by item name."""
    if manifest.unnamed and not named:
        return loaded[next(iter(manifest.items))]
    return dict(loaded)


def check_broadcast(nbytes: object, *, own_disks: bool) -> None:
    """Check the memory budget with which processes may exchange what they read.

    Raises:
        InvalidArgumentError: It is not a number of bytes, or the processes have no disk in common.
    """
    if nbytes is None:
        return
    hint = " (1 MiB), in bytes; or None for every process to read what it needs"
    whole_number("broadcast_bytes", nbytes, least=_LEAST_BROADCAST_BYTES, hint=hint)
    if own_disks:
        raise InvalidArgumentError(
            "broadcast_bytes: with OwnDisks every process reads from its own disk, so that there "
            "is nothing to share; leave it out"
        )
