"""Keeping by item: each item of a root has a policy of its own. Pure.

Each item is treated as if it were alone in the root: its policy sees the steps that have it, and
keeps some of them. A step of which no item is kept goes as a whole; a step that stays loses the
items that are not kept.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt._arguments import shown
from ckpt.keep._keep_policies import Any as AnyOf
from ckpt.keep._keep_policies import KeepByItem, KeepPolicyLike, steps_kept
from ckpt.keep._questions import SavedStep, name_of

# Pattern for all items that no other pattern in the mapping is for.
OTHERS = "*"
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Leaving:
    """The steps and items that are not kept.

    Attributes:
        steps: Steps that go as a whole.
        items: By step, the items that go, each with the text of its policy; for a whole step, all.
    """

    steps: frozenset[int]
    items: Mapping[int, Mapping[str, str]]


def pattern_of(item: str, patterns: Iterable[str]) -> str | None:
    """Return the pattern that decides about an item; None if there is none.

    The name of the item comes first, then the first pattern with a star that matches, then `*`.
    """
    known = list(patterns)
    if item in known:
        return item
    found = (each for each in known if each != OTHERS and _matches(each, item))
    return next(found, OTHERS if OTHERS in known else None)


def _matches(pattern: str, item: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), item) is not None


def unused_patterns(policies: KeepByItem, items: Collection[str]) -> list[str]:
    """Return the patterns that decide about none of these items; `*` is never among them."""
    used = {pattern_of(item, policies) for item in items}
    return [each for each in policies if each != OTHERS and each not in used]


def leaving(
    policies: KeepByItem,
    steps: Sequence[SavedStep],
    items: Mapping[int, Collection[str]],
    now: float,
    always: Collection[int | None] = (),
) -> Leaving:
    """Return the steps and items of a root that are not kept.

    Args:
        policies: The policies by pattern; an item without a pattern stays.
        steps: The committed steps, ascending.
        items: By step, the names of its items; a step whose items are unknown stays whole.
        now: Unix seconds.
        always: Steps that stay whole.

    Raises:
        InvalidArgumentError: As by `steps_kept`. Nothing may be deleted then.
    """
    going: dict[int, dict[str, str]] = {}
    kept: dict[tuple[str, tuple[int, ...]], frozenset[int]] = {}
    for item in sorted({name for each in items.values() for name in each}):
        pattern = pattern_of(item, policies)
        if pattern is None:
            continue
        having = [each for each in steps if item in items.get(each.step, ())]
        # Items that are always saved together need one answer only.
        question = pattern, tuple(each.step for each in having)
        if question not in kept:
            kept[question] = steps_kept(policies[pattern], having, now)
        for each in having:
            if each.step not in kept[question] and each.step not in always:
                going.setdefault(each.step, {})[item] = text_of(policies[pattern])
    whole = frozenset(step for step, gone in going.items() if len(gone) == len(items[step]))
    return Leaving(whole, going)


def by_item_text(policies: KeepByItem) -> str:
    """Return the policies of items as text, for people."""
    return ", ".join(f"{pattern}: {text_of(each)}" for pattern, each in policies.items())


def text_of(policy: KeepPolicyLike) -> str:
    """Return a policy as a program writes it, for people: `Latest(3)`."""
    return "".join(each if each.isprintable() else " " for each in _written(policy))[:_MOST_TEXT]


def _written(policy: object) -> str:
    name = type(policy).__name__
    if type(policy) is AnyOf:
        return f"{name}({', '.join(map(_written, policy.policies))})"
    if dataclasses.is_dataclass(policy) and type(policy).__module__.startswith("ckpt.keep"):
        fields = dataclasses.fields(policy)
        given = [(each.name, getattr(policy, each.name), each.default) for each in fields]
        texts = [f"{name}={shown(value)}" for name, value, default in given if value != default]
        # Programs write the first argument without its name.
        return f"{name}({', '.join([shown(given[0][1]), *texts[1:]] if given else [])})"
    text = name_of(policy) if callable(policy) else shown(policy)
    # The address in a default `repr` says nothing to people.
    return name if " at 0x" in text else text
