"""`merge`: load the weighted mean of checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckpt._calls.oneshot import Call
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.restore.weighted_reads import WeightedReader
from ckpt._plan.adapt import Adapt
from ckpt._plan.weighted_means import check_alike, check_weights, heaviest, with_common_arrays
from ckpt._redaction import redact
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine, place_in_job
from ckpt._steps.opened import OpenedStep
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.restores.restore_arguments import context_of, result_of, volume_text, wanted_items
from ckpt._steps.restores.restore_options import restore_options
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt.coordination._base import Coordinator

logger = logging.getLogger("ckpt")


def merge_call(
    weights: Mapping[Any, float],
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    at: str | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    handlers: HandlersLike,
    coordinator: Coordinator | None,
) -> Call[Any]:
    options = restore_options(like, items, at, adapt)
    checked = check_weights("weights", weights)
    places = [(path, *open_step_dir(path, follow=True)) for path in checked]
    process, count = place_in_job(coordinator)
    engine = make_engine(Staging(), handlers, ())
    context_for = partial(context_of, engine=engine, process=process, count=count)

    async def call() -> Any:
        began = time.perf_counter()
        contexts = await opened_sources("weights", places, context_for)
        mean = WeightedMean(contexts, list(checked.values()))
        main = mean.main
        loaded = await restore_items(main, wanted_items(main.manifest, options), mean.reader)
        logger.info(
            "merged %d checkpoints: %s; leaves that have no mean are those of %s",
            len(contexts),
            volume_text(main, began),
            redact(mean.place),
        )
        return result_of(main, options, loaded)

    return call


class WeightedMean:
    """Checkpoints whose weighted mean is read.

    Real and complex numbers are averaged. Everything else (counters, keys, texts, files) is taken
    from the main checkpoint, which has the largest weight.

    Attributes:
        place: The path or URL of the main checkpoint.
        main: The context of its reads; its manifest has the leaves of the mean.
    """

    def __init__(self, checkpoints: Mapping[str, RestoreContext], weights: Sequence[float]) -> None:
        """Take the contexts of the checkpoints by path or URL, and their weights.

        Raises:
            TargetMismatchError: The checkpoints do not have the same leaves; lists all differences.
        """
        self.place = heaviest(list(checkpoints), weights)
        check_alike({place: each.manifest.items for place, each in checkpoints.items()}, self.place)
        main = checkpoints[self.place]
        every = [replace(each, moved=main.moved) for each in checkpoints.values()]
        self._every = list(zip(weights, every, strict=True))
        items = {
            name: with_common_arrays(entry, [each.manifest.items[name] for each in every])
            for name, entry in main.manifest.items.items()
        }
        self.main = replace(main, manifest=replace(main.manifest, items=items))

    def reader(self, item: str) -> WeightedReader:
        """Return a reader of the mean of an item."""
        return WeightedReader(self.main, self._every, item)


async def opened_sources(
    argument: str,
    places: Sequence[tuple[PathLike, Storage, str]],
    context_for: Callable[[OpenedStep], RestoreContext],
) -> dict[str, RestoreContext]:
    """Return a context for each of several checkpoints, by path or URL.

    Raises:
        InvalidArgumentError: A checkpoint is given twice.
        NotACheckpointError: There is no checkpoint at a path.
    """
    found: dict[str, RestoreContext] = {}
    for path, storage, name in places:
        where = f"{storage.location}/{name}"
        if where in found:
            raise InvalidArgumentError(f"{argument}: {where} is given twice, under two names")
        found[where] = context_for(await opened_checkpoint(path, storage, name))
    return found
