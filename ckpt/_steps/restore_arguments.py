"""Turn the options of a restore into items, targets and files for the engine, and its results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt._arguments import invalid, shown
from ckpt._engine.engine import Engine
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import ItemTarget
from ckpt._engine.restore.step_files import OtherCopies, StepFiles
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._plan.leaf_entries import unread_items
from ckpt._steps.opened import OpenedStep
from ckpt._steps.restore_options import RestoreOptions
from ckpt._steps.step_metadata import ItemInfo
from ckpt._tree.leaf_names import branch_of, split_leaf
from ckpt._tree.leaf_specs import is_function
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError, ItemDroppedError

if TYPE_CHECKING:
    from ckpt._job.shared_reads import Broadcast

_AS_SAVED = RestoreOptions()


def context_of(
    opened: OpenedStep,
    engine: Engine,
    process: int = 0,
    count: int = 1,
    observers: tuple[Observer, ...] = (),
    broadcast: Broadcast | None = None,
    options: RestoreOptions = _AS_SAVED,
    copies: OtherCopies | None = None,
) -> RestoreContext:
    """Return the context of a restore of the step.

    Args:
        opened: The step.
        engine: The engine.
        process: Number of this process in its job.
        count: Number of processes in the job.
        observers: Observers of the phases, beside those of the engine.
        broadcast: The exchange in which processes share the bytes they read.
        options: The options of the restore.
        copies: Other copies of the step, for parts that are damaged in this one.
    """
    files: StepFiles | None = opened.foreign
    if files is None and opened.manifest.sources:
        from ckpt._engine.restore.step_files import files_of

        files = files_of(opened.storage, opened.step_dir, opened.manifest)
    check = None
    if options.checks_devices:
        from ckpt.extensions import device_check

        check = device_check(engine.extension_states)
    return RestoreContext(
        opened.storage,
        opened.step_dir,
        opened.manifest,
        engine,
        (*engine.observers, *observers),
        process,
        count,
        broadcast,
        memory=options.memory,
        check=check,
        copies=copies,
        external_files=files,
    )


def wanted_items(manifest: Manifest, options: RestoreOptions) -> dict[str, ItemTarget]:
    """Return the items to load, each with its target and the allowed differences.

    With `at`, the target is the branch of the one item at that leaf path; where `items` names the
    item, the path may name it, too.

    Raises:
        InvalidArgumentError: `like` and `items` are both given, `like` does not say which of
            several items it is for, or `adapt` names an item that is not loaded.
        ItemDroppedError: A wanted item was taken out of the step.
    """
    # An ItemInfo of metadata() means no target, so that a step's metadata can be passed as `like`.
    items, like, at = options.items, options.like, options.at
    if items is None and isinstance(at, str) and at:
        item, path = branch_of(at, list(manifest.items), unnamed=manifest.unnamed)
        items, like, at = {item: like}, None, path or None
    likes = {
        name: None if isinstance(each, ItemInfo) else each
        for name, each in _likes(manifest, like, items).items()
    }
    for name, each in likes.items():
        _check_like(each, manifest, name)
    given: object = options.adapt
    if at is not None:
        if options.items is not None and isinstance(at, str):
            named, path = split_leaf(at, manifest.items)
            at = path if path and list(likes) == [named] else at
        given = _branch(at, given, likes, manifest)
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
    """Return the adaptation that makes the branch at a leaf path the whole tree."""
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
        given: object = items
        if isinstance(given, str) or not isinstance(given, Iterable):
            hint = f"such as [{shown(given)}]" if isinstance(given, str) else "or a dict to targets"
            raise invalid("items", given, f"a list of item names, {hint}", step=manifest.step)
        likes = dict(items) if isinstance(items, Mapping) else dict.fromkeys(items)
        _refuse_dropped(manifest, likes)
        return likes
    if like is None:
        unread = unread_items(manifest.items)
        return dict.fromkeys(each for each in manifest.items if each not in unread)
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
    """Return a text about the items that a restore of a whole step leaves out; empty if none."""
    texts = [f"item {each.item!r} was {each}" for each in manifest.dropped]
    unread = unread_items(manifest.items)
    texts += [f"item {name!r} is not read: {reason}" for name, reason in unread.items()]
    return "; ".join(texts)


def result_of(context: RestoreContext, options: RestoreOptions, loaded: Mapping[str, Any]) -> Any:
    """Return the result of a restore: the tree of an unnamed item or a branch, or all by name."""
    manifest = context.manifest
    if options.items is None and (manifest.unnamed or options.at is not None):
        return next(iter(loaded.values()))
    return dict(loaded)


def volume_text(context: RestoreContext, began: float) -> str:
    """Return how much was read since `began`, by `time.perf_counter`, for the log."""
    return f"{format_bytes(sum(context.moved))} in {time.perf_counter() - began:.2f} s"
