"""`Superfluous`: the steps of a root, and the items of steps, that are not kept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from ckpt._steps.index import IndexedStep
from ckpt.policies._by_item import Preservation, leaving
from ckpt.policies._context import SavedStep
from ckpt.policies._preservation import PreserveAll, steps_kept


class Superfluous(Struct, frozen=True):
    """What is not kept.

    Attributes:
        steps: Steps that go as a whole.
        items: By step the items that go, each with the text of its policy, where items have
            policies; all those of a step that goes as a whole.
        found: The steps that items go from.
    """

    steps: Mapping[int, IndexedStep] = field(default_factory=dict)
    items: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    found: Mapping[int, IndexedStep] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.items)

    def losing(self) -> dict[int, Mapping[str, str]]:
        """Return the steps that stay and lose items, and which."""
        return {step: gone for step, gone in self.items.items() if step not in self.steps}

    def where(self, goes: Callable[[int], bool]) -> Superfluous:
        """Return what is left if only these steps may change."""
        return Superfluous(
            {step: each for step, each in self.steps.items() if goes(step)},
            {step: each for step, each in self.items.items() if goes(step)},
            {step: each for step, each in self.found.items() if goes(step)},
        )


def keeps_all(policy: Preservation) -> bool:
    """Tell whether nothing is ever superfluous by a policy."""
    policies = policy.values() if isinstance(policy, Mapping) else [policy]
    return all(isinstance(each, PreserveAll) for each in policies)


def superfluous_by(
    policy: Preservation,
    found: Mapping[int, IndexedStep],
    steps: Sequence[SavedStep],
    now: float,
    always: Collection[int | None],
) -> Superfluous:
    """Return what a policy does not keep.

    Args:
        policy: The policy, or those of the items.
        found: The committed steps, ascending.
        steps: The same as policies see them.
        now: Unix seconds.
        always: Steps that stay whole.

    Raises:
        InvalidArgumentError: A policy cannot be asked.
    """
    if not isinstance(policy, Mapping):
        kept = {*steps_kept(policy, steps, now), *always}
        return Superfluous({step: each for step, each in found.items() if step not in kept})
    items = {step: each.items for step, each in found.items()}
    gone = leaving(policy, steps, items, now, always)
    return Superfluous(
        {step: found[step] for step in sorted(gone.steps)},
        gone.items,
        {step: found[step] for step in gone.items},
    )


def kept_of(found: Mapping[int, IndexedStep], own: Superfluous) -> list[tuple[int, list[str]]]:
    """Return the steps that stay, each with its items that stay."""
    return [
        (step, [item for item in each.items if item not in own.items.get(step, ())])
        for step, each in found.items()
        if step not in own.steps
    ]


def in_common(own: Superfluous, kept: Iterable[Iterable[tuple[int, Iterable[str]]]]) -> Superfluous:
    """Return what goes from the disk of a process, where all of them have their own.

    What one of them keeps stays on all. What one has dropped already goes from the others, too.

    Args:
        own: What this process does not keep.
        kept: What each process keeps; see `kept_of`. All have the same steps.
    """
    stay: dict[int, set[str]] = {}
    for each in kept:
        for step, names in each:
            stay.setdefault(step, set()).update(names)
    left = {
        step: {item: text for item, text in gone.items() if item not in stay.get(step, ())}
        for step, gone in own.items.items()
    }
    # Of a disk that has none of the items which the others keep, the step stays as it is.
    lost = {
        step: gone
        for step, gone in left.items()
        if gone and (step not in stay or len(gone) < len(own.found[step].items))
    }
    return Superfluous(
        {step: each for step, each in own.steps.items() if step not in stay},
        lost,
        {step: own.found[step] for step in lost},
    )
