"""The calls without a manager: `save`, `load`, `metadata`, `verify`, `watch` and others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from ckpt._api import waits
from ckpt._api.hints import hinted
from ckpt._api.resumption import State
from ckpt._api.stored_array import StoredArray
from ckpt._api.watch import Watch
from ckpt._arguments import true_or_false
from ckpt._calls.background import background_saves
from ckpt._calls.branches import Source
from ckpt._calls.oneshot import Call, find_array, load_call, metadata_call, save_call, verify_call
from ckpt._calls.watches import watcher_of
from ckpt._commit import Commit, StepInfo
from ckpt._engine.verify.report import VerifyReport, read_limits
from ckpt._events import Observer
from ckpt._plan.adapt import Adapt
from ckpt._plan.save_plan import Formats
from ckpt._runtime.loop import run_once
from ckpt._settings import ArrayMemory, IfTaken, Staging, StagingMode, Timeouts
from ckpt._steps.saves.save_arguments import make_request
from ckpt._steps.step_metadata import StepMetadata
from ckpt._steps.watcher import Until
from ckpt.exports import Safetensors, Zarr
from ckpt.handlers._registry import HandlersLike
from ckpt.step_names import StepNames
from ckpt.storage._resolve import PathLike

if TYPE_CHECKING:
    from ckpt._calls.conversion import Conversion, FormatName
    from ckpt._proof.contract import Contract
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions._interface import Extensions


@overload
async def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    if_exists: IfTaken = "error",
    handlers: HandlersLike = (),
    staging: Staging | StagingMode | None = None,
    formats: Formats | None = None,
    extensions: Extensions = (),
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    durable: Literal[True] = True,
    timeout: float | None = None,
) -> StepInfo: ...


@overload
async def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    if_exists: IfTaken = "error",
    handlers: HandlersLike = (),
    staging: Staging | StagingMode | None = None,
    formats: Formats | None = None,
    extensions: Extensions = (),
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    durable: Literal[False],
    timeout: float | None = None,
) -> Commit: ...


@overload
async def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    if_exists: IfTaken = "error",
    handlers: HandlersLike = (),
    staging: Staging | StagingMode | None = None,
    formats: Formats | None = None,
    extensions: Extensions = (),
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    durable: bool,
    timeout: float | None = None,
) -> StepInfo | Commit: ...


@hinted
async def save(
    path: PathLike,
    state: Any = None,
    *,
    items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    custom_metadata: Any = None,
    if_exists: IfTaken = "error",
    handlers: HandlersLike = (),
    staging: Staging | StagingMode | None = None,
    formats: Formats | None = None,
    extensions: Extensions = (),
    timeouts: Timeouts | None = None,
    coordinator: Coordinator | None = None,
    observers: Iterable[Observer] = (),
    durable: bool = True,
    timeout: float | None = None,
) -> StepInfo | Commit:
    """Save one checkpoint at `path`; durable on return, or written in the background.

    With `durable=False` it returns when `CheckpointManager.save` would: you may then donate, delete
    or change everything you passed. All such saves of a process share one thread and its staging
    memory, and are written one after the other. In a job of several processes, all of them make the
    call.

    Args:
        path: A directory that does not exist yet, or is empty; or a URL, or a store of
            `ckpt.storage`.
        state: One PyTree of jax arrays, numpy arrays and Python scalars; None with `items`.
        items: Several objects by name, instead of `state`.
        metrics: Numbers by name to keep with the checkpoint, or dicts of them, texts or lists.
        custom_metadata: JSON values to keep with the checkpoint.
        if_exists: `"error"` raises if there is a checkpoint at `path`. `"replace"` replaces it: the
            old one (on a disk, also one of Orbax) stays until the new one is published.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        staging: A `Staging`, or the name of its mode. By default only numpy arrays are copied,
            since jax arrays cannot be donated before the call returns. Not with `durable=False`.
        formats: How arrays are stored: `{pattern of leaf paths: ArrayFormat}`, a dtype for all
            arrays of its kind, or a function.
        extensions: What is noted beside the arrays, such as a contract; see `CheckpointManager`.
        timeouts: Time limits, in seconds.
        coordinator: The processes of the job; None uses those of `jax.distributed`.
        observers: Called with an `Event` for every timed phase, on the library's thread.
        durable: Return only when the checkpoint is durable. With False, return a `Commit`: await it
            for durability and for errors. A program that ends waits for the save; an error that was
            not fetched is then written to standard error, and the exit status is 120.
        timeout: Seconds after this call at which the save is given up; see
            `CheckpointManager.save`.

    Returns:
        The `StepInfo` of the checkpoint; with `durable=False`, the commit.

    Raises:
        CheckpointError: As for `CheckpointManager.save` and its commit.

    Cancellation: the save is stopped and removed before the cancellation continues.

    Example:
        ```python
        info = await ckpt.save("exports/final", state, metrics={"loss": 0.5})
        commit = await ckpt.save("exports/next", state, durable=False)
        info = await commit
        ```
    """
    true_or_false("durable", durable)
    request = make_request(
        "", None, state, items, metrics, custom_metadata, if_exists=if_exists, timeout=timeout
    )
    options = handlers, formats, timeouts, coordinator, extensions, observers
    if durable:
        return await run_once(save_call(path, request, staging, *options))
    # plain: background_saves().loop.check_caller()
    commit, job, staged = background_saves().start(path, request, staging, *options)
    await waits.snapshot_taken(job, staged)
    return commit


@hinted
async def load(
    path: PathLike | Mapping[str, PathLike | Source],
    like: State | None = None,
    *,
    items: Mapping[str, Any] | Iterable[str] | None = None,
    at: str | None = None,
    adapt: Adapt | Mapping[str, Adapt] | None = None,
    handlers: HandlersLike = (),
    coordinator: Coordinator | None = None,
    memory: ArrayMemory = "jax",
    check_devices: bool = False,
    contract: Contract | None = None,
) -> State:
    """Load a one-shot checkpoint, or a step from a manager's root (`runs/a/100`).

    The branches of a target can come from several checkpoints: `{"params": "runs/a/100",
    "opt_state": "runs/b/50"}` loads each from the branch of that name. Use `ckpt.Source` for a
    branch of another name, or for a whole checkpoint.

    In a job of several processes, each loads what its own devices need, without waiting for others.

    Args:
        path: Directory, URL or store of the checkpoint; also one that Orbax wrote; a model in
            safetensors (a file, or a directory); and files `*.npz`, `*.npy` and `*.msgpack` of
            numpy and Flax. Or a mapping of leaf paths of branches to checkpoints; other leaves of
            `like` are an error then, unless `adapt` keeps them.
        like: The target: a tree whose leaves have the dtypes and shardings to return, such as a
            state. None restores everything as it was saved.
        items: Load these items only: their names, or a mapping of names to targets.
        at: Load only the branch at this leaf path, as if it were the whole tree.
        adapt: Allowed differences between the checkpoint and the target. By default they must
            agree. With several checkpoints, one for all, or a mapping with one for each branch; its
            leaf paths begin below the branch.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        coordinator: The processes of the job; None uses those of `jax.distributed`.
        memory: Kind of memory of the arrays on CPU devices; see `CheckpointManager.restore`.
        check_devices: Compare the arrays on the devices with the vital signs of the
            checkpoint. Arrays that cannot be compared are named in a warning. By default, the bytes
            read are compared with their digests.
        contract: The contract that the checkpoint has to have, as `ckpt.extensions.Contract` says;
            with one checkpoint only.

    Returns:
        The tree of a checkpoint that was saved without item names, else a dict by item name.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.
        ContractMismatchError: The checkpoint is of another contract.
        CheckpointError: As for `CheckpointManager.restore`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        params = await ckpt.load("runs/a/100", like=params, at="params")
        both = await ckpt.load({"params": "runs/a/100", "opt_state": "runs/b/50"})
        ```
    """
    how = handlers, coordinator, memory, check_devices, contract
    call: Call[State] = load_call(path, like, items, at, adapt, *how)
    return await run_once(call)


async def metadata(path: PathLike) -> StepMetadata:
    """Return the structure, shapes, dtypes and shardings of a checkpoint. Reads no array bytes.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.

    Example:
        ```python
        found = await ckpt.metadata("runs/a/100")
        print(found.tree["params"]["w"].shape)
        ```
    """
    return await run_once(metadata_call(path))


async def verify(
    path: PathLike,
    *,
    deep: bool = True,
    sample: float | None = None,
    seed: int | None = None,
    timeout: float | None = None,
) -> VerifyReport:
    """Compare a one-shot checkpoint, or a step from a manager's root, with its manifest.

    Args:
        path: The directory, URL or store of the checkpoint.
        deep: Read everything. With False, only compare names, kinds and sizes of files.
        sample: Read only this share of the files and of their bytes, chosen at random, above 0
            and up to 1. The report lists what was left out.
        seed: Makes that choice repeatable.
        timeout: Seconds after this call at which no more files are begun. Files are read in random
            order then.

    Returns:
        The report, true if nothing is wrong. Damage is reported, never raised.

    Raises:
        NotACheckpointError: There is no committed checkpoint at `path`.
        StepDeletedError: The checkpoint was deleted or replaced meanwhile.
        UnsupportedFormatError: The checkpoint was written in a later format.
        InvalidArgumentError: `sample` or `timeout` is invalid, or given with `deep=False`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        report = await ckpt.verify("runs/a/100")
        assert report.ok, report
        ```
    """
    return await run_once(verify_call(path, read_limits(deep, sample, seed, timeout), deep))


def watch(
    root: PathLike,
    *,
    timeout: float | None = None,
    min_interval: float = 0.0,
    until: Until = None,
    after: int | None = None,
    only_latest: bool = False,
    poll_interval: float = 1.0,
    pin: bool = True,
    step_names: StepNames | None = None,
    timeouts: Timeouts | None = None,
) -> Watch:
    """Iterate over the committed steps of a root, including those saved later.

    `async for info in ckpt.watch(root)` gives the `StepInfo` of each step once, in ascending order.
    A step that is overwritten, or deleted and saved again, counts as new; a step that is deleted
    before its turn is left out. The root need not exist yet. The current step is pinned by a lease,
    so that no manager deletes it, until the next one is asked for or the iteration ends. All work
    is done on a thread of the library's own, which also renews the lease while the caller is busy.

    Args:
        root: The root of the manager: a directory, a URL or a store.
        timeout: Seconds to wait for a new step before the iteration ends. None waits forever, 0
            gives only the steps that exist. It is an error if the root cannot be read by then.
        min_interval: The least seconds between two steps.
        until: When to end: after this step or a greater one that the run did not go back behind; or
            a function without arguments that returns True if no more steps will come. It is called
            in a thread while there is no new step, and may not be async.
        after: Only give steps greater than this one.
        only_latest: If several steps are new, only give the greatest; none that the run went back
            behind.
        poll_interval: Seconds between two looks at the root.
        pin: True to pin the current step. Without a pin, nothing is written to the root, and the
            step may be deleted while it is read.
        step_names: Naming of the step directories (`ckpt.step_names`).
        timeouts: Time limits; `lease` is the time that the pin lasts if this process is killed.

    Returns:
        The iterator.

    Raises:
        InvalidArgumentError: An argument is invalid.
        StorageError: While iterating: the root could not be read six times in a row, or not before
            `timeout`; or the lease could not be written.
        CorruptCheckpointError: While iterating: the manifest of a step is damaged. The next call
            gives the next step.
        UnsupportedFormatError: While iterating: a step has a later format. The next call gives the
            next step.

    Cancellation: nothing stays pinned, and the next call gives the step that the cancelled one
    would have given.

    Example:
        ```python
        async for info in ckpt.watch("runs/a", until=1000):
            params = await ckpt.load(info.path, at="params")
        ```
    """
    options = timeout, min_interval, until, after, only_latest, poll_interval, pin
    return Watch(watcher_of(root, step_names, timeouts, *options))


async def open_array(path: PathLike, leaf: str) -> StoredArray:
    """Open one array of a checkpoint, to read parts of it.

    Opening reads the manifest, and no array bytes. It works for everything that `ckpt.load` reads:
    checkpoints of this library and of Orbax, safetensors, and files of numpy and Flax, on disks and
    in stores.

    Args:
        path: The directory, URL or store of the checkpoint.
        leaf: Leaf path of the array, as `ckpt.metadata(path)` shows it: `params.w`, or in a
            checkpoint with named items `model:params.w`.

    Raises:
        InvalidArgumentError: There is no such item or leaf, or the leaf is no array.
        NotACheckpointError: There is no committed checkpoint at `path`.

    Example:
        ```python
        kernel = await ckpt.open_array("runs/a/100", "params.w")
        first = await kernel[0]
        ```
    """
    return StoredArray(await run_once(partial(find_array, path, leaf)))


@hinted
async def convert(
    source: PathLike | Mapping[Any, float],
    target: PathLike,
    *,
    format: FormatName | Safetensors | Zarr = "ckpt",
    at: str | None = None,
    formats: Formats | None = None,
    step: int | None = None,
    step_names: StepNames | None = None,
    if_exists: IfTaken = "error",
    budget_bytes: int = 256 << 20,
) -> Conversion:
    """Write a checkpoint anew, in this or another format; or the weighted mean of several.

    Arrays are read and written piece by piece, so that memory stays within a budget, whatever their
    size. Data with digests is compared with them on the way. No class of a saved object is needed:
    the structure of a tree stays as it was. One process makes the call, also in a job of several.

    Args:
        source: A checkpoint that `load` reads: of this library, of Orbax, in safetensors and so
            on. Or several, each with its weight: the arrays of real numbers become their weighted
            mean, added up in float32 or more, and everything else comes from the checkpoint with
            the largest weight.
        target: Path of the result, which does not exist yet. For exports (`safetensors`, `zarr`) a
            path on a disk.
        format: `ckpt` is a checkpoint of this library, which Orbax reads, too. `safetensors` and
            `zarr` hold arrays alone; `ckpt.exports` has their options.
        at: The branch of the tree to export; its leaf paths begin below it.
        formats: How arrays are stored, as for `save`; for `ckpt` only.
        step: Number of the step, if `target` is the root of a manager.
        step_names: How the manager names its steps, if not by the number alone.
        if_exists: `"error"` raises if something is at `target`, and `"replace"` replaces it.
        budget_bytes: The most memory for arrays, in bytes. A chunk of the source that has to be
            decoded or compared as a whole may exceed it.

    Returns:
        A description of the result.

    Raises:
        NotACheckpointError: There is no checkpoint at `source`.
        CorruptCheckpointError: Stored data is damaged; the error names the leaf.
        StepDeletedError: A checkpoint was deleted or replaced while it was read.
        TargetMismatchError: The checkpoints to be merged have different leaves; the error lists
            them.
        UnsupportedLeafError: The format cannot hold some leaves; the error lists them.
        StepExistsError: There is something at `target`.
        InvalidArgumentError: An argument is invalid.
        StorageError: A store refused.

    Cancellation: the written part is removed before the cancellation continues.

    Example:
        ```python
        await ckpt.convert("runs/a/100", "model.safetensors", format="safetensors", at="params")
        await ckpt.convert({"runs/a/100": 0.5, "runs/a/200": 0.5}, "exports/mean")
        ```
    """
    from ckpt._calls.conversion import convert_call

    return await run_once(
        convert_call(source, target, format, at, formats, step, step_names, if_exists, budget_bytes)
    )


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
    that is higher, on their target devices. They are loaded in groups: beside the result, there is
    never more than one group in memory. Everything else (counters, keys, texts, files) comes from
    the checkpoint with the largest weight. In a job of several processes, each loads what its own
    devices need, without waiting for others.

    Args:
        weights: The checkpoints, each with its weight.
        like: The target, as for `load`.
        items: Load these items only, as for `load`.
        at: Load only the branch at this leaf path, as for `load`.
        adapt: Allowed differences between the checkpoints and the target, as for `load`.
        handlers: Handlers for more kinds of items; or a mapping of item names to handlers.
        coordinator: The processes of the job; None uses those of `jax.distributed`.

    Returns:
        The tree, or a dict by item name, as for `load`.

    Raises:
        TargetMismatchError: The checkpoints have different leaves; the error lists them.
        InvalidArgumentError: A weight is not a number, or a checkpoint is given twice.
        CheckpointError: As for `load`.

    Cancellation: reading stops and memory is freed before the cancellation continues.

    Example:
        ```python
        mean = await ckpt.merge({"runs/a/100": 0.25, "runs/a/200": 0.75}, like=state)
        ```
    """
    from ckpt._calls.conversion import merge_call

    call: Call[State] = merge_call(weights, like, items, at, adapt, handlers, coordinator)
    return await run_once(call)


