"""`Best` and `Within`: steps that are ranked, by a metric, or by what other policies like best."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckpt._arguments import invalid, shown, true_or_false, whole_number
from ckpt.errors import InvalidArgumentError
from ckpt.keep._keep_policies import All, KeepPolicyLike, members_of, steps_kept
from ckpt.keep._keep_policies import Any as AnyOf
from ckpt.keep._questions import SavedStep, ask, name_of

logger = logging.getLogger("ckpt")

Metric = str | Callable[[Mapping[str, Any]], float | None]
Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the `n` best steps by a metric.

    NaN is worse than every number, and never best. Of equally good steps, the greater one is
    better.

    Attributes:
        n: Number of steps to keep.
        metric: Name of a metric; or a function that takes the metrics of a step, as they were
            passed to `save`, and returns a number. A step lacks the metric if it was saved without
            it, or if the function raises KeyError or returns None. A warning names the first such
            step.
        mode: `"min"` if the smallest number is best, `"max"` if the greatest is. There is no
            default: the wrong one would delete the best steps.
        keep_without_metrics: Also keep every step that lacks the metric. Otherwise such steps rank
            last, the greater first, and are kept only if there is room among the `n`.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, keep=ckpt.keep.Best(3, "loss", "min"))
        best = await mgr.best_step()
        ```
    """

    n: int
    metric: Metric
    mode: Mode
    keep_without_metrics: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number("n", self.n, of="Best"))
        check_metric("Best", self.metric, self.mode)
        true_or_false("keep_without_metrics", self.keep_without_metrics, of="Best")

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        ranked = sorted((_rank(saved, self.metric, self.mode), saved.step) for saved in steps)
        without = [step for rank, step in ranked if rank == _WITHOUT]
        best = [step for _, step in ranked]
        if self.keep_without_metrics:
            return frozenset((*without, *best[len(without) :][-self.n :]))
        return frozenset(best[-self.n :])


def check_metric(policy: str, metric: object, mode: object) -> None:
    """Check that steps can be ranked by `metric` and `mode`."""
    if isinstance(metric, type) or not (callable(metric) or (isinstance(metric, str) and metric)):
        what = "the name of a metric, such as 'loss', or a function from metrics to a number"
        raise invalid("metric", metric, what, of=policy)
    if not isinstance(mode, str) or mode not in get_args(Mode):
        what = "'min' or 'max': whether the smallest or the greatest number is best"
        raise invalid("mode", mode, what, of=policy)


def best_of(steps: Sequence[SavedStep], metric: Metric, mode: Mode) -> int | None:
    """Return the best step by a metric; None if no step has a number for it.

    Args:
        steps: The committed steps, in any order.
        metric: As in `Best`.
        mode: As in `Best`.

    Raises:
        InvalidArgumentError: `metric` or `mode` is invalid, or the function raised an error or did
            not return a number.

    Example:
        ```python
        steps = [ckpt.keep.SavedStep(step, 0.0, {"loss": 1 / (1 + step)}) for step in range(5)]
        assert ckpt.keep.best_of(steps, "loss", "min") == 4
        ```
    """
    # Named like the method of the manager by which users know it.
    check_metric("best_step", metric, mode)
    ranked = [(_rank(saved, metric, mode), saved.step) for saved in steps]
    best = max((each for each in ranked if each[0] > _NAN), default=None)
    return None if best is None else best[1]


def ranking_of(policy: object) -> Best | None:
    """Return the `Best` among the members of a keep policy, or the policies of items.

    Returns:
        The first `Best`; None if there is none, or if they rank by different metrics or modes.

    Example:
        ```python
        policy = ckpt.keep.Any(
            ckpt.keep.Latest(3), ckpt.keep.Best(1, "loss", "min")
        )
        assert ckpt.keep.ranking_of(policy).metric == "loss"
        ```
    """
    found = rankings_in(policy)
    questions = [(each.metric, each.mode) for each in found]
    return found[0] if found and questions.count(questions[0]) == len(found) else None


def rankings_in(policy: object) -> list[Best]:
    """Return every `Best` among the members of a keep policy."""
    return [each for each in members_of(policy) if isinstance(each, Best)]


# Ranks; a greater one is better: no metric, NaN, numbers.
_WITHOUT = (0, 0.0)
_NAN = (1, 0.0)


def _rank(saved: SavedStep, metric: Metric, mode: Mode) -> tuple[int, float]:
    value = value_of(saved, metric)
    if value is None:
        return _WITHOUT
    if math.isnan(value):
        return _NAN
    return (2, value if mode == "max" else -value)


