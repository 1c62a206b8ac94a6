"""The steps of a root that a keep policy keeps, with reasons, and those that people pin."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._inspection.json_values import age_of, time_of
from ckpt._inspection.locations import RunRoot, checkpoint_at, locate, refuse_doubled, step_path_of
from ckpt._inspection.removals import Removal, RemovedStep, trash_of_run
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._steps.index import IndexedStep
from ckpt._steps.pins import check_pin_name, pin, pins, unpin
from ckpt._steps.removal.deletion_plan import DeletionPlan
from ckpt._steps.removal.retention import Retention
from ckpt._tree.table import format_bytes
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, NotACheckpointError
from ckpt.keep._deletion import Deletion
from ckpt.keep._health import Healthy, allowed_by, health_of
from ckpt.keep._keep_policies import (
    All,
    ClosestToEvery,
    EverySeconds,
    EverySteps,
    KeepPolicyLike,
    KeepRules,
    Latest,
    Newer,
    Steps,
    members_of,
    steps_kept,
)
from ckpt.keep._keep_policies import Any as AnyOf
from ckpt.keep._questions import SavedStep
from ckpt.keep._ranking import Best, Within

_REGULAR = {3600.0: "hourly", 86_400.0: "daily", 604_800.0: "weekly"}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


async def forget_steps(
    root: RunRoot,
    policy: KeepPolicyLike,
    given: str | None,
    *,
    for_good: bool,
    dry_run: bool,
) -> Removal:
    """Delete the steps that a policy does not keep, except the latest, pinned and foreign steps.

    If the latest step is unhealthy, the last healthy step stays, too.

    Args:
        root: The root.
        policy: The policy that keeps steps.
        given: The trash that deleted steps go to; None for the trash of the run, if it has one.
        for_good: True to use no trash.
        dry_run: True to plan only.

    Raises:
        CheckpointError: The root cannot be read.
        ExceptionGroup: Steps could not be deleted; all others were.
    """
    await refuse_doubled(root)
    trash = await trash_of_run(root, given, for_good=for_good)
    deletion = Deletion(trash=trash)
    retention = Retention(root.storage, root.index, policy, deletion, OrbaxSidecars())
    found = await root.index.refresh()
    going = (await retention.deletion_plan(found, says_spared=False)).steps
    steps = await _planned(root, policy, found, going, await retention.saved_steps(found), trash)
    if not dry_run and going:
        await root.storage.prepare()
        await retention.prepare()
        await retention.preserve(DeletionPlan(going))
        left = await root.index.refresh()
        steps = [_spared(each, left) if each.step in going else each for each in steps]
    return Removal(root.location, steps, done=not dry_run)


def _spared(planned: RemovedStep, left: Mapping[int, IndexedStep]) -> RemovedStep:
    """Return the outcome for a step that was to go: it may have been pinned meanwhile."""
    if planned.step not in left:
        return planned
    reasons = ["pinned or saved again meanwhile"]
    return replace(planned, goes=False, trash=None, reasons=reasons)


async def _planned(
    root: RunRoot,
    policy: KeepPolicyLike,
    found: Mapping[int, IndexedStep],
    going: Mapping[int, IndexedStep],
    steps: Sequence[SavedStep],
    trash: str | None,
) -> list[RemovedStep]:
    kept = kept_for(policy, steps, time.time())
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
            reasons = ["of another library" if each.is_foreign else "latest" if is_latest else last]
        goes = step in going
        planned.append(
            RemovedStep(
                f"{root.location}/{each.step_dir}",
                step,
                time_of(each.committed_ns),
                age_of(each.committed_ns),
                each.stored_bytes,
                trash if goes else None,
                goes,
                unmet if goes else reasons,
            )
        )
    return planned


async def next_to_go(
    root: RunRoot,
    policy: KeepRules,
    deletion: Deletion,
    found: Mapping[int, IndexedStep],
) -> DeletionPlan:
    """Return what a run deletes after its next commit, unless the new step is a better one.

    The new step is assumed to have the items of the step before it.

    Raises:
        CheckpointError: The pins of the root cannot be read, or the policy cannot be evaluated.
    """
    if not found:
        return DeletionPlan()
    now_ns = time.time_ns()
    numbers = list(found)
    distance = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    # The new step is assumed to be as healthy as the latest one.
    times = {"created_ns": now_ns, "committed_ns": now_ns}
    latest = found[numbers[-1]]
    coming = replace(latest, step=latest.step + distance, metrics=None, library="", **times)
    retention = Retention(root.storage, root.index, policy, deletion, OrbaxSidecars())
    with_it = {**found, coming.step: coming}
    return await retention.deletion_plan(with_it, says_spared=False)


def kept_for(
    policy: KeepPolicyLike, steps: Sequence[SavedStep], now: float
) -> dict[int, list[str]]:
    """Return for every step the texts of the members of a policy that keep it.

    Raises:
        InvalidArgumentError: The policy cannot be evaluated.
    """
    found: dict[int, list[str]] = {each.step: [] for each in steps}
    by_step = {each.step: each for each in steps}
    for member in members_of(policy):
        for step in steps_kept(member, steps, now):
            text = text_of(member)
            if isinstance(member, Best) and isinstance(member.metric, str):
                has_it = member.metric in (by_step[step].metrics or {})
                text = text if has_it else f"without {member.metric}"
            found[step].append(text)
    return found


def text_of(policy: KeepRules) -> str:
    """Return a policy in a few words, such as `newest 3`."""
    if isinstance(policy, Mapping):
        # The name of each item comes after its policies, of which there may be several.
        return ", ".join(f"{text_of(each)} ({name})" for name, each in policy.items())
    match policy:
        case AnyOf():
            within = f" within {format_bytes(policy.nbytes)}" if isinstance(policy, Within) else ""
            return ", ".join(text_of(each) for each in policy.policies) + within
        case All():
            return "all"
        case Latest():
            return f"newest {policy.n}"
        case EverySteps():
            return _at_most(f"{'every' if policy.exact else 'one of'} {policy.n}", policy)
        case ClosestToEvery():
            return _at_most(f"closest to every {policy.n}", policy)
        case EverySeconds():
            return _REGULAR.get(policy.seconds) or f"one in {_duration(policy.seconds)}"
        case Newer():
            return f"within {_duration(policy.seconds)}"
        case Best() if isinstance(policy.metric, str):
            return f"best {policy.metric}" if policy.n == 1 else f"best {policy.n} {policy.metric}"
        case Healthy():
            return "newest healthy" if policy.n == 1 else f"newest {policy.n} healthy"
        case Steps():
            return "chosen"
    return repr(policy)


def _at_most(text: str, policy: EverySteps | ClosestToEvery) -> str:
    return text if policy.max_to_keep is None else f"{text}, at most {policy.max_to_keep}"


def _duration(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds % length == 0:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:g} s"


class PinChange(Struct, frozen=True):
    """Steps that were pinned or unpinned.

    Attributes:
        root: Path of their root.
        name: Name of the pin.
        steps: Numbers of the steps.
        pinned: True if they are pinned now.
    """

    root: str
    name: str
    steps: list[int]
    pinned: bool


async def pin_at(path: str, name: str) -> PinChange:
    """Pin a step; for a root, its latest step.

    Raises:
        InvalidArgumentError: The name is not valid for a pin, or the path is a single checkpoint.
        CheckpointError: There is no step, or it cannot be read or pinned.
    """
    check_pin_name(name)
    found = await checkpoint_at(path)
    step = found.opened.manifest.step
    if step is None:
        raise InvalidArgumentError(
            f"{found.location} is a single checkpoint: nothing deletes it, so it cannot be pinned"
        )
    await found.storage.prepare()

    async def is_committed() -> bool:
        return await found.storage.exists(found.opened.step_dir)

    await pin(found.storage, step, name, is_committed)
    return PinChange(found.storage.location, name, [step], pinned=True)


async def unpin_at(path: str, name: str) -> PinChange:
    """Remove a pin from a step, even a damaged or deleted one; for a root, from all steps with it.

    Raises:
        InvalidArgumentError: There is no such pin; lists the existing ones.
        CheckpointError: There is neither a root nor a step, or the storage cannot be written.
    """
    check_pin_name(name)
    place = step_path_of(path)
    try:
        found = await locate(path)
    except (NotACheckpointError, CorruptCheckpointError):
        if place is None:
            raise
        found = place.root
    if isinstance(found, RunRoot) and (place is None or found is not place.root):
        storage, only = found.storage, None
    elif place is not None:
        storage, only = place.root.storage, place.step
    else:
        raise InvalidArgumentError(f"{found.location} is a single checkpoint, which has no pins")
    pinned = {
        step: [each.name for each in some if each.seconds is None]
        for step, some in (await pins(storage)).items()
        if only in (None, step)
    }
    steps = [step for step, names in pinned.items() if name in names]
    if not steps:
        where = storage.location if only is None else f"step {only} of {storage.location}"
        others = sorted({each for names in pinned.values() for each in names})
        raise InvalidArgumentError(
            f"no pin of {where} is called {name!r}; it has "
            + (", ".join(map(repr, others)) or "none")
        )
    for step in steps:
        await unpin(storage, step, name)
    return PinChange(storage.location, name, steps, pinned=False)
