"""`convert`: write a checkpoint in another format, within a budget of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from msgspec.structs import replace

from ckpt._arguments import check_step, invalid, one_of, shown, whole_number
from ckpt._calls.merge import WeightedMean, opened_sources
from ckpt._calls.oneshot import Call
from ckpt._conversion.checkpoint_items import checkpoint_items, reading_within
from ckpt._conversion.export import ExportTarget
from ckpt._conversion.export_folder import export_path
from ckpt._conversion.whole_checkpoint import CheckpointTarget
from ckpt._conversion.written import Target
from ckpt._events import Observer
from ckpt._plan.format_rules import Formats
from ckpt._plan.weighted_means import check_weights
from ckpt._redaction import redact
from ckpt._settings import IfTaken
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError
from ckpt.exports import Safetensors, Zarr
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_root, open_step_dir, refuse_inside

logger = logging.getLogger("ckpt")

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
