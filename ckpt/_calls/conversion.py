"""Checkpoints written anew or adopted: `convert`, `merge` and `adopt`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec.structs import replace

from ckpt._arguments import check_step, invalid, one_of, shown, whole_number
from ckpt._calls.oneshot import Call
from ckpt._commit import StepInfo
from ckpt._conversion.checkpoint_items import Target, checkpoint_items, reading_within
from ckpt._conversion.export import ExportTarget, export_path
from ckpt._conversion.whole_checkpoint import CheckpointTarget
from ckpt._engine.restore.composed import WeightedReader
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.save_plan import Formats
from ckpt._plan.weighted_means import check_alike, check_weights, heaviest, with_common_arrays
from ckpt._redaction import redact
from ckpt._settings import IfTaken, Staging
from ckpt._steps.opened import OpenedStep
from ckpt._steps.path_diagnosis import opened_checkpoint
from ckpt._steps.restore_arguments import context_of, result_of, volume_text, wanted_items
from ckpt._steps.restore_options import restore_options
from ckpt._steps.saves.adoption import adopt_step
from ckpt._steps.service import make_engine, place_in_job
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError
from ckpt.exports import Safetensors, Zarr
from ckpt.handlers._registry import HandlersLike
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_beside, open_root, open_step_dir, refuse_inside
from ckpt.storage._store import Store

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


FormatName = Literal["ckpt", "safetensors", "zarr"]

_LEAST_BUDGET_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of `convert`.

    Attributes:
        path: Path of the new checkpoint or export.
        format: Its format: `ckpt`, `safetensors` or `zarr`.
        arrays: Number of its arrays.
        nbytes: Bytes of these arrays.
        seconds: Duration of the conversion.

    Example:
        ```python
        done = await ckpt.convert("runs/a/100", "exports/final")
        print(f"{done.path}: {done.arrays} arrays, {done.nbytes} bytes in {done.seconds:.1f} s")
        ```
    """

    path: str
    format: str
    arrays: int
    nbytes: int
    seconds: float


def convert_call(
    source: PathLike | Mapping[Any, float],
    target: PathLike,
    format: FormatName | Safetensors | Zarr,
    at: str | None,
    formats: Formats | None,
    step: int | None,
    step_names: StepNames | None,
    if_exists: IfTaken,
    budget_bytes: int,
    observers: tuple[Observer, ...] = (),
) -> Call[Conversion]:
    """Return the call behind `convert`; `observers` receive the events of a save."""
    one_of("if_exists", if_exists, get_args(IfTaken))
    hint = " (16 MiB), in bytes"
    budget = whole_number("budget_bytes", budget_bytes, least=_LEAST_BUDGET_BYTES, hint=hint)
    weights = check_weights("source", source) if isinstance(source, Mapping) else {source: 1.0}
    places = [(path, *open_step_dir(path, follow=True)) for path in weights]
    made: Target = _target(target, format, at, formats, step, step_names, if_exists)
    if isinstance(made, CheckpointTarget):
        made = replace(made, observers=observers)
    into = open_root(target, create=False).location + ("" if step is None else f"/{step}")
    for _, storage, name in places:
        refuse_inside(f"{storage.location}/{name}", into)

    async def call() -> Conversion:
        began = time.perf_counter()
        # A quarter of the budget is for reading: small arrays read together, and decoded chunks.
        # Half of it is for writing, and the rest for arrays on the way from one to the other.
        share = budget // 4 // len(places)
        contexts = await opened_sources("source", places, partial(reading_within, share))
        if isinstance(source, Mapping):
            mean = WeightedMean(contexts, list(weights.values()))
            main, others = mean.main, f"; leaves that have no mean are those of {mean.place}"
            items = await checkpoint_items(main, share // 2, mean.reader)
        else:
            [main], others = contexts.values(), ""
            items = await checkpoint_items(main, share // 2)
        done = await made.write(items, main.manifest, budget // 2)
        seconds = time.perf_counter() - began
        logger.info(
            "wrote %s as %s: %s in %.2f s%s",
            redact(done.path),
            made.format,
            format_bytes(done.nbytes),
            seconds,
            redact(others),
        )
        return Conversion(done.path, made.format, done.arrays, done.nbytes, seconds)

    return call


def _target(
    target: PathLike,
    format: FormatName | Safetensors | Zarr,
    at: str | None,
    formats: Formats | None,
    step: int | None,
    step_names: StepNames | None,
    if_exists: IfTaken,
) -> Target:
    overwrite = if_exists == "replace"
    given: object = format
    if isinstance(given, str):
        one_of("format", given, get_args(FormatName))
    elif not isinstance(given, Safetensors | Zarr):
        what = "'ckpt' (which Orbax reads, too), 'safetensors', 'zarr', or one of ckpt.exports"
        raise invalid("format", format, what)
    if format != "ckpt":
        own = {"formats": formats, "step": step, "step_names": step_names}
        wrong = next((name for name, value in own.items() if value is not None), None)
        if wrong is not None:
            raise InvalidArgumentError(f"{wrong}= is for format='ckpt' only; leave it out")
        options = format
        if isinstance(options, str):
            options = Safetensors() if options == "safetensors" else Zarr()
        return ExportTarget(export_path(target), options, at, overwrite)
    if at is not None:
        raise InvalidArgumentError(
            f"at={shown(at)}: a checkpoint is written whole. To have one branch of it, load that "
            "with load(at=...), and save it"
        )
    return CheckpointTarget(*place_of(target, step, step_names), step, overwrite, formats)


def place_of(target: PathLike, step: int | None, names: StepNames | None) -> tuple[Storage, str]:
    """Return the place of a new checkpoint: at a path, or of a step in the root that is there."""
    if step is None:
        return open_step_dir(target)
    return open_root(target), (names or Standard()).name(check_step(step))


def adopt_call(
    source: PathLike,
    target: PathLike,
    step: int | None,
    step_names: StepNames | None,
    if_exists: IfTaken,
) -> Call[StepInfo]:
    one_of("if_exists", if_exists, get_args(IfTaken))
    storage, step_dir = place_of(target, step, step_names)
    found, name = open_step_dir(source, follow=True)
    # Readers have no more of the source than its path or URL.
    where = f"{found.location}/{name}"
    if isinstance(source, Store) and "://" not in where:
        raise InvalidArgumentError(
            f"{redact(where)} is in a store that was given as an object, and has no URL by which "
            "it could be read where it is. Take ckpt.convert instead"
        )
    open_beside(found, where)
    request = SaveRequest(step_dir, step, {}, False, None, None, if_exists)
    engine = make_engine(Staging(), (), ())

    async def call() -> StepInfo:
        opened = await opened_checkpoint(source, found, name)
        return await adopt_step(opened, where, storage, request, engine)

    return call
