"""`merge`: the weighted mean of checkpoints, loaded."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ckpt._api.faces.coroutines import awaited
from ckpt._api.oneshot import Call
from ckpt._api.resumption import State
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.item_reader import EngineItemReader
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.restore.weighted_reads import WeightedItem, WeightedReader
from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt._plan.multihost.per_process import pick
from ckpt._plan.weighted_means import check_alike, check_weights, heaviest
from ckpt._redaction import redact
from ckpt._runtime.loop import run_once
from ckpt._settings import Staging
from ckpt._steps.factory import job_of, make_engine
from ckpt._steps.restores.requests import context_of, result_of, wanted_items
from ckpt._steps.wrong_paths import opened_checkpoint
from ckpt._tree.table import size_text
from ckpt.coordination._base import Coordinator
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._manifests import while_read
from ckpt.storage._resolve import open_step_dir

logger = logging.getLogger("ckpt")


@awaited("ckpt.merge", "ckpt.sync.merge")
async def merge(
    weights: Mapping[Any, float],
    like: State | None = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    at: str | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
    coordinator: Coordinator | None = None,
) -> State:
    """Load the weighted mean of several checkpoints, onto any mesh.

    The arrays of real and complex numbers are added up in float32, or in their own precision if
    that is higher, on the devices that they are for; a group of arrays at a time, so that besides
    the result there is never more than a group. Everything else (counters, keys, texts, files) is
    that of the checkpoint with the largest weight. In a job of several processes, each loads what
    its own devices need, without waiting for others.

    Args:
        weights: The checkpoints, each with its weight.
        like: The target, as for `load`.
        items: Load these items only, as for `load`.
        at: Load only the branch at this leaf path, as for `load`.
        adapt: How the checkpoints may differ from the target, as for `load`.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        coordinator: The processes of the job; None uses those of `jax.distributed`.

    Returns:
        The tree, or a dict by item name, as `load`.

    Raises:
        TargetMismatchError: The checkpoints have different leaves; lists them.
        InvalidArgumentError: A weight is not a number, or a checkpoint is given twice.
        CheckpointError: As by `load`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        mean = await ckpt.merge({"runs/a/100": 0.25, "runs/a/200": 0.75}, like=state)
        ```
    """
    return await run_once(merge_call(weights, like, items, at, adapt, handlers, coordinator))


def merge_call(
    weights: Mapping[Any, float],
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    at: str | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    handlers: HandlersLike,
    coordinator: Coordinator | None,
) -> Call[Any]:
    """Return the call behind `merge`."""
    checked = check_weights("weights", weights)
    opened = [(weight, path, *open_step_dir(path, follow=True)) for path, weight in checked.items()]
    job = job_of(coordinator)
    engine = make_engine(Staging(), handlers, ())

    async def call() -> Any:
        began = time.perf_counter()
        contexts: dict[str, tuple[float, RestoreContext]] = {}
        for weight, path, storage, name in opened:
            where = f"{storage.location}/{name}"
            if where in contexts:
                raise InvalidArgumentError(f"weights: {where} is given twice, under two names")
            step = await opened_checkpoint(path, storage, name)
            context = context_of(step, step.storage, engine, job.process_index, job.process_count)
            contexts[where] = weight, context
        main = heaviest(list(contexts), [weight for weight, _ in contexts.values()])
        manifests = {place: context.manifest for place, (_, context) in contexts.items()}
        check_alike({place: each.items for place, each in manifests.items()}, main)
        manifest = manifests[main]
        wanted = wanted_items(manifest, like, items, adapt, at)
        through = partial(_weighted, contexts, main)
        async with contextlib.AsyncExitStack() as reading:
            for _, context in contexts.values():
                read = while_read(context.storage, context.step_dir, context.manifest)
                await reading.enter_async_context(read)
            loaded = await restore_items(contexts[main][1], wanted, through)
        logger.info(
            "merged %d checkpoints: %s in %.2f s; leaves that have no mean are those of %s",
            len(contexts),
            size_text(sum(sum(context.moved) for _, context in contexts.values())),
            time.perf_counter() - began,
            redact(main),
        )
        return result_of(manifest, loaded, named=items is not None)

    return call


def _weighted(
    contexts: Mapping[str, tuple[float, RestoreContext]],
    main: str,
    plain: EngineItemReader,
    entry: ItemEntry,
) -> WeightedReader:
    """Return what reads an item of all checkpoints; `plain` reads that of the main one."""
    every = {}
    for place, (weight, context) in contexts.items():
        part = pick(context.manifest, plain.item, context.process, context.processes)
        reader = plain if place == main else EngineItemReader(context, plain.item, part)
        every[place] = WeightedItem(weight, part.entry, reader)
    return WeightedReader(every[main], list(every.values()))
