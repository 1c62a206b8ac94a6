"""Where two runs part that should be equal, from the manifests of the steps that both have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping

from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.differences import CheckpointDifferences, compare, is_same_state
from ckpt._inspection.places import Checkpoint, RunRoot, refuse_doubled
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt._steps.unreadable import look_closely, shortened
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    UnsupportedFormatError,
)

# Up to so many steps are looked at one after the other, which takes no assumption.
FEW_STEPS = 32
# Of the leaves of a step that cannot be compared, the reason names so many.
_MOST_NAMED = 3
# Errors that say nothing of other steps.
_ABOUT_ONE_STEP = (
    CorruptCheckpointError,
    NotACheckpointError,
    StepNotFoundError,
    UnsupportedFormatError,
)


class UncomparedStep(Struct, frozen=True):
    """A step that was looked at, and of which it is not known whether it is the same in both runs.

    Attributes:
        step: Its number.
        reason: Why that is not known.
    """

    step: int
    reason: str


class PartedRuns(Struct, frozen=True):
    """Where two runs part.

    Attributes:
        first, second: Where the runs are.
        is_same: Whether the last step that both have is the same, and none was looked at in vain.
        last_same: The last step before they part that is the same in both; None if there is none.
        first_different: The first step that is known to differ; None if there is none.
        skipped: Steps up to that one that were looked at in vain.
        common: How many steps both runs have, with those that cannot be read.
        looked_at: How many of them were looked at.
        in_order: Whether that was one after the other. If not, steps between those that were looked
            at are assumed to be like their neighbours: runs that have parted stay apart.
        only_first: Steps that only the first run has. One that the second has and that cannot be
            read there is not among them.
        only_second: Steps that only the second run has.
        differences: How the two runs differ at the first step that differs, in tree order, but for
            metrics and metadata.
    """

    first: str
    second: str
    is_same: bool
    last_same: int | None
    first_different: int | None
    skipped: list[UncomparedStep]
    common: int
    looked_at: int
    in_order: bool
    only_first: list[int]
    only_second: list[int]
    differences: CheckpointDifferences | None


class FoundParting(Struct, frozen=True):
    """What a search has found, as numbers of places.

    Attributes:
        last_same: The last place that is the same; -1 for none.
        first_different: The first one that is not; the number of places for none.
        looked_at: How many were looked at.
    """

    last_same: int
    first_different: int
    looked_at: int


async def parted_runs(first: RunRoot, second: RunRoot, *, in_order: bool = False) -> PartedRuns:
    """Return where two runs part.

    Args:
        first: One run.
        second: The other.
        in_order: Look at one step after the other, however many there are.

    Raises:
        InvalidArgumentError: They have no step in common.
        StepNotFoundError: One has no steps at all.
        StorageError: One cannot be read.
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
    skipped: dict[int, UncomparedStep] = {}
    differing: list[CheckpointDifferences] = []

    async def look(place: int) -> bool | None:
        step = common[place]
        reasons = [each[step] for each in unreadable if step in each]
        if reasons:
            skipped[step] = UncomparedStep(step, "; ".join(reasons))
            return None
        try:
            one, other = [
                await _opened(root, steps[step]) for root, steps in zip(roots, listed, strict=True)
            ]
            is_same = is_same_state(one, other)
            differences = None if is_same else compare(one, other)[0]
        except _ABOUT_ONE_STEP as error:
            skipped[step] = UncomparedStep(step, str(error))
            return None
        if differences is not None and is_same is None:
            skipped[step] = UncomparedStep(step, _reason(differences))
        elif differences is not None:
            # Each that differs is before those that were found before.
            differing[:] = [replace(differences, metrics=[], metadata=[])]
        return is_same

    found = await find_parting(len(common), look, in_order=in_order)
    differs = common[found.first_different] if differing else None
    in_vain = [skipped[step] for step in sorted(skipped) if differs is None or step < differs]
    return PartedRuns(
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


async def find_parting(
    count: int, look: Callable[[int], Awaitable[bool | None]], *, in_order: bool
) -> FoundParting:
    """Return where a row of places changes from the same to different.

    Args:
        count: How many places there are.
        look: Tells whether a place is the same; None if that is not known.
        in_order: Look at one after the other, until one differs. Otherwise the interval is halved,
            which is right if no place after one that differs is the same.
    """
    low, high, looked_at = -1, count, 0
    rest = list(range(count))
    while rest:
        at = 0 if in_order else len(rest) // 2
        place = rest[at]
        looked_at += 1
        match await look(place):
            case None:
                # Its neighbours may tell.
                del rest[at]
            case True:
                low, rest = place, rest[at + 1 :]
            case False:
                high, rest = place, rest[:at]
    return FoundParting(low, high, looked_at)


async def _steps_of(root: RunRoot) -> Mapping[int, IndexedStep]:
    await refuse_doubled(root)
    found = await root.index.refresh()
    if not found:
        raise root.index.no_step()
    return found


async def _unreadable(root: RunRoot, listed: Container[int]) -> dict[int, str]:
    """Return why steps that are there cannot be read."""
    found = {each.step: each.reason for each in root.index.unreadable}
    for name in await root.storage.step_dirs():
        step = root.names.step(name)
        # Of many, the index has looked at some.
        if step is not None and step not in listed and step not in found:
            looked = await look_closely(root.storage, name, step)
            if looked is not None:
                found[step] = looked.reason
    # Where a step has several directories, one that can be read counts.
    return {step: reason for step, reason in found.items() if step not in listed}


async def _opened(root: RunRoot, step: IndexedStep) -> Checkpoint:
    opened = await open_step(root.storage, step.step_dir, step.step)
    if opened is None:
        raise StepDeletedError(f"{root.location} has lost it meanwhile", step=step.step)
    return Checkpoint(root.storage, opened)


def _reason(found: CheckpointDifferences) -> str:
    """Return why two steps could not be compared."""
    names = [
        ": ".join(filter(None, (each.leaf.item, each.leaf.path))) for each in found.not_compared
    ]
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown}{more}: other chunks or no digests, and no vital signs in both"