async def adopt(
    source: PathLike,
    target: PathLike,
    *,
    step: int | None = None,
    step_names: StepNames | None = None,
    if_exists: IfTaken = "error",
) -> StepInfo:
    """Make a checkpoint from another library's files, without copying a byte of its arrays.

    The new checkpoint is a *virtual* one: its manifest gives the place of each chunk of each array
    in the files of `source`. Every reader of checkpoints reads it: `load`, `open_array`, a manager,
    any mesh, `Adapt`. The files must stay where they are. They have no digests, so until the first
    `verify` a changed file is recognized by its size and time (in a store, by what the store says).
    That `verify` reads all bytes once and writes their digests into the manifest; from then on, a
    changed byte is never taken for the original.

    One process makes the call, also in a job of several.

    Args:
        source: Models in safetensors (a file, or a directory), or a checkpoint of Orbax.
        target: A directory that does not exist yet; or a URL, or a store of `ckpt.storage`. With
            `step`, the root of a manager.
        step: Number of the new step in that root.
        step_names: How the manager names its steps, if not by the number alone.
        if_exists: `"error"` raises if the checkpoint exists, and `"replace"` replaces it.

    Returns:
        The `StepInfo` of the new checkpoint.

    Raises:
        NotACheckpointError: There is nothing that can be read at `source`.
        InvalidArgumentError: `source` is a checkpoint of this library, which needs no adoption.
        StepExistsError: There is a checkpoint already.
        CorruptCheckpointError: The metadata of `source` is damaged.
        UnsupportedFormatError: An array has a dtype that is not read.
        StorageError: A store refused.

    Cancellation: nothing is left behind, unless the checkpoint was just being published.

    Example:
        ```python
        await ckpt.adopt("models/llama", "runs/a", step=0)
        params = await ckpt.load("runs/a/0", like=params)
        ```
    """
    from ckpt._calls.conversion import adopt_call

    return await run_once(adopt_call(source, target, step, step_names, if_exists))
