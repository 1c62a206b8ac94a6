"""What is told from two marks of one step: whether it was repeated exactly, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from msgspec import Struct

from ckpt._proof.state_marks import ITERATOR, Array, StateMark

# A difference of rounding alone is at most this part of what the step has changed. Gradients that
# are summed up in another order differ by far less, and other data or rates by far more.
ROUNDING = 2e-2
# Once a program rounds differently each time, this part of what it has changed since then.
DRIFT = 0.3
# A part of the norm below which two sketches cannot be told apart.
_LEAST = 5e-7
_MOST_NAMED = 5
Holders = Callable[[int, int], Sequence[str]]
_COUNTERS = ("int", "uint")


def _no_holders(_leaf: int, _part: int) -> Sequence[str]:
    return ()


class Difference(Struct, frozen=True):
    """Two marks of one step that are not the same.

    Attributes:
        step: The step.
        leaves: The leaf paths that differ, those with the greatest distance first.
        cause: What the pattern says; empty for rounding.
        distance: Largest part of its norm by which a leaf differs; infinite if a leaf that is no
            float differs, or if it is unknown.
        is_rounding: True if nothing but rounding seems to differ.
    """

    step: int
    leaves: Sequence[str]
    cause: str
    distance: float
    is_rounding: bool

    def __str__(self) -> str:
        if self.is_rounding:
            return (
                f"step {self.step} was not repeated bit for bit, and differs by rounding alone "
                f"({self.distance:.0e} of the norm at most): the mesh is another one, or the "
                "program is not deterministic. From now on, marks are compared within a tolerance"
            )
        more = len(self.leaves) - _MOST_NAMED
        named = ", ".join(f"{name:.80}" for name in self.leaves[:_MOST_NAMED])
        return (
            f"step {self.step} is not what it was when it was run before: {self.cause}. "
            f"Different: {named}{f' and {more} more' if more > 0 else ''}"
        )


class Repetition(Struct):
    """The comparison of a run with one that went through the same steps before.

    Attributes:
        earlier: The marks of the run before, by step.
        steps: First and last step of those that were the same in a row, up to now.
        rounding: The first difference of rounding alone; from then on there is a tolerance.
        found: The first difference that is more than that. Nothing is compared after it.
    """

    earlier: dict[int, StateMark]
    steps: tuple[int, int] | None = None
    rounding: Difference | None = None
    found: Difference | None = None
    # The mark before that difference: what has changed since then is the measure.
    _since: StateMark | None = None

    @property
    def how(self) -> str:
        """How well the steps were repeated."""
        return "exactly" if self.rounding is None else "within the rounding of the program"

    def is_over_at(self, step: int) -> bool:
        """Return True if no later step was marked before."""
        return max(self.earlier, default=-1) <= step

    def compare(self, mark: StateMark, holders: Holders = _no_holders) -> Difference | None:
        """Compare a step; return what there is to tell, once for each kind of difference.

        Args:
            mark: The mark of this run.
            holders: Returns the devices that hold a part of a leaf of it, by their numbers.
        """
        before = self.earlier.get(mark.step)
        if before is None or self.found is not None:
            return None
        follows_equal = self.steps is not None
        since = self._since
        if since is None and (follows_equal or mark.step - 1 not in self.earlier):
            # Where each step has a mark, the first one is of the state that was restored, exactly.
            since = self.earlier.get(max((n for n in self.earlier if n < mark.step), default=-1))
        share = ROUNDING if self.rounding is None else DRIFT
        found = difference(
            before, mark, since=since, share=share, follows_equal=follows_equal, holders=holders
        )
        if found is None or found.is_rounding:
            self.steps = mark.step if self.steps is None else self.steps[0], mark.step
            if found is None or self.rounding is not None:
                return None
            self.rounding, self._since = found, since
        else:
            self.found = found
        return found


def difference(
    before: StateMark,
    now: StateMark,
    *,
    since: StateMark | None = None,
    share: float = ROUNDING,
    follows_equal: bool = False,
    holders: Holders = _no_holders,
) -> Difference | None:
    """Return the difference between two marks of one step; None if they are the same.

    Args:
        before: The mark of the run before.
        now: The mark of this run.
        since: An earlier mark of the run before: what it has changed since then is the measure of
            rounding. None if nothing can have been rounded.
        share: The part of that which is taken for rounding.
        follows_equal: True if the marks before these were the same.
        holders: Returns the devices that hold a part of a leaf of `now`, by their numbers.
    """
    if before.layout != now.layout:
        return _of_layouts(before, now)
    one, two = before.leaves, now.leaves
    differing = np.flatnonzero((one["fingerprint"] != two["fingerprint"]).any(axis=-1)).tolist()
    if not differing:
        return None
    distances = {number: _distance(one[number], two[number]) for number in differing}
    is_rounding = since is not None and _is_rounding(since, before, now, differing, share)
    cause = "" if is_rounding else _cause(before, now, differing, follows_equal, holders)
    # The leaf that is the farthest away is most likely the first that was wrong.
    differing.sort(key=distances.__getitem__, reverse=True)
    names = [now.layout.names[number] for number in differing]
    return Difference(now.step, names, cause, max(distances.values()), is_rounding)


def _changes(leaf: Any) -> bool:
    """Return True for an array that has values other than 0, so that rounding may show."""
    return bool(leaf["norm"] > 0)


def _distance(one: Any, two: Any) -> float:
    """Return by which part of its norm a leaf differs; infinite if that is unknown.

    The difference of two sketches is, at a venture, the norm of the difference: its expected square
    is the square of that norm.
    """
    norm = max(float(one["norm"]), float(two["norm"]))
    apart = max(abs(float(one[name]) - float(two[name])) for name in ("norm", "sketch"))
    return apart / norm if norm and math.isfinite(apart) else math.inf


def _is_rounding(
    since: StateMark, before: StateMark, now: StateMark, differing: Sequence[int], share: float
) -> bool:
    """Return True if all that differs is explained by rounding, in the arrays of each dtype."""
    floats = _floats(now)
    shown = [number for number in floats if _changes(before.leaves[number])]
    are_most = floats.issuperset(differing) and 2 * len(differing) >= len(shown)
    if not are_most or since.layout != now.layout:
        return False
    kinds = [kind.partition("[")[0] for kind in now.layout.kinds]
    for dtype in {kinds[number] for number in differing}:
        alike = [number for number in floats if kinds[number] == dtype]
        found, old, earlier = (each.leaves[alike] for each in (now, before, since))
        info: Any = jnp.finfo
        least = max(_LEAST, float(info(dtype).eps) / 8)
        apart = max(_total(found[name] - old[name]) for name in ("sketch", "norm"))
        changed = _total(old["sketch"] - earlier["sketch"])
        if not apart <= share * changed + least * _total(old["norm"]):
            return False
    return True


def _total(values: Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def _floats(mark: StateMark) -> set[int]:
    kinds = enumerate(mark.layout.kinds)
    return {n for n, kind in kinds if kind.startswith(("float", "bfloat", "complex"))}


def _of_layouts(before: StateMark, now: StateMark) -> Difference:
    old = dict(zip(before.layout.names, before.layout.kinds, strict=True))
    new = dict(zip(now.layout.names, now.layout.kinds, strict=True))
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    changed = [name for name in new if name in old and old[name] != new[name]]
    found = [f"{name} is {new[name]} and was {old[name]}" for name in changed[:_MOST_NAMED]]
    found += [f"{name} is missing" for name in sorted(gone)[:_MOST_NAMED]]
    found += [f"{name} is new" for name in sorted(added)[:_MOST_NAMED]]
    named = [*changed, *sorted(gone), *sorted(added)]
    cause = f"the state has other leaves: {', '.join(found)}"
    return Difference(now.step, named or list(new), cause, math.inf, is_rounding=False)


def _cause(
    before: StateMark,
    now: StateMark,
    differing: Sequence[int],
    follows_equal: bool,
    holders: Holders,
) -> str:
    """Return what the pattern of the differing leaves says."""
    names, kinds = now.layout.names, now.layout.kinds
    one, two = before.leaves, now.leaves
    keys = [n for n in differing if kinds[n].startswith("key") or _is_raw_key(names[n], kinds[n])]
    counters = [n for n in differing if n not in keys and _is_counter(kinds[n])]
    others = [n for n in differing if n not in keys and n not in counters]
    counted = ", ".join(
        f"{names[n]} is {int(two[n]['value'])} and was {int(one[n]['value'])}"
        for n in counters[:_MOST_NAMED]
    )
    iterators = [n for n in differing if kinds[n].startswith(ITERATOR)]
    if counters and (keys or iterators):
        return f"the state is of another step, or was not restored ({counted})"
    if keys:
        return (
            f"the random key {names[keys[0]]} differs: its state was forgotten, or it was used "
            "once more or once less"
        )
    if iterators:
        return (
            f"the iterator {names[iterators[0]]} is at another place: it began again, or is some "
            "elements off"
        )
    if counters and not others:
        return f"only a counter differs ({counted}): it is off, or was not restored"
    if counters:
        are_all = len(counters) == sum(map(_is_counter, kinds))
        so = "the state is of another step" if are_all else "a part of it was not restored"
        return f"a counter differs, too ({counted}): {so}"
    old = {one[n]["fingerprint"].tobytes(): names[n] for n in differing}
    moved = [(names[n], old.get(two[n]["fingerprint"].tobytes())) for n in differing]
    if all(source is not None for _, source in moved):
        name, source = moved[0]
        return f"leaves have changed places: {name} has the values of {source}"
    part = _one_part(one, two, differing)
    if part is not None:
        devices = ", ".join(holders(differing[0], part))
        on = f", which is on {devices}" if devices else ""
        so = "or the data came in another order" if follows_equal else "or it was not restored"
        return f"only one part of an array differs{on}: a device may be faulty, {so}"
    otherwise = (
        "the state was the same at the mark before, so the data came in another order, or the step "
        "was computed otherwise (such as with another learning rate)"
    )
    floats = [n for n in _floats(now) if _changes(one[n]) or _changes(two[n])]
    if set(floats) <= set(differing):
        what = "all arrays of floats differ, and no key or counter"
        also = "the state is of another step, or the data came in another order"
        return f"{what}: {otherwise if follows_equal else also}"
    common = _branch([names[n] for n in differing])
    what = f"only some leaves{' in ' + common if common else ''} differ"
    return f"{what}: {otherwise if follows_equal else 'they were not restored, or are stale'}"


def _is_raw_key(name: str, kind: str) -> bool:
    """Return True for a random key of the old kind: numbers, known by its name."""
    last = name.rpartition(".")[2].lower()
    return kind.startswith("uint32[") and kind != "uint32[]" and ("rng" in last or "key" in last)


def _is_counter(kind: str) -> bool:
    return kind == "int" or (kind.endswith("[]") and kind.startswith(_COUNTERS))


def _one_part(one: Array, two: Array, differing: Sequence[int]) -> int | None:
    """Return the part that alone differs in all of some leaves, or None."""
    found = set()
    for number in differing:
        if one[number]["split"] != two[number]["split"] or one[number]["split"] < 2:
            return None
        found.add(tuple(np.flatnonzero(one[number]["parts"] != two[number]["parts"]).tolist()))
    parts = found.pop()
    return parts[0] if not found and len(parts) == 1 else None


def _branch(names: Sequence[str]) -> str:
    """Return the longest branch that all of some leaves are in; empty if there is none."""
    shared = names[0].split(".")
    for name in names[1:]:
        keys = name.split(".")
        count = 0
        while count < min(len(shared), len(keys)) and shared[count] == keys[count]:
            count += 1
        shared = shared[:count]
    return ".".join(shared) if len(names) > 1 else names[0]