def value_of(saved: SavedStep, metric: Metric) -> float | None:
    """Return the number by which a step is ranked; None if it has none.

    Raises:
        InvalidArgumentError: As by `best_of`.
    """
    if saved.metrics is None:
        return None
    if isinstance(metric, str):
        value: object = saved.metrics.get(metric)
    else:
        value = ask(metric, _looked_up, metric, saved.groups or saved.metrics)
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError("strings are not converted")
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        called = repr(metric) if isinstance(metric, str) else name_of(metric)
        raise InvalidArgumentError(
            f"metric {called}: {shown(value)} is not a number", step=saved.step
        ) from error


def _looked_up(
    metric: Callable[[Mapping[str, Any]], float | None], metrics: Mapping[str, Any]
) -> float | None:
    try:
        # A copy, as the steps are asked again after the next commit.
        return metric(dict(metrics))
    except KeyError:
        return None


_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGTP]?)(i?)B\s*")
_UNITS = "kmgtp"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Within(AnyOf):
    """Keeps what other policies like best, inside a size.

    Each policy in turn gets the step that it likes best, then the next one, and so on, as long as
    they fit: of `Best` the steps with the best metric first, of others the greatest step first. The
    greatest step always stays. A step counts with all of its files, also with those that it shares
    with another one; one whose size is not known, such as a step of Orbax, does not count. During a
    save there is one step more.

    After a save, one INFO line says what that leaves of the size. A warning says so, once, if two
    more saves of the newest size will not fit, even if all other steps go.

    Attributes:
        policies: What is kept inside the size; without any, the greatest steps.
        nbytes: The size, in bytes. It is given first, as a text such as `"2 TB"` or `"500 GiB"`, or
            as such.

    Raises:
        InvalidArgumentError: The size is not understood, or a policy is none.

    Example:
        ```python
        policy = ckpt.keep.Within("2 TB", ckpt.keep.Best(5, "loss", "min"), ckpt.keep.Latest(50))
        mgr = ckpt.CheckpointManager(root, keep=policy)
        ```
    """

    nbytes: int
    # The newest step of which a log line has told what is left, and whether two more fit.
    _told: dict[str, int] = field(compare=False)

    def __init__(self, size: str | int, *policies: KeepPolicyLike) -> None:
        AnyOf.__init__(self, *(policies or (All(),)))
        object.__setattr__(self, "nbytes", _bytes_in(size))
        object.__setattr__(self, "_told", {})

    def __repr__(self) -> str:
        given = "" if self.policies == (All(),) else ", ".join(["", *map(repr, self.policies)])
        return f"Within({self.nbytes}{given})"

    def keep(self, steps: Sequence[SavedStep], now: float) -> frozenset[int]:
        """Return the chosen ones of `steps`."""
        if not steps:
            return frozenset()
        sizes = {each.step: each.nbytes for each in steps}
        newest = steps[-1].step
        first = sizes[newest] or 0
        left, kept = self.nbytes - first, {newest}
        wishes = [_liked(each, steps, now) for each in members_of(self)]
        for step in itertools.chain(*itertools.zip_longest(*wishes)):
            if step is not None and step not in kept:
                nbytes = sizes[step]
                if nbytes is None or nbytes <= left:
                    kept.add(step)
                    left -= nbytes or 0
        self._say(newest, first, len(kept), left)
        return frozenset(kept)

    def _say(self, newest: int, nbytes: int, count: int, left: int) -> None:
        if self._told.get("newest") == newest:
            return
        size, is_tight = _text(self.nbytes), 3 * nbytes > self.nbytes
        logger.info("%d steps are kept, which leaves %s of %s", count, _text(left), size)
        if is_tight and not self._told.get("is_tight"):
            logger.warning(
                "two more saves like step %d, of %s each, will not fit into %s beside it: give "
                "keep.Within a greater size, or save less",
                newest,
                _text(nbytes),
                size,
            )
        self._told.update(newest=newest, is_tight=is_tight)


def _liked(policy: object, steps: Sequence[SavedStep], now: float) -> Iterator[int]:
    """Yield the steps that a policy keeps; the one it likes best comes first."""
    kept = steps_kept(policy, steps, now)  # type: ignore[arg-type]
    rest = [each for each in steps if each.step in kept]
    if isinstance(policy, Best):
        while (best := best_of(rest, policy.metric, policy.mode)) is not None:
            yield best
            rest = [each for each in rest if each.step != best]
    yield from (each.step for each in reversed(rest))


def _bytes_in(size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    nbytes = 0
    if found is not None:
        power = _UNITS.find(found[2].lower()) + 1 if found[2] else 0
        nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if not nbytes:
        raise invalid("size", size, "a size such as '2 TB' or '500 GiB', or bytes", of="Within")
    return nbytes


def _text(nbytes: int) -> str:
    """Return a size as disks are sold, such as `1.5 TB`."""
    power = min(len(_UNITS), (len(str(max(nbytes, 0))) - 1) // 3)
    unit = f"{_UNITS[power - 1].upper() if power else ''}B".replace("KB", "kB")
    return f"{max(nbytes, 0) / 1000**power:.3g} {unit}"
