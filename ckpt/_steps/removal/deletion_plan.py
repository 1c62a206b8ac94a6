"""`DeletionPlan`: the steps of a root, and the items of steps, that are not kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from ckpt._steps.index import IndexedStep
from ckpt.keep._keep_policies import All, KeepRules, steps_kept
from ckpt.keep._questions import SavedStep


class DeletionPlan(Struct, frozen=True):
    """The steps and items that are to be deleted.

    Attributes:
        steps: Steps that go as a whole.
        items: If items have policies: by step the items that go, each with the text of its policy;
            all items for a step that goes as a whole.
        found: The steps that items go from.
    """

    steps: Mapping[int, IndexedStep] = field(default_factory=dict)
    items: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    found: Mapping[int, IndexedStep] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.items)

    def losing(self) -> dict[int, Mapping[str, str]]:
        """Return the steps that stay but lose items, with these items."""
        return {step: gone for step, gone in self.items.items() if step not in self.steps}

    def where(self, goes: Callable[[int], bool]) -> DeletionPlan:
        """Return the part of the plan for the steps for which `goes` is true."""
        return DeletionPlan(
            {step: each for step, each in self.steps.items() if goes(step)},
            {step: each for step, each in self.items.items() if goes(step)},
            {step: each for step, each in self.found.items() if goes(step)},
        )


def keeps_all(policy: KeepRules) -> bool:
    """Return True if nothing is ever superfluous by a policy."""
    policies = policy.values() if isinstance(policy, Mapping) else [policy]
    return all(isinstance(each, All) for each in policies)


def plan_deletions(
    policy: KeepRules,
    found: Mapping[int, IndexedStep],
    steps: Sequence[SavedStep],
    now: float,
    always: Collection[int | None],
) -> DeletionPlan:
    """Return the steps and items that a policy does not keep.

    Args:
        policy: The policy, or a policy for each item.
        found: The committed steps, ascending.
        steps: The same steps in the form that policies take.
        now: Unix seconds.
        always: Steps that stay whole.

    Raises:
        InvalidArgumentError: A policy has raised an error, or given no valid answer.
    """
    if not isinstance(policy, Mapping):
        kept = {*steps_kept(policy, steps, now), *always}
        return DeletionPlan({step: each for step, each in found.items() if step not in kept})
    from ckpt.keep._by_item import leaving

    items = {step: each.items for step, each in found.items()}
    gone = leaving(policy, steps, items, now, always)
    return DeletionPlan(
        {step: found[step] for step in sorted(gone.steps)},
        gone.items,
        {step: found[step] for step in gone.items},
    )


def kept_items(found: Mapping[int, IndexedStep], own: DeletionPlan) -> list[tuple[int, list[str]]]:
    """Return the steps that stay, each with the items that stay."""
    return [
        (step, [item for item in each.items if item not in own.items.get(step, ())])
        for step, each in found.items()
        if step not in own.steps
    ]


def common_deletions(
    own: DeletionPlan, kept: Iterable[Iterable[tuple[int, Iterable[str]]]]
) -> DeletionPlan:
    """Return what goes from the disk of this process, if every process has its own disk.

    Whatever one process keeps stays on all disks. An item that one disk has lost already goes from
    the other disks, too.

    Args:
        own: The plan of this process alone.
        kept: The `kept_items` of each process, about the same steps.
    """
    stay: dict[int, set[str]] = {}
    for each in kept:
        for step, names in each:
            stay.setdefault(step, set()).update(names)
    left = {
        step: {item: text for item, text in gone.items() if item not in stay.get(step, ())}
        for step, gone in own.items.items()
    }
    # If a disk has none of the items that the others keep, leave its step unchanged.
    lost = {
        step: gone
        for step, gone in left.items()
        if gone and (step not in stay or len(gone) < len(own.found[step].items))
    }
    return DeletionPlan(
        {step: each for step, each in own.steps.items() if step not in stay},
        lost,
        {step: own.found[step] for step in lost},
    )
