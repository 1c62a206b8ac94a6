"""The step at which two runs part that should be equal, from the manifests of common steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.differences import CheckpointDifferences, compare, is_same_state
from ckpt._inspection.locations import Checkpoint, RunRoot, SkippedStep, refuse_doubled
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import look_closely, open_step, shortened
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    UnsupportedFormatError,
)

# Up to this number of steps, all are compared in order, which needs no assumption.
FEW_STEPS = 32
# Number of leaves that are named in the reason why a step cannot be compared.
_MOST_NAMED = 3
# Errors that say nothing about other steps.
_ABOUT_ONE_STEP = (
    CorruptCheckpointError,
    NotACheckpointError,
    StepNotFoundError,
    UnsupportedFormatError,
)


class Divergence(Struct, frozen=True):
    """The step at which two runs part.

    Attributes:
        first, second: Paths of the runs.
        is_same: True if the last common step is the same, and all steps looked at were compared.
        last_same: The last step before the runs part that is the same in both; None if there is
            none.
        first_different: The first step that is known to differ; None if there is none.
        skipped: Steps before `first_different` that could not be compared.
        common: Number of common steps, including unreadable ones.
        looked_at: Number of the common steps that were looked at.
        in_order: True if the steps were compared in order. Otherwise, steps between two compared
            steps are assumed to be like their neighbours: runs that have parted stay apart.
        only_first: Steps that only the first run has. A step that the second run has but cannot be
            read there is not listed.
        only_second: Steps that only the second run has.
        differences: Differences between the runs at `first_different`, in tree order, without
            metrics and metadata.
    """

    first: str
    second: str
    is_same: bool
    last_same: int | None
    first_different: int | None
    skipped: list[SkippedStep]
    common: int
    looked_at: int
    in_order: bool
    only_first: list[int]
    only_second: list[int]
    differences: CheckpointDifferences | None


class DivergencePoint(Struct, frozen=True):
    """The result of a search, as indexes into the common steps.

    Attributes:
        last_same: The last index that is the same; -1 if there is none.
        first_different: The first index that is not; the number of steps if there is none.
        looked_at: Number of indexes that were looked at.
    """

    last_same: int
    first_different: int
    looked_at: int


async def find_run_divergence(
    first: RunRoot, second: RunRoot, *, in_order: bool = False
) -> Divergence:
    """Return the step at which two runs part.

    Args:
        first: One run.
        second: The other.
        in_order: Compare the steps in order, however many there are.

    Raises:
        InvalidArgumentError: The runs have no step in common.
        StepNotFoundError: A run has no steps at all.
        StorageError: A run cannot be read.
    """
    roots = first, second
    listed = [await _steps_of(root) for root in roots]
    unreadable = [await _unreadable(root, steps) for root, steps in zip(roots, listed, strict=True)]
    there = [{*steps, *reasons} for steps, reasons in zip(listed, unreadable, strict=True)]
    common = sorted(there[0] & there[1])
    only = [[step for step in listed[at] if step not in there[1 - at]] for at in (0, 1)]
    if not common:
        raise InvalidArgumentError(
            f"{first.location} and {second.location} have no step in common: the first has "
            f"{shortened(only[0])}, the second {shortened(only[1])}"
        )
    in_order = in_order or len(common) <= FEW_STEPS
    skipped: dict[int, SkippedStep] = {}
    differing: list[CheckpointDifferences] = []

    async def look(place: int) -> bool | None:
        step = common[place]
        reasons = [each[step] for each in unreadable if step in each]
        if reasons:
            skipped[step] = SkippedStep(step, "; ".join(reasons))
            return None
        try:
            one, other = [
                await _opened(root, steps[step]) for root, steps in zip(roots, listed, strict=True)
            ]
            is_same = is_same_state(one, other)
            differences = None if is_same else compare(one, other)[0]
        except _ABOUT_ONE_STEP as error:
            skipped[step] = SkippedStep(step, str(error))
            return None
        if differences is not None and is_same is None:
            skipped[step] = SkippedStep(step, _reason(differences))
        elif differences is not None:
            # In either order of the search, a differing step comes before those found earlier.
            differing[:] = [replace(differences, metrics=[], metadata=[])]
        return is_same

    found = await find_divergence(len(common), look, in_order=in_order)
    differs = common[found.first_different] if differing else None
    in_vain = [skipped[step] for step in sorted(skipped) if differs is None or step < differs]
    return Divergence(
        first.location,
        second.location,
        found.last_same == len(common) - 1 and not in_vain,
        common[found.last_same] if found.last_same >= 0 else None,
        differs,
        in_vain,
        len(common),
        found.looked_at,
        in_order,
        only[0],
        only[1],
        differing[0] if differing else None,
    )


async def find_divergence(
    count: int, look: Callable[[int], Awaitable[bool | None]], *, in_order: bool
) -> DivergencePoint:
    """Return the index at which a row changes from the same to different.

    Args:
        count: Length of the row.
        look: Returns True if the entry at an index is the same; None if that is unknown.
        in_order: Look at one entry after the other, until one differs. Otherwise the interval is
            halved, which is right if no entry after a different one is the same.
    """
    low, high, looked_at = -1, count, 0
    rest = list(range(count))
    while rest:
        at = 0 if in_order else len(rest) // 2
        place = rest[at]
        looked_at += 1
        match await look(place):
            case None:
                # The neighbours of the index may tell.
                del rest[at]
            case True:
                low, rest = place, rest[at + 1 :]
            case False:
                high, rest = place, rest[:at]
    return DivergencePoint(low, high, looked_at)


async def _steps_of(root: RunRoot) -> Mapping[int, IndexedStep]:
    await refuse_doubled(root)
    found = await root.index.refresh()
    if not found:
        raise root.index.no_step()
    return found


async def _unreadable(root: RunRoot, listed: Container[int]) -> dict[int, str]:
    """Return the reasons why existing steps cannot be read."""
    found = {each.step: each.reason for each in root.index.unreadable}
    for name in await root.storage.step_dirs():
        step = root.names.step(name)
        # If there are many, the index has looked at only some of them.
        if step is not None and step not in listed and step not in found:
            looked = await look_closely(root.storage, name, step)
            if looked is not None:
                found[step] = looked.reason
    # If a step has several directories, a readable one counts.
    return {step: reason for step, reason in found.items() if step not in listed}


async def _opened(root: RunRoot, step: IndexedStep) -> Checkpoint:
    opened = await open_step(root.storage, step.step_dir, step.step)
    if opened is None:
        raise StepDeletedError(f"{root.location} has lost it meanwhile", step=step.step)
    return Checkpoint(root.storage, opened)


def _reason(found: CheckpointDifferences) -> str:
    names = [each.leaf.name for each in found.not_compared]
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown}{more}: other chunks or no digests, and no vital signs in both"
