"""Copies of steps between disks and stores: whole, compared, and begun again where they ended."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal

import anyio
from msgspec import Struct

from ckpt._conversion.step_copy import (
    CopyPlace,
    CopyProgress,
    StepCopier,
    copied_meanwhile,
    others_in,
    presence_of,
)
from ckpt._format.manifest import Manifest
from ckpt._steps.index import StepIndex
from ckpt._steps.pins import PinLease, hold, pin, pins, refuse_pinned
from ckpt._steps.root_metadata import read_root_metadata, write_root_metadata
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepDeletedError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

_RENEWALS = 6
_NAMED = 5
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

# Writes a virtual step anew, with its arrays.
WritesWhole = Callable[[CopyPlace, int | None, CopyPlace], Awaitable[object]]


class CopiedStep(Struct, frozen=True):
    """What has become of one step.

    Attributes:
        step: Its number, or None.
        path: Where it was to be copied to.
        outcome: `copied`; `there`, if it was; `damaged`, if it was not copied because of that; or
            `deleted`, if it was deleted before it was copied.
        nbytes: Bytes that were copied.
        is_virtual: Whether its arrays stay where they are.
        others: Files in its directory that are not of the step, and were not copied.
        reason: Why it was not copied, or None.
    """

    step: int | None
    path: str
    outcome: Literal["copied", "there", "damaged", "deleted"]
    nbytes: int = 0
    is_virtual: bool = False
    others: Sequence[str] = ()
    reason: str | None = None


Told = Callable[[CopiedStep], None]


class StepsToCopy(Struct, frozen=True):
    """Steps of a root, and where they go.

    Attributes:
        storage: The root.
        steps: The names of their directories by step, ascending.
        target: The other root.
    """

    storage: Storage
    steps: Mapping[int, str]
    target: Storage


async def copy_steps(
    work: StepsToCopy,
    *,
    overwrite: bool,
    write_whole: WritesWhole | None,
    progress: CopyProgress,
    told: Told,
) -> list[CopiedStep]:
    """Copy steps of a root, ascending, with their pins and the metadata of the root.

    Steps that are there already are passed over. A damaged one is left out, and the others are
    copied. None is visible before all of it is there.

    Args:
        work: The steps.
        overwrite: Whether other steps of the same names are replaced.
        write_whole: Writes virtual steps; None copies them as virtual ones.
        progress: Told of the bytes.
        told: Told of each step.

    Raises:
        StepExistsError: Another step has the name of one; nothing was copied.
        InvalidArgumentError: The target is a checkpoint.
        StorageError: A storage refused.

    Cancellation: the steps that were copied stay, of others nothing is left behind.
    """
    target = work.target
    if not overwrite:
        await _refuse_others(work, virtual=write_whole is None)
    await target.prepare()
    if overwrite:
        await _refuse_pinned(work)
    await target.sweep()
    with contextlib.suppress(CorruptCheckpointError):
        metadata = await read_root_metadata(work.storage)
        if metadata is not None:
            await write_root_metadata(target, metadata)
    done = []
    copier = StepCopier(progress)
    try:
        for step, name in work.steps.items():
            source, place = CopyPlace(work.storage, name), CopyPlace(target, name)
            copied = await _copy_one(copier, source, step, place, overwrite, write_whole)
            if copied.outcome in ("copied", "there"):
                await _copy_pins(work.storage, step, place)
            told(copied)
            done.append(copied)
    finally:
        copier.close()
    return done


async def copy_checkpoint(
    source: CopyPlace,
    target: CopyPlace,
    *,
    overwrite: bool,
    write_whole: WritesWhole | None,
    progress: CopyProgress,
) -> CopiedStep:
    """Copy a step, or a checkpoint by itself; see `copy_steps`.

    Raises:
        StepExistsError: There is another checkpoint.
        CorruptCheckpointError: The checkpoint is damaged.
        StorageError: A storage refused.

    Cancellation: nothing is left behind.
    """
    step = (await read_manifest(source.storage, source.name)).step
    await target.storage.prepare()
    await target.storage.sweep()
    if overwrite and step is not None:
        work = StepsToCopy(source.storage, {step: source.name}, target.storage)
        if source.name == target.name:
            await _refuse_pinned(work)
    copier = StepCopier(progress)
    try:
        copied = await _copy_one(copier, source, step, target, overwrite, write_whole)
    finally:
        copier.close()
    if copied.outcome == "damaged":
        raise CorruptCheckpointError(copied.reason or "", step=step)
    if copied.outcome == "deleted":
        raise StepDeletedError(copied.reason or "", step=step)
    return copied


def refuse_same(source: Storage, target: Storage) -> None:
    """Raise if two roots are the same.

    Raises:
        InvalidArgumentError: They are.
    """
    places = [each.location.rstrip("/") for each in (source, target)]
    if places[0] == places[1] or os.path.realpath(places[0]) == os.path.realpath(places[1]):
        raise InvalidArgumentError(f"{source.location} cannot be copied to itself")


async def committed_steps(index: StepIndex) -> tuple[dict[int, str], list[int]]:
    """Return the steps of a root with their directories, and those that another library wrote."""
    found = (await index.refresh()).values()
    own = {each.step: each.step_dir for each in found if not each.is_foreign}
    return own, [each.step for each in found if each.is_foreign]


async def _refuse_others(work: StepsToCopy, *, virtual: bool) -> None:
    """Raise if other steps have the names of some.

    Raises:
        StepExistsError: They have; names them.
    """
    taken = []
    for step, name in work.steps.items():
        with contextlib.suppress(StepNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
            manifest = await read_manifest(work.storage, name, step=step)
            place = CopyPlace(work.target, name)
            found = await presence_of(manifest, place)
            # What is damaged there is moved aside, or refused, when its turn comes.
            is_whole = found == "other" and await _is_whole(place)
            if is_whole or (found == "same" and manifest.sources and not virtual):
                taken.append(step)
    if taken:
        shown = ", ".join(map(str, taken[:_NAMED])) + (", ..." if len(taken) > _NAMED else "")
        raise StepExistsError(
            f"{work.target.location} has other steps {shown} already; nothing was copied. "
            "Overwrite them, or choose another place"
        )


async def _refuse_pinned(work: StepsToCopy) -> None:
    """Raise if a step that would be replaced is pinned.

    Raises:
        StepPinnedError: It is; nothing was copied.
    """
    for step, pinned in (await pins(work.target)).items():
        name = work.steps.get(step)
        if name is None:
            continue
        with contextlib.suppress(StepNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
            manifest = await read_manifest(work.storage, name, step=step)
            if await presence_of(manifest, CopyPlace(work.target, name)) == "other":
                refuse_pinned(work.target, step, pinned)


async def _is_whole(place: CopyPlace) -> bool:
    try:
        await read_manifest(place.storage, place.name)
    except CorruptCheckpointError:
        return False
    return True


async def _copy_one(
    copier: StepCopier,
    source: CopyPlace,
    step: int | None,
    target: CopyPlace,
    overwrite: bool,
    write_whole: WritesWhole | None,
) -> CopiedStep:
    if source.location == target.location:
        refuse_same(source.storage, target.storage)
    try:
        async with _held(source, step) as manifest:
            is_virtual = bool(manifest.sources) and write_whole is None
            others = await others_in(source, manifest)
            found = await presence_of(manifest, target)
            if found == "same" and (is_virtual or not manifest.sources):
                return CopiedStep(
                    step, target.location, "there", is_virtual=is_virtual, others=others
                )
            if write_whole is not None and manifest.sources:
                await write_whole(source, step, target)
            else:
                replaces = overwrite or found == "damaged"
                try:
                    await copier.copy(source, manifest, target, overwrite=replaces)
                except StepExistsError as error:
                    await copied_meanwhile(error, manifest, target)
            nbytes = sum(file.size for file in manifest.files.values())
            return CopiedStep(step, target.location, "copied", nbytes, is_virtual, others)
    except (StepNotFoundError, StepDeletedError):
        reason = f"{source.location} was deleted before it was copied"
        return CopiedStep(step, target.location, "deleted", reason=reason)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return CopiedStep(step, target.location, "damaged", reason=error.message)


@contextlib.asynccontextmanager
async def _held(source: CopyPlace, step: int | None) -> AsyncIterator[Manifest]:
    """Keep a step from being deleted while it is copied, where its root may be written to.

    Raises:
        StepNotFoundError: It is not there any more.
    """
    lease: PinLease | None = None

    async def look() -> Manifest | None:
        try:
            return await read_manifest(source.storage, source.name, step=step)
        except (StepNotFoundError, NotACheckpointError):
            return None

    manifest = None
    if step is not None:
        try:
            held = await hold(source.storage, step, look)
        except StorageError as error:
            if error.errno not in _READ_ONLY:
                raise
            manifest = await look()
        else:
            lease, manifest = held or (None, None)
    else:
        manifest = await look()
    if manifest is None:
        raise StepNotFoundError(f"{source.location} is not there any more", step=step)
    if lease is None:
        yield manifest
        return
    try:
        async with _renewed(lease, source.storage.lease_seconds / _RENEWALS):
            yield manifest
    finally:
        await lease.drop()


@contextlib.asynccontextmanager
async def _renewed(lease: PinLease, seconds: float) -> AsyncIterator[None]:
    ended = anyio.Event()

    async def renew() -> None:
        while not ended.is_set():
            with anyio.move_on_after(seconds):
                await ended.wait()
            if not ended.is_set():
                # If it has run out, the copy tells whether the step is gone.
                with contextlib.suppress(StorageError):
                    await lease.renew()

    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(renew)
        try:
            yield
        except Exception as error:
            # Not within the group, which would wrap it.
            failure = error
        finally:
            ended.set()
    if failure is not None:
        raise failure


async def _copy_pins(source: Storage, step: int, target: CopyPlace) -> None:
    """Give a copied step the pins that stay; those of readers are leases, and not copied."""
    for each in (await pins(source)).get(step, ()):
        if each.seconds is None:

            async def is_there() -> bool:
                return await target.storage.exists(target.name)

            await pin(target.storage, step, each.name, is_there)
