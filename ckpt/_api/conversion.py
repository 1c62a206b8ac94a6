"""`convert`: a checkpoint becomes one of another format, within a budget of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from msgspec.structs import replace

from ckpt._api.faces.coroutines import awaited
from ckpt._api.oneshot import Call
from ckpt._arguments import check_step, invalid, one_of, shown, true_or_false, whole_number
from ckpt._conversion.export import ExportTarget
from ckpt._conversion.export_folder import export_path
from ckpt._conversion.stored_items import StoredItem, items_of
from ckpt._conversion.weighted_mean import merged
from ckpt._conversion.whole_checkpoint import CheckpointTarget
from ckpt._conversion.written import Target
from ckpt._events import Observer
from ckpt._plan.format_rules import Formats
from ckpt._plan.weighted_means import check_weights, heaviest
from ckpt._redaction import redact
from ckpt._runtime.loop import run_once
from ckpt._steps.opened import OpenedStep
from ckpt._steps.wrong_paths import opened_checkpoint
from ckpt._tree.table import size_text
from ckpt.errors import InvalidArgumentError
from ckpt.exports import Safetensors, Zarr
from ckpt.step_names import Standard, StepNames
from ckpt.storage._resolve import PathLike, open_root, open_step_dir, refuse_inside

logger = logging.getLogger("ckpt")

FormatName = Literal["ckpt", "safetensors", "zarr"]

_LEAST_BUDGET_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` has written.

    Attributes:
        path: Where it is.
        format: Its format: `ckpt`, `safetensors` or `zarr`.
        arrays: How many arrays it has.
        nbytes: Bytes of these arrays.
        seconds: How long it took.

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


@awaited("ckpt.convert", "ckpt.sync.convert")
async def convert(
    source: PathLike | Mapping[Any, float],
    target: PathLike,
    *,
    format: FormatName | Safetensors | Zarr = "ckpt",
    at: str | None = None,
    formats: Formats | None = None,
    step: int | None = None,
    step_names: StepNames | None = None,
    overwrite: bool = False,
    budget_bytes: int = 256 << 20,
) -> Conversion:
    """Write a checkpoint anew, in this or another format; or the weighted mean of several.

    Arrays are read and written piece by piece, so that memory stays within a budget, whatever their
    size. Whatever has digests is compared with them on the way. No class of a saved object is
    needed: a tree stays what it was. One process makes the call, also in a job of several.

    Args:
        source: A checkpoint that `load` reads: of this library, of Orbax, in safetensors and so
            on. Or several, each with its weight: the arrays of real numbers become their weighted
            mean, added up in float32 or more, and everything else is that of the checkpoint with
            the largest weight.
        target: Where to write; it does not exist yet. For exports (`safetensors`, `zarr`) a path of
            a disk.
        format: `ckpt` is a checkpoint of this library, which Orbax reads, too. `safetensors` and
            `zarr` hold arrays alone; `ckpt.exports` has their options.
        at: The branch of the tree to export; its leaf paths begin below it.
        formats: How arrays are stored, as for `save`; for `ckpt` only.
        step: With it, `target` is the root of a manager, and this the number of the step.
        step_names: How the manager names its steps, if not by the number alone.
        overwrite: Replace what is at `target`.
        budget_bytes: The most memory for arrays, in bytes. A chunk of the source that has to be
            decoded or compared as a whole may exceed it.

    Returns:
        What was written.

    Raises:
        NotACheckpointError: There is no checkpoint at `source`.
        CorruptCheckpointError: What is stored there is damaged; names the leaf.
        TargetMismatchError: The checkpoints to be merged have different leaves; lists them.
        UnsupportedLeafError: The format cannot hold some leaves; lists them.
        StepExistsError: There is something at `target`.
        InvalidArgumentError: An argument is invalid.
        StorageError: A store refused.

    Cancellation: what was written is removed before the cancellation continues.

    Example:
        ```python
        await ckpt.convert("runs/a/100", "model.safetensors", format="safetensors", at="params")
        await ckpt.convert({"runs/a/100": 0.5, "runs/a/200": 0.5}, "exports/mean")
        ```
    """
    return await run_once(
        convert_call(source, target, format, at, formats, step, step_names, overwrite, budget_bytes)
    )


def convert_call(
    source: PathLike | Mapping[Any, float],
    target: PathLike,
    format: FormatName | Safetensors | Zarr,
    at: str | None,
    formats: Formats | None,
    step: int | None,
    step_names: StepNames | None,
    overwrite: bool,
    budget_bytes: int,
    observers: tuple[Observer, ...] = (),
) -> Call[Conversion]:
    """Return the call behind `convert`; `observers` receive the events of a save."""
    true_or_false("overwrite", overwrite)
    hint = " (16 MiB), in bytes"
    budget = whole_number("budget_bytes", budget_bytes, least=_LEAST_BUDGET_BYTES, hint=hint)
    weights = check_weights("source", source) if isinstance(source, Mapping) else {source: 1.0}
    places = [(path, *open_step_dir(path, follow=True)) for path in weights]
    made: Target = _target(target, format, at, formats, step, step_names, overwrite)
    if isinstance(made, CheckpointTarget):
        made = replace(made, observers=observers)
    into = open_root(target, create=False).location + ("" if step is None else f"/{step}")
    for _, storage, name in places:
        refuse_inside(f"{storage.location}/{name}", into)

    async def call() -> Conversion:
        began = time.perf_counter()
        # A quarter of the budget is for reading: small arrays at once, and what is decoded. Half of
        # it is for writing, and what is left for arrays on the way from one to the other.
        share = budget // 4 // len(places)
        steps: dict[str, OpenedStep] = {}
        found: dict[str, dict[str, StoredItem]] = {}
        for path, storage, name in places:
            where = f"{storage.location}/{name}"
            if where in steps:
                raise InvalidArgumentError(f"source: {where} is given twice, under two names")
            steps[where] = await opened_checkpoint(path, storage, name)
            found[where] = await items_of(steps[where], steps[where].storage, share)
        main = heaviest(list(steps), list(weights.values()))
        items = (
            merged(found, list(weights.values())) if isinstance(source, Mapping) else found[main]
        )
        done = await made.write(items, steps[main].manifest, budget // 2)
        seconds = time.perf_counter() - began
        logger.info(
            "wrote %s as %s: %s in %.2f s",
            redact(done.path),
            made.format,
            size_text(done.nbytes),
            seconds,
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
    overwrite: bool,
) -> Target:
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
    if step is None:
        return CheckpointTarget(*open_step_dir(target), None, overwrite, formats)
    step_dir = (step_names or Standard()).name(check_step(step))
    return CheckpointTarget(open_root(target), step_dir, step, overwrite, formats)
