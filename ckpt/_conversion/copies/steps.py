"""Copies of steps between disks and stores: whole, verified, and resumable."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._conversion.copies.selection import Selection, nothing_selected, selected, unmatched
from ckpt._conversion.copies.step_copy import CopyProgress, StepCopier, others_in
from ckpt._conversion.copies.step_location import StepLocation, copied_meanwhile, presence_of
from ckpt._format.manifest import Manifest
from ckpt._steps.index import StepIndex
from ckpt._steps.pins import PinLease, hold, pin, pins, refuse_pinned
from ckpt._steps.root import read_root_metadata, write_root_metadata
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
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._manifests import note_branch, read_manifest
from ckpt.storage._resolve import refuse_inside

# The lease of a copied step is short, since that of a killed copy keeps others from deleting.
_LEASE_SECONDS, _RENEWALS = 60.0, 6
_NAMED = 5
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class CopyRules(Struct, frozen=True):
    """Rules of a copy: the parts to copy, and the treatment of existing steps.

    Attributes:
        overwrite: True to replace other steps of the same names.
        whole: True to copy the arrays of virtual steps, too.
        select: Patterns of the parts to copy; empty for everything.
        verify: True to compare every byte of existing copies with its digest.
        makes_way: True if saves that a step's manifest says it replaces make way for the step.
    """

    overwrite: bool = False
    whole: bool = False
    select: tuple[str, ...] = ()
    verify: bool = False
    replaces_older: bool = False

    def writes_anew(self, selection: Selection) -> bool:
        """Return True if a selection has arrays that cannot be copied with their files."""
        return bool(selection.cut) or (self.whole and bool(selection.manifest.sources))


class CopiedStep(Struct, frozen=True):
    """The outcome of the copy of one step.

    Attributes:
        step: Its number, or None.
        path: Path of its copy.
        outcome: `copied`; `there`, if the copy existed; `damaged`, if it was not copied because it
            is damaged; `deleted`, if it was deleted before it was copied; `blocked`, if the step in
            its place was not replaced; or `unselected`, if nothing of it was to be copied.
        nbytes: Bytes that were copied.
        is_virtual: True if its arrays stay where they are.
        others: Files in its directory that do not belong to the step, and were not copied.
        left_out: Its unselected parts, for people.
        is_reshaped: True if containers have become dicts, since they lost some of their children.
        reason: Reason why it was not copied, or None.
    """

    step: int | None
    path: str
    outcome: Literal["copied", "there", "damaged", "deleted", "blocked", "unselected"]
    nbytes: int = 0
    is_virtual: bool = False
    others: Sequence[str] = ()
    left_out: Sequence[str] = ()
    is_reshaped: bool = False
    reason: str | None = None


Told = Callable[[CopiedStep], None]


class StepsToCopy(Struct, frozen=True):
    """Steps of a root, and their destination.

    Attributes:
        storage: The root.
        steps: The names of their directories by step, ascending.
        target: The other root.
    """

    storage: Storage
    steps: Mapping[int, str]
    target: Storage


async def copy_steps(
    work: StepsToCopy, rules: CopyRules, progress: CopyProgress, told: Told
) -> list[CopiedStep]:
    """Copy steps of a root, ascending, with their pins and the metadata of the root.

    Existing copies are passed over. A damaged step is left out, and the others are copied. No step
    is visible before all of it is there.

    Args:
        work: The steps.
        rules: The rules of the copy.
        progress: Receives the progress.
        told: Called with the outcome of each step.

    Raises:
        StepExistsError: A target has another step with the name of one of them; nothing was copied.
        InvalidArgumentError: A pattern fits nothing in any step; nothing was copied.
        StepPinnedError: A step that would be replaced is pinned; nothing was copied.
        StorageError: A storage refused.

    Cancellation: steps that were copied stay; nothing of the other steps is left behind.
    """
    target = work.target
    refuse_inside(work.storage.location, target.location)
    await _look_ahead(work, rules)
    await target.prepare()
    if rules.overwrite:
        await _refuse_pinned(work, rules)
    await target.sweep()
    with contextlib.suppress(CorruptCheckpointError):
        metadata = await read_root_metadata(work.storage)
        if metadata:
            await write_root_metadata(target, metadata)
    done = []
    with contextlib.closing(StepCopier(progress)) as copier:
        for step, name in work.steps.items():
            source, place = StepLocation(work.storage, name), StepLocation(target, name)
            copied = await copy_step(copier, source, step, place, rules)
            if copied.outcome in ("copied", "there"):
                await copy_pins(work.storage, step, place)
            told(copied)
            done.append(copied)
    return done


async def copy_checkpoint(
    source: StepLocation, target: StepLocation, rules: CopyRules, progress: CopyProgress
) -> CopiedStep:
    """Copy a step, or a one-shot checkpoint; see `copy_steps`.

    Raises:
        StepExistsError: There is another checkpoint at the target.
        CorruptCheckpointError: The checkpoint is damaged.
        InvalidArgumentError: A pattern fits nothing in the checkpoint.
        StorageError: A storage refused.

    Cancellation: nothing is left behind.
    """
    refuse_inside(source.location, target.location)
    manifest = await read_manifest(source.storage, source.name)
    step = manifest.step
    for pattern in unmatched(manifest, rules.select):
        raise nothing_selected(source.location, manifest, pattern)
    await target.storage.prepare()
    await target.storage.sweep()
    if rules.overwrite and step is not None and source.name == target.name:
        work = StepsToCopy(source.storage, {step: source.name}, target.storage)
        await _refuse_pinned(work, rules)
    with contextlib.closing(StepCopier(progress)) as copier:
        copied = await copy_step(copier, source, step, target, rules)
    error = {
        "damaged": CorruptCheckpointError,
        "deleted": StepDeletedError,
        "blocked": StepExistsError,
    }.get(copied.outcome)
    if error is not None:
        raise error(copied.reason or "", step=step)
    return copied


def refuse_same(source: Storage, target: Storage) -> None:
    """Raise if two roots are the same.

    Raises:
        InvalidArgumentError: The roots are the same.
    """
    places = [each.location.rstrip("/") for each in (source, target)]
    if places[0] == places[1] or os.path.realpath(places[0]) == os.path.realpath(places[1]):
        raise InvalidArgumentError(f"{source.location} cannot be copied to itself")


async def committed_steps(index: StepIndex) -> tuple[dict[int, str], list[int]]:
    """Return the steps of a root with their directories, and the steps of other libraries."""
    found = (await index.refresh()).values()
    own = {each.step: each.step_dir for each in found if not each.is_foreign}
    return own, [each.step for each in found if each.is_foreign]


async def _look_ahead(work: StepsToCopy, rules: CopyRules) -> None:
    """Raise if the target has other steps of the same names, or if a pattern fits nothing.

    Raises:
        StepExistsError: There are other steps of the same names; names them.
        InvalidArgumentError: A pattern fits nothing in any step.
    """
    taken, left = [], list(rules.select)
    last: Manifest | None = None
    for step, name in work.steps.items():
        with contextlib.suppress(StepNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
            manifest = await read_manifest(work.storage, name, step=step)
            left, last = unmatched(manifest, left), manifest
            if not rules.overwrite and await _is_taken(
                manifest, StepLocation(work.target, name), rules
            ):
                taken.append(step)
    if left and last is not None:
        raise nothing_selected(work.storage.location, last, left[0])
    if taken:
        shown = ", ".join(map(str, taken[:_NAMED])) + (", ..." if len(taken) > _NAMED else "")
        raise StepExistsError(
            f"{work.target.location} has other steps {shown} already; nothing was copied. "
            "Overwrite them, or choose another place"
        )


async def _is_taken(manifest: Manifest, place: StepLocation, rules: CopyRules) -> bool:
    """Return True if there is another step at the place of a copy."""
    selection = selected(manifest, rules.select)
    if selection is None:
        return False
    anew = rules.writes_anew(selection)
    return await presence_of(selection.manifest, place, whole=anew) == "other"


async def _refuse_pinned(work: StepsToCopy, rules: CopyRules) -> None:
    """Raise if a step that would be replaced is pinned.

    Raises:
        StepPinnedError: A step is pinned; nothing was copied.
    """
    for step, pinned in (await pins(work.target)).items():
        name = work.steps.get(step)
        if name is None:
            continue
        with contextlib.suppress(StepNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
            manifest = await read_manifest(work.storage, name, step=step)
            if await _is_taken(manifest, StepLocation(work.target, name), rules):
                refuse_pinned(work.target, step, pinned)


async def copy_step(
    copier: StepCopier,
    source: StepLocation,
    step: int | None,
    target: StepLocation,
    rules: CopyRules,
    on_read: Callable[[Manifest], None] = lambda _: None,
) -> CopiedStep:
    """Copy one step, or return why it was not copied, while a lease keeps it from being deleted.

    Args:
        copier: The copier.
        source: The step.
        step: Its number; None for a one-shot checkpoint.
        target: The place of the copy.
        rules: The rules of the copy.
        on_read: Called with the manifest of the step.

    Raises:
        InvalidArgumentError: The step would be copied to itself.
        StorageError: A storage refused.

    Cancellation: nothing visible is left behind.
    """
    if source.location == target.location:
        refuse_same(source.storage, target.storage)
    where = target.location
    try:
        async with _held(source, step) as manifest:
            on_read(manifest)
            selection = selected(manifest, rules.select)
            if selection is None:
                return CopiedStep(step, where, "unselected", reason="nothing of it is selected")
            wanted, anew = selection.manifest, rules.writes_anew(selection)
            copied = CopiedStep(
                step,
                where,
                "copied",
                is_virtual=bool(wanted.sources) and not anew,
                others=await others_in(source, manifest),
                left_out=selection.left_out,
                is_reshaped=selection.is_reshaped,
            )
            found = await presence_of(wanted, target, whole=anew, deep=rules.verify)
            if found == "same":
                # A virtual step also counts as copied if the copy has its arrays.
                there = await read_manifest(target.storage, target.name)
                return replace(copied, outcome="there", is_virtual=bool(there.sources))
            replaces = rules.overwrite or found == "damaged"
            if found == "other" and rules.replaces_older:
                replaces = await _replaces_older(manifest, target)
            if step is not None:
                await note_branch(target.storage, wanted.left_behind)
            try:
                if anew:
                    # Imported only here, since copies file by file need no jax.
                    from ckpt._conversion.copies.rewritten_copy import write_anew

                    nbytes = await write_anew(
                        source, wanted, target, overwrite=replaces, observers=(copier.progress,)
                    )
                else:
                    nbytes = await copier.copy(
                        source, manifest, selection, target, overwrite=replaces
                    )
            except StepExistsError as error:
                await copied_meanwhile(error, wanted, target, whole=anew)
                nbytes = 0
            return replace(copied, nbytes=nbytes)
    except (StepNotFoundError, StepDeletedError):
        reason = f"{source.location} was deleted before it was copied"
        return CopiedStep(step, where, "deleted", reason=reason)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        return CopiedStep(step, where, "damaged", reason=error.message)
    except StepExistsError as error:
        return CopiedStep(step, where, "blocked", reason=error.message)


async def _replaces_older(manifest: Manifest, target: StepLocation) -> bool:
    """Return True if a step is to replace the one at a place; move a bad save out of its way.

    Only saves that its manifest names make way. If a storage cannot move a save, the save is
    replaced.

    Raises:
        StepExistsError: The save at the place should make way, and is pinned.
    """
    there = await read_manifest(target.storage, target.name)
    times = there.created_ns, there.committed_ns
    for each in manifest.replaces:
        if (each.created_ns, each.committed_ns) != times or manifest.step is None:
            continue
        pinned = (await pins(target.storage)).get(manifest.step, ())
        if pinned:
            raise StepExistsError(
                f"{target.location} is an earlier save of this step, which this one replaces, and "
                f"is pinned by {', '.join(map(str, pinned))}. Unpin it",
                step=manifest.step,
            )
        if not each.state or not isinstance(target.storage, HasDirectories):
            # An abandoned save of a run is lost only if it was to be overwritten.
            return each.state != "abandoned"
        await target.storage.move(target.name, each.state, listed=False)
    return False


@contextlib.asynccontextmanager
async def _held(source: StepLocation, step: int | None) -> AsyncIterator[Manifest]:
    """Keep a step from being deleted while it is copied, if its root can be written to.

    Raises:
        StepNotFoundError: The step no longer exists.
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
            held = await hold(source.storage, step, look, seconds=_lease_seconds(source.storage))
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
        async with _renewed(lease, _lease_seconds(source.storage) / _RENEWALS):
            yield manifest
    finally:
        await lease.drop()


def _lease_seconds(storage: Storage) -> float:
    return min(_LEASE_SECONDS, storage.traits.lease_seconds)


@contextlib.asynccontextmanager
async def _renewed(lease: PinLease, seconds: float) -> AsyncIterator[None]:
    ended = anyio.Event()

    async def renew() -> None:
        while not ended.is_set():
            with anyio.move_on_after(seconds):
                await ended.wait()
            if not ended.is_set():
                # If the lease has expired, the copy itself notices whether the step is gone.
                with contextlib.suppress(StorageError):
                    await lease.renew()

    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(renew)
        try:
            yield
        except Exception as error:
            # Raised outside of the task group, which would wrap it.
            failure = error
        finally:
            ended.set()
    if failure is not None:
        raise failure


async def copy_pins(source: Storage, step: int, target: StepLocation) -> None:
    """Copy the permanent pins of a step; pins of readers are leases, and are not copied."""
    for each in (await pins(source)).get(step, ()):
        if each.seconds is None:

            async def is_there() -> bool:
                return await target.storage.exists(target.name)

            await pin(target.storage, step, each.name, is_there)
