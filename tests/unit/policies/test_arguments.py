"""What policies are made of: numbers of numpy, and numbers that Python does not write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt import policies as p
from ckpt.errors import InvalidArgumentError
from ckpt.policies import SaveContext, SavedStep, refusal_of


def test_counts_and_steps_come_as_numbers_of_numpy_too() -> None:
    one: Any = np.int64(1)
    for count in (
        p.FixedInterval(one).n,
        p.LatestN(one).n,
        p.EveryNSteps(one).n,
        p.EveryNSteps(2, max_to_keep=one).max_to_keep,
        p.EveryNStepsClosest(one).n,
        p.EveryNStepsClosest(2, max_to_keep=one).max_to_keep,
        p.BestN(one, "loss", "min").n,
        p.Healthy(one).n,
        p.Deletion(concurrency=one).concurrency,
        *p.SpecificSteps([one]).steps,
    ):
        assert (type(count), count) == (int, 1)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), [10**5000]], ids=["great", "negative", "within"]
)
def test_what_is_too_long_to_write_is_refused_in_words(value: Any) -> None:
    """Python does not write such a number, so it must not get into a reason or a file's name."""
    calls: tuple[Any, ...] = (
        p.FixedInterval,
        p.LatestN,
        p.EveryNSteps,
        p.EveryNStepsClosest,
        p.EverySeconds,
        p.Continuous,
        p.BoundedOverhead,
        p.EveryNSeconds,
        p.LatestDuration,
        p.Deletion,
        lambda value: p.SpecificSteps([value]),
        lambda value: p.CustomSteps([value]),
        lambda value: p.BestN(value, "loss", "min"),
        p.Healthy,
        lambda value: p.Healthy(allow=value),
        lambda value: p.BestN(1, "loss", value),
        lambda value: p.BestN(1, value, "min"),
        lambda value: p.Deletion(trash=value),
        lambda value: p.Deletion(keep_latest=value),
        p.AnySave,
        p.AnyPreservation,
        lambda value: refusal_of(lambda *_: value, 1, [], SaveContext(0.0)),
        lambda value: p.steps_kept(lambda _: value, [SavedStep(7, 0.0)], 0.0),
        lambda value: p.best_of([SavedStep(1, 0.0, {"loss": value})], "loss", "min"),
    )
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="too long to write") as caught:
            call(value)
        assert len(str(caught.value)) < 400
