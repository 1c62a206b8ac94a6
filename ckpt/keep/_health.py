"""The health of steps: `Healthy`, and the step that stays because the newest is unhealthy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from ckpt._arguments import invalid, shown, whole_number
from ckpt._tree.leaf_names import compile_pattern, near_miss
from ckpt.keep._keep_policies import last_of, members_of
from ckpt.keep._questions import Requirement, SavedStep

Health = Literal["healthy", "unknown", "unhealthy"]

# Number of leaves that a message names, if there are many.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Healthy:
    """Keeps the newest steps that are known to be healthy.

    A step is healthy if its vital signs say that no array has NaN or infinite values, and if no
    replicas differ. The health of a step that was saved without vital signs is not known.

    Attributes:
        n: Number of steps to keep.
        allow: Patterns of leaf paths whose arrays may have values that are not finite, such as
            `["**.mask"]`. In a step of several items they apply to each item, or to the one whose
            name stands before them, as in `model:**.mask`. Replicas that differ are never allowed.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        policy = ckpt.keep.Any(
            ckpt.keep.Latest(3), ckpt.keep.Healthy(allow=["**.mask"])
        )
        mgr = ckpt.CheckpointManager(root, keep=policy, extensions=[ckpt.extensions.VitalSigns()])
        ```
    """

    n: int = 1
    allow: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, of="Healthy"))
        object.__setattr__(self, "allow", _patterns(self.allow))

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the last `n` healthy ones of `steps`, as `Latest` would of those."""
        healthy = [each for each in steps if health_of(each, self.allow) == "healthy"]
        return last_of(healthy, self.n)


def _patterns(given: object) -> tuple[str, ...]:
    what = "a list of patterns of leaf paths, such as ['**.mask']"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise invalid("allow", given, what, of="Healthy")
    found = tuple(given)
    if not all(isinstance(each, str) and each for each in found):
        raise invalid("allow", given, what, of="Healthy")
    return found


def check_healthy(healthy: object) -> Requirement | None:
    """Return what the argument `healthy` of a call asks of steps; None for nothing.

    Raises:
        InvalidArgumentError: `healthy` is neither a bool nor a `Healthy`.
    """
    if not isinstance(healthy, bool | Healthy):
        what = "True, False, or a policy such as ckpt.keep.Healthy(allow=['**.mask'])"
        raise invalid("healthy", healthy, what)
    if healthy is False:
        return None
    allow = () if healthy is True else healthy.allow
    advice = (
        "leave out healthy=, or allow leaves whose values are meant with "
        "healthy=ckpt.keep.Healthy(allow=[...])"
    )
    why_not = partial(why_not_healthy, allow=allow)
    return Requirement("healthy", "unhealthy", why_not, advice)


def health_of(saved: SavedStep, allow: Sequence[str]) -> Health:
    """Return the health of a step, as far as it is known; leaves in `allow` may have odd values."""
    if saved.unequal_leaves or _not_allowed(saved, allow)[0]:
        return "unhealthy"
    is_known = saved.nonfinite_leaves is not None and not saved.unknown_leaves
    return "healthy" if is_known else "unknown"


def why_not_healthy(saved: SavedStep, allow: Sequence[str]) -> str:
    """Return why a step is not known to be healthy; an empty text if it is."""
    reasons = []
    count, names = _not_allowed(saved, allow)
    if count:
        have = "1 leaf has" if count == 1 else f"{count} leaves have"
        reasons.append(f"{have} values that are not finite{_list_names(names)}")
        paths = [_path(name) for name in names]
        for pattern in allow if names else ():
            if not any(_is_allowed(name, [pattern]) for name in saved.nonfinite):
                hint = near_miss(pattern, paths)
                reasons.append(f"allow={shown(pattern)} fits none of its leaves like that{hint}")
    if saved.unequal_leaves:
        of = _leaves(saved.unequal_leaves)
        reasons.append(f"replicas of {of} differ{_list_names(saved.unequal)}")
    if not reasons and (saved.unknown_leaves or saved.nonfinite_leaves is None):
        signs = f"the vital signs of {_leaves(saved.unknown_leaves)}"
        if saved.nonfinite_leaves is None:
            signs = "its vital signs"
        advice = "save with extensions=[ckpt.extensions.VitalSigns()]"
        reasons.append(f"{signs} are not known: {advice}")
    return "; ".join(reasons)


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def last_resort(
    steps: Sequence[SavedStep],
    staying: Collection[int],
    allow: Sequence[str],
    saved: int | None = None,
) -> SavedStep | None:
    """Return the step that must not go, because the newest one that stays is unhealthy.

    It is the newest healthy step, or else the newest step of unknown health: the step that a run
    would go back to.

    Args:
        steps: The committed steps, ascending.
        staying: The steps that stay in any case.
        allow: As in `Healthy`.
        saved: The step that was acknowledged last, or None.

    Returns:
        The step; None if it stays anyway, or there is none, or none is needed.
    """
    newest = next((each.step for each in reversed(steps) if each.step in staying), None)
    # A run that went back past steps of unknown health goes on below them.
    latest = [each for each in steps if each.step in (newest, saved)]
    if all(health_of(each, allow) != "unhealthy" for each in latest):
        return None
    for health in ("healthy", "unknown"):
        for each in reversed(steps):
            if health_of(each, allow) == health:
                return None if each.step in staying else each
    return None


def last_resorts(
    policy: object, steps: Sequence[SavedStep], staying: Collection[int], saved: int | None
) -> dict[int, str]:
    """Return the steps that must not go, though a keep policy does not keep them, with the reason.

    The arguments are those of `last_resort`.
    """
    allow, found = allowed_by(policy), dict[int, str]()
    # The second round looks at the current branch alone, since a run goes back to a step of it.
    for some in (steps, [each for each in steps if not each.left_behind]):
        whole = {*staying, *found}
        last = last_resort(some, whole, allow, saved)
        if last is not None:
            ill = [s for s in some if s.step in whole and health_of(s, allow) == "unhealthy"][-1]
            why = f"Step {ill.step}: {why_not_healthy(ill, allow)}"
            found[last.step] = f"no newer step is known to be healthy. {why}"
    return found


def allowed_by(policy: object) -> tuple[str, ...]:
    """Return the patterns of leaves for which keep policies allow odd values."""
    known = [each for each in members_of(policy) if isinstance(each, Healthy)]
    return tuple(dict.fromkeys(pattern for each in known for pattern in each.allow))


def _not_allowed(saved: SavedStep, allow: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of leaves with values that are not allowed, and their known names.

    A leaf whose name is not known is not allowed.
    """
    if not saved.nonfinite_leaves:
        return 0, []
    names = list(_not_allowed_names(saved.nonfinite, tuple(allow)))
    return saved.nonfinite_leaves - len(saved.nonfinite) + len(names), names


@lru_cache(maxsize=1024)
def _not_allowed_names(names: tuple[str, ...], allow: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that no pattern allows; cached, as most steps have the same ones."""
    return tuple(name for name in names if not _is_allowed(name, allow)) if allow else names


def _is_allowed(name: str, allow: Sequence[str]) -> bool:
    item, colon, _ = name.partition(":")
    return any(
        compile_pattern(each).covers(_path(name))
        for pattern in allow
        # The name of the item stands before a pattern, as in messages, or not.
        for each in (pattern, pattern.removeprefix(item + colon) if colon else pattern)
        if each
    )


def _path(name: str) -> str:
    """Return the leaf path without the item that stands before it."""
    return name.partition(":")[2] or name


def _list_names(names: Sequence[str]) -> str:
    """Return the first names as text, for a message."""
    if not names:
        return ""
    more = ", ..." if len(names) > _MOST_NAMED else ""
    return f": {', '.join(f'{name:.80}' for name in names[:_MOST_NAMED])}{more}"
