"""Calls for one checkpoint at one path: `save`, `load`, `metadata`, `verify` and `open_array`."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import instance_of, invalid
from ckpt._calls.branches import Source, branches_call
from ckpt._commit import Commit, CommitHooks, StepInfo
from ckpt._engine.restore.item_reader import RegionReader
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.verify.report import ReadLimits, VerifyReport
from ckpt._events import EventRecorder, Observer
from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, whole
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._plan.adapt import Adapt
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.save_plan import Formats
from ckpt._plan.slices import region_of_index
from ckpt._redaction import redact
from ckpt._runtime.loop import call_once
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory, Staging, StagingMode, Timeouts, as_staging
from ckpt._steps.opened import OpenedStep
from ckpt._steps.path_diagnosis import opened_checkpoint, verified
from ckpt._steps.restore_arguments import (
    context_of,
    result_of,
    volume_text,
    wanted_items,
    what_is_missing,
)
from ckpt._steps.restore_options import restore_options
from ckpt._steps.saves.one_shot import finished, save_one_shot
from ckpt._steps.service import make_engine, make_job, place_in_job
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import branch_of, suggestion
from ckpt.errors import InvalidArgumentError, StepDeletedError
from ckpt.handlers._registry import HandlersLike
from ckpt.storage._manifests import has_lost_items
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt._proof.contract import Contract
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions._interface import Extensions

Array = np.ndarray[Any, Any]
logger = logging.getLogger("ckpt")

T = TypeVar("T")
# A call with checked arguments; either face runs it on an engine's loop.
Call = Callable[[], Awaitable[T]]


def save_call(
    path: PathLike,
    request: SaveRequest,
    staging: Staging | StagingMode | None,
    handlers: HandlersLike,
    formats: Formats | None,
    timeouts: Timeouts | None,
    coordinator: Coordinator | None,
    extensions: Extensions,
    observers: Iterable[Observer],
) -> Call[StepInfo]:
    """Return the call behind `save`; `path` gives its `request` the step directory."""
    storage, step_dir = open_step_dir(path)
    request = replace(request, step_dir=step_dir)
    staging = as_staging(staging, "view")
    timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
    sidecars = OrbaxSidecars(one_shot=True)
    engine = make_engine(staging, handlers, observers, formats, extensions, sidecars)
    job = make_job(coordinator, timeouts, f"{storage.location}/{step_dir}", engine)

    async def call() -> StepInfo:
        # This commit is not handed out: the call itself returns or raises its outcome.
        hooks = CommitHooks(Commit(None, lambda: None))
        recorder = EventRecorder("save", None, engine.observers)
        with recorder.ending(time.perf_counter_ns()) as moved:
            manifest = await save_one_shot(engine, storage, request, job.one_shot(step_dir), hooks)
            info = finished(storage, request, manifest, hooks)
            moved.append(info.nbytes)
        return info

    return call


def load_call(
    path: PathLike | Mapping[str, PathLike | Source],
    like: Any,
    items: Mapping[str, Any] | Iterable[str] | None,
    at: str | None,
    adapt: Adapt | Mapping[str, Adapt] | None,
    handlers: HandlersLike,
    coordinator: Coordinator | None,
    memory: ArrayMemory,
    check_devices: bool,
    contract: Contract | None,
) -> Call[Any]:
    options = restore_options(like, items, at, adapt, memory, check_devices)
    if isinstance(path, Mapping):
        if contract is not None:
            raise invalid("contract", contract, "None, since several checkpoints are loaded")
        return branches_call(path, options, handlers, coordinator)
    storage, step_dir = open_step_dir(path, follow=True)
    process = place_in_job(coordinator)
    engine = make_engine(Staging(), handlers, ())

    async def call() -> Any:
        began = time.perf_counter()
        while True:
            opened = await opened_checkpoint(path, storage, step_dir)
            if contract is not None:
                contract._check(opened.manifest, opened.location)
            context = context_of(opened, engine, *process, options=options)
            try:
                loaded = await restore_items(context, wanted_items(opened.manifest, options))
                break
            except StepDeletedError:
                # Try again if items were taken out: a step has a limited number of them.
                if not await has_lost_items(opened.storage, opened.step_dir, opened.manifest):
                    raise
        where = redact(opened.location)
        missing = what_is_missing(opened.manifest) if options.are_for_everything else ""
        if missing:
            logger.warning("%s was loaded without some items: %s", where, missing)
        logger.info("loaded %s: %s", where, volume_text(context, began))
        return result_of(context, options, loaded)

    return call


def metadata_call(path: PathLike) -> Call[StepMetadata]:
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> StepMetadata:
        opened = await opened_checkpoint(path, storage, step_dir)
        return await run_in_thread(describe_step, opened.manifest, opened.location)

    return call


def verify_call(path: PathLike, limits: ReadLimits, deep: bool) -> Call[VerifyReport]:
    storage, step_dir = open_step_dir(path, follow=True)

    async def call() -> VerifyReport:
        return await verified(path, storage, step_dir, deep, limits=limits)

    return call


class FoundArray(Struct, frozen=True):
    """An array in a checkpoint.

    Attributes:
        opened: The checkpoint.
        item: The item of the array.
        number: Number of its leaf.
        entry: Its manifest entry.
        where: Checkpoint and leaf path, for messages.
    """

    opened: OpenedStep
    item: str
    number: int
    entry: LeafEntry
    where: str

    async def read(self, region: Region) -> Array:
        """Return a region of the array; reads and checks the chunks that the region touches."""
        context = context_of(self.opened, make_engine(Staging(), ()))
        [found] = await RegionReader(context, self.item, None).read([(self.number, region)])
        return found


async def find_array(path: PathLike, leaf: str) -> FoundArray:
    """Return an array of a checkpoint.

    Raises:
        InvalidArgumentError: There is no such item or leaf, or the leaf is no array.
        NotACheckpointError: There is no checkpoint at `path`.
    """
    storage, step_dir = open_step_dir(path, follow=True)
    opened = await opened_checkpoint(path, storage, step_dir)
    where, manifest = opened.location, opened.manifest
    try:
        item, name = branch_of(str(leaf), list(manifest.items), unnamed=manifest.unnamed)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error.message}") from None
    entry = manifest.items[item]
    check_leaves(entry)
    names = list(unboxed_names(entry.nodes, entry.leaves.names))
    if name not in names:
        below = [each for each in names if each.startswith(f"{name}.")]
        hint = suggestion(name, names)
        if below:
            hint = f"; it is a branch with {len(below)} of them, such as {below[0]!r:.200}"
        raise InvalidArgumentError(f"{where}: there is no leaf {leaf!r:.200}{hint}", item=item)
    number = names.index(name)
    found = entry.leaves[number]
    if found.kind not in ARRAY_KINDS or found.kind == "key":
        what = "PRNG key" if found.kind == "key" else found.kind
        raise InvalidArgumentError(
            f"{where}: the leaf {leaf!r:.200} is no array ({what}): read it with "
            f"ckpt.load(path, at={leaf!r:.200})",
            item=item,
        )
    return FoundArray(opened, item, number, found, f"{where}: {leaf}")


class ArrayBase:
    """A stored array without its reads, which differ between the two faces."""

    def __init__(self, found: FoundArray) -> None:
        self._found = found

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self._found.entry.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return parse_dtype(self._found.entry.dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of its stored chunks: the smallest parts that are read."""
        return tuple(self._found.entry.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return whole(self.shape).size * self.dtype.itemsize

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self.dtype.name}{list(self.shape)}, {self._found.where}>"

    def _call(self, index: Any) -> Callable[[], Awaitable[Array]]:
        """Return the call that reads the elements of an index."""
        region, within = region_of_index(index, self.shape)

        async def call() -> Array:
            if not region.size:
                return np.empty(region.shape, self.dtype)[within]
            return (await self._found.read(region))[within]

        return call


class PlainArrayBase(ArrayBase):
    """A stored array of the plain face, which numpy can read as a whole."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            # numpy requires a ValueError if a copy cannot be avoided.
            raise ValueError("a stored array is read from its files, which makes a copy of it")
        found = call_once(self._call(...))
        return found if dtype is None else found.astype(dtype)

    def __iter__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a stored array is not iterated over, since each element would be a read of its own: "
            "read a part of it, such as array[:100], and go through that"
        )
