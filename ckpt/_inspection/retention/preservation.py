"""What a preservation policy keeps of a root, and for which reasons."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.json_values import time_of
from ckpt._inspection.places import RunRoot, refuse_doubled
from ckpt._inspection.retention.removals import trash_of_run
from ckpt._steps.index import IndexedStep
from ckpt._steps.pins import pins
from ckpt._steps.removal.retention import Retention
from ckpt._steps.removal.superfluous import Superfluous
from ckpt.errors import CheckpointError
from ckpt.policies._by_item import Preservation
from ckpt.policies._context import SavedStep
from ckpt.policies._deletion import Deletion
from ckpt.policies._health import Healthy, allowed_by, health_of
from ckpt.policies._intervals import EveryNSeconds, EveryNSteps, EveryNStepsClosest, LatestDuration
from ckpt.policies._preservation import (
    AnyPreservation,
    CustomSteps,
    LatestN,
    PreservationPolicyLike,
    PreserveAll,
    steps_kept,
)
from ckpt.policies._ranking import BestN

_REGULAR = {3600.0: "hourly", 86_400.0: "daily", 604_800.0: "weekly"}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


class PlannedStep(Struct, frozen=True):
    """A step that goes or stays.

    Attributes:
        step: Its number.
        name: The name of its directory.
        committed: When it was committed (UTC); None if that is not known.
        age_seconds: How long ago that was.
        stored_bytes: Bytes of its files; None of what another library wrote.
        goes: Whether it is deleted.
        reasons: What keeps it; of a step that goes, what does not keep it.
    """

    step: int
    name: str
    committed: datetime | None
    age_seconds: float | None
    stored_bytes: int | None
    goes: bool
    reasons: list[str]


class ForgottenSteps(Struct, frozen=True):
    """The steps of a root after some of them were deleted.

    Attributes:
        root: Where it is.
        steps: All that there were, ascending.
        trash: The trash that steps go to; None if they are removed for good.
        done: Whether anything was deleted; False if it was only looked at.
    """

    root: str
    steps: list[PlannedStep]
    trash: str | None
    done: bool


async def forget_steps(
    root: RunRoot,
    policy: PreservationPolicyLike,
    given: str | None,
    *,
    for_good: bool,
    dry_run: bool,
) -> ForgottenSteps:
    """Delete what a policy does not keep, but for the latest, pinned and foreign steps.

    If the latest is unhealthy, the last healthy step stays, too.

    Args:
        root: The root.
        policy: What to keep.
        given: The trash that the others go to; None for that of the run, if it has one.
        for_good: Use no trash.
        dry_run: Only look.

    Raises:
        CheckpointError: The root cannot be read, or a step could not be deleted; all others were.
    """
    await refuse_doubled(root)
    trash = await trash_of_run(root, given, for_good=for_good)
    deletion = Deletion(trash=trash)
    retention = Retention(root.storage, root.index, policy, deletion, (), time.time_ns)
    found = await root.index.refresh()
    going = (await retention.superfluous(found, says_spared=False)).steps
    steps = await _planned(root, policy, found, going, await retention.saved_steps(found))
    if not dry_run and going:
        await root.storage.prepare()
        await retention.prepare()
        try:
            await retention.preserve(Superfluous(going))
        except ExceptionGroup as group:
            raise _first(group) from group
        left = await root.index.refresh()
        steps = [_spared(each, left) if each.step in going else each for each in steps]
    return ForgottenSteps(root.location, steps, trash, done=not dry_run)


def _spared(planned: PlannedStep, left: Mapping[int, IndexedStep]) -> PlannedStep:
    """Return what has become of a step that was to go: it may have been pinned meanwhile."""
    if planned.step not in left:
        return planned
    return replace(planned, goes=False, reasons=["pinned or saved anew meanwhile"])


def _first(group: ExceptionGroup[Exception]) -> Exception:
    found = group.subgroup(CheckpointError)
    error: Exception = group if found is None else found
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _planned(
    root: RunRoot,
    policy: PreservationPolicyLike,
    found: Mapping[int, IndexedStep],
    going: Mapping[int, IndexedStep],
    steps: Sequence[SavedStep],
) -> list[PlannedStep]:
    now = time.time()
    kept = kept_for(policy, steps, now)
    pinned = await pins(root.storage)
    unmet = [text_of(policy)]
    planned = []
    for each, saved in zip(found.values(), steps, strict=True):
        step = each.step
        reasons = [*kept[step]]
        if step in pinned:
            reasons.append(f"pinned: {', '.join(pin.name for pin in pinned[step])}")
        if step not in going and not reasons:
            is_latest = saved is steps[-1]
            health = health_of(saved, allowed_by(policy))
            last = "last healthy" if health == "healthy" else "last of unknown health"
            reasons = ["written by Orbax" if each.is_foreign else "latest" if is_latest else last]
        committed = each.committed_ns / 1e9
        planned.append(
            PlannedStep(
                step,
                each.step_dir,
                time_of(each.committed_ns),
                max(now - committed, 0.0) if committed else None,
                each.stored_bytes,
                step in going,
                unmet if step in going else reasons,
            )
        )
    return planned


async def next_to_go(
    root: RunRoot,
    policy: Preservation,
    deletion: Deletion,
    found: Mapping[int, IndexedStep],
) -> Superfluous:
    """Return what a run deletes after its next commit, if that is not a better one.

    That is taken to have the items of the step before it.

    Raises:
        CheckpointError: The pins of the root cannot be read, or the policy cannot be asked.
    """
    if not found:
        return Superfluous()
    now_ns = time.time_ns()
    numbers = list(found)
    distance = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    # It may well be as healthy as the latest.
    times = {"created_ns": now_ns, "committed_ns": now_ns}
    latest = found[numbers[-1]]
    coming = replace(latest, step=latest.step + distance, metrics=None, is_foreign=False, **times)
    retention = Retention(root.storage, root.index, policy, deletion, (), time.time_ns)
    with_it = {**found, coming.step: coming}
    return await retention.superfluous(with_it, says_spared=False)


def kept_for(
    policy: PreservationPolicyLike, steps: Sequence[SavedStep], now: float
) -> dict[int, list[str]]:
    """Return for every step the texts of the members of a policy that keep it.

    Raises:
        InvalidArgumentError: The policy cannot be asked.
    """
    found: dict[int, list[str]] = {each.step: [] for each in steps}
    by_step = {each.step: each for each in steps}
    for member in _members(policy):
        for step in steps_kept(member, steps, now):
            text = text_of(member)
            if isinstance(member, BestN) and isinstance(member.metric, str):
                has_it = member.metric in (by_step[step].metrics or {})
                text = text if has_it else f"without {member.metric}"
            found[step].append(text)
    return found


def text_of(policy: Preservation) -> str:
    """Return what a policy keeps, in a few words: `newest 3`."""
    if isinstance(policy, Mapping):
        # In words of their own: each may be several.
        return ", ".join(f"{text_of(each)} ({name})" for name, each in policy.items())
    match policy:
        case AnyPreservation():
            return ", ".join(text_of(each) for each in policy.policies)
        case PreserveAll():
            return "all"
        case LatestN():
            return f"newest {policy.n}"
        case EveryNSteps():
            return _at_most(f"{'every' if policy.exact else 'one of'} {policy.n}", policy)
        case EveryNStepsClosest():
            return _at_most(f"closest to every {policy.n}", policy)
        case EveryNSeconds():
            return _REGULAR.get(policy.seconds) or f"one in {_duration(policy.seconds)}"
        case LatestDuration():
            return f"within {_duration(policy.seconds)}"
        case BestN() if isinstance(policy.metric, str):
            return f"best {policy.metric}" if policy.n == 1 else f"best {policy.n} {policy.metric}"
        case Healthy():
            return "newest healthy" if policy.n == 1 else f"newest {policy.n} healthy"
        case CustomSteps():
            return "chosen"
    return repr(policy)


def _members(policy: PreservationPolicyLike) -> list[PreservationPolicyLike]:
    if isinstance(policy, AnyPreservation):
        return [member for each in policy.policies for member in _members(each)]
    return [policy]


def _at_most(text: str, policy: EveryNSteps | EveryNStepsClosest) -> str:
    return text if policy.max_to_keep is None else f"{text}, at most {policy.max_to_keep}"


def _duration(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"
