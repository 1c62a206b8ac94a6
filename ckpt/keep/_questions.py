"""What policies are asked about, and the reading of their answers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert

from ckpt._arguments import shown
from ckpt._format.manifest_head import Aside
from ckpt.errors import CheckpointError, InvalidArgumentError

T = TypeVar("T")
# The extension whose notes say how healthy the leaves of a step are.
SIGNS_NOTE = "vital_signs"


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that is committed, or being saved.

    Attributes:
        step: The step.
        time: Time at which its save began, in Unix seconds.
        metrics: The metrics it was saved with, by name (`train/loss` where they are in groups), or
            None.
        nonfinite_leaves: Number of leaves with NaN or infinite values; None if unknown, as for a
            step that was saved without vital signs.
        unequal_leaves: Number of leaves whose replicas were not equal, as far as that is known.
        nonfinite: Leaf paths of the leaves with NaN or infinite values. They are known to
            keep policies. In a step of several items, the name of the item comes first:
            `model:params.w`.
        unequal: Leaf paths of the leaves with unequal replicas.
        groups: The metrics as they were passed, if some are in groups (`{"train": {"loss": 0.5}}`),
            or are no numbers.
        unknown_leaves: Least number of arrays without vital signs, in a step whose `nonfinite` is
            known. A step with such arrays is not known to be healthy, even if its odd values are
            allowed.
        left_behind: True if the step is of a branch that the run went back behind, as far as that
            is known. It is known to keep policies.
        custom_metadata: The `custom_metadata=` that it was saved with, for keep policies of your
            own; None otherwise, and for a step of Orbax.
        nbytes: Bytes of its files; None for a step that is being saved, or of another library.
    """

    step: int
    time: float
    metrics: Mapping[str, float] | None = None
    nonfinite_leaves: int | None = None
    unequal_leaves: int = 0
    nonfinite: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    unknown_leaves: int = 0
    groups: Mapping[str, Any] | None = None
    left_behind: bool = False
    custom_metadata: Any = None
    nbytes: int | None = None


class LeafNotes(Struct, frozen=True):
    """What extensions have noted about the leaves of a step; attributes as in `SavedStep`."""

    nonfinite_leaves: int | None = None
    unequal_leaves: int = 0
    nonfinite: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    unknown_leaves: int = 0

    def __bool__(self) -> bool:
        return bool(self.nonfinite_leaves or self.unequal_leaves)


NO_NOTES = LeafNotes()


def notes_in(head: Any) -> LeafNotes:
    """Return the notes that a manifest, or the head of one, has; they name no leaf."""
    with contextlib.suppress(ValidationError):
        return convert(head.extensions.get(SIGNS_NOTE, {}), LeafNotes)
    return NO_NOTES


def notes_on_all(disks: Sequence[LeafNotes]) -> LeafNotes:
    """Return the notes on a step whose parts are on several disks: a note on any disk counts.

    A disk whose leaves could not be read gives only their number. These leaves may be the same as
    on another disk, but are counted as others: a leaf without a known name cannot be allowed.
    """
    unknown = sum(each.unknown_leaves or each.nonfinite_leaves is None for each in disks)
    nonfinite, odd = _union([(each.nonfinite_leaves or 0, each.nonfinite) for each in disks])
    unequal, differing = _union([(each.unequal_leaves, each.unequal) for each in disks])
    known = None if unknown and not odd else odd
    return LeafNotes(known, differing, nonfinite, unequal, unknown)


def _union(disks: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[str, ...], int]:
    """Return the names of leaves on any disk, and the least number of leaves with unnamed ones."""
    names = tuple(dict.fromkeys(name for _, each in disks for name in each))
    return names, len(names) + max(max(0, count - len(each)) for count, each in disks)


class Requirement(Struct, frozen=True):
    """What steps must be to be taken; a newer step that is not is passed over.

    Attributes:
        name: The argument that asks for it, and the word for a step that meets it.
        opposite: The word for a step that does not meet it; such steps are moved to this folder.
        why_not: Returns why a step is not known to meet it; an empty text if it does.
        advice: Advice for a root in which no step meets it.
    """

    name: str
    opposite: Aside
    why_not: Callable[[SavedStep], str]
    advice: str


def why_not_a_policy(policy: object, method: str, *, other: tuple[str, str]) -> str | None:
    """Return why something cannot be asked as a policy, or None if it can.

    Args:
        policy: An instance with the method, or a function; neither may be async.
        method: The method.
        other: A method of the other kind of policy, and where to pass that kind.
    """
    foreign, where = other
    if hasattr(policy, foreign) and not hasattr(policy, method):
        return where
    if isinstance(policy, type):
        return f"it is a class; pass an instance: {policy.__name__}(...)"
    if isinstance(policy, list | tuple | set | frozenset):
        return "pass several as Any(first, second)"
    function = getattr(policy, method, policy)
    if inspect.iscoroutinefunction(function):
        return "it is async, but policies answer at once"
    return None if callable(function) else f"it is of type {type(policy).__name__}"


def ask(policy: object, question: Callable[..., T], *arguments: object) -> T:
    """Return the answer of a policy.

    Raises:
        InvalidArgumentError: The policy raised an error. Errors of this library pass unchanged.
    """
    try:
        return question(*arguments)
    except CheckpointError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{name_of(policy)} raised {type(error).__name__}: {error}"
        ) from error


def truth_of(answer: object) -> bool | None:
    """Return a bool, or a boolean scalar of numpy or jax, as a bool; None for anything else."""
    if isinstance(answer, bool):
        return answer
    kind = getattr(getattr(answer, "dtype", None), "kind", None)
    return bool(answer) if kind == "b" and getattr(answer, "shape", None) == () else None


def name_of(policy: object) -> str:
    """Return the name of a policy for messages."""
    return getattr(policy, "__qualname__", None) or shown(policy)
