"""`Best`, and the ranking of steps by a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckpt._arguments import invalid, shown, true_or_false, whole_number
from ckpt.errors import InvalidArgumentError
from ckpt.keep._keep_policies import members_of
from ckpt.keep._questions import SavedStep, ask, name_of

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
